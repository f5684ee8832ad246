"""The two Debian releases that the package is for: what it is built in, the bare system that it is installed on, and
what it is checked with.

Run as `python -m deb.roots build CODENAME` to have a root made to build in, which prints its folder, or as `python -m
deb.roots bare` to have the bare systems made, which can take longer than a test may.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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


# perl-openssl-defaults provides what debootstrap does not find by itself.
LINT = Root("bookworm", ("systemd", "dbus", "perl-openssl-defaults", "lintian"), edition=1, purpose="lint")


def main(purpose: str, codename: str = "") -> None:
    if purpose == "build":
        print(next(one for one in RELEASES if one.codename == codename).build.made())
    else:
        with ThreadPoolExecutor(2) as makers:
            list(makers.map(Root.made, (release.bare for release in RELEASES)))


if __name__ == "__main__":
    main(*sys.argv[1:])
