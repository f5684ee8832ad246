"""More interleavings of their own on the simulated host of the rules: a server that hangs, a stop in the instant after
our own."""

from collections.abc import Callable, Iterator

import pytest

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Outcome
from sglang_watchdog.domain.unit import ActiveState
from sim_host.world import UNIT
from unit.test_rules import Rules, a_host

pytestmark = pytest.mark.usefixtures("silent")


@pytest.fixture
def host() -> Iterator[Rules]:
    rules = a_host()
    yield rules
    rules.teardown()


def observed() -> Rules:
    """A host where what hangs may not be ended."""
    rules = Rules()
    rules.boot(True, 4, 5, 5.0, False, False, 60.0, restart_hung=False)
    return rules


def test_a_server_that_hangs_is_told_once_and_told_again_when_it_goes_on() -> None:
    host = observed()
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
    host.teardown()


@pytest.mark.parametrize("traffic", [False, True])
def test_a_server_that_gives_tokens_is_never_called_hung(host: Rules, traffic: bool) -> None:
    assert host.world.running is not None
    host.world.running.traffic = traffic
    host.daemon.run_for(600)
    assert not any("unresponsive" in words for words in host.said)


# What is done about it

OWN_WATCHDOG_OVER_S = 40.0  # one and a half of its --watchdog-timeout, and a little


def hung(host: Rules, seconds: float) -> str:
    """The invocation that hangs since so long."""
    assert host.world.running is not None
    host.world.hang()
    host.daemon.run_for(seconds)
    return host.world.unit.invocation


def serves_again(host: Rules, hung_one: str) -> bool:
    running = host.world.running
    return running is not None and running.invocation != hung_one and running.serves and running.steps == 4


@pytest.mark.parametrize("restart_s", [None, 0.1, 5.0])
def test_what_hangs_is_ended_and_the_same_config_serves_again(restart_s: float | None) -> None:
    host = a_host(restart_s=restart_s)
    before = hung(host, OWN_WATCHDOG_OVER_S - 5)
    assert host.world.unit.invocation == before
    host.daemon.run_for(60)
    assert serves_again(host, before)
    last = host.daemon.ledger.incidents(UNIT, 1)[0]
    assert (last.failure, last.outcome, len(host.oracle.recoveries)) == (
        FailureClass.UNRESPONSIVE,
        Outcome.RECOVERED,
        1,
    )
    assert not any("external_kill" in words for words in host.said)  # our own kill is no failure of its own
    host.teardown()


def test_sglangs_own_watchdog_goes_first_and_a_server_that_goes_on_meanwhile_is_left_alone(host: Rules) -> None:
    before = hung(host, 30)
    assert any("unresponsive" in words for words in host.said)
    host.world.go_on()
    host.daemon.run_for(900)
    assert host.world.unit.invocation == before
    assert host.daemon.ledger.incidents(UNIT, 1)[0].reason == "It makes progress again."


def test_without_leave_what_hangs_is_reported_and_not_touched() -> None:
    host = observed()
    before = hung(host, 1200)
    assert host.world.unit.invocation == before
    assert host.daemon.ledger.incidents(UNIT, 1)[0].outcome is Outcome.REPORTED
    host.teardown()


@pytest.mark.parametrize("act", ["stops", "restarts", "starts", "pauses"])
def test_what_the_operator_does_to_what_hangs_wins(host: Rules, act: str) -> None:
    before = hung(host, OWN_WATCHDOG_OVER_S - 5)
    match act:
        case "stops":
            host.the_operator_stops()
        case "restarts":
            host.the_operator_deploys(4, False, True)
        case "starts":  # which does nothing to what runs, and is a job of theirs all the same
            host.the_operator_starts(0.05)
        case _:
            host.the_operator_pauses(3600.0)
    host.daemon.run_for(200)
    assert host.oracle.recoveries == []
    assert (host.world.running is None) == (act == "stops")
    assert (host.world.unit.invocation == before) == (act != "restarts")


def test_a_server_that_hangs_again_and_again_is_left_to_a_human_once_the_budget_is_spent(host: Rules) -> None:
    for _ in range(5):
        hung(host, OWN_WATCHDOG_OVER_S + 60)
        host.daemon.run_for(600)
    assert len(host.oracle.recoveries) == 4
    assert any("It hangs, and is left as it is: 4 recoveries in one day are used up" in words for words in host.said)


def test_a_daemon_that_is_killed_at_any_call_of_it_leaves_a_server_that_serves() -> None:
    """Also where systemd itself would not start it again."""

    def about_to_act() -> Rules:
        host = a_host(restart_s=None)
        hung(host, OWN_WATCHDOG_OVER_S - 5)
        return host

    host = about_to_act()
    calls = host.world.calls
    wait(host, lambda: any("What hangs is ended" in words for words in host.said))
    first = host.world.calls - calls
    wait(host, lambda: bool(host.oracle.recoveries))
    last = host.world.calls - calls
    host.teardown()
    assert last - first > 10
    for call in range(max(1, first - 10), last + 3, 2):  # after one call is before the next
        host = about_to_act()
        before, host.world.kill_in = host.world.unit.invocation, call
        host.daemon.run_for(6 * OWN_WATCHDOG_OVER_S)
        assert serves_again(host, before), f"killed at call {call}"
        assert not host.daemon.ledger.open_incidents()
        assert not any("external_kill" in words for words in host.said)
        host.teardown()
        assert host.oracle.broken == []


@pytest.mark.parametrize("act", ["nothing", "stop", "mask", "terminate"])
def test_a_daemon_that_is_gone_while_what_it_killed_falls_calls_that_no_failure_of_its_own(act: str) -> None:
    host = a_host(restart_s=None)
    before = hung(host, OWN_WATCHDOG_OVER_S - 5)
    wait(host, lambda: host.world.unit.active_state is ActiveState.DEACTIVATING)
    match act:
        case "nothing":
            host.daemon.kill()
        case "stop":
            host.daemon.kill()
            host.the_operator_stops()
        case "mask":
            host.daemon.kill()
            host.the_operator_masks_or_unmasks()
        case _:
            host.the_daemon_is_restarted()
    host.daemon.run_for(60)
    assert not any("external_kill" in words for words in host.said)
    assert serves_again(host, before) is (act in ("nothing", "terminate"))
    host.teardown()
    assert host.oracle.broken == []


def test_what_the_operator_ends_while_it_is_looked_at_is_not_reported(host: Rules) -> None:
    host.world.hang()
    wait(host, lambda: host.world.looked_at > 0)
    host.the_operator_stops()
    host.daemon.run_for(60)
    assert not any("unresponsive" in words for words in host.said)
    assert host.world.running is None


def wait(host: Rules, condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        host.daemon.run_for(0.05)
    raise AssertionError("it does not come to that")


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
