"""A unit's definition as it lies on disk: which files make it up, their digests, and the command that they give.

`NeedDaemonReload` goes by modification times (yes after rewriting identical bytes, once no after a fresh drop-in), so
content is compared here by digest. Nothing here writes: that is `host.override`'s.
"""

import contextlib
import glob
import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_watchdog.domain.launch import Definition, Shadowed
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import quadlet
from sglang_watchdog.host.unit_syntax import (
    BadSyntax,
    ExecLine,
    assignments,
    expand,
    parse_environment,
    parse_exec,
    split_words,
)

# `systemd-analyze unit-paths` of the system manager, highest priority first; the same in 252 and 257 but for /lib.
UNIT_PATHS = tuple(
    Path(path)
    for path in (
        "/etc/systemd/system.control",
        "/run/systemd/system.control",
        "/run/systemd/transient",
        "/run/systemd/generator.early",
        "/etc/systemd/system",
        "/etc/systemd/system.attached",
        "/run/systemd/system",
        "/run/systemd/system.attached",
        "/run/systemd/generator",
        "/usr/local/lib/systemd/system",
        "/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/run/systemd/generator.late",
    )
)
DROP_IN_NAME = "90-sglang-watchdog.conf"
_DROP_IN_FOLDER = Path("/etc/systemd/system")
OVERRIDES = Path("/var/lib/sglang-watchdog/overrides")
_NOT_READABLE = "unreadable"


class Unresolved(ValueError):
    """A specifier that only systemd itself can resolve."""


def drop_in_of(unit: str) -> Path:
    """Our own drop-in, whether it is there or not."""
    return _DROP_IN_FOLDER / f"{unit}.d" / DROP_IN_NAME


def environment_file_of(unit: str, overrides: Path = OVERRIDES) -> Path:
    """Our own environment file, whether it is there or not. The unit has to list it, with `-`, and last."""
    return overrides / f"{unit}.env"


@dataclass(frozen=True, slots=True)
class ServiceOnDisk:
    """What the files of a unit say, as systemd would read them now. `commands`: None where they cannot be known."""

    fragment: str
    drop_ins: tuple[str, ...]
    commands: tuple[ExecLine, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_files: tuple[str, ...] = ()

    @property
    def command(self) -> ExecLine | None:
        """The only command of ExecStart=; None for none, several, or one that cannot be known."""
        return self.commands[0] if self.commands is not None and len(self.commands) == 1 else None


def definition(snapshot: UnitSnapshot, in_sync: Definition | None = None) -> Definition:
    """The definition that systemd has loaded: digests of its fragment and drop-ins, and of what it was generated of.

    The bytes that were loaded are on disk only while nothing changed since. So where systemd says that a reload is
    due, the digests are those of `in_sync`, the last definition taken before that (empty where there is none).
    """
    paths = [path for path in (snapshot.fragment, snapshot.source, *snapshot.drop_ins) if path]
    known = (in_sync.digests if in_sync else {}) if snapshot.need_daemon_reload else {p: _digest(p) for p in paths}
    return Definition(snapshot.fragment, {p: known.get(p, "") for p in paths}, redact_argv(snapshot.exec_start))


def definition_on_disk(snapshot: UnitSnapshot) -> Definition:
    """The definition that a reload would load now, drop-ins included that systemd has not seen yet."""
    disk = on_disk(snapshot)
    digests = {path: _digest(path) for path in (disk.fragment, snapshot.source, *disk.drop_ins) if path}
    return Definition(disk.fragment, digests, redact_argv(disk.command.argv) if disk.command else ())


def intended_config(snapshot: UnitSnapshot, managed: frozenset[str]) -> SpeculationConfig | None:
    """The config that would run after a reload and a start: the files as they are now, our override included.
    None where the command cannot be known from the files."""
    return _config(on_disk(snapshot), managed)


def planned_argv(snapshot: UnitSnapshot) -> tuple[str, ...]:
    """The command that a start would run now, our override included. Empty where that cannot be known: the files are
    not what systemd has loaded, or do not tell."""
    disk = on_disk(snapshot)
    known = disk.command is not None and not snapshot.need_daemon_reload
    return tuple(expand(disk.command, disk.environment)) if known and disk.command else ()


def loaded_argv(snapshot: UnitSnapshot) -> tuple[str, ...]:
    """The command that systemd has loaded, variables as the files on disk give them. Empty where it has several."""
    if snapshot.exec_start_count != 1:
        return ()
    return tuple(expand(ExecLine("", snapshot.exec_start), on_disk(snapshot).environment))


def disk_changed(snapshot: UnitSnapshot) -> float | None:
    """When the newest of the unit's files came to be what it is now (Unix seconds). The change time of the inode, since
    a copy may carry an old modification time."""
    disk = on_disk(snapshot)
    times = []
    for path in filter(None, (disk.fragment, snapshot.source, *disk.drop_ins, *disk.environment_files)):
        with contextlib.suppress(OSError):
            times.append(os.stat(path).st_ctime)
    return max(times, default=None)


def operator_config(
    snapshot: UnitSnapshot, managed: frozenset[str] = frozenset(), overrides: Path = OVERRIDES
) -> SpeculationConfig | None:
    """As `intended_config`, without our override: what the operator's own files ask for."""
    return _config(on_disk(snapshot, own=False, overrides=overrides), managed)


def shadowed_config(snapshot: UnitSnapshot, managed: frozenset[str]) -> Shadowed | None:
    """What the unit file asks for, where it was changed after a drop-in of the operator that sets another command.
    None where no drop-in does, where both come to the same, and where one of them cannot be known from the files."""
    disk = on_disk(snapshot, own=False)
    shadowing = [path for path in disk.drop_ins if any(key == "ExecStart" for key, _ in _assigned(path))]
    if not disk.fragment or not shadowing:
        return None
    alone = _Service(snapshot.name, None)
    alone.read(_text(disk.fragment))
    asked, effective = _config(alone.result(disk.fragment, ()), managed), _config(disk, managed)
    if asked is None or effective is None or asked.same_as(effective):
        return None
    try:
        changed, shadowed_since = os.stat(disk.fragment).st_ctime, os.stat(shadowing[-1]).st_ctime
    except OSError:
        return None
    return Shadowed(shadowing[-1], asked, changed) if changed > shadowed_since else None


def _assigned(path: str) -> list[tuple[str, str]]:
    return list(assignments(_text(path), "Service"))


def _config(disk: ServiceOnDisk, managed: frozenset[str]) -> SpeculationConfig | None:
    return SpeculationConfig.of(expand(disk.command, disk.environment), managed) if disk.command else None


def on_disk(snapshot: UnitSnapshot, *, own: bool = True, overrides: Path = OVERRIDES) -> ServiceOnDisk:
    """Reads the unit's files as systemd would. `own=False` leaves out what the watchdog itself wrote."""
    unit = snapshot.name
    fragment = _fragment(snapshot)
    drop_ins = [path for path in _drop_ins(snapshot) if own or path != str(drop_in_of(unit))]
    service = _Service(unit, None if own else str(environment_file_of(unit, overrides)))
    service.read(_text(fragment))
    if snapshot.source.endswith(quadlet.SUFFIX):
        service.regenerate(_text(fragment), _text(snapshot.source))
    for path in drop_ins:
        service.read(_text(path))
    return service.result(fragment, tuple(drop_ins))


class _Service:
    """Folds the assignments of [Service] together, in the order of the files."""

    def __init__(self, unit: str, left_out: str | None) -> None:
        self._unit = unit
        self._left_out = left_out
        self._commands: list[ExecLine] | None = []
        self._environment: dict[str, str] = {}
        self._files: list[str] = []

    def read(self, text: str) -> None:
        for key, value in assignments(text, "Service"):
            match key:
                case "ExecStart":
                    self._exec_start(value)
                case "Environment":
                    self._assign_environment(value)
                case "EnvironmentFile":
                    self._files = [*self._files, value] if value else []

    def regenerate(self, generated: str, source: str) -> None:
        """Of a unit that podman generates of a file: the command as it would be after a reload."""
        if not self._commands:
            return
        (line, *_), self._commands = self._commands, None
        with contextlib.suppress(BadSyntax, Unresolved):
            if changed := quadlet.changed_words(generated, source):
                old, new = (tuple(map(self._resolve, words)) for words in changed)
                kept = len(line.words) - len(old)
                if line.words[kept:] == old:
                    self._commands = [ExecLine(line.prefix, (*line.words[:kept], *new))]

    def _exec_start(self, value: str) -> None:
        if not value:
            self._commands = []
        elif self._commands is not None:
            try:
                self._commands += [self._resolved(line) for line in parse_exec(value)]
            except Unresolved:
                self._commands = None
            except BadSyntax:
                pass  # systemd ignores the line as well

    def _resolved(self, line: ExecLine) -> ExecLine:
        return ExecLine(line.prefix, tuple(self._resolve(word) for word in line.words))

    def _resolve(self, word: str) -> str:
        return resolve_specifiers(word, self._unit)

    def _assign_environment(self, value: str) -> None:
        if not value:
            self._environment = {}
            return
        try:
            words = [self._resolve(word) for word in split_words(value)]
        except (BadSyntax, Unresolved):
            return
        self._environment |= dict(_pair(word) for word in words if "=" in word)

    def result(self, fragment: str, drop_ins: tuple[str, ...]) -> ServiceOnDisk:
        commands = None if self._commands is None else tuple(self._commands)
        files = [path for path in self._environment_files() if path != self._left_out]
        environment = dict(self._environment)
        for path in files:  # a file beats Environment=, a later file an earlier one
            environment |= parse_environment(_text(path))
        return ServiceOnDisk(fragment, drop_ins, commands, environment, tuple(files))

    def _environment_files(self) -> Iterator[str]:
        for value in self._files:
            try:
                yield from sorted(glob.glob(self._resolve(value.removeprefix("-"))))
            except Unresolved:
                continue


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _fragment(snapshot: UnitSnapshot) -> str:
    """The unit file that a reload would take; where it is the loaded one, spelled as systemd spells it."""
    names = [snapshot.name, *filter(None, [_template(snapshot.name)])]
    found = next((path for name in names for folder in UNIT_PATHS if os.path.lexists(path := folder / name)), None)
    if found is None:
        return ""
    return snapshot.fragment if _same_file(found, snapshot.fragment) else str(found)


def _drop_ins(snapshot: UnitSnapshot) -> tuple[str, ...]:
    """Drop-ins that a reload would read, in the order of their names. Those that are loaded and still there count too,
    since a drop-in of an alias is found by the alias's name only."""
    chosen: dict[str, Path] = {}
    for folder in _drop_in_folders(snapshot.name):
        for path in sorted(folder.glob("[!.]*.conf")):
            chosen.setdefault(path.name, path)
    spelled = {os.path.realpath(path): path for path in snapshot.drop_ins}
    for path in map(Path, snapshot.drop_ins):
        if path.exists():
            chosen.setdefault(path.name, path)
    files = [path for _, path in sorted(chosen.items()) if os.path.realpath(path) != os.devnull and path.is_file()]
    return tuple(spelled.get(os.path.realpath(path), str(path)) for path in files)


def _drop_in_folders(unit: str) -> Iterator[Path]:
    names = list(_drop_in_names(unit))
    for folder in UNIT_PATHS:
        yield from (folder / f"{name}.d" for name in names)
    yield from (folder / "service.d" for folder in UNIT_PATHS)


def _drop_in_names(unit: str) -> Iterator[str]:
    """The unit's name, its template's, and each beginning of these that ends with a dash."""
    yield unit
    template = _template(unit)
    if template:
        yield template
    prefix = unit.removesuffix(".service").partition("@")[0]
    tail = ("@" if template else "") + ".service"
    while (dash := prefix.rstrip("-").rfind("-")) > 0:
        prefix = prefix[: dash + 1]
        yield prefix + tail


def _template(unit: str) -> str:
    prefix, at, instance = unit.removesuffix(".service").partition("@")
    return f"{prefix}@.service" if at and instance else ""


def _same_file(path: Path, other: str) -> bool:
    return bool(other) and os.path.realpath(path) == os.path.realpath(other)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError:
        return _NOT_READABLE


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def resolve_specifiers(word: str, unit: str) -> str:
    """`%` in a word of a unit file (systemd.unit(5), "Specifiers"). A percent sign before what is no letter stays, as
    systemd has it. Raises `Unresolved` for what needs systemd's own state."""
    values = _specifiers(unit)

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise Unresolved(match[0])
        return values[match[1]]

    return re.sub(r"%([A-Za-z%])", value, word)


def _specifiers(unit: str) -> dict[str, str]:
    name = unit.removesuffix(".service")
    prefix, _, instance = name.partition("@")
    last = prefix.rpartition("-")[2]
    names = {"n": unit, "N": name, "p": prefix, "P": _unescaped(prefix), "i": instance, "I": _unescaped(instance)}
    folders = {"t": "/run", "S": "/var/lib", "C": "/var/cache", "L": "/var/log", "E": "/etc", "T": "/tmp"}
    # The manager's user, not the unit's User=.
    manager = {"u": "root", "U": "0", "g": "root", "G": "0", "h": "/root", "V": "/var/tmp"}
    host = {"H": socket.gethostname(), "v": os.uname().release, "%": "%"}
    return {**names, "j": last, "J": _unescaped(last), **folders, **manager, **host}


def _unescaped(name: str) -> str:
    slashes = name.replace("-", "/")
    return re.sub(r"\\x([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), slashes)


def operator_command(snapshot: UnitSnapshot, overrides: Path = OVERRIDES) -> tuple[ExecLine | None, Mapping[str, str]]:
    """The command of the operator's own definition, without our override, and the variables it is expanded with.

    systemd's own parse is taken where it is of the operator's files as they are now, and else our reading of them.
    Only the files tell the marks before the path (`-`, `@`, …), which D-Bus's argv has lost.
    """
    disk = on_disk(snapshot, own=False, overrides=overrides)
    loaded_is_theirs = str(drop_in_of(snapshot.name)) not in snapshot.drop_ins and not snapshot.need_daemon_reload
    if not loaded_is_theirs or snapshot.exec_start_count != 1:
        return disk.command, disk.environment
    prefix = disk.command.prefix if disk.command else ""
    path = disk.command.words[:1] if disk.command and "@" in prefix else ()
    return ExecLine(prefix, (*path, *snapshot.exec_start)), disk.environment
