"""Reads a host for `setup`: which services start SGLang, and how they are defined. Writes nothing."""

import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.domain.errors import BusError, UnusableInput
from sglang_watchdog.domain.journal import MessageId
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.domain.speculation import SpeculationConfig, is_managed
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import override
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.override import VARIABLE, OverrideKind
from sglang_watchdog.host.unit_files import OVERRIDES, on_disk, operator_command
from sglang_watchdog.host.unit_syntax import (
    BadSyntax,
    ExecLine,
    expand,
    expand_word,
    parse_environment,
    render_exec,
    render_variable,
    render_word,
    variable_of,
)
from sglang_watchdog.survey import Drains, Found, Launcher, drains_of, launcher_of, source_of

_LARGEST_SCRIPT = 64 * 1024
_JOURNAL_S = 30
# Of each stop three or four: a thousand stops are enough of a past.
_NEWEST_ENTRIES = 4000
_STOPS = (
    MessageId.UNIT_STOPPING,
    MessageId.PROCESS_EXIT,
    MessageId.UNIT_FAILED,
    MessageId.UNIT_SUCCESS,
    MessageId.UNIT_STOPPED,
)
_ROLLBACK = {
    OverrideKind.ENVIRONMENT_FILE: "by environment file, without a daemon-reload",
    OverrideKind.DROP_IN: "by drop-in, with a daemon-reload",
}


def sglang_units(systemd: Systemd) -> list[Found]:
    """Every service of the host that starts SGLang, by name. Raises `BusError`."""
    found = (_look(systemd, unit) for unit in systemd.services())
    return [one for one in found if one and one.launcher]


def look(systemd: Systemd, unit: str) -> Found:
    """The unit that somebody named, whether it starts SGLang or not. Raises `UnusableInput` where there is none."""
    snapshot = systemd.snapshot(unit)
    if not snapshot.loaded:
        raise UnusableInput(f"{unit} is not loaded ({snapshot.load_state or 'systemd does not know it'})")
    return _found(snapshot)


def _look(systemd: Systemd, unit: str) -> Found | None:
    try:
        snapshot = systemd.snapshot(unit)
    except BusError:  # a name that systemd lists and cannot load is none that it could start
        return None
    return _found(snapshot) if snapshot.loaded and launcher(snapshot) else None


def launcher(snapshot: UnitSnapshot) -> Launcher | None:
    argv = _argv(snapshot)
    return launcher_of(argv, _scripts(argv)) if argv else None


def _argv(snapshot: UnitSnapshot) -> tuple[str, ...]:
    command, environment = operator_command(snapshot)
    if command is None:
        return snapshot.exec_start
    return expand(command, environment)


def _scripts(argv: tuple[str, ...]) -> Iterator[str]:
    """Texts of the scripts that a command names. Whatever is large, or no plain file, is none."""
    for word in argv:
        if word.startswith("/") and (text := _script(Path(word))):
            yield text


def _script(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.read(2) != b"#!":
                return ""
            return file.read(_LARGEST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


def _found(snapshot: UnitSnapshot) -> Found:
    command, environment = operator_command(snapshot)
    argv = _argv(snapshot)
    how = launcher_of(argv, _scripts(argv))
    hidden = how is Launcher.SCRIPT or override.override_obstacle(snapshot)
    return Found(
        unit=snapshot.name,
        state=_state(snapshot),
        launcher=how,
        command=" ".join(redact_argv(argv)),
        config="" if hidden else SpeculationConfig.of(argv).describe(),
        given=_given(snapshot, command, environment) if command and not hidden else "",
        rollback=_rollback(snapshot, how),
        service_type=snapshot.service_type,
        restart=snapshot.restart,
        restart_delay=snapshot.restart_delay,
        kill_mode=snapshot.kill_mode,
        stop_timeout=snapshot.stop_timeout,
        keeps_environ=environment.get("SPT_NOENV") == "1",
        drains=drains(snapshot.name),
        by_variable=_by_variable(snapshot, command, environment) if command and how is Launcher.DIRECT else (),
    )


def _state(snapshot: UnitSnapshot) -> str:
    known = (snapshot.active_state, snapshot.sub_state, snapshot.unit_file_state)
    active, sub, enabled = (str(word or "") for word in known)
    return f"{active} ({sub}), {enabled or 'transient'}"


def _rollback(snapshot: UnitSnapshot, how: Launcher | None) -> str:
    if how is Launcher.SCRIPT:
        return "not possible: the server's flags are in a script; start it directly in ExecStart="
    kind = override.override_kind(snapshot)
    return _ROLLBACK.get(kind) or f"not possible: {override.override_obstacle(snapshot)}"


def _given(snapshot: UnitSnapshot, command: ExecLine, environment: Mapping[str, str]) -> str:
    """Where the speculation flags of a command come from."""
    ways = []
    if any(is_managed(word.partition("=")[0], frozenset()) for word in command.argv):
        ways.append("on the ExecStart= line")
    disk = on_disk(snapshot, own=False)
    files = {path: _variables(path) for path in disk.environment_files}
    for name in filter(None, map(variable_of, command.argv if command.expands else ())):
        parts = expand_word(f"${name}", environment)
        if name == VARIABLE or any(is_managed(part.partition("=")[0], frozenset()) for part in parts):
            source = source_of(name, files, environment)
            ways.append(f"by ${name}" + (f" from {source}" if source else ", which nothing sets"))
    return " and ".join(ways)


def _variables(path: str) -> dict[str, str]:
    try:
        return parse_environment(Path(path).read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return {}


def _by_variable(snapshot: UnitSnapshot, command: ExecLine, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The lines that make a unit take an override by environment file, for one that takes it by drop-in."""
    if override.override_kind(snapshot) is not OverrideKind.DROP_IN or not command.expands:
        return ()
    kept = override.without_managed(command, frozenset(), environment)
    config = SpeculationConfig.of(expand(command, environment))
    # A value that was hidden is not the operator's any more: the line says so instead of leaking it.
    line = ExecLine(command.prefix, (*redact_argv(kept), f"${VARIABLE}"))
    try:
        variable = render_word(f"{VARIABLE}={render_variable(config.words())}")
    except BadSyntax:
        return ()
    return (
        f"Environment={variable}",
        f"EnvironmentFile=-{OVERRIDES}/%n.env",
        "ExecStart=",
        f"ExecStart={render_exec(line)}",
    )


def drains(unit: str) -> Drains:
    """Past stops of the unit, as far as the journal can be read."""
    matches = ["_PID=1", f"UNIT={unit}", *(f"MESSAGE_ID={each}" for each in _STOPS)]
    command = ["journalctl", "--output=json", "--all", "--no-pager", "--quiet", f"--lines={_NEWEST_ENTRIES}", *matches]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_JOURNAL_S)
        return drains_of(read_journal(done.stdout.splitlines(), "the journal"))
    except (OSError, subprocess.TimeoutExpired, UnusableInput):  # an empty journal too
        return Drains()
