"""Debian's own checks of the package."""

import pytest

from conftest import LabFactory
from deb.package import Package
from deb.roots import LINT

# Its root, of some 200 packages, is made once.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]


def test_lintian_has_nothing_to_say(lab_factory: LabFactory, package: Package) -> None:
    with lab_factory("lint", base=LINT.made(), binds=(package.path.parent,)) as host:
        done = host.run("lintian", "--allow-root", "--fail-on=error,warning", package.path, check=False, timeout=250)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
