"""The control groups of one lab host: its memory and process limits, and the means to end all that it started.

On cgroup v1 (or hybrid) a host has one group of its own name in each hierarchy that matters; on cgroup v2 one group.
Every process of the host is in them, so that a limit or a kill by group reaches exactly this host.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
# memory and pids carry the limits; the other two are where the host's own systemd builds its tree. Without a group
# of its own there, two hosts would share `/system.slice`.
V1_HIERARCHIES = ("memory", "pids", "systemd", "unified")
MAX_PROCESSES = 4096
# A leaf for commands that come from outside (`LabHost.run`): cgroup v2 allows processes in leaves only.
VISITORS = "visitors"
GRACE_S = 1.0


class NoCgroup(Exception):
    """Memory cannot be bounded on this machine; the message says what is missing."""


@dataclass(frozen=True)
class HostGroups:
    """The groups of the host called `name`; constructing one does not touch the system."""

    name: str

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(parent / self.name for parent in _parents())

    @property
    def visitor_files(self) -> tuple[Path, ...]:
        """Where a process writes its pid to be counted to the host."""
        return tuple(folder / VISITORS / "cgroup.procs" for folder in self.folders)

    @property
    def memory_limit_file(self) -> Path:
        return MOUNT / self.name / "memory.max" if is_v2() else MOUNT / "memory" / self.name / "memory.limit_in_bytes"

    def create(self, memory_bytes: int) -> None:
        """Makes the groups and sets their limits. Raises NoCgroup."""
        try:
            if is_v2():
                _enable_controllers()
            for folder in self.folders:
                (folder / VISITORS).mkdir(parents=True)
            self.memory_limit_file.write_text(str(memory_bytes))
            for folder in self.folders:
                _limit(folder / "pids.max", MAX_PROCESSES)
                _limit(folder / "memory.swap.max", 0)
        except OSError as error:
            raise NoCgroup(f"cannot bound memory: {error.strerror}: {error.filename}") from error

    def processes(self) -> set[int]:
        """Pids, as this machine sees them, of all that runs in any of the groups."""
        return {pid for folder in self.folders for group in _tree(folder) for pid in _pids(group)}

    def leader(self) -> int:
        """Pid, as this machine sees it, of the first process in the innermost pid namespace: the host's systemd."""
        return next(pid for pid in self.processes() if _namespaced_pids(pid)[-1] == 1)

    def remove(self, deadline_s: float = 20.0) -> None:
        """Removes the groups, ending what is left in them. Raises TimeoutError when something does not die.

        Expects the host's systemd to be dead or dying: the kernel then ends all in its pid namespace, and visitors
        leave by themselves. Only what has not gone after a moment is killed.
        """
        start = time.monotonic()
        while not self._try_remove():
            waited = time.monotonic() - start
            if waited > deadline_s:
                raise TimeoutError(f"lab host {self.name}: still running: {sorted(self.processes())}")
            if waited > GRACE_S:
                self._kill()
            time.sleep(0.01)

    def _kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _try_remove(self) -> bool:
        left = [group for folder in self.folders for group in _tree(folder) if not _remove_group(group)]
        return not left


def is_v2() -> bool:
    return (MOUNT / "cgroup.controllers").exists()


def _parents() -> tuple[Path, ...]:
    if is_v2():
        return (MOUNT,)
    return tuple(MOUNT / name for name in V1_HIERARCHIES if (MOUNT / name / "cgroup.procs").exists())


def _enable_controllers() -> None:
    control = MOUNT / "cgroup.subtree_control"
    wanted = {"memory", "pids"} - set(control.read_text().split())
    if wanted:
        control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))


def _limit(file: Path, value: int) -> None:
    if file.exists():  # which of them exist depends on the hierarchy and on whether the kernel counts swap
        file.write_text(str(value))


def _tree(folder: Path) -> Iterator[Path]:
    """`folder` and its sub-groups, children first; nothing if it is gone."""
    for path, _, _ in os.walk(folder, topdown=False):
        yield Path(path)


def _pids(group: Path) -> list[int]:
    try:
        pids = [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):  # removed meanwhile
            return []
        raise
    return [pid for pid in pids if pid]  # 0: not in the reader's pid namespace


def _namespaced_pids(pid: int) -> list[int]:
    """The pid in each of its namespaces, the outermost first."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next([int(word) for word in line.split()[1:]] for line in status.splitlines() if line[:6] == "NSpid:")


def _remove_group(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
