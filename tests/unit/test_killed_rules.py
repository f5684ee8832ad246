"""The daemon killed at each call that it makes, on a simulated host: what the next one then has to bring to an end."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sglang_watchdog.domain.failure import FailureClass
from sim_host.world import UNIT
from unit.test_rules import Rules, a_host

pytestmark = pytest.mark.usefixtures("silent")


def killed_at_each_call(begin: Callable[[Rules], None], end: Callable[[Rules], None], **options: Any) -> int:
    """Runs `begin` on a host of its own for each call of the product after it, with the daemon killed there, and then
    `end`. Returns how many calls that were."""
    for calls in itertools.count(1):
        host = a_host(**options)
        begin(host)
        lives, host.world.kill_in = host.daemon.lives, calls
        host.daemon.run_for(4)
        killed, host.world.kill_in = host.daemon.lives > lives, None
        host.daemon.run_for(20)
        end(host)
        host.teardown()
        if not killed:
            return calls - 1
    raise AssertionError("unreachable")


def test_the_end_of_an_incident_is_told_also_by_the_daemon_after_the_one_that_closed_it() -> None:
    def until_tokens_are_due(host: Rules) -> None:
        host.the_operator_deploys(10, True, True)
        host.daemon.run_for(5.0)
        assert host.daemon.ledger.open_incidents()[0].target is not None

    def told(host: Rules) -> None:
        ends = [words for words in host.said if "serves again, which is not what was asked for" in words]
        assert 1 <= len(ends) <= 2  # twice where it died before it could write down that it had told
        assert host.daemon.ledger.untold(UNIT) == []

    assert killed_at_each_call(until_tokens_are_due, told) > 10


def test_the_reload_after_an_override_was_taken_away_is_made_also_by_the_next_daemon() -> None:
    def deploy_other_flags(host: Rules) -> None:
        host.the_operator_deploys(10, True, True)
        host.daemon.run_for(30)
        assert host.world.ours_loaded == 4
        host.world.on_disk = 3
        host.world.reload()

    def gone(host: Rules) -> None:
        assert (host.world.ours_on_disk, host.world.ours_loaded) == (None, None)

    assert killed_at_each_call(deploy_other_flags, gone, drop_in=True) > 10


def test_a_left_over_is_freed_also_where_a_restart_of_systemds_ran_into_it_while_no_daemon_lived() -> None:
    """What was planned and not come to is no try of the same config."""

    def end_and_leave_memory_held(host: Rules) -> None:
        assert host.world.running is not None
        host.world.leaks = True
        host.world.end(host.world.running, FailureClass.EXTERNAL_KILL)
        host.world.leaks = False

    def serves(host: Rules) -> None:
        assert host.world.running is not None
        assert (host.world.running.serves, host.world.running.steps) == (True, 4)

    assert killed_at_each_call(end_and_leave_memory_held, serves, restart_s=0.1) > 10
