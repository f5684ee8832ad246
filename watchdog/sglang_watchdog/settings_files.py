"""The files of the settings as they lie on the host, not validated yet, and what a command must know before anything
else: where the daemon listens. Every command imports it, so nothing that is slow to load is imported here."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_watchdog.domain.errors import UnusableInput

DEFAULT_PATH = Path("/etc/sglang-watchdog/config.toml")
DEFAULT_RUNTIME_DIR = Path("/run/sglang-watchdog")
_LARGEST = 1024 * 1024
SOCKET_NAME = "control.sock"  # in the runtime_dir

Key = tuple[str, ...]
Json = dict[str, Any]


@dataclass(slots=True)
class Read:
    """`merged` is what all files say together, `origins` which file said it last, `errors` a sentence for each file
    that cannot be used."""

    merged: Json = field(default_factory=dict)
    origins: dict[Key, Path] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def read_files(path: Path) -> Read:
    """`path`, then `config.d/*.toml` beside it in the order of their names. A later file wins, key by key."""
    read = Read()
    for file in (path, *sorted((path.parent / "config.d").glob("*.toml"))):
        try:
            _merge(read.merged, _tables(file), file, read.origins)
        except UnusableInput as error:
            read.errors.append(str(error))
    return read


def runtime_dir(path: Path) -> Path:
    """Where the daemon listens. No other setting is looked at: a mistake in one, made after the daemon was started,
    keeps nobody from asking it. Raises `UnusableInput`."""
    read = read_files(path)
    said = read.merged.get("runtime_dir", str(DEFAULT_RUNTIME_DIR))
    if not read.errors and isinstance(said, str) and said.startswith("/"):
        return Path(said)
    from sglang_watchdog.settings import load  # it says what is wrong

    return load(path).runtime_dir


def _tables(file: Path) -> Json:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UnusableInput(f"{file}: is larger than {_LARGEST >> 20} MiB, so it is no settings file.")
        return tomllib.loads(content.decode().removeprefix("\ufeff"))
    except OSError as error:
        raise UnusableInput(f"{file}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UnusableInput(f"{file}: is not UTF-8 text (byte {error.start}), so it is no TOML.") from error
    except (ValueError, RecursionError) as error:
        raise UnusableInput(f"{file}: is not TOML: {error}.") from error


def _merge(into: Json, new: Json, file: Path, origins: dict[Key, Path], at: Key = ()) -> None:
    for name, value in new.items():
        here = (*at, name)
        origins[here] = file
        if isinstance(value, dict):
            if not isinstance(into.get(name), dict):
                into[name] = {}
            _merge(into[name], value, file, origins, here)
        else:
            into[name] = value
