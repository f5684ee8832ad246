"""Processes and cgroups by readings of /proc that cannot hang, and signals that cannot hit the wrong process.

Nothing here reads through the memory of a process, but for `command_line` and `variables` of a unit's own main process:
that blocks behind a process stuck in the driver, so GPU holders are described by `host.gpu.ProbeWorker`.

psutil serves where it can (ancestors). A process is identified by its start in clock ticks, which psutil does
not give: its `create_time()` is in Unix seconds and moves when the clock is stepped. Its `name()` reads the command
line for long names, and its table of sockets is read anew for each process.
"""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import psutil

from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.domain.ownership import Ancestor, ProcessFacts

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
# Where systemd keeps its groups: the unified hierarchy, or version 1's own hierarchy of systemd (hybrid and legacy).
_CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))
_MOVES = ("rchar:", "wchar:", "read_bytes:")  # the last: pages that a mapped file was read for
_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


# One process


def start_ticks(pid: int) -> int | None:
    """Clock ticks since boot at which it started; None where there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def identify(pid: int) -> ProcessId | None:
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessId(pid, ticks)


def name(pid: int) -> str:
    """The kernel's name of the process (comm: at most 15 characters), empty where it is gone."""
    return _text(pid, "comm").rstrip("\n")


def command_line(pid: int) -> tuple[str, ...]:
    """The words of the command, secrets and all; empty where the process is gone or a zombie. Only for a unit's main
    process."""
    text = _text(pid, "cmdline")
    return tuple(text.rstrip("\0").split("\0")) if text else ()


def doing(pid: int) -> str:
    """Its name, its state, and what in the kernel its main thread waits in; empty where it is gone."""
    lines = dict(line.split(":\t", 1) for line in _text(pid, "status").splitlines() if ":\t" in line)
    if "State" not in lines:
        return ""
    waits = _text(pid, "wchan").strip()
    where = "" if waits in ("", "0") else f", waits in {waits}"
    return f"{lines['Name']} ({pid}): {lines['State']}{where}, {lines.get('Threads', '?')} threads"


def stuck_in_the_kernel(pid: int) -> bool:
    """Whether it sleeps without being woken by a signal (a driver or a disk that does not answer)."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "D"


def is_traced(pid: int) -> bool:
    """Whether a debugger or a tracer is attached to it."""
    lines = (line.partition(":") for line in _text(pid, "status").splitlines())
    return any(name == "TracerPid" and value.strip() != "0" for name, _, value in lines)


def variables(pid: int, names: Collection[str]) -> dict[str, str] | None:
    """These variables of its environment, as far as they are set; None where it cannot be read. Only for a unit's main
    process."""
    text = _text(pid, "environ")
    words = (word.partition("=") for word in text.split("\0"))
    return {name: value for name, _, value in words if name in names} if text else None


def cgroup(pid: int) -> str | None:
    """The path of its group in systemd's hierarchy, as in a unit's ControlGroup; None where it cannot be read."""
    return systemd_path(_text(pid, "cgroup"), unified=(_CGROUP_ROOTS[0] / "cgroup.controllers").exists())


def systemd_path(text: str, *, unified: bool) -> str | None:
    """Out of /proc/PID/cgroup. `unified`: version 2 is mounted alone, and of version 1's hierarchies, which another
    systemd (of an outer host) may use, the path says nothing here."""
    by_hierarchy = dict(line.split(":", 2)[1:] for line in text.splitlines())
    return by_hierarchy.get("" if unified else "name=systemd", by_hierarchy.get(""))


def facts(pid: int) -> ProcessFacts | None:
    """All that can be told without reading through the memory of the process; None where it is gone."""
    fields = _stat(pid)
    if fields is None:
        return None
    identity = ProcessId(pid, int(fields[19]))
    found = ProcessFacts(
        identity,
        started=unix_time(identity.start_ticks),
        name=name(pid),
        state=fields[0],
        uid=_uid(pid),
        cgroup=cgroup(pid),
        ancestors=ancestors(pid),
        terminal=fields[4] != "0",
    )
    return found if identify(pid) == identity else None  # else the pid changed hands between two readings


def ancestors(pid: int) -> tuple[Ancestor, ...]:
    """Its parent first, and up to PID 1. An orphan's chain is short: it was given to PID 1 or a subreaper."""
    try:
        parents = psutil.Process(pid).parents()
    except psutil.Error:
        return ()
    identities = (identify(parent.pid) for parent in parents)
    return tuple(Ancestor(identity, name(identity.pid)) for identity in identities if identity)


def children(pid: int) -> tuple[int, ...]:
    """Of a process with one thread. Empty where it is gone."""
    return tuple(map(int, _text(pid, f"task/{pid}/children").split()))


def boot_time() -> float:
    """When the machine booted, in Unix seconds by the clock as it is set now (/proc/stat has whole seconds only)."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_time(ticks: int) -> float:
    """Clock ticks since boot as Unix seconds, 10 ms fine."""
    return boot_time() + ticks / _TICKS_PER_S


def boot_id() -> str:
    """As journal entries carry it (`_BOOT_ID`): hexadecimal, without dashes."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (the name before it may hold blanks and brackets)."""
    text = _text(pid, "stat")
    return text.rpartition(")")[2].split() if text else None


def _uid(pid: int) -> int:
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return -1


def _text(pid: int, what: str) -> str:
    try:
        return (_PROC / str(pid) / what).read_text(errors="replace")
    except OSError:  # gone; ESRCH when it goes between open and read
        return ""


# The unit's cgroup


def cgroup_processes(control_group: str) -> tuple[ProcessId, ...]:
    """All processes of a unit's group (D-Bus: ControlGroup) and the groups below it, oldest first."""
    pids = {int(line) for text in _cgroup_files(control_group, "cgroup.procs") for line in text.split()}
    found = (identify(pid) for pid in pids if pid)  # 0: a process of an outer PID namespace
    return tuple(sorted(filter(None, found), key=lambda process: (process.start_ticks, process.pid)))


def cgroup_listens(control_group: str, port: int) -> bool:
    """Whether a process of the group holds a listening TCP socket on the port, on whatever address."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    # Oldest first: the socket is the main process's, and the GPU holders below it need not be looked into.
    return bool(sockets) and any(_holds(process.pid, sockets) for process in cgroup_processes(control_group))


def has_to_itself(control_groups: Iterable[str], port: int) -> bool:
    """Whether every listening TCP socket on the port is held by a process of these groups: one on another address could
    be the one that answers."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    pids = [process.pid for group in control_groups for process in cgroup_processes(group)]
    return bool(sockets) and all(any(_holds(pid, {socket}) for pid in pids) for socket in sockets)


def _cgroup_files(control_group: str, file: str) -> Iterator[str]:
    relative = control_group.strip("/")
    if not relative:
        return  # of a unit that has none; never the root with everybody's processes
    for root in _CGROUP_ROOTS:
        if (root / relative / file).exists():
            for folder, _, _ in os.walk(root / relative):
                with contextlib.suppress(OSError):  # removed meanwhile, or a threaded group
                    yield Path(folder, file).read_text()
            return


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    yield columns[9]


def _holds(pid: int, sockets: set[str]) -> bool:
    folder = _PROC / str(pid) / "fd"
    try:
        return any(os.readlink(folder / fd) in sockets for fd in os.listdir(folder))
    except OSError:  # it has ended, or closed the file meanwhile
        return False


def bytes_moved(control_groups: Iterable[str]) -> int:
    """What the processes of these groups have read and written so far, from files and elsewhere; those that cannot be
    told left out."""
    texts = (_text(process.pid, "io") for group in control_groups for process in cgroup_processes(group))
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith(_MOVES))


# Its end


class SignalOutcome(StrEnum):
    SENT = "sent"
    GONE = "gone"  # it has ended; its pid may be somebody else's by now
    NOT_PROVEN = "not_proven"  # the proof did not hold any more
    DENIED = "denied"


def signal_process(process: ProcessId, number: int, proof: Callable[[], bool]) -> SignalOutcome:
    """Holds the process by a pidfd, has the proof read again, and only then signals: whatever becomes of the pid
    meanwhile, no other process is hit."""
    with _held(process) as fd:
        if fd is None:
            return SignalOutcome.GONE
        if not proof():
            return SignalOutcome.NOT_PROVEN
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return SignalOutcome.GONE
        except PermissionError:
            return SignalOutcome.DENIED
        return SignalOutcome.SENT


def lives(process: ProcessId) -> bool:
    """Whether any of its threads still runs: a pidfd tells, while `Z` in /proc is the main thread's alone.

    One that does not live may still hold memory of a card, reaped or not: only NVML says that it is released.
    """
    with _held(process) as fd:
        if fd is None:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)


# pidfd_open(2) where the number is no process: of nobody (ESRCH); still of a process group whose leader is gone, as
# children leave it behind (EINVAL before Linux 6.15, ESRCH since); of a thread (EINVAL, or ENOENT since).
_NO_PROCESS = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})


@contextlib.contextmanager
def _held(process: ProcessId) -> Iterator[int | None]:
    """A pidfd of this very process; None where it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        yield None
        return
    try:
        # Only now: a pid that was reused before the pidfd was opened has another start.
        yield fd if start_ticks(process.pid) == process.start_ticks else None
    finally:
        os.close(fd)
