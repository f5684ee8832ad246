"""The package, and bare Debian systems to install it on: each test has one of its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import LabFactory
from deb.package import Package
from deb.roots import RELEASES, Release
from deb.system import SIZES, Debian


@pytest.fixture(scope="session")
def package() -> Package:
    return Package.built()


@pytest.fixture(scope="session")
def others() -> Iterator[Path]:
    """A folder for more versions of the package, in sight of every system (/tmp is each one's own)."""
    with tempfile.TemporaryDirectory(prefix="sglang-watchdog-deb-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def release() -> Release:
    """Debian 12, unless a test asks for others."""
    return RELEASES[0]


@pytest.fixture
def debian(lab_factory: LabFactory, release: Release, package: Package, others: Path) -> Iterator[Debian]:
    seen = (package.path.parent, others)
    with lab_factory(f"bare{release.number}", base=release.bare.made(), binds=seen, **SIZES) as host:
        yield Debian(host)
