"""What is changed in a root before it boots as a lab host, so that it boots in seconds and is quiet.

The root is an overlay, so nothing here reaches the machine or the cached root below it.
"""

import shutil
import uuid
from pathlib import Path

# Nothing that the machine's packages or its admin enabled belongs in a lab host. These are pulled in statically.
MASKED = (
    "console-getty.service",
    "getty.target",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-machine-id-commit.service",
    "systemd-random-seed.service",
    "systemd-timesyncd.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-update-done.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "ldconfig.service",
)
# They turn the machine's fstab, its SysV scripts and the container's console into units.
MASKED_GENERATORS = (
    "postgresql-generator",
    "systemd-cryptsetup-generator",
    "systemd-fstab-generator",
    "systemd-getty-generator",
    "systemd-gpt-auto-generator",
    "systemd-rc-local-generator",
    "systemd-ssh-generator",
    "systemd-sysv-generator",
)
# What an admin, or an installed watchdog, keeps on the machine. A host starts without it, or a unit of the machine
# would take part in a test of the same name.
LOCAL = ("etc/systemd/system", "etc/sglang-watchdog", "var/lib/sglang-watchdog")
# In memory, bounded, and without a rate limit: a test that wants journald's limit says so in its unit.
JOURNALD = """\
[Journal]
Storage=volatile
RuntimeMaxUse=64M
RateLimitIntervalSec=0
ForwardToSyslog=no
ForwardToWall=no
"""


def prepare(root: Path, name: str) -> None:
    for folder in LOCAL:
        _remove(root / folder)
    etc = root / "etc"
    for unit in MASKED:
        _link(etc / "systemd/system" / unit, "/dev/null")
    for generator in MASKED_GENERATORS:
        _link(etc / "systemd/system-generators" / generator, "/dev/null")
    _link(etc / "systemd/system/default.target", "/usr/lib/systemd/system/multi-user.target")
    _write(etc / "systemd/journald.conf.d/lab.conf", JOURNALD)
    _write(etc / "machine-id", f"{uuid.uuid4().hex}\n")
    _write(etc / "hostname", f"{name}\n")
    _write(etc / "hosts", f"127.0.0.1 localhost {name}\n::1 localhost\n")


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # its target may lie out of the root
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a link that points out of the root
    path.write_text(text)
