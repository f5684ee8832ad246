"""The rules that never bend, under whatever a host, its systemd, an operator and the daemon's own deaths come up with.

The watcher, the incidents, the executor and the ledger are the product's own; what is below them is `sim_host`. The
number of steps in all is `SOAK_STEPS`: 10 000 in `make test-faults`, and up to that they are the same ones each time.
"""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_watchdog.by_hand import ByHand
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.reporting.metrics import Metrics
from sglang_watchdog.settings import UnitSettings
from sim_host.adapters import SimFiles, install
from sim_host.daemon import SimDaemon
from sim_host.oracle import Oracle
from sim_host.virtual_time import VirtualLoop
from sim_host.world import DRAIN_S, GIB, UNIT, Stranger, World

STEPS_OF_ONE = 50
# Two minutes of CPU for all steps, on a machine that may be busy.
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("silent")]
STEPS = int(os.environ.get("SOAK_STEPS", "10000"))
SAME_UP_TO = 10_000
QUIET_WITHIN_S = 600
CRASHES = (FailureClass.CUDA_ERROR, FailureClass.SOFTWARE_EXCEPTION, FailureClass.EXTERNAL_KILL)
METRICS = Metrics((UNIT,), "0")
STEP_COUNTS = st.sampled_from([0, 2, 3, 4, 5, 10])


class Rules(RuleBasedStateMachine):
    @initialize(
        act=st.sampled_from([True, True, True, False]),
        steps=st.sampled_from([3, 4, 5]),
        fits=st.sampled_from([2, 4, 5, 5]),
        restart_s=st.sampled_from([None, 1.0, 5.0]),
        drop_in=st.booleans(),
        allow_none=st.booleans(),
        proven_for=st.sampled_from([6.0, 60.0, 60.0]),
        restart_hung=st.sampled_from([True, True, True, False]),
    )
    def boot(
        self,
        act: bool,
        steps: int,
        fits: int,
        restart_s: float | None,
        drop_in: bool,
        allow_none: bool,
        proven_for: float,
        restart_hung: bool = True,
    ) -> None:
        self.loop = VirtualLoop()
        self.world = World(self.loop, steps=steps, fits=fits, restart_s=restart_s, drop_in=drop_in)
        self.said: list[str] = []
        chosen = UnitSettings(
            act=act,
            soak=20,
            start_deadline=60,
            verify_deadline=20,
            free_deadline=3,
            rollbacks=2,
            rollback_window=600,
            rollbacks_per_day=4,
            allow_no_speculation=allow_none,
            serving_budget=20,
            restart_unresponsive=restart_hung,
        )
        self.oracle = Oracle(self.world, chosen)
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        Ledger(self.db, Path(":memory:"))._prepare(read_only=False)
        self.patch = pytest.MonkeyPatch()
        files = SimFiles(self.world, self.oracle, lambda: self.daemon.ledger)
        install(self.patch, self.world, files, self.oracle, self.said)
        self.world.start(by="operator")
        self.daemon = SimDaemon(self.world, self.oracle, chosen, self.db, METRICS)
        self.daemon.run_for(proven_for)

    # Time

    @rule()
    def a_while_passes(self) -> None:
        self.daemon.run_for(30)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.daemon.run_for(seconds)

    @rule()
    def an_hour_passes(self) -> None:
        self.loop.elapsed += 3600
        self.daemon.run_for(1)

    # The server

    @rule(failure=st.sampled_from(CRASHES), leaks=st.booleans(), lag=st.sampled_from([0.0, 0.5, 10.0]))
    def the_server_crashes(self, failure: FailureClass, leaks: bool, lag: float) -> None:
        self.world.leaks, self.world.driver_lag = leaks, lag
        if self.world.running is not None and not self.world.unit.job:
            self.world.end(self.world.running, failure)
        self.daemon.run_for(0.1)

    @rule(seconds=st.sampled_from([5.0, 39.0, 70.0, 70.0]), calls=st.sampled_from([None, None, 45]))
    def the_server_hangs(self, seconds: float, calls: int | None) -> None:
        """Once it serves. HTTP answers 200 all the while; SGLang's own watchdog has had its time after 40 s."""
        if self.world.running is None or not self.world.running.serves:
            self.world.fits = 5
            self.the_operator_deploys(4, True, True)
        self.world.go_on()
        self.daemon.run_for(10)
        self.world.hang()
        self.daemon.run_for(seconds)
        self.world.kill_in = calls
        self.daemon.run_for(1)

    @rule()
    def the_server_goes_on(self) -> None:
        self.world.go_on()

    @rule()
    def others_ask_it(self) -> None:
        if self.world.running is not None:
            self.world.running.traffic = True

    @rule(fits=st.sampled_from([2, 4, 5]))
    def less_or_more_fits(self, fits: int) -> None:
        self.world.fits = fits

    # The operator

    @rule()
    def the_operator_stops(self) -> None:
        self.world.operator_stopped = True
        self.world.stop(by="operator")
        self.daemon.run_for(0.05)

    @rule(seconds=st.just(0.05))
    def the_operator_starts(self, seconds: float) -> None:
        if self.world.unit.load_state == "loaded":
            self.world.operator_stopped = self.oracle.held_by_us = False
            self.world.start(by="operator")
        if seconds:
            self.daemon.run_for(seconds)

    @rule()
    def the_operator_starts_what_dies_at_once(self) -> None:
        """Between two looks of the watchdog."""
        was_down = self.world.unit.ended
        self.the_operator_starts(0.0)
        if was_down and (begun := self.world.running) is not None:
            self.world.end(begun, FailureClass.SOFTWARE_EXCEPTION)
        self.daemon.run_for(0.05)

    @rule(steps=STEP_COUNTS, reload=st.sampled_from([True, True, False]), restart=st.sampled_from([True, True, False]))
    def the_operator_deploys(self, steps: int, reload: bool, restart: bool) -> None:
        self.world.on_disk = steps
        if reload:
            self.world.reload()
        if restart and self.world.unit.load_state == "loaded":
            self.world.operator_stopped = self.oracle.held_by_us = False
            self.world.restart(by="operator")
        self.daemon.run_for(0.05)

    @rule(steps=st.sampled_from([4, 5, 10]), seconds=st.sampled_from([0.5, 2.5, 3.0, 20.0]))
    def the_operator_tries_more(self, steps: int, seconds: float) -> None:
        self.the_operator_deploys(steps, True, True)
        self.daemon.run_for(seconds)

    @rule(how=st.sampled_from(["stops", "starts", "starts_what_dies_at_once"]))
    def the_operator_acts_in_a_recovery(self, how: str) -> None:
        """While the watchdog waits for the cards, if it waits."""
        self.the_operator_deploys(10, True, True)
        self.daemon.run_for(2.5)
        self.world.driver_lag = 2.0
        self.daemon.run_for(1.5)
        match how:
            case "stops":
                self.the_operator_stops()
            case "starts":
                self.the_operator_starts(0.05)
            case _:
                self.the_operator_starts_what_dies_at_once()

    @rule(seconds=st.sampled_from([0.5, 12.0, 12.0]))
    def the_operator_insists(self, seconds: float) -> None:
        """On what does not fit, faster than anything is proven."""
        for steps in (10, 11, 12):
            self.the_operator_deploys(steps, True, True)
            self.daemon.run_for(seconds)

    @rule()
    def the_operator_takes_the_override_away(self) -> None:
        self.world.ours_on_disk = None
        self.world.reload()
        self.daemon.run_for(0.05)

    @rule()
    def the_operator_masks_or_unmasks(self) -> None:
        masked = self.world.unit.load_state == "masked"
        self.oracle.held_by_us = False
        self.world.change(load_state="loaded" if masked else "masked")
        self.daemon.run_for(0.5)

    @rule(seconds=st.sampled_from([1.0, 30.0, 3600.0]))
    def the_operator_pauses(self, seconds: float) -> None:
        if self.daemon.by_hand is not None:
            self.daemon.ask(_pause(self.daemon.by_hand, seconds))
            self.daemon.run_for(0.05)

    @rule(command=st.sampled_from(["resume", "roll_back", "mark_good"]))
    def the_operator_asks_for(self, command: str) -> None:
        hand = self.daemon.by_hand
        if hand is None:
            return
        match command:
            case "resume":
                self.daemon.ask(hand.resume())
            case "roll_back":
                self.world.operator_stopped = self.oracle.held_by_us = False
                self.daemon.ask(hand.roll_back(""))
            case _:
                self.daemon.ask(hand.mark_good())
        self.daemon.run_for(0.5)

    # The world's faults, and the daemon's own

    @rule(seconds=st.sampled_from([0.1, 5.0]))
    def the_bus_goes_and_comes_back(self, seconds: float) -> None:
        self.world.bus_up = False
        self.daemon.run_for(seconds)
        self.world.bus_up = True

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def the_driver_hangs_for_a_while(self, seconds: float) -> None:
        self.world.nvml_hangs = True
        self.daemon.run_for(seconds)
        self.world.nvml_hangs = False

    @rule(kind=st.sampled_from(Stranger), size=st.sampled_from([GIB // 2, GIB // 2, 20 * GIB]))
    def a_stranger_comes_or_goes(self, kind: Stranger, size: int) -> None:
        """A small one leaves room for the server."""
        theirs = [process for process in self.world.processes.values() if not process.owner]
        if theirs:
            self.world.drop(theirs[0])
        else:
            self.world.stranger(kind, size)

    @rule(calls=st.integers(1, 60), seconds=st.sampled_from([1.0, 10.0]))
    def the_daemon_is_killed_at_a_call(self, calls: int, seconds: float) -> None:
        self.world.kill_in = calls
        self.daemon.run_for(seconds)

    @rule()
    def the_daemon_is_killed_now(self) -> None:
        self.daemon.kill()
        self.daemon.run_for(0.6)

    @rule()
    def the_daemon_is_restarted(self) -> None:
        self.daemon.terminate()
        self.daemon.run_for(0.1)

    # What always holds

    @invariant()
    @precondition(lambda self: hasattr(self, "oracle"))
    def no_rule_was_broken(self) -> None:
        assert not self.oracle.broken, "; ".join((*self.oracle.broken, "said:", *self.said[-12:]))

    def teardown(self) -> None:
        """Every ladder ends, and what is owed is paid, once the world leaves it in peace."""
        if not hasattr(self, "daemon"):
            return
        try:
            self.world.kill_in, self.world.nvml_hangs, self.world.bus_up = None, False, True
            for _ in range(QUIET_WITHIN_S // 5):
                self.daemon.run_for(5)
                if not self.daemon.ledger.open_incidents() and not self.daemon.commands:
                    break
            self.oracle.nothing_is_owed(self.daemon.ledger)
            self.no_rule_was_broken()
        finally:
            self.world.dead = True
            self.daemon.bury()
            self.patch.undo()
            self.loop.close()
            self.db.close()


async def _pause(hand: ByHand, seconds: float) -> str:
    return hand.pause(seconds)


TestRules = pytest.mark.faults(Rules.TestCase)
TestRules.settings = settings(
    max_examples=max(1, STEPS // STEPS_OF_ONE),
    stateful_step_count=STEPS_OF_ONE,
    deadline=None,
    derandomize=STEPS <= SAME_UP_TO,
    database=None,
    phases=(Phase.generate, Phase.shrink) if STEPS > SAME_UP_TO else (Phase.generate,),  # shrinking takes minutes
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# Interleavings of their own


@pytest.fixture
def host() -> Iterator[Rules]:
    rules = a_host()
    yield rules
    rules.teardown()


def a_host(*, drop_in: bool = False, restart_s: float | None = 5.0) -> Rules:
    """A proven server of steps 4 that may be acted on, of a test that has several."""
    rules = Rules()
    rules.boot(act=True, steps=4, fits=5, restart_s=restart_s, drop_in=drop_in, allow_none=False, proven_for=60.0)
    return rules


def hold_until_the_cards_are_free(host: Rules) -> None:
    """Returns while the watchdog holds the unit: the driver takes its time."""
    host.the_operator_deploys(10, True, True)
    host.daemon.run_for(2.5)  # the old launch is drained and released, the new one loads
    host.world.driver_lag = 2.0
    host.daemon.run_for(1.5)
    assert host.oracle.held_by_us


def test_a_rollback_is_what_it_should_be_here_too(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.daemon.run_for(60)
    assert host.world.running is not None
    assert (host.world.running.steps, host.world.running.serves) == (4, True)
    assert len(host.oracle.recoveries) == 1


def test_what_was_stopped_while_it_was_held_is_not_handed_back(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.the_operator_stops()
    host.the_daemon_is_restarted()
    host.daemon.run_for(60)
    assert host.world.running is None
    assert host.oracle.broken == []


def test_a_person_who_insists_is_held_once_the_budget_is_spent(host: Rules) -> None:
    host.the_operator_insists(12.0)
    assert len(host.oracle.recoveries) == 2
    assert any("2 recoveries in 10 minutes are used up" in words for words in host.said)


def test_flags_that_are_changed_meanwhile_are_the_operators_to_try(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.the_operator_deploys(3, True, False)
    host.daemon.run_for(5)
    assert host.world.running is not None
    assert (host.world.running.steps, host.world.ours_on_disk) == (3, None)
    assert any("flags were changed to steps 3 before the step override" in words for words in host.said)


def test_what_was_held_is_started_before_a_pause(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.the_operator_pauses(3600.0)
    assert host.world.running is not None
    assert host.oracle.broken == []


def test_a_launch_that_nobody_saw_alive_says_nothing_of_what_was_proven(host: Rules) -> None:
    """Its command is gone, and with it what it would have to be compared with."""
    host.daemon.kill()
    host.daemon.bury()
    host.world.on_disk = 10
    host.world.reload()
    host.world.restart(by="operator")
    host.world.loop.run_for(DRAIN_S + 3)
    assert host.world.unit.in_auto_restart
    host.daemon.start()
    host.daemon.run_for(2)
    assert not host.oracle.held_by_us
    host.daemon.run_for(60)
    assert host.world.running is not None
    assert (host.world.running.steps, host.world.running.serves) == (4, True)


def test_a_stop_of_what_is_held_outlives_the_daemon_that_did_not_hear_of_it(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.daemon.kill()
    host.the_operator_stops()
    host.daemon.run_for(60)
    assert host.world.running is None
    assert host.oracle.broken == []


def test_a_stop_during_a_pause_of_what_failed_in_it_is_kept_when_the_pause_is_over() -> None:
    host = a_host(restart_s=None)
    host.the_operator_pauses(30.0)
    host.the_operator_deploys(10, True, True)
    host.daemon.run_for(10)
    assert host.world.running is None
    host.the_operator_stops()
    host.daemon.run_for(60)
    assert host.world.running is None
    assert any("the pause is over" in words for words in host.said)
    host.teardown()
    assert host.oracle.broken == []


@pytest.mark.parametrize("kind", Stranger)
def test_whoever_else_is_on_the_card_lives_through_a_rollback(host: Rules, kind: Stranger) -> None:
    stranger = host.world.stranger(kind, GIB // 2)
    host.world.leaks = True
    host.the_operator_deploys(10, True, True)
    host.daemon.run_for(60)
    assert host.world.running is not None
    assert (host.world.running.steps, stranger.alive, host.oracle.broken) == (4, True, [])


def test_a_start_by_hand_ends_a_recovery_also_where_what_it_started_is_gone_at_once(host: Rules) -> None:
    hold_until_the_cards_are_free(host)
    host.the_operator_starts_what_dies_at_once()
    assert host.world.unit.ended
    host.daemon.run_for(2)
    assert any(words.startswith(f"{UNIT}: yielded: somebody queued a job") for words in host.said)
    host.daemon.run_for(60)
    assert host.oracle.broken == []
