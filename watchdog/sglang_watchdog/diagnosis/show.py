"""Reads what `systemctl show UNIT` printed into a snapshot of the unit. Does not run systemctl."""

import re
from collections.abc import Mapping

from sglang_watchdog.diagnosis.clock import first_time, has_known_zone
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.unit import ActiveState, ExitCode, ServiceResult, UnitSnapshot

_ROW = re.compile(r"([A-Z][A-Za-z0-9]+)=(.*)")
_COMMAND = re.compile(r"argv\[\]=(.*?) ; (?:ignore_errors|flags)=")
_SPAN = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*(us|ms|min|month|s|h|d|w|y)?(?=\s|\d|$)")
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "month": 2629800.0,
    "y": 31557600.0,
}


def parse_show(text: str, name: str) -> UnitSnapshot | None:
    """The unit that the text shows; of several the first. None for an empty file. Raises UnusableInput for other text.

    The argv of ExecStart= comes without quotes, so a value with blanks in it is several words here.
    """
    rows, others = _rows(text)
    if not rows:
        if others:
            raise UnusableInput(f"{name}: not the output of `systemctl show UNIT`: {others[0][:80]!r}")
        return None
    return _snapshot(rows)


def _rows(text: str) -> tuple[dict[str, list[str]], list[str]]:
    """Properties of the first unit in the text, and the lines that are none. ExecStart= may come more than once."""
    rows: dict[str, list[str]] = {}
    others: list[str] = []
    for line in text.splitlines():
        found = _ROW.fullmatch(line)
        if not line.strip() and "Id" in rows:
            break  # systemctl puts an empty line between units
        if found:
            rows.setdefault(found[1], []).append(found[2])
        elif line.strip():
            others.append(line)
    return rows, others


def _snapshot(rows: Mapping[str, list[str]]) -> UnitSnapshot:
    def text(key: str) -> str:
        return rows.get(key, [""])[-1]

    commands = [found[1].split() for row in rows.get("ExecStart", []) for found in _COMMAND.finditer(row)]
    return UnitSnapshot(
        name=text("Id"),
        load_state=text("LoadState"),
        active_state=_active_state(text("ActiveState")),
        sub_state=text("SubState"),
        unit_file_state=text("UnitFileState"),
        invocation=text("InvocationID").replace("-", ""),
        result=_result(text("Result")),
        exec_main_code=_exit_code(text("ExecMainCode")),
        exec_main_status=_number(text("ExecMainStatus")),
        exec_main_pid=_number(text("ExecMainPID")),
        main_pid=_number(text("MainPID")),
        exec_main_started=_time(text("ExecMainStartTimestamp")),
        exec_main_exited=_time(text("ExecMainExitTimestamp")),
        inactive_exit=_time(text("InactiveExitTimestamp")),
        restarts=_number(text("NRestarts")),
        fragment=text("FragmentPath"),
        source=text("SourcePath"),
        drop_ins=tuple(text("DropInPaths").split()),
        environment_files=tuple(row.split(" (")[0] for row in rows.get("EnvironmentFiles", []) if row),
        need_daemon_reload=text("NeedDaemonReload") == "yes",
        exec_start=tuple(commands[0]) if commands else (),
        exec_start_count=len(commands),
        control_group=text("ControlGroup"),
        kill_mode=text("KillMode"),
        restart=text("Restart"),
        restart_delay=seconds(text("RestartUSec")),
        stop_timeout=seconds(text("TimeoutStopUSec")),
        service_type=text("Type"),
        runtime_max=seconds(text("RuntimeMaxUSec")),
        oom_policy=text("OOMPolicy"),
        memory_max=_number(text("MemoryMax")) or None,
        known=frozenset(rows),
    )


def seconds(text: str) -> float | None:
    """A span of time as systemctl writes it (`1min 30s`, `100ms`). None for `infinity` and for no value."""
    found = _SPAN.findall(text.strip())
    if not found or text.strip() == "infinity":
        return None
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in found)


def _time(text: str) -> float:
    if text.startswith("@"):
        return float(text[1:]) if re.fullmatch(r"\d{1,18}(\.\d+)?", text[1:]) else 0.0
    return (first_time(text) or 0.0) if has_known_zone(text) else 0.0


def _number(text: str) -> int:
    return whole(text) or 0


def _active_state(text: str) -> ActiveState | None:
    return ActiveState(text) if text in ActiveState.__members__.values() else None


def _result(text: str) -> ServiceResult:
    return ServiceResult(text) if text in ServiceResult.__members__.values() else ServiceResult.UNKNOWN


def _exit_code(text: str) -> ExitCode:
    """systemctl prints the number; a person may have written the word."""
    number = {"exited": 1, "killed": 2, "dumped": 3}.get(text, _number(text))
    return ExitCode(number) if number in ExitCode.__members__.values() else ExitCode.NONE
