"""Fixtures for tests that need a real systemd. Hosts are shared: such a test makes units of its own `unit_name`."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import structlog

from lab.host import Base, LabHost, LabUnavailable
from lab.service import Service

# Files that keep a worker busy for minutes come first, lest the others wait for it in the end.
LONGEST = ("test_crash_points.py", "test_rules.py")
LabFactory = Callable[..., AbstractContextManager[LabHost]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@contextmanager
def _lab_required() -> Iterator[None]:
    """Without a lab the test is skipped; in CI, which is there to run these tests, it fails."""
    try:
        yield
    except LabUnavailable as unavailable:
        if os.environ.get("CI"):
            pytest.fail(f"no lab: {unavailable}", pytrace=False)
        pytest.skip(f"no lab: {unavailable}")


@contextmanager
def _host(*args: Any, **options: Any) -> Iterator[LabHost]:
    with _lab_required(), LabHost.boot(*args, **options) as host:
        yield host


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command that a test runs within its own process sets up the log: for that test, and its stderr, alone."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def lab_factory() -> LabFactory:
    """`LabHost.boot`, for a test that needs hosts of its own."""
    return _host


@pytest.fixture(scope="session")
def module_lab() -> LabFactory:
    """As `lab_factory`, for the fixtures of a whole file."""
    return _host


@pytest.fixture(scope="session")
def lab() -> Iterator[LabHost]:
    """A host on this machine's own systemd, shared by many tests."""
    with _host("shared") as host:
        yield host


@pytest.fixture(scope="session")
def lab13() -> Iterator[LabHost]:
    """As `lab`, on Debian 13."""
    with _host("shared13", base=Base.DEBIAN13) as host:
        yield host


@pytest.fixture(params=[Base.DEBIAN12, pytest.param(Base.DEBIAN13, marks=pytest.mark.lab13)], ids=str)
def systemd_host(request: pytest.FixtureRequest) -> LabHost:
    """The shared host of either version: a test that asks for it runs on both."""
    host = request.getfixturevalue("lab13" if request.param is Base.DEBIAN13 else "lab")
    assert isinstance(host, LabHost)
    return host


@pytest.fixture
def unit_name() -> str:
    """A service name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:8]}.service"


@pytest.fixture
def service(systemd_host: LabHost, unit_name: str) -> Iterator[Service]:
    """A unit of the test's own on either version, gone at its end."""
    service = Service(systemd_host, unit_name)
    yield service
    service.remove()
