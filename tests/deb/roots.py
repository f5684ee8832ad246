"""The two Debian releases that the package is for: what it is built in, and the bare system that it is installed on.

Run as `python -m deb.roots build CODENAME` to have a root made; prints its folder.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.debootstrap import Root

BARE = ("systemd", "dbus", "python3")
COMPILER = ("gcc", "libc6-dev", "libsystemd-dev", "pkg-config", "python3-dev", "python3-venv")


@dataclass(frozen=True)
class Release:
    """`python` is the version that the release has as python3."""

    codename: str
    number: int
    python: str

    @property
    def bare(self) -> Root:
        """A system on which nothing of ours was ever installed: what the package depends on, and no more."""
        return Root(self.codename, BARE, edition=1, purpose="bare")

    @property
    def build(self) -> Root:
        """The bare system and a compiler: extension modules made here fit the bare one."""
        return Root(self.codename, (*BARE, *COMPILER), edition=1, purpose="build")


RELEASES = (Release("bookworm", 12, "3.11"), Release("trixie", 13, "3.13"))


def main(purpose: str, codename: str) -> Path:
    release = next(one for one in RELEASES if one.codename == codename)
    return (release.build if purpose == "build" else release.bare).made()


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
