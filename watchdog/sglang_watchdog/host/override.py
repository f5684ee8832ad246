"""Puts a speculation config in force, and takes it back: by an environment file of our own or by a drop-in.

The environment file needs no reload (systemd reads it just before every start), but only a unit that expands
`$SGLANG_SPECULATION_ARGS` and lists the file can be served so. A drop-in works for every visible command. Whatever is
written comes from systemd's closed grammar, because who can write a drop-in is root. The operator's own files are never
touched.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath

from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.speculation import SpeculationConfig, is_managed
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import child
from sglang_watchdog.host.unit_files import OVERRIDES, drop_in_of, environment_file_of, on_disk, operator_command
from sglang_watchdog.host.unit_syntax import (
    BadSyntax,
    ExecLine,
    expand_word,
    render_environment,
    render_exec,
    render_variable,
    variable_of,
)

VARIABLE = "SGLANG_SPECULATION_ARGS"
FOLDER = "overrides"  # of environment files, in the state folder
VERIFY_DEADLINE_S = 10.0
_WIDEST_MODE = 0o644
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_SERVERS = frozenset({"sglang.launch_server", "launch_server.py", "sglang"})
_MODEL_OPTIONS = ("--model-path", "--model")
_HEADER = "# Written by sglang-watchdog, which takes it away again. Do not edit: change the unit itself.\n"
# SGLang titles its workers over their environment, which holds the proof of whose they are; this keeps it readable.
_KEEP_ENVIRON = {"SPT_NOENV": "1"}


class OverrideKind(StrEnum):
    ENVIRONMENT_FILE = "environment_file"
    DROP_IN = "drop_in"
    NOT_POSSIBLE = "not_possible"


@dataclass(frozen=True, slots=True)
class Override:
    """A file that puts a config in force. `loaded`: systemd has read our drop-in as it lay there when this was made."""

    unit: str
    kind: OverrideKind
    path: Path
    text: str
    mode: int
    loaded: bool


def override_kind(
    snapshot: UnitSnapshot, managed: frozenset[str] = frozenset(), overrides: Path = OVERRIDES
) -> OverrideKind:
    """Which way a config can be put in force for this unit."""
    if override_obstacle(snapshot, overrides):
        return OverrideKind.NOT_POSSIBLE
    if _takes_environment_file(snapshot, managed, overrides):
        return OverrideKind.ENVIRONMENT_FILE
    return OverrideKind.DROP_IN


def override_obstacle(snapshot: UnitSnapshot, overrides: Path = OVERRIDES) -> str:
    """Why no config can be put in force for this unit, for a person; empty where it can."""
    if snapshot.exec_start_count > 1:
        return f"{snapshot.name} has {snapshot.exec_start_count} ExecStart= commands, so none is the server alone"
    command, environment = operator_command(snapshot, overrides)
    if command is None or not command.argv:
        return f"the ExecStart= of {snapshot.name} cannot be read from its files"
    return _obstacle(snapshot.name, command, environment)


def _obstacle(unit: str, command: ExecLine, environment: Mapping[str, str]) -> str:
    words = [part for word in command.argv for part in expand_word(word, environment)]
    name = PurePath(words[0]).name if words else ""
    if name in _SHELLS:
        return f"{unit} starts a shell ({words[0]}), so the flags of the server cannot be seen: start it directly"
    if not any(PurePath(word).name in _SERVERS or word.partition("=")[0] in _MODEL_OPTIONS for word in words):
        return f"no SGLang command is to be seen in the ExecStart= of {unit} ({words[0]}): start the server directly"
    return ""


def _takes_environment_file(snapshot: UnitSnapshot, managed: frozenset[str], overrides: Path) -> bool:
    """The command has the variable, our file is read last, and no managed flag stands beside the variable, where an
    environment file could not take it away. What is loaded counts too, since nothing will be reloaded."""
    command, _ = operator_command(snapshot, overrides)
    ours_is_loaded = str(drop_in_of(snapshot.name)) in snapshot.drop_ins
    if command is None or not command.expands or f"${VARIABLE}" not in command.argv:
        return False
    if not ours_is_loaded and f"${VARIABLE}" not in snapshot.exec_start:
        return False
    if snapshot.environment_files[-1:] != (str(environment_file_of(snapshot.name, overrides)),):
        return False
    return not any(is_managed(word.partition("=")[0], managed) for word in command.argv)


def render(
    snapshot: UnitSnapshot,
    config: SpeculationConfig,
    managed: frozenset[str] = frozenset(),
    overrides: Path = OVERRIDES,
) -> Override:
    """The file that puts `config` in force for the operator's definition as it is now.

    Raises `UnusableInput` where that cannot be done, with the obstacle.
    """
    kind = override_kind(snapshot, managed, overrides)
    disk = on_disk(snapshot, own=False, overrides=overrides)
    try:
        match kind:
            case OverrideKind.NOT_POSSIBLE:
                raise UnusableInput(override_obstacle(snapshot, overrides))
            case OverrideKind.ENVIRONMENT_FILE:
                path, text = environment_file_of(snapshot.name, overrides), render_environment_file(config)
            case OverrideKind.DROP_IN:
                command, environment = operator_command(snapshot, overrides)
                assert command is not None  # or there were an obstacle
                path, text = drop_in_of(snapshot.name), render_drop_in(command, config, managed, environment)
    except BadSyntax as error:
        raise UnusableInput(f"{snapshot.name}: {error}") from error
    # What the operator hid from other users (a key on the command line) stays hidden in a copy of it.
    mode = _no_wider_than((disk.fragment, *disk.drop_ins, *disk.environment_files))
    loaded = str(path) in snapshot.drop_ins and not snapshot.need_daemon_reload
    return Override(snapshot.name, kind, path, text, mode, loaded)


def render_environment_file(config: SpeculationConfig) -> str:
    """Raises `BadSyntax` for a control character in a flag."""
    return _HEADER + render_environment({VARIABLE: render_variable(config.words()), **_KEEP_ENVIRON})


def render_drop_in(
    command: ExecLine,
    config: SpeculationConfig,
    managed: frozenset[str] = frozenset(),
    environment: Mapping[str, str] | None = None,
) -> str:
    """The operator's command with its managed flags replaced by those of `config`. `environment` is what the command is
    expanded with: a variable that holds managed flags is replaced by what else it holds."""
    kept = without_managed(command, managed, environment or {})
    given = config.words() if not command.expands else tuple(word.replace("$", "$$") for word in config.words())
    line = ExecLine(command.prefix, (*kept, *given))
    settings = "".join(f"Environment={name}={value}\n" for name, value in _KEEP_ENVIRON.items())
    return f"{_HEADER}[Service]\n{settings}ExecStart=\nExecStart={render_exec(line)}\n"


def without_managed(command: ExecLine, managed: frozenset[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The command's words without managed flags, all others as they stand."""
    kept: list[str] = []
    takes_value = False
    for word in _flattened(command, managed, environment):
        if takes_value and _is_value(word, environment):
            takes_value = False
            continue
        name, equals, _ = word.partition("=")
        takes_value = is_managed(name, managed) and not equals
        if not is_managed(name, managed):
            kept.append(word)
    return tuple(kept)


def _flattened(command: ExecLine, managed: frozenset[str], environment: Mapping[str, str]) -> Iterator[str]:
    for word in command.words:
        name = variable_of(word) if command.expands else None
        if name is None:
            yield word
            continue
        parts = expand_word(word, environment)
        if any(is_managed(part.partition("=")[0], managed) for part in parts):
            yield from (part.replace("$", "$$") for part in parts)
        elif name != VARIABLE:
            yield word


def _is_value(word: str, environment: Mapping[str, str]) -> bool:
    """Whether a word behind a managed flag is its value: each of them takes one at most, and a variable may be
    anything."""
    if variable_of(word) is None:
        return not word.startswith("--")
    parts = expand_word(word, environment)
    return len(parts) == 1 and not parts[0].startswith("--")


def _no_wider_than(paths: Iterable[str]) -> int:
    mode = _WIDEST_MODE
    for path in filter(None, paths):
        with contextlib.suppress(OSError):
            mode &= os.stat(path).st_mode
    return mode | 0o600


def put_in_force(override: Override) -> bool:
    """Writes the file, whole or not at all. True if systemd has to reload before it takes effect.

    Doing it again changes nothing, not even the file's time. Raises `UnusableInput` where the folder is a link or
    cannot be written.
    """
    written = _write_once(override)
    if override.kind is OverrideKind.DROP_IN:
        return written or not override.loaded  # a watchdog that was killed may have written it and not reloaded
    return _remove(drop_in_of(override.unit))  # of a time when the unit did not list our environment file


def is_in_force(override: Override) -> bool:
    """Whether `put_in_force` would change nothing."""
    if override.kind is OverrideKind.ENVIRONMENT_FILE and drop_in_of(override.unit).exists():
        return False
    if not override.path.parent.is_dir():
        return False
    with _folder(override.path.parent) as folder:
        written = _content(folder, override.path.name) == (override.text, override.mode)
    return written and (override.loaded or override.kind is OverrideKind.ENVIRONMENT_FILE)


def lies_there(unit: str, overrides: Path = OVERRIDES) -> bool:
    """Whether a file of ours is there, in either way."""
    return environment_file_of(unit, overrides).exists() or drop_in_of(unit).exists()


def withdraw(unit: str, overrides: Path = OVERRIDES) -> bool:
    """Takes away what was put in force, in either way. True if systemd has to reload before it takes effect."""
    _remove(environment_file_of(unit, overrides))
    return _remove(drop_in_of(unit))


def _remove(path: Path) -> bool:
    if not path.parent.is_dir():
        return False
    with _folder(path.parent) as folder:
        try:
            os.unlink(path.name, dir_fd=folder)
        except FileNotFoundError:
            return False
        os.fsync(folder)
    return True


@contextlib.contextmanager
def _folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """The folder as a descriptor, so that nothing that happens to its path meanwhile leads elsewhere."""
    try:
        if make:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise UnusableInput(f"{path}: no override can be written there: {why}.") from error
    try:
        yield folder
    except OSError as error:
        raise UnusableInput(f"{path}: the override cannot be written or removed: {error.strerror}.") from error
    finally:
        os.close(folder)


def _write_once(override: Override) -> bool:
    with _folder(override.path.parent, make=True) as folder:
        if _content(folder, override.path.name) == (override.text, override.mode):
            return False
        _write(folder, override)
        return True


def _content(folder: int, name: str) -> tuple[str, int] | None:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(file, encoding="utf-8", errors="surrogateescape") as opened:
        return opened.read(), os.fstat(file).st_mode & 0o7777


def _write(folder: int, override: Override) -> None:
    """The file belongs to whom the watchdog runs as, root: its service may not change owners."""
    # Always the same name, so that a write that was cut off leaves one file at most; systemd reads only *.conf.
    temporary = f".{override.path.name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=folder)
    with open(file, "w", encoding="utf-8", errors="surrogateescape") as opened:
        opened.write(override.text)
        opened.flush()
        os.fchmod(file, override.mode)
        os.fsync(file)
    os.rename(temporary, override.path.name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


async def verify(unit: str, deadline_s: float = VERIFY_DEADLINE_S) -> str:
    """What `systemd-analyze verify` has against the unit as it lies on disk, empty where a reload would load it.

    Only the unit itself counts, not what it depends on. Raises `DeadlineExceeded`; `UnusableInput` where the command
    is missing.
    """
    command = ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", "--", unit)
    try:
        ended = await child.run(command, deadline_s)
    except child.CannotBeRun as error:
        raise UnusableInput(f"{error}.") from error
    said = "\n".join(filter(None, (ended.printed.decode(errors="replace").strip(), ended.complaint)))
    return said or f"systemd-analyze verify ended with status {ended.status}" if ended.status else ""
