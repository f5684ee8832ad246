"""The Debian 13 root (systemd 257) that hosts of `Base.DEBIAN13` boot from: made once, kept outside the checkout.

Made by debootstrap from the mirror that this machine's apt is configured with, so no registry is named here. It holds
no Python: what depends on systemd's behaviour is tested with systemctl, busctl, journalctl and shell.
Run as `python -m lab.debian13` to have it made ahead of the tests.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.errors import LabUnavailable

CACHE = Path(os.environ.get("SGLANG_WATCHDOG_LAB_CACHE", "/var/cache/sglang-watchdog-lab"))
SUITE = "trixie"
PACKAGES = ("systemd", "dbus")
# Part of the folder's name: a change of what the root is made of makes a new one.
EDITION = 1
MAKE_DEADLINE_S = 900.0


def root() -> Path:
    """The root's folder; makes it first if need be (about 40 s with a near mirror). Raises LabUnavailable."""
    folder = CACHE / f"{SUITE}-{EDITION}"
    if folder.is_dir():
        return folder
    with _only_maker():
        if not folder.is_dir():
            _make(folder)
    return folder


@contextmanager
def _only_maker() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    """Complete or not there: the name is given by a rename at the end. The caller holds the lock."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    mirror = debian_mirror()
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(unfinished), mirror]
    # Its own mount namespace: debootstrap mounts /proc in the new root, and may be killed before it unmounts.
    command = ["unshare", "--mount", "--propagation", "private", "--", "setpriv", "--pdeathsig", "KILL", "--", *command]
    try:
        made = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MAKE_DEADLINE_S
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LabUnavailable(f"cannot make a Debian 13 root: {error}") from error
    if made.returncode:
        last = (made.stdout + made.stderr).strip().splitlines()[-1:]
        raise LabUnavailable(f"cannot make a Debian 13 root: debootstrap: {' '.join(last)}")
    shutil.rmtree(unfinished / "var/cache/apt/archives", ignore_errors=True)
    unfinished.rename(folder)


def debian_mirror() -> str:
    """The address of the Debian archive in apt's sources on this machine. Raises LabUnavailable."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    try:
        listing = ["apt-get", "--print-uris", "update"]
        listed = subprocess.run(listing, check=True, capture_output=True, text=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        raise LabUnavailable(f"cannot make a Debian 13 root: apt's sources cannot be read: {error}") from error
    # The plain release, as opposed to its -updates and -security: where it is, Debian's other releases are too.
    found = re.search(rf"^'(\S+)/dists/{re.escape(release)}/InRelease'", listed, re.MULTILINE)
    if not found:
        raise LabUnavailable(f"cannot make a Debian 13 root: no Debian archive of {release!r} in apt's sources")
    return found[1]


if __name__ == "__main__":
    print(root())
