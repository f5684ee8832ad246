"""The keeper: a process that owns everything one lab host is made of, and takes it away when its test process ends.

Started by `LabHost.boot` as the first process of a pid namespace and in a mount namespace of its own, so that neither
processes nor mounts can outlive it. It mounts, boots, says `{"booted": true}` on stdout, then waits on stdin:
`poweroff` shuts the host down in order, `power-cut` (no process gets a word) boots it again over what it has written,
end of file (the test process is gone, however it died) kills it. Should the
keeper itself be killed, the kernel ends the whole host; `sweep` then removes the empty groups and the empty folder.

Not here: anything a test talks to inside the host (`lab.host`).
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from lab import image
from lab.cgroups import HostGroups, NoCgroup

WORK = Path("/var/tmp/sglang-watchdog-lab")  # not /tmp: inside a host that is a fresh tmpfs, and it may be small
BOOT_DEADLINE_S = 60.0
POWEROFF_DEADLINE_S = 20.0
NSPAWN_TIDIES_S = 5.0
POWEROFF_SIGNAL = signal.SIGRTMIN + 4  # systemd(1): "starts the poweroff.target unit"


class Cgroup(StrEnum):
    """The hierarchy that the host's systemd sees. UNIFIED is what Debian's own default is."""

    HYBRID = "hybrid"
    UNIFIED = "unified"


@dataclass(frozen=True)
class Spec:
    """What to boot. `lower` is the read-only root under the overlay; binds appear inside at the same path."""

    name: str
    lower: str
    memory_bytes: int
    disk_bytes: int
    cgroup: Cgroup
    binds: Sequence[str]
    read_only_binds: Sequence[str]
    kmsg: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "cgroup": Cgroup(values["cgroup"])})

    @property
    def folder(self) -> Path:
        return WORK / self.name


class BootFailed(Exception):
    """The host did not come up; the message ends with what its console said."""


def main(spec: Spec) -> None:
    with _claimed(spec.folder):
        groups = HostGroups(spec.name)
        try:
            groups.create(spec.memory_bytes)
            _keep(spec, groups)
        except (BootFailed, NoCgroup, OSError, subprocess.CalledProcessError) as error:
            _say(error=f"{type(error).__name__}: {error}")
        finally:
            groups.remove()


def _keep(spec: Spec, groups: HostGroups) -> None:
    root = _mount(spec)
    image.prepare(root, spec.name)
    with _notify_socket(root.parent / "notify") as ready:
        while _boot(spec, groups, root, ready):
            pass


def _boot(spec: Spec, groups: HostGroups, root: Path, ready: socket.socket) -> bool:
    """From a boot to its end; whether it is to be booted again."""
    console = root.parent / "console.log"
    with _nspawn(spec, groups, root, console) as nspawn:
        leader = _wait_ready(ready, nspawn, console)
        _say(booted=True)
        _drain_until(ready, sys.stdin)
        word = sys.stdin.readline().strip()
        if word == "poweroff":
            _say(clean=_power_off(leader, nspawn, ready))
        return word == "power-cut"


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Makes the host's folder and holds its lock: while the lock is held, `sweep` knows that the owner lives."""
    with _sweep_lock():
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    # Not if that failed: a folder that stays is how `sweep` finds what is left.
    _unmount(folder)
    folder.rmdir()
    os.close(lock)


@contextlib.contextmanager
def _sweep_lock() -> Iterator[None]:
    WORK.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sweep() -> list[str]:
    """Removes what hosts whose keeper is dead left behind, and returns their names. Running hosts stay untouched."""
    with _sweep_lock():
        return [folder.name for folder in sorted(WORK.iterdir()) if folder.is_dir() and _swept(folder)]


def _swept(folder: Path) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            HostGroups(folder.name).remove()
            folder.rmdir()  # empty: the mount on it went away with the namespace that it was in
        except (BlockingIOError, FileNotFoundError):  # its keeper lives, or has just gone in order
            return False
    return True


def _mount(spec: Spec) -> Path:
    """The overlay, ready to be changed. Everything written to it lies in a tmpfs of bounded size."""
    tmpfs = spec.folder
    # nspawn refuses a /run/systemd on disk, and leaves folders there when killed: give it one that goes away.
    _check("mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "lab-run", "/run")
    Path("/run/systemd").mkdir()
    _check("mount", "-t", "tmpfs", "-o", f"size={spec.disk_bytes},mode=755", "lab-disk", str(tmpfs))
    upper, work, root = (tmpfs / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    options = f"lowerdir={spec.lower},upperdir={upper},workdir={work}"
    _check("mount", "-t", "overlay", "-o", options, "lab-root", str(root))
    return root


def _unmount(folder: Path) -> None:
    """Takes the mounts away at once in this namespace; those that nspawn held died with it."""
    for path in (folder / "root", folder):
        subprocess.run(["umount", "--lazy", str(path)], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _notify_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(path))
        yield ready


@contextlib.contextmanager
def _nspawn(spec: Spec, groups: HostGroups, root: Path, console: Path) -> Iterator[subprocess.Popen[bytes]]:
    enter = ["sh", "-c", ENTER_GROUPS, "enter", *(str(f / "cgroup.procs") for f in groups.folders), "--"]
    command = [*enter, *_nspawn_command(spec, root)]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "NOTIFY_SOCKET": str(root.parent / "notify"),
    }
    if spec.cgroup is Cgroup.UNIFIED:  # otherwise as the machine has it
        environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
    with (
        console.open("wb") as out,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd="/", start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            _end_nspawn(process)


def _end_nspawn(process: subprocess.Popen[bytes]) -> None:
    """The host's systemd first, so that nspawn reaps it and tidies up."""
    for payload in _children(process.pid):
        os.kill(payload, signal.SIGKILL)  # our child is alive or a zombie, so its children's pids are still theirs
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(NSPAWN_TIDIES_S)
    process.kill()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


# Writes the shell's own pid to each file before `--`, then becomes the rest of the command line.
ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; exec "$@"'


def _nspawn_command(spec: Spec, root: Path) -> list[str]:
    command = ["systemd-nspawn", "--quiet", "--boot", f"--directory={root}", f"--machine={spec.name}"]
    command += ["--register=no", "--keep-unit", "--notify-ready=yes"]
    command += ["--resolv-conf=off", "--timezone=off", "--link-journal=no"]
    command += [f"--bind={_bindable(path)}" for path in spec.binds]
    command += [f"--bind-ro={_bindable(path)}" for path in spec.read_only_binds]
    if spec.kmsg:
        command += ["--bind=/dev/kmsg", "--capability=CAP_SYSLOG"]
    return command


def _bindable(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:")


def _wait_ready(ready: socket.socket, nspawn: subprocess.Popen[bytes], console: Path) -> int:
    """Reads nspawn's notifications until the host's systemd says READY=1; returns the leader's pid."""
    leader = 0
    end = time.monotonic() + BOOT_DEADLINE_S
    exited = os.pidfd_open(nspawn.pid)
    try:
        while (left := end - time.monotonic()) > 0:
            events = select.select([ready, exited, sys.stdin], [], [], left)[0]
            if exited in events:
                raise BootFailed(f"nspawn ended with {nspawn.wait()}: {_tail(console)}")
            if sys.stdin in events:
                raise BootFailed("given up: the test process is gone")
            if ready in events:
                fields = dict(line.split("=", 1) for line in ready.recv(4096).decode().splitlines() if "=" in line)
                leader = int(fields.get("X_NSPAWN_LEADER_PID", leader))
                if fields.get("READY") == "1" and leader:
                    return leader
    finally:
        os.close(exited)
    raise BootFailed(f"not ready after {BOOT_DEADLINE_S:g} s: {_tail(console)}")


def _drain_until(ready: socket.socket, awaited: IO[str] | int, deadline_s: float | None = None) -> bool:
    """Waits until `awaited` is readable, and reads nspawn's notifications meanwhile: with nobody to read them, the
    host's systemd would block for good after some twenty reloads."""
    end = None if deadline_s is None else time.monotonic() + deadline_s
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        events = select.select([ready, awaited], [], [], left)[0]
        if ready in events:
            ready.recv(4096)
        if awaited in events or not events:
            return awaited in events


def _power_off(leader: int, nspawn: subprocess.Popen[bytes], ready: socket.socket) -> bool:
    os.kill(leader, POWEROFF_SIGNAL)
    exited = os.pidfd_open(nspawn.pid)
    try:
        return _drain_until(ready, exited, POWEROFF_DEADLINE_S)
    finally:
        os.close(exited)


def _tail(console: Path) -> str:
    return console.read_text(errors="replace")[-2000:].strip()


def _check(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def _say(**values: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(values), flush=True)


def _end(*_: object) -> None:
    raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # clean up then, too
    main(Spec.from_json(sys.argv[1]))
