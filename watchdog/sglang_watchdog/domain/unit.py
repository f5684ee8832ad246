"""A systemd service unit as one consistent reading of its properties."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class ActiveState(StrEnum):
    ACTIVE = "active"
    RELOADING = "reloading"
    INACTIVE = "inactive"
    FAILED = "failed"
    ACTIVATING = "activating"
    DEACTIVATING = "deactivating"
    MAINTENANCE = "maintenance"
    REFRESHING = "refreshing"


class ServiceResult(StrEnum):
    """`Result=` of a service (org.freedesktop.systemd1.Service)."""

    SUCCESS = "success"
    RESOURCES = "resources"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    EXIT_CODE = "exit-code"
    SIGNAL = "signal"
    CORE_DUMP = "core-dump"
    WATCHDOG = "watchdog"
    START_LIMIT_HIT = "start-limit-hit"
    OOM_KILL = "oom-kill"
    EXEC_CONDITION = "exec-condition"
    UNKNOWN = ""


class ExitCode(IntEnum):
    """`ExecMainCode=`, the si_code of waitid(2): how the main process ended."""

    NONE = 0
    EXITED = 1
    KILLED = 2
    DUMPED = 3


@dataclass(frozen=True, slots=True)
class UnitSnapshot:
    """Durations in seconds (None: infinity or not known); times in Unix seconds (0: never)."""

    name: str
    load_state: str = ""
    active_state: ActiveState | None = None
    sub_state: str = ""
    unit_file_state: str = ""
    invocation: str = ""
    result: ServiceResult = ServiceResult.UNKNOWN
    exec_main_code: ExitCode = ExitCode.NONE
    exec_main_status: int = 0
    exec_main_pid: int = 0
    main_pid: int = 0
    exec_main_started: float = 0.0
    exec_main_exited: float = 0.0
    inactive_exit: float = 0.0
    restarts: int = 0
    job: int = 0  # id of the queued job, 0 for none
    job_type: str = ""  # start, stop, restart …; empty where no job is queued
    fragment: str = ""
    source: str = ""  # the file that a generator made the fragment of
    drop_ins: tuple[str, ...] = ()
    environment_files: tuple[str, ...] = ()
    need_daemon_reload: bool = False
    exec_start: tuple[str, ...] = ()  # of the first ExecStart= line, variables not expanded
    exec_start_count: int = 0
    control_group: str = ""
    kill_mode: str = ""
    restart: str = ""
    restart_delay: float | None = None
    stop_timeout: float | None = None
    frozen: bool = False  # by `systemctl freeze`, or about to be
    service_type: str = ""
    runtime_max: float | None = None
    oom_policy: str = ""
    memory_max: int | None = None  # bytes, None: no limit, or not known
    # which properties the reading held: a `systemctl show` file may be partial
    known: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def in_auto_restart(self) -> bool:
        # 257 splits the state: auto-restart-queued is the instant when the restart job is queued.
        return self.sub_state in ("auto-restart", "auto-restart-queued")

    @property
    def ended(self) -> bool:
        """No process of the last launch is supervised any more."""
        return self.in_auto_restart or self.active_state in (ActiveState.INACTIVE, ActiveState.FAILED)

    @property
    def refused(self) -> bool:
        """A condition of the unit (`ExecCondition=`) kept its newest start from running: no failure, and no stop."""
        return self.active_state is ActiveState.INACTIVE and self.result is ServiceResult.EXEC_CONDITION

    @property
    def in_condition(self) -> bool:
        """Its newest start is not decided yet."""
        return self.sub_state == "condition"

    @property
    def stop_ends_all(self) -> bool:
        """systemd's own stop leaves no process of the unit's cgroup behind; with KillMode=process or none the operator
        has asked for some to stay."""
        return self.kill_mode in ("control-group", "mixed")

    @property
    def loaded(self) -> bool:
        return self.load_state == "loaded"
