"""The truth of the simulated host: what systemd, the cards and the files are, and who did what."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sglang_watchdog.domain.errors import BusError, BusLost, JobRefused
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.journal import JournalEntry, MessageId
from sglang_watchdog.domain.launch import Phase, ProcessId
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState, ServiceResult, UnitSnapshot
from sglang_watchdog.host.bus import Hint, HintKind
from sim_host.virtual_time import VirtualLoop

UNIT = "sglang.service"
GROUP = f"/system.slice/{UNIT}"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/90-sglang-watchdog.conf"
EPOCH = 1_790_000_000.0
GIB = 1 << 30
CARD = 96 * GIB
TICKS = 100
DRAIN_S = 1.0
FALLS_S = 2.0  # what hung and was killed, until it is gone
OWN_WATCHDOG_S = 20  # --watchdog-timeout: before it has fired, nothing that hangs may be ended
RELEASED = "the driver releases"


class Killed(BaseException):
    """The daemon is gone, between two instructions."""


def config_of(steps: int) -> SpeculationConfig:
    return SpeculationConfig.of(argv_of(steps))


def argv_of(steps: int) -> tuple[str, ...]:
    speculation = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps))
    topk = ("--speculative-eagle-topk", "1")
    plain = ("python", "-m", "sglang.launch_server", "--model-path", "/models/m")
    return (*plain, *speculation, *topk) if steps else plain


class Stranger(StrEnum):
    """Who else can be on the card, by the cgroup that it lives in."""

    LOOSE = "/"  # of no unit at all
    TRAINING = "/system.slice/training.service"
    MULTIPLEXER = "/user.slice/user-1000.slice/session-3.scope"  # started from the unit, kept by its user
    HELPER = "/system.slice/cache.service"  # another unit, with the environment of ours
    CONTAINER = "/system.slice/docker-" + 64 * "a" + ".scope"


@dataclass
class Process:
    """`owner` is the invocation that it is of, empty for somebody else's. `claims` is the one in its environment."""

    id: ProcessId
    owner: str
    group: str
    argv: tuple[str, ...]
    started: float
    holds: int = 0
    alive: bool = True
    claims: str = ""


@dataclass
class Start:
    """One launch, as it really was."""

    invocation: str
    steps: int
    by: str
    began: float
    main: int
    serves: bool = False
    hung_since: float | None = None  # it runs, HTTP answers, and there are no tokens
    traffic: bool = False
    failure: FailureClass | None = None
    phase: Phase = Phase.STARTING
    entries: list[JournalEntry] = field(default_factory=list)


class World:
    """`fits` is the most steps that fit an empty card; `restart_s` None is Restart=no."""

    def __init__(self, loop: VirtualLoop, *, steps: int, fits: int, restart_s: float | None, drop_in: bool) -> None:
        self.loop = loop
        self.fits, self.restart_s, self.drop_in = fits, restart_s, drop_in
        self.numbers = itertools.count(1)
        self.unit = UnitSnapshot(
            UNIT,
            load_state="loaded",
            active_state=ActiveState.INACTIVE,
            sub_state="dead",
            kill_mode="control-group",
        )
        self.starts: dict[str, Start] = {}
        self.processes: dict[int, Process] = {}
        self.on_disk = self.loaded = steps
        self.ours_on_disk: int | None = None  # our override, in either way
        self.ours_loaded: int | None = None
        self.releasing = 0
        self.driver_lag = 0.0
        self.leaks = False
        self.nvml_hangs = False
        self.bus_up = True
        self.operator_stopped = False
        self.witness = False
        self.listener: Callable[[Hint], None] = lambda _: None
        self.dead = False
        self.kill_in: int | None = None
        self.calls = 0
        self.clock_set_by = 0.0  # seconds by which somebody has set the clock of the host
        self.looked_at = 0  # how often the stacks of its processes were looked at
        self._queued_start = ""

    # Time, and the points at which a daemon can be killed

    def now(self) -> float:
        return EPOCH + self.loop.elapsed + self.clock_set_by

    def point(self) -> None:
        """Before and after each call of the product to the outside."""
        if self.dead:
            raise Killed
        self.calls += 1
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_in, self.dead = None, True
                raise Killed

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self.loop.call_later(seconds, do)

    # The unit

    @property
    def current(self) -> Start | None:
        return self.starts.get(self.unit.invocation)

    @property
    def running(self) -> Start | None:
        return self.current if not self.unit.ended else None

    def snapshot(self) -> UnitSnapshot:
        stale = self.on_disk != self.loaded or (self.drop_in and self.ours_on_disk != self.ours_loaded)
        ours = (DROP_IN,) if self.drop_in and self.ours_loaded is not None else ()
        return replace(self.unit, need_daemon_reload=stale, drop_ins=ours)

    def change(self, **values: object) -> None:
        self.unit = replace(self.unit, **values)  # type: ignore[arg-type]
        self.tell(Hint(HintKind.CHANGED, UNIT))

    def tell(self, hint: Hint) -> None:
        if self.bus_up and not self.dead:
            self.loop.call_soon(self.listener, hint)

    def new_job(self) -> int:
        job = next(self.numbers)
        self.tell(Hint(HintKind.JOB_NEW, UNIT, job=job))
        return job

    def launch(self, by: str) -> None:
        number = next(self.numbers)
        in_force = self.ours_loaded if self.drop_in else self.ours_on_disk
        steps = self.loaded if in_force is None else in_force
        start = Start(f"{number:032x}", steps, by, self.now(), self.process(f"{number:032x}", steps).id.pid)
        self.starts[start.invocation] = start
        self.say(start, f"server_args=ServerArgs(watchdog_timeout={OWN_WATCHDOG_S})")
        worker = self.process(start.invocation, steps)
        self.change(
            active_state=ActiveState.ACTIVE,
            sub_state="running",
            invocation=start.invocation,
            result=ServiceResult.SUCCESS,
            restarts=self.unit.restarts + 1 if by == "systemd" else 0,
            main_pid=start.main,
            inactive_exit=self.now(),
            control_group=GROUP,
            job=0,
            job_type="",
        )
        self.later(1.0, lambda: self._load(start, worker))

    def process(self, owner: str, steps: int, group: str = GROUP) -> Process:
        pid = 1000 + next(self.numbers)
        ticks = int(self.loop.elapsed * TICKS) + 1
        made = Process(ProcessId(pid, ticks), owner, group, argv_of(steps) if owner else ("train",), self.now())
        made.claims = owner
        self.processes[pid] = made
        return made

    def stranger(self, kind: Stranger, size: int) -> Process:
        """Somebody else's, on the card. In a session or a unit it may have inherited the newest launch's id."""
        made = self.process("", 0, kind.value)
        made.holds = size
        made.claims = "" if kind in (Stranger.LOOSE, Stranger.TRAINING) else self.unit.invocation
        return made

    def _load(self, start: Start, worker: Process) -> None:
        if self.running is not start:
            return
        start.phase = Phase.ALLOCATING_KV
        held = sum(p.holds for p in self.processes.values()) + self.releasing
        if held > GIB:
            worker.holds = 2 * GIB
            self.later(1.0, lambda: self.end(start, FailureClass.GPU_MEMORY_HELD))
        elif start.steps > self.fits:
            worker.holds = 50 * GIB
            self.later(1.0, lambda: self.end(start, FailureClass.KV_CACHE_OOM))
        else:
            worker.holds = 60 * GIB
            self.later(2.0, lambda: self._ready(start))

    def _ready(self, start: Start) -> None:
        if self.running is start:
            start.serves, start.phase = True, Phase.SERVING
            self.say(start, "The server is fired up and ready to roll!")

    def hang(self) -> None:
        if self.running is not None and self.running.serves and self.running.hung_since is None:
            self.running.hung_since = self.loop.elapsed

    def go_on(self) -> None:
        if self.running is not None:
            self.running.hung_since = None

    def say(self, start: Start, message: str, **fields: str) -> None:
        entry = JournalEntry(
            self.now(), message, cursor=str(next(self.numbers)), unit=UNIT, invocation=start.invocation, pid=start.main
        )
        start.entries.append(entry._replace(**fields))  # type: ignore[arg-type]

    def end(self, start: Start, failure: FailureClass) -> None:
        """The launch ends, and systemd does what its Restart= says."""
        if self.running is not start:
            return
        asked = failure is FailureClass.REQUESTED_STOP
        if self.unit.active_state is ActiveState.DEACTIVATING and not asked:
            self._stopped(start)  # dead before its stop has drained it: there is no restart after a stop
            return
        start.failure, start.serves = failure, False
        for process in [p for p in self.processes.values() if p.owner == start.invocation]:
            if not (self.leaks and process.id.pid != start.main and not asked):
                self.drop(process)
        self.say(start, "Main process exited", message_id=MessageId.PROCESS_EXIT)
        result = ServiceResult.SUCCESS if asked else ServiceResult.EXIT_CODE
        if asked:
            self.change(active_state=ActiveState.INACTIVE, sub_state="dead", result=result, main_pid=0)
        elif self.restart_s is None:
            self.change(active_state=ActiveState.FAILED, sub_state="failed", result=result, main_pid=0)
        else:
            self.change(active_state=ActiveState.ACTIVATING, sub_state="auto-restart", result=result, main_pid=0)
            self.later(self.restart_s, lambda: self._restart(start))

    def drop(self, process: Process) -> None:
        """It is gone, and the driver gives its bytes back a little later."""
        process.alive = False
        self.processes.pop(process.id.pid, None)
        held = process.holds
        if held and self.driver_lag:
            self.releasing += held
            self.later(self.driver_lag, lambda: self._released(held))

    def _released(self, held: int) -> None:
        self.releasing -= held

    def _restart(self, start: Start) -> None:
        if self.unit.in_auto_restart and self.current is start:
            self.new_job()
            self.launch("systemd")

    # What is asked of systemd. `mode` fail refuses while another job is queued

    def stop(self, *, by: str) -> int:
        if by == "watchdog" and self.unit.job and self.unit.job_type != "stop":
            raise JobRefused("another job is queued")
        self._queued_start = ""  # a stop takes the place of a start that waits
        self.witness = False
        if self.unit.job and self.unit.job_type == "stop":
            return self.unit.job
        job = self.new_job()
        start = self.running
        if start is None:
            if self.unit.in_auto_restart:
                self.change(active_state=ActiveState.INACTIVE, sub_state="dead")
        else:
            stopping = {"active_state": ActiveState.DEACTIVATING, "sub_state": "stop-sigterm"}
            self.change(**stopping, job=job, job_type="stop")
            self.later(DRAIN_S, lambda: self._stopped(start))
        return job

    def _stopped(self, start: Start) -> None:
        if self.running is not start:
            return
        by, self._queued_start = self._queued_start, ""
        self.unit = replace(self.unit, job=0, job_type="")
        self.end(start, FailureClass.REQUESTED_STOP)
        if by:
            self.launch(by)

    def start(self, *, by: str) -> int:
        if self.unit.load_state != "loaded":
            raise BusError("the unit is masked")
        if self.unit.active_state is ActiveState.DEACTIVATING:
            if by == "watchdog":
                raise JobRefused("a stop job is queued")
            self._queued_start = by
            return self.new_job()
        job = self.new_job()
        if self.unit.ended:
            self.launch(by)
        return job

    def restart(self, *, by: str) -> int:
        if self.unit.load_state != "loaded":
            raise BusError("the unit is masked")
        if self.unit.ended:
            return self.start(by=by)
        if by == "watchdog" and self.unit.job:
            raise JobRefused("another job is queued")
        if self.unit.active_state is not ActiveState.DEACTIVATING:
            job = self.stop(by=by)
            self.unit = replace(self.unit, job_type="restart")
        else:
            job = self.new_job()
        self._queued_start = by
        return job

    def reset_failed(self) -> None:
        if self.unit.active_state is ActiveState.FAILED:
            self.change(active_state=ActiveState.INACTIVE, sub_state="dead")

    def kill_group(self) -> None:
        for process in [p for p in self.processes.values() if p.group == GROUP]:
            self.drop(process)
        start = self.running
        if start is not None and start.hung_since is not None:  # what is stuck takes its time to go
            start.serves = False
            self.change(active_state=ActiveState.DEACTIVATING, sub_state="final-sigterm", main_pid=0)
            self.later(FALLS_S, lambda: self._fallen(start))
        elif start is not None:
            self.end(start, FailureClass.EXTERNAL_KILL)

    def _fallen(self, start: Start) -> None:
        if self.running is not start or self.unit.job:
            return  # a stop that came meanwhile ends it
        by, self._queued_start = self._queued_start, ""
        self.unit = replace(self.unit, active_state=ActiveState.ACTIVE)
        self.end(start, FailureClass.EXTERNAL_KILL)
        if by:
            self.launch(by)

    def reload(self) -> None:
        self.loaded, self.ours_loaded = self.on_disk, self.ours_on_disk
        self.tell(Hint(HintKind.RELOADED))

    def need_bus(self) -> None:
        if not self.bus_up:
            raise BusLost("the bus is away")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
