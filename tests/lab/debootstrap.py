"""Debian roots made by debootstrap: each once, kept in a cache outside the checkout, and never changed after that.

The mirror is the one that this machine's apt is configured with, so no registry is named here.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabUnavailable

CACHE = Path(os.environ.get("SGLANG_WATCHDOG_LAB_CACHE", "/var/cache/sglang-watchdog-lab"))
MAKE_DEADLINE_S = 900.0


@dataclass(frozen=True)
class Root:
    """What a root is made of. `edition` is a part of its folder's name: raise it with a change of the packages."""

    suite: str
    packages: tuple[str, ...]
    edition: int
    purpose: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.suite, self.purpose, str(self.edition))))

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    def made(self) -> Path:
        """The root's folder; makes it first if need be (about 40 s with a near mirror). Raises LabUnavailable."""
        if self.folder.is_dir():
            return self.folder
        with only_maker(self.name):
            if not self.folder.is_dir():
                self._make()
        return self.folder

    def _make(self) -> None:
        """Complete or not there: the name is given by a rename at the end. The caller holds the lock."""
        unfinished = CACHE / f".{self.name}.unfinished"
        if unfinished.exists():
            shutil.rmtree(unfinished)
        include = f"--include={','.join(self.packages)}"
        command = ["debootstrap", "--variant=minbase", include, self.suite, str(unfinished), debian_mirror()]
        # Its own mount namespace: debootstrap mounts /proc in the new root, and may be killed before it unmounts.
        own = ["unshare", "--mount", "--propagation", "private", "--", "setpriv", "--pdeathsig", "KILL", "--"]
        try:
            made = subprocess.run(
                [*own, *command],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=MAKE_DEADLINE_S,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise LabUnavailable(f"cannot make a root of {self.suite}: {error}") from error
        if made.returncode:
            last = (made.stdout + made.stderr).strip().splitlines()[-1:]
            raise LabUnavailable(f"cannot make a root of {self.suite}: debootstrap: {' '.join(last)}")
        shutil.rmtree(unfinished / "var/cache/apt/archives", ignore_errors=True)
        unfinished.rename(self.folder)


@contextmanager
def only_maker(name: str) -> Iterator[None]:
    """Holds a lock of the cache: what is not there yet is made by one process at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def debian_mirror() -> str:
    """The address of the Debian archive in apt's sources on this machine. Raises LabUnavailable."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    try:
        listing = ["apt-get", "--print-uris", "update"]
        listed = subprocess.run(listing, check=True, capture_output=True, text=True, timeout=60).stdout
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        raise LabUnavailable(f"cannot make a Debian root: apt's sources cannot be read: {error}") from error
    # The plain release, as opposed to its -updates and -security: where it is, Debian's other releases are too.
    found = re.search(rf"^'(\S+)/dists/{re.escape(release)}/InRelease'", listed, re.MULTILINE)
    if not found:
        raise LabUnavailable(f"cannot make a Debian root: no Debian archive of {release!r} in apt's sources")
    return found[1]
