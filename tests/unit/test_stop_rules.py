"""A stop by hand in the middle of a recovery, on the simulated host of the rules: an interleaving of its own."""

from collections.abc import Iterator

import pytest
import structlog

from unit.test_rules import Rules, a_host


@pytest.fixture(autouse=True)
def silent() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))


@pytest.fixture
def host() -> Iterator[Rules]:
    rules = a_host()
    yield rules
    rules.teardown()


def test_a_stop_in_the_instant_after_our_own_is_obeyed(host: Rules) -> None:
    """The witness left with our stop, and is not back yet."""
    host.the_operator_deploys(10, True, True)
    for _ in range(1000):
        host.daemon.run_for(0.01)
        if host.oracle.held_by_us:
            break
    host.the_operator_stops()
    host.daemon.run_for(60)
    assert host.world.running is None
    assert host.oracle.broken == []
