"""Fixtures of the tests that need no lab host."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture
def silent() -> Iterator[None]:
    """A simulated host's daemons log thousands of lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()
