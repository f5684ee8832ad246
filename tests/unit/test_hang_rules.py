"""A server that hangs, on the simulated host of the rules: interleavings of their own."""

from collections.abc import Iterator

import pytest
import structlog

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Outcome
from sim_host.world import UNIT
from unit.test_rules import Rules, a_host


@pytest.fixture(autouse=True)
def silent() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))


@pytest.fixture
def host() -> Iterator[Rules]:
    rules = a_host()
    yield rules
    rules.teardown()


def test_a_server_that_hangs_is_told_once_and_told_again_when_it_goes_on(host: Rules) -> None:
    for _ in range(2):
        host.world.hang()
        host.daemon.run_for(90)
        host.world.go_on()
        host.daemon.run_for(20)
    told = [words for words in host.said if "unresponsive: The server has generated nothing for" in words]
    assert len(told) == 2
    assert sum("makes progress again" in words for words in host.said) == 2
    last = host.daemon.ledger.incidents(UNIT, 1)[0]
    assert (last.failure, last.outcome) == (FailureClass.UNRESPONSIVE, Outcome.REPORTED)


@pytest.mark.parametrize("traffic", [False, True])
def test_a_server_that_gives_tokens_is_never_called_hung(host: Rules, traffic: bool) -> None:
    assert host.world.running is not None
    host.world.running.traffic = traffic
    host.daemon.run_for(600)
    assert not any("unresponsive" in words for words in host.said)
