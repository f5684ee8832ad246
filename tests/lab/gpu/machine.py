"""A systemd host on a machine that has none: Debian 12's systemd, unpacked over the machine's root, booted by nspawn.

For the machine with a GPU (Ubuntu 24.04, PID 1 is no systemd, nothing can be fetched). What it needs is carried in a
kit, made by kit.sh. Nothing is written to the machine's own root but a machine id and mounts; it is thrown away
afterwards. On a machine that is not, use `lab.host`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab import image
from lab.host import CHECKOUT, LabHost
from waiting import wait_until

MEMORY_BYTES = 48 << 30
DISK_BYTES = 8 << 30
BOOT_DEADLINE_S = 25.0
DEVICES = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "kmsg")
DRIVER = Path("/usr/local/nvidia")
GROUP = Path("/sys/fs/cgroup/gpu-lab")
WATCHDOG = "opt/sglang-watchdog"
SITE = "opt/server-site"
# The one writable folder of the host that is no tmpfs: pages of its files can be reclaimed.
ON_DISK = Path("/var/tmp/gpu-lab-disk")
POWEROFF_SIGNAL = signal.SIGRTMIN + 4
LIBRARIES = ("usr/lib/x86_64-linux-gnu/systemd", "usr/lib/x86_64-linux-gnu")
# Without them in-kernel programs are refused, and with these DeviceAllow= and IPAddressDeny= of units.
BPF = ("--system-call-filter=bpf perf_event_open", "--capability=CAP_BPF,CAP_NET_ADMIN,CAP_PERFMON,CAP_SYSLOG")


class MachineHost(LabHost):
    """As a lab host, without its keeper: `_keeper` is nspawn itself."""

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.leader}", "--all", "--", "setpriv", "--pdeathsig", "KILL", "--"]

    def power_off(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.leader, POWEROFF_SIGNAL)
        try:
            return self._keeper.wait(20) == 0
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            return False


@contextmanager
def booted(kit: Path, work: Path, lower: Path = Path("/")) -> Iterator[MachineHost]:
    """Boots it from the kit's packages over `lower`; `work` becomes a tmpfs with all that is written."""
    root = _root(kit, work, lower)
    image.prepare(root, "gpu-lab")
    _install(kit, root)
    _memory_group()
    attempts = (BPF, ("--capability=CAP_SYSLOG",))
    for options in attempts:
        process = _nspawn(root, work / "console.log", options)
        try:
            leader = wait_until(lambda: _leader(process), BOOT_DEADLINE_S, "nspawn's child")  # noqa: B023
            host = MachineHost("gpu-lab", leader, process)
            wait_until(lambda: _is_up(host), BOOT_DEADLINE_S, "systemd is up")  # noqa: B023
        except AssertionError as in_vain:
            process.kill()
            print("not booted with", options, in_vain, (work / "console.log").read_text(errors="replace")[-1500:])
            continue
        print("booted with", *options, flush=True)
        try:
            yield host
        finally:
            host.power_off()
        return
    raise SystemExit("the host does not boot")


def _root(kit: Path, work: Path, lower: Path) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=755", "gpu-lab", str(work))
    upper, scratch, root, packages = (work / name for name in ("upper", "scratch", "root", "packages"))
    for folder in (upper, scratch, root, packages):
        folder.mkdir()
    for package in sorted((kit / "debs").glob("*.deb")):
        _run("dpkg", "-x", str(package), str(packages))
    _merge_usr(packages)
    _run("mount", "-t", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={scratch}", "gpu-lab", str(root))
    # A library that is there is never replaced: the machine's own programs are linked to it.
    pack = f"tar -C {packages} -c usr etc | tar -C {root} -x --skip-old-files --keep-directory-symlink"
    _run("sh", "-c", pack)
    _add_users(root)
    _run("chroot", str(root), "ldconfig")
    return root


def _merge_usr(packages: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        if (packages / name).is_dir():
            _run("mkdir", "-p", str(packages / "usr" / name))
            _run("cp", "-a", f"{packages / name}/.", str(packages / "usr" / name))


def _add_users(root: Path) -> None:
    for name, number in (("messagebus", 981), ("systemd-journal", 980), ("systemd-oom", 979)):
        _append(root / "etc/passwd", f"{name}:x:{number}:{number}::/nonexistent:/usr/sbin/nologin")
        _append(root / "etc/group", f"{name}:x:{number}:")


def _append(path: Path, line: str) -> None:
    text = path.read_text()
    if f"\n{line.partition(':')[0]}:" not in text:
        path.write_text(text.rstrip("\n") + f"\n{line}\n")


def _install(kit: Path, root: Path) -> None:
    """The product in an environment of its own, from wheels alone; setproctitle where the server finds it."""
    wheels = sorted(str(wheel) for wheel in (kit / "whl").glob("*.whl"))
    if not wheels:
        return
    environment = root / WATCHDOG
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    packages = next((environment / "lib").glob("python3*")) / "site-packages"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
    titles = [wheel for wheel in wheels if "setproctitle" in wheel]
    _run(*pip, "--target", str(packages), *(wheel for wheel in wheels if wheel not in titles))
    _run(*pip, "--target", str(root / SITE), *titles)
    command = root / "usr/bin/sglang-watchdog"
    command.write_text(
        f"#!/{WATCHDOG}/bin/python3\nimport sys\nfrom sglang_watchdog.__main__ import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)


def _memory_group() -> None:
    """A group with a limit, and the controllers that units inside shall have."""
    if not (GROUP.parent / "cgroup.controllers").exists():
        return
    controllers = "+memory +pids +cpu"
    for path, text in (
        (GROUP.parent / "cgroup.subtree_control", controllers),
        (GROUP / "memory.max", str(MEMORY_BYTES)),
        (GROUP / "memory.swap.max", "0"),
    ):
        GROUP.mkdir(exist_ok=True)
        try:
            path.write_text(text)
        except OSError as error:
            print(f"{path}: {error}", flush=True)


def _nspawn(root: Path, console: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    Path("/etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    Path("/run/systemd").mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "gpu-lab-run", "/run/systemd")
    command = [str(root / "usr/bin/systemd-nspawn"), "--quiet", "--boot", f"--directory={root}", "--machine=gpu-lab"]
    command += ["--register=no", "--keep-unit", "--resolv-conf=off", "--timezone=off", "--link-journal=no", *options]
    command += [f"--bind=/dev/{name}" for name in DEVICES if Path("/dev", name).exists()]
    command += [f"--bind-ro={path}" for path in _binds()]
    ON_DISK.mkdir(parents=True, exist_ok=True)
    command.append(f"--bind={ON_DISK}")
    enter = f'echo $$ > {GROUP}/cgroup.procs; exec "$@"' if GROUP.exists() else 'exec "$@"'
    with console.open("w") as out:
        return subprocess.Popen(
            ["sh", "-c", enter, "enter", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
            env={
                "PATH": os.environ["PATH"],
                "LD_LIBRARY_PATH": ":".join(str(root / library) for library in LIBRARIES),
                "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            },
        )


def _binds() -> list[Path]:
    """What the overlay does not show because it is another file system, or a fresh one inside (`/tmp`)."""
    wanted = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), DRIVER]
    base = Path("/").stat().st_dev
    elsewhere = [p for p in wanted if p.exists() and (p.stat().st_dev != base or Path("/tmp") in p.parents)]
    return list(dict.fromkeys(elsewhere))


def _leader(nspawn: subprocess.Popen[str]) -> int:
    if nspawn.poll() is not None:
        raise AssertionError(f"nspawn ended with {nspawn.returncode}")
    for child in _children(nspawn.pid):
        if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
            return child
    return 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_up(host: MachineHost) -> bool:
    time.sleep(0.2)
    state = host.run("systemctl", "is-system-running", check=False).stdout.strip()
    return state in ("running", "degraded")


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
