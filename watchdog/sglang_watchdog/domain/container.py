"""Containers that a unit starts: who started one, and which one a process lives in. Pure.

A container's processes live in a cgroup that its engine makes, without the unit's INVOCATION_ID. What ties them to a
launch is the container's id, known while the launch runs: from the monitor that podman leaves in the unit's own cgroup
(conmon), from the file that the command has the id written to, or from the engine itself, asked by name. The processes
of that container are then recorded as those of the unit's own cgroup are.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

_ID = re.compile(r"[0-9a-f]{64}")
# By podman and Docker, with systemd's slices and without: libpod-ID.scope, libpod-payload-ID, docker-ID.scope, ID.
_GROUP = re.compile(r"(?:(?:libpod|docker)-(?:payload-)?)?([0-9a-f]{64})(?:\.scope)?")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # as both engines allow it, so that none is read as a flag
_SHORT = 12  # digits that the engines themselves print


class Engine(StrEnum):
    """An engine that is asked by its own command, found where systemd looks for commands: the unit's words for it may
    name a file that others than root can write."""

    PODMAN = "podman"
    DOCKER = "docker"


@dataclass(frozen=True, slots=True)
class Container:
    """A container that a launch has started. `id` has 64 hexadecimal digits."""

    id: str
    engine: Engine

    @property
    def short(self) -> str:
        return self.id[:_SHORT]

    @property
    def kill(self) -> str:
        """What a person types to end it."""
        return f"{self.engine} kill {self.short}"


@dataclass(frozen=True, slots=True)
class RunCommand:
    """`podman run` or `docker run` in an ExecStart=. `cidfile` and `name` are empty where the command has none."""

    engine: Engine
    argv: tuple[str, ...]
    cidfile: str
    name: str


def run_command(argv: Sequence[str]) -> RunCommand | None:
    """None where the command starts no container by itself."""
    program = argv[0].rpartition("/")[2] if argv else ""
    if program not in set(Engine) or "run" not in argv:
        return None
    options = argv[argv.index("run") + 1 :]
    name = _value(options, "--name")
    return RunCommand(Engine(program), tuple(argv), _value(options, "--cidfile"), name if _NAME.fullmatch(name) else "")


def _value(options: Sequence[str], flag: str) -> str:
    """The first one: what follows the image is the server's own command."""
    for word, following in zip(options, (*options[1:], ""), strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def is_id(text: str) -> bool:
    return bool(_ID.fullmatch(text))


def monitored(argv: Sequence[str]) -> str:
    """The container that this conmon started and monitors, by its command line; empty where it is another's: that of
    `podman exec` names the container, and a session of its own beside it."""
    container = _option(argv, "-c", "--cid")
    session = _option(argv, "-u", "--cuuid")
    executes = any(word in ("-e", "--exec") for word in argv)
    return container if is_id(container) and session == container and not executes else ""


def _option(argv: Sequence[str], *names: str) -> str:
    pairs = pairwise(argv)
    return next((value for word, value in pairs if word in names), "")


def named_by(group: Sequence[str]) -> str:
    """The id in the folders of a cgroup's path, of the outermost container: its engine is the one that this host has.
    Empty where none is there."""
    found = (_GROUP.fullmatch(part) for part in group)
    return next((match[1] for match in found if match), "")


def places_of(container: Container) -> tuple[str, ...]:
    """The cgroups that its engine may have made for it, by the engine's defaults."""
    match container.engine:
        case Engine.PODMAN:
            return (f"/machine.slice/libpod-{container.id}.scope", f"/libpod_parent/libpod-{container.id}")
        case Engine.DOCKER:
            return (f"/system.slice/docker-{container.id}.scope", f"/docker/{container.id}")


@dataclass(frozen=True, slots=True)
class Inspected:
    """What an engine says of a container: `created` is Unix seconds."""

    id: str
    created: float
    image: str


def is_started_by(command: RunCommand, seen: Inspected, since: float) -> bool:
    """Whether the container with the command's name is that of the launch that began at `since` (Unix seconds): made
    after it, of an image that the command names behind the name. Another one with that name is older, or the launch
    would not have come to run."""
    behind = command.argv[_end_of_name(command) :]
    return is_id(seen.id) and seen.created >= since and seen.image in behind


def _end_of_name(command: RunCommand) -> int:
    positions = (i for i, word in enumerate(command.argv) if word in (command.name, f"--name={command.name}"))
    return next(positions, len(command.argv)) + 1
