"""The engines of containers: what their traces on this host say, and what they are asked to do.

An engine needs namespaces, mounts and capabilities that the sandbox of the watchdog's service does not have, so its
command is run by systemd in a transient unit of its own.
"""

import os
import signal
import stat
from collections.abc import Iterable, Iterator
from datetime import datetime

from sglang_watchdog.domain.container import (
    Container,
    Engine,
    Inspected,
    RunCommand,
    is_id,
    is_started_by,
    monitored,
    places_of,
)
from sglang_watchdog.domain.errors import DeadlineExceeded
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.host import processes, transient
from sglang_watchdog.host.child import CannotBeRun

# podman answers in a third of a second on an idle host; its lock is held for as long as an image is pulled.
_DEADLINE_S = 10.0
_MONITOR = "conmon"
# mtimes and systemd's timestamps are of different clocks of the kernel.
_SLACK_S = 1.0
_LARGEST_CIDFILE = 256
_LINES = "{{.Id}}\n{{.Created.Unix}}\n{{.Config.Image}}"
_LINES_DOCKER = "{{.Id}}\n{{.Created}}\n{{.Config.Image}}"


class EngineSilent(Exception):
    """It does not answer, or refuses, in one sentence."""


# Traces


def monitored_by(group: Iterable[ProcessId]) -> Iterator[Container]:
    """Containers whose monitor is among these processes of a unit's cgroup. Of root's alone: another user's podman is
    another engine, and whoever is not root could name a container that is not theirs."""
    for process in group:
        if not is_monitor(process.pid):
            continue
        found, facts = monitored(processes.command_line(process.pid)), processes.facts(process.pid)
        if facts is not None and facts.id == process and facts.uid == 0:
            yield Container(found, Engine.PODMAN)


def is_monitor(pid: int) -> bool:
    """Whether it is podman's, of a container that it started."""
    return processes.name(pid) == _MONITOR and bool(monitored(processes.command_line(pid)))


def first_command(monitor: int) -> tuple[str, ...]:
    """Of the container's first process, empty where there is none any more."""
    return next((line for pid in processes.children(monitor) if (line := processes.command_line(pid))), ())


def written_down(command: RunCommand, since: float) -> Container | None:
    """By the engine, in the file that the command names; None where there is none of root's that is younger than
    `since` (Unix seconds)."""
    if not command.cidfile.startswith("/"):
        return None
    try:
        with open(os.open(command.cidfile, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_LARGEST_CIDFILE).decode(errors="replace").strip()
    except OSError:
        return None
    roots = stat.S_ISREG(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o022
    fresh = status.st_mtime >= since - _SLACK_S
    return Container(text, command.engine) if roots and fresh and is_id(text) else None


def inhabitants(container: Container) -> tuple[ProcessId, ...]:
    """The container's processes, in the cgroups that its engine makes by default."""
    return tuple(process for place in places_of(container) for process in processes.cgroup_processes(place))


def listens(container: Container, port: int) -> bool:
    """Whether a process of the container holds a listening TCP socket of the host's network on the port."""
    return any(processes.cgroup_listens(place, port) for place in places_of(container))


# Questions and orders


async def named(command: RunCommand, since: float) -> Container | None:
    """The container of the command's name, if it is that of the launch that began at `since`."""
    if not command.name:
        return None
    try:
        said = await _ask(command.engine, "container", "inspect", f"--format={_format(command.engine)}", command.name)
        found, created, image = said.splitlines()
        seen = Inspected(found, _seconds(created), image)
    except (EngineSilent, ValueError):
        return None
    return Container(seen.id, command.engine) if is_started_by(command, seen, since - _SLACK_S) else None


async def silence(container: Container) -> str:
    """Why its engine cannot end it, in one sentence; empty where the engine knows it."""
    try:
        said = await _ask(container.engine, "container", "inspect", "--format={{.Id}}", container.id)
    except EngineSilent as why:
        return str(why)
    return "" if said.strip() == container.id else f"{container.engine} knows another container by that id"


async def kill(container: Container, number: signal.Signals) -> str:
    """Has the engine send a signal to the container. Returns why it did not; empty where it did."""
    try:
        await _ask(container.engine, "kill", f"--signal={number.name.removeprefix('SIG')}", container.id)
    except EngineSilent as why:
        return str(why)
    return ""


def _format(engine: Engine) -> str:
    return _LINES if engine is Engine.PODMAN else _LINES_DOCKER


def _seconds(text: str) -> float:
    """Unix seconds, or Docker's RFC 3339 with nanoseconds."""
    return float(text) if "T" not in text else datetime.fromisoformat(f"{text[:19]}+00:00").timestamp()


async def _ask(engine: Engine, *words: str) -> str:
    """What the engine's command prints. Raises `EngineSilent`."""
    try:
        ended = await transient.run(engine, *words, deadline=_DEADLINE_S, description=f"sglang-watchdog asks {engine}")
    except (CannotBeRun, DeadlineExceeded) as error:
        raise EngineSilent(str(error)) from error
    if ended.status:
        raise EngineSilent(f"{engine} answers: {ended.last_words or f'status {ended.status}'}")
    return ended.printed.decode(errors="replace")
