"""A real systemd host in about a second: boot it, run commands in it, read its journal, power it off.

`LabHost` is the test's side of a host: what it is made of, and that it goes away, is the keeper's matter
(`lab.keeper`). The host is this machine's own root (or a Debian 13) under an overlay in memory, booted by
systemd-nspawn, with the checkout and its virtual environment at the same paths. It shares this machine's network, so
ports on 127.0.0.1 are shared too (`free_port`). `/tmp` inside is the host's own.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import psutil

from lab import debian13, keeper
from lab.cgroups import HostGroups, NoCgroup
from lab.errors import CommandFailed, LabBootFailed, LabUnavailable
from lab.keeper import Cgroup
from ports import free_port

__all__ = ["Base", "Cgroup", "CommandFailed", "LabBootFailed", "LabHost", "LabUnavailable", "free_port", "lab_problem"]

CHECKOUT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
NEEDED_COMMANDS = ("systemd-nspawn", "nsenter", "unshare", "setpriv", "mount", "umount")
# A keeper answers a boot or a power-off later than its own deadlines only if the machine is stuck.
KEEPER_MARGIN_S = 15.0
# As the first process of its own pid namespace the keeper takes everything in it along, however it dies; the mounts go
# with the mount namespace.
OWN_NAMESPACES = (
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount",
    "--mount-proc",
    "--propagation=private",
    "--",
)
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}


class Base(StrEnum):
    """The root under a host's overlay. DEBIAN12 is this machine's own `/`, whatever Debian that is."""

    DEBIAN12 = "debian12"
    DEBIAN13 = "debian13"

    def root(self) -> Path:
        """The folder to boot from; makes the Debian 13 root first if it is not there yet. Raises LabUnavailable."""
        match self:
            case Base.DEBIAN12:
                return Path("/")
            case Base.DEBIAN13:
                return debian13.root()


@dataclass
class LabHost:
    """A running host. Made by `LabHost.boot` only; every method may be called from one thread at a time."""

    name: str
    leader: int
    """Pid of the host's systemd, as this machine sees it."""
    _keeper: subprocess.Popen[str]

    @classmethod
    @contextmanager
    def boot(
        cls,
        name: str = "host",
        *,
        memory_bytes: int = 1024 * MIB,
        disk_bytes: int = 1024 * MIB,
        base: Base | Path = Base.DEBIAN12,
        cgroup: Cgroup = Cgroup.UNIFIED,
        binds: Sequence[Path] = (),
        kmsg: bool = False,
    ) -> "Iterator[LabHost]":
        """Boots a host and powers it off at the end of the block.

        `memory_bytes` bounds all its processes and files together, `disk_bytes` its files. `binds` appear inside at
        the same path, writable; they cannot lie under /run. `base` may be the folder of any other root. With `kmsg`,
        kernel lines (the machine's) reach its journal. Raises LabUnavailable, LabBootFailed.
        """
        if problem := lab_problem():
            raise LabUnavailable(problem)
        cls.sweep()
        spec = keeper.Spec(
            name=f"lab-{name}-{uuid.uuid4().hex[:8]}",
            lower=str(base.root() if isinstance(base, Base) else base),
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            cgroup=cgroup,
            binds=tuple(str(path) for path in binds),
            read_only_binds=_always_visible(),
            kmsg=kmsg,
        )
        process = _start_keeper(spec)
        try:
            answer = _answer(process, keeper.BOOT_DEADLINE_S)
            if not answer.get("booted"):
                raise LabBootFailed(answer.get("error", "the keeper ended without a word"))
            host = cls(spec.name, HostGroups(spec.name).leader(), process)
            host.run("rm", "-f", "/run/systemd/container")  # it stands for a host of its own, kernel and all
            yield host
            host.power_off()
        finally:
            _end_keeper(process)

    @staticmethod
    def sweep() -> list[str]:
        """Removes what hosts of killed keepers left (empty groups, an empty folder); running hosts stay."""
        return keeper.sweep()

    @property
    def root(self) -> Path:
        """The host's root as its own systemd sees it, `/run` and `/tmp` included.

        For opening things (a socket, a log). Absolute links in it lead out of the host, so change files with `write`.
        """
        return Path(f"/proc/{self.leader}/root")

    @property
    def bus_address(self) -> str:
        """The host's system bus, for a client outside it (its `/proc/…/root` path works from every namespace)."""
        return f"unix:path={self.root}/run/dbus/system_bus_socket"

    @functools.cached_property
    def systemd_version(self) -> int:
        return int(self.run("systemctl", "--version").stdout.split()[1])

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002 - as subprocess.run calls it
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the host as root, in `/`, and waits `timeout` seconds at most. Raises CommandFailed."""
        stdin = subprocess.PIPE if input is not None else subprocess.DEVNULL
        with self.popen(*argv, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(input, timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise CommandFailed(argv, f"still running after {timeout:g} s", out, err) from None
        if check and process.returncode:
            raise CommandFailed(argv, f"exit status {process.returncode}", out, err)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def popen(
        self,
        *argv: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> "Visitor":
        """Starts a command in the host; it ends with the host at the latest."""
        return Visitor(
            [*self._enter(), "env", "-i", *(f"{k}={v}" for k, v in {**ENVIRONMENT, **(env or {})}.items()), *argv],
            cwd="/",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    def _enter(self) -> list[str]:
        files = [str(file) for file in HostGroups(self.name).visitor_files]
        # The root as well: where this machine is a chroot, nspawn cannot pivot, and the namespace's own is another.
        root = f"/proc/{self.leader}/root"
        nsenter = ["nsenter", f"--target={self.leader}", "--all", "--root", f"--wd={root}"]
        enter = ["sh", "-c", keeper.ENTER_GROUPS, "enter", *files, "--", *nsenter]
        return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "--"]

    def write(self, path: str | Path, text: str, mode: int = 0o644) -> None:
        """Writes a file in place (no rename), and the folders above it."""
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.run("sh", "-c", script, "write", path, f"{mode:o}", input=text)

    def read(self, path: str | Path) -> str:
        return self.run("cat", path).stdout

    def copy_in(self, src: Path, dst: str | Path) -> None:
        """Copies a file or a folder to the path `dst` (not into it), and makes the folders above it."""
        pack = ["tar", "--create", "--file=-", f"--directory={src.parent}", src.name]
        unpack = 'set -e; t=$(mktemp -d); tar -x -C "$t"; mkdir -p "$(dirname "$1")"; mv -T "$t/$2" "$1"; rmdir "$t"'
        with (
            subprocess.Popen(pack, stdout=subprocess.PIPE) as packer,
            self.popen(
                "sh", "-c", unpack, "copy", dst, src.name, stdin=packer.stdout, stderr=subprocess.PIPE
            ) as unpacker,
        ):
            _, err = unpacker.communicate(timeout=120)
        if packer.returncode or unpacker.returncode:
            raise CommandFailed(("copy_in", src, dst), f"exit status {unpacker.returncode}", "", err)

    def unit(self, name: str, text: str) -> None:
        """Writes a unit file and has it loaded."""
        self.write(f"/etc/systemd/system/{name}", text)
        self.systemctl("daemon-reload")

    def systemctl(self, *args: str, check: bool = True, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *args, check=check, timeout=timeout)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """`systemctl show`: the named properties, or all. A property that is shown twice has its values on lines."""
        wanted = [f"--property={','.join(properties)}"] if properties else []
        shown: dict[str, str] = {}
        for line in self.systemctl("show", *wanted, "--", unit).stdout.splitlines():
            key, _, value = line.partition("=")
            shown[key] = f"{shown[key]}\n{value}" if key in shown else value
        return shown

    def journal(self, *args: str) -> list[dict[str, Any]]:
        """Entries as `journalctl -o json --all` gives them, everything logged so far included."""
        self.run("journalctl", "--sync")
        out = self.run("journalctl", "--output=json", "--all", "--no-pager", "--quiet", *args, timeout=120).stdout
        return [json.loads(line) for line in out.splitlines()]

    def power_cut(self) -> None:
        """Ends it without a word to any of its processes, and boots it again over its own files. Raises LabBootFailed.

        There is no orderly counterpart: systemd's shutdown stops every process first (SIGSTOP), and a visitor's nsenter
        outside stops with its command, so that the shutdown would wait for it for ever."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("power-cut\n")
        self._keeper.stdin.flush()
        answer = _answer(self._keeper, keeper.BOOT_DEADLINE_S)
        if not answer.get("booted"):
            raise LabBootFailed(answer.get("error", "the keeper ended without a word"))
        self.leader = HostGroups(self.name).leader()

    def power_off(self) -> bool:
        """Shuts the host down in order, by force after 20 s. True if it went in order; once off, does nothing."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return False
        _hang_up(self._keeper, last_words="poweroff\n")
        in_order = bool(_answer(self._keeper, keeper.POWEROFF_DEADLINE_S).get("clean"))
        _end_keeper(self._keeper)
        return in_order


class Visitor(subprocess.Popen[str]):
    """A command in a host. Its `pid` is nsenter's, which waits outside and ends as the command does."""

    def send_signal(self, sig: int) -> None:
        """Signals the command, not nsenter: if that died first, its child would stay a zombie for a while, since the
        machine's init has to adopt it across pid namespaces, and the host could not end before that."""
        with contextlib.suppress(psutil.NoSuchProcess):
            commands = psutil.Process(self.pid).children()
            for command in commands:
                command.send_signal(sig)
            if not commands:  # not started yet, or just ended
                super().send_signal(sig)


@functools.cache
def lab_problem() -> str | None:
    """What keeps this machine from booting lab hosts, in one line; None if nothing does."""
    checks: tuple[Callable[[], str | None], ...] = (_root_problem, _command_problem, _mount_problem, _cgroup_problem)
    return next((problem for check in checks if (problem := check())), None)


def _root_problem() -> str | None:
    return "not root" if os.geteuid() else None


def _command_problem() -> str | None:
    missing = [command for command in NEEDED_COMMANDS if not shutil.which(command)]
    return f"not installed: {', '.join(missing)}" if missing else None


def _mount_problem() -> str | None:
    """Tries what a boot does, in a mount namespace that goes away with the try."""
    script = (
        "mount -t tmpfs -o size=1m none /mnt && mkdir /mnt/u /mnt/w /mnt/root &&"
        " mount -t overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w none /mnt/root"
    )
    command = [*OWN_NAMESPACES, "sh", "-c", script]
    tried = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    return (
        f"cannot make namespaces and mount an overlay in them: {' '.join(tried.stderr.split())}"
        if tried.returncode
        else None
    )


def _cgroup_problem() -> str | None:
    groups = HostGroups(f"lab-try-{uuid.uuid4().hex[:8]}")
    try:
        groups.create(memory_bytes=64 * MIB)
    except NoCgroup as error:
        return str(error)
    finally:
        groups.remove()
    return None


def _always_visible() -> tuple[str, ...]:
    """The checkout, the virtual environment and its interpreter, wherever they are (`/tmp`, another file system)."""
    paths = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)]
    outside = [path for path in paths if path != Path("/usr") and CHECKOUT not in path.parents]
    return tuple(dict.fromkeys(str(path) for path in outside))


def _start_keeper(spec: keeper.Spec) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*OWN_NAMESPACES, sys.executable, "-m", "lab.keeper", spec.to_json()],
        cwd=CHECKOUT / "tests",
        stdin=subprocess.PIPE,  # its end, however this process ends, is the keeper's order to clean up
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal is for the tests; the keeper follows by end of file
    )


def _answer(process: subprocess.Popen[str], deadline_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], deadline_s + KEEPER_MARGIN_S)
    line = process.stdout.readline() if readable else ""
    return dict(json.loads(line)) if line else {}


def _hang_up(process: subprocess.Popen[str], last_words: str = "") -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        if not process.stdin.closed:
            process.stdin.write(last_words)
        process.stdin.close()


def _end_keeper(process: subprocess.Popen[str]) -> None:
    """Returns when everything of the host is gone."""
    assert process.stdout is not None
    _hang_up(process)
    try:
        process.wait(KEEPER_MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        keeper.sweep()
    finally:
        process.stdout.close()
