"""The plan for an ended launch: what is rolled back, what is only freed, and where every ladder ends."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.recovery.policy import (
    CURABLE,
    DAY_S,
    PROVES_A_CEILING,
    REMEDY,
    Budget,
    Facts,
    Plan,
    Remedy,
    decide,
    demotes,
    proves_a_ceiling,
)

NOW = 1_000_000.0


def config(steps: int) -> SpeculationConfig:
    words = f"python -m sglang.launch_server --speculative-algorithm NEXTN --speculative-num-steps {steps} "
    return SpeculationConfig.of((words + "--speculative-eagle-topk 1").split())


def proven(steps: int, at: float = 0.0) -> KnownGood:
    return KnownGood("sglang.service", "base", config(steps), f"launch-{steps}", at)


def diagnosis(failure: FailureClass, rollback_helps: bool | None = True) -> Diagnosis:
    return Diagnosis(failure, 0.95, "It ended.", Phase.ALLOCATING_KV, rollback_helps)


def past(
    failure: FailureClass = FailureClass.KV_CACHE_OOM,
    *,
    steps: tuple[Step, ...] = (),
    opened: float = NOW - 60,
    outcome: Outcome = Outcome.FAILED,
    target: SpeculationConfig | None = None,
    ran: SpeculationConfig | None = None,
) -> Incident:
    return Incident("id", "sglang.service", "i", opened, failure, "", outcome, steps=steps, target=target, ran=ran)


RETRY = (Step.HOLD, Step.FREE, Step.START, Step.VERIFY)
FACTS = Facts(now=NOW, act=True, running=config(10), known_good=(proven(4),))


def test_every_class_has_a_remedy() -> None:
    assert set(REMEDY) == set(FailureClass)


@pytest.mark.parametrize("failure", sorted(CURABLE))
def test_a_class_that_another_config_cures_goes_back_to_known_good(failure: FailureClass) -> None:
    plan = decide(diagnosis(failure), FACTS)
    assert plan.target == config(4)
    assert plan.steps == (Step.HOLD, Step.FREE, Step.OVERRIDE, Step.RELOAD, Step.START, Step.VERIFY)


IN_THE_WAY = {failure for failure, remedy in REMEDY.items() if remedy is Remedy.FREE_AND_RETRY}


@pytest.mark.parametrize("failure", sorted(set(FailureClass) - CURABLE - IN_THE_WAY))
def test_no_other_class_ever_changes_the_config(failure: FailureClass) -> None:
    plan = decide(diagnosis(failure), replace(FACTS, left_overs=True))
    assert plan.target is None
    assert Step.OVERRIDE not in plan.steps
    assert Step.START not in plan.steps


@pytest.mark.parametrize("failure", sorted(FailureClass))
def test_nothing_is_touched_without_act(failure: FailureClass) -> None:
    assert decide(diagnosis(failure), replace(FACTS, act=False, left_overs=True)).steps == ()


@pytest.mark.parametrize("failure", sorted(FailureClass))
def test_nothing_is_touched_during_a_pause(failure: FailureClass) -> None:
    assert decide(diagnosis(failure), replace(FACTS, paused="paused until 18:00 UTC", left_overs=True)).steps == ()


@pytest.mark.parametrize("failure", sorted(FailureClass))
def test_a_launch_of_several_nodes_is_never_acted_on(failure: FailureClass) -> None:
    assert decide(diagnosis(failure), replace(FACTS, several_nodes=True, left_overs=True)).steps == ()


@pytest.mark.parametrize("failure", sorted(set(FailureClass) - {FailureClass.STOP_TIMEOUT_SIGKILL}))
def test_what_was_stopped_by_hand_meanwhile_stays_stopped(failure: FailureClass) -> None:
    assert decide(diagnosis(failure), replace(FACTS, operator_stopped=True, left_overs=True)).steps == ()


def test_a_stop_timeout_frees_left_overs_and_starts_nothing() -> None:
    verdict = diagnosis(FailureClass.STOP_TIMEOUT_SIGKILL, rollback_helps=False)
    assert decide(verdict, replace(FACTS, left_overs=True, operator_stopped=True)).steps == (Step.FREE,)
    assert decide(verdict, FACTS).steps == ()


class TestPort:
    VERDICT = diagnosis(FailureClass.PORT_IN_USE, rollback_helps=False)

    def test_a_left_over_that_may_serve_on_is_ended_and_the_same_config_is_tried_once(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, left_overs=True))
        assert (plan.steps, plan.target) == ((Step.HOLD, Step.FREE, Step.START, Step.VERIFY), None)

    def test_another_left_over_after_that_is_a_humans_matter(self) -> None:
        freed = past(FailureClass.PORT_IN_USE, steps=RETRY)
        plan = decide(self.VERDICT, replace(FACTS, left_overs=True, history=(freed,), begun=frozenset(RETRY)))
        assert (plan.steps, plan.hold) == ((Step.HOLD,), True)

    def test_a_stranger_keeps_the_port_and_no_config_is_changed_for_it(self) -> None:
        reported = past(FailureClass.PORT_IN_USE, outcome=Outcome.REPORTED)
        assert decide(self.VERDICT, FACTS).steps == ()
        assert decide(self.VERDICT, replace(FACTS, history=(reported,))).steps == ()


class TestHeldMemory:
    VERDICT = diagnosis(FailureClass.GPU_MEMORY_HELD)

    def test_left_overs_that_only_a_person_can_end_are_named(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, out_of_reach="`podman kill c3` ends it."))
        assert (plan.steps, plan.reason, plan.by_hand) == ((), "`podman kill c3` ends it.", True)

    def test_own_left_overs_are_freed_and_the_same_config_is_tried_once(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, left_overs=True))
        assert plan.steps == (Step.HOLD, Step.FREE, Step.START, Step.VERIFY)
        assert plan.target is None

    def test_the_second_time_in_a_row_it_rolls_back(self) -> None:
        freed = past(FailureClass.GPU_MEMORY_HELD, steps=RETRY)
        facts = replace(FACTS, left_overs=True, history=(freed,), begun=frozenset(RETRY))
        assert decide(self.VERDICT, facts).target == config(4)

    def test_what_was_planned_and_not_come_to_was_no_try(self) -> None:
        planned = past(FailureClass.GPU_MEMORY_HELD, steps=RETRY)
        facts = replace(FACTS, left_overs=True, history=(planned,), begun=frozenset({Step.HOLD}))
        assert decide(self.VERDICT, facts).steps == RETRY

    def test_a_freeing_that_worked_does_not_count_against_the_config(self) -> None:
        freed = past(FailureClass.GPU_MEMORY_HELD, steps=RETRY, outcome=Outcome.RECOVERED)
        facts = replace(FACTS, left_overs=True, history=(freed,), begun=frozenset(RETRY))
        assert decide(self.VERDICT, facts).target is None

    def test_a_stranger_that_stays_ends_in_a_config_that_needs_less(self) -> None:
        """Nothing is ours to free, so systemd's own restart was the one try of the same config."""
        reported = past(FailureClass.GPU_MEMORY_HELD, outcome=Outcome.REPORTED)
        assert decide(self.VERDICT, replace(FACTS, history=(reported,))).target == config(4)
        known_good_itself = replace(FACTS, running=config(4), history=(reported,))
        assert decide(self.VERDICT, known_good_itself).steps == ()
        long_ago = past(FailureClass.GPU_MEMORY_HELD, outcome=Outcome.REPORTED, opened=NOW - 7200)
        assert decide(self.VERDICT, replace(FACTS, history=(long_ago,))).steps == ()

    def test_memory_of_strangers_only_is_a_humans_matter(self) -> None:
        plan = decide(self.VERDICT, FACTS)
        assert plan.steps == ()
        assert "human" in plan.reason


class TestLadder:
    VERDICT = diagnosis(FailureClass.KV_CACHE_OOM)

    def test_the_newest_proof_comes_first(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, known_good=(proven(3, 20), proven(4, 10))))
        assert plan.target == config(3)

    def test_a_ceiling_is_never_a_target_again(self) -> None:
        facts = replace(FACTS, known_good=(proven(5), proven(4)), ceilings=(config(5),))
        assert decide(self.VERDICT, facts).target == config(4)

    def test_the_failing_config_is_never_its_own_target(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, running=config(4)))
        assert plan.hold
        assert plan.steps == (Step.HOLD,)

    def test_no_speculation_is_the_last_rung_where_allowed(self) -> None:
        facts = replace(FACTS, known_good=(), allow_no_speculation=True)
        assert decide(self.VERDICT, facts).target == SpeculationConfig()
        assert decide(self.VERDICT, replace(facts, allow_no_speculation=False)).hold

    def test_the_last_rung_keeps_the_managed_memory_flags(self) -> None:
        managed = frozenset({"--mem-fraction-static"})
        argv = [*config(10).words(), "--mem-fraction-static", "0.8"]
        facts = replace(FACTS, running=SpeculationConfig.of(argv, managed), known_good=(), allow_no_speculation=True)
        assert decide(self.VERDICT, facts).target == SpeculationConfig((("--mem-fraction-static", ("0.8",)),))

    def test_a_pool_that_ran_full_while_serving_is_not_held_against_the_config(self) -> None:
        full = replace(diagnosis(FailureClass.KV_CACHE_OOM, None), phase=Phase.SERVING)
        assert decide(full, replace(FACTS, running=config(4))).steps == ()

    def test_a_config_that_cannot_be_put_in_force_is_held_and_says_why(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, override_obstacle="ExecStart= is a shell script"))
        assert plan.hold
        assert "shell script" in plan.reason

    @pytest.mark.parametrize("failure", sorted(PROVES_A_CEILING))
    def test_memory_that_no_config_of_ours_cures_is_held(self, failure: FailureClass) -> None:
        plain = SpeculationConfig()
        plan = decide(diagnosis(failure, rollback_helps=False), replace(FACTS, running=plain))
        assert plan.hold


class TestNeverBackAndForth:
    """A fails, B is put in force and fails too: A is no way out."""

    BROKEN = diagnosis(FailureClass.SOFTWARE_EXCEPTION)
    WENT = past(FailureClass.SOFTWARE_EXCEPTION, target=config(4), ran=config(5))
    FACTS = replace(FACTS, running=config(4), known_good=(proven(4, NOW - 900), proven(5, NOW - 1800)))

    def test_what_a_rollback_went_away_from_is_no_target(self) -> None:
        assert decide(self.BROKEN, self.FACTS).target == config(5)
        assert decide(self.BROKEN, replace(self.FACTS, rollbacks=(self.WENT,))).hold

    def test_it_is_one_again_once_it_is_proven_anew(self) -> None:
        proven_since = (proven(5, NOW - 30), proven(4, NOW - 900))
        facts = replace(self.FACTS, known_good=proven_since, rollbacks=(self.WENT,))
        assert decide(self.BROKEN, facts).target == config(5)

    def test_it_is_one_again_after_a_day(self) -> None:
        yesterday = replace(self.WENT, opened=NOW - DAY_S - 1)
        assert decide(self.BROKEN, replace(self.FACTS, rollbacks=(yesterday,))).target == config(5)

    def test_memory_that_a_stranger_holds_does_not_send_it_back_and_forth(self) -> None:
        held = diagnosis(FailureClass.GPU_MEMORY_HELD, None)
        went = past(FailureClass.GPU_MEMORY_HELD, target=config(4), ran=config(3))
        facts = replace(self.FACTS, known_good=(proven(4), proven(3)), history=(went,))
        assert decide(held, facts).target == config(3)
        assert decide(held, replace(facts, rollbacks=(went,))).steps == ()

    @pytest.mark.parametrize("failure", [FailureClass.KV_CACHE_OOM, FailureClass.RUNTIME_CUDA_OOM])
    def test_what_needs_more_memory_is_no_cure_for_a_lack_of_it(self, failure: FailureClass) -> None:
        assert decide(diagnosis(failure), self.FACTS).hold
        assert decide(diagnosis(failure), replace(self.FACTS, known_good=(proven(5), proven(3)))).target == config(3)

    def test_from_no_speculation_there_is_no_way_up(self) -> None:
        plain = replace(self.FACTS, running=SpeculationConfig())
        assert decide(diagnosis(FailureClass.RUNTIME_CUDA_OOM), plain).hold


class TestDemotion:
    ROLLBACK = Plan("Go back.", target=config(3))

    def test_what_failed_by_what_another_config_cures_is_no_longer_known_good(self) -> None:
        assert demotes(diagnosis(FailureClass.CUDA_ERROR), self.ROLLBACK)
        assert not demotes(diagnosis(FailureClass.CUDA_ERROR), Plan("systemd's own restart policy goes on."))

    def test_what_does_not_fit_is_demoted_whatever_the_plan_is(self) -> None:
        assert demotes(diagnosis(FailureClass.KV_CACHE_OOM), Plan("Held."))

    def test_memory_that_others_held_says_nothing_against_a_config(self) -> None:
        assert not demotes(diagnosis(FailureClass.GPU_MEMORY_HELD, None), self.ROLLBACK)


class TestBudget:
    VERDICT = diagnosis(FailureClass.KV_CACHE_OOM)
    BUDGET = Budget(rollbacks=2, window=3600, per_day=3, cool_down=30)

    @pytest.mark.parametrize(
        ("ages", "held"),
        [
            ((), False),
            ((60,), False),
            ((10,), True),  # within the cool-down
            ((60, 120), True),  # the window is used up
            ((3700, 3800), False),  # outside the window
            ((3700, 7200, 10000), True),  # the day is used up
        ],
    )
    def test_recoveries_are_limited_by_cool_down_window_and_day(self, ages: tuple[float, ...], held: bool) -> None:
        facts = replace(FACTS, budget=self.BUDGET, starts=tuple(NOW - age for age in ages))
        assert decide(self.VERDICT, facts).hold is held

    def test_freeing_again_and_again_is_limited_as_well(self) -> None:
        held = diagnosis(FailureClass.GPU_MEMORY_HELD)
        facts = replace(FACTS, budget=self.BUDGET, left_overs=True, starts=(NOW - 60, NOW - 120))
        assert decide(held, facts).hold

    def test_a_plan_that_was_never_carried_out_costs_nothing(self) -> None:
        planned = past(opened=NOW - 1, target=config(4), steps=(Step.START,), outcome=Outcome.YIELDED)
        facts = replace(FACTS, budget=self.BUDGET, history=(planned, planned, planned))
        assert decide(self.VERDICT, facts).target == config(4)

    def test_a_config_that_is_proven_meanwhile_clears_the_window_and_not_the_day(self) -> None:
        used = tuple(NOW - age for age in (60, 120))
        facts = replace(FACTS, budget=self.BUDGET, starts=used)
        assert decide(self.VERDICT, replace(facts, proven=NOW - 90)).target == config(4)
        assert decide(self.VERDICT, replace(facts, proven=NOW - 300)).hold
        assert decide(self.VERDICT, replace(facts, proven=NOW - 40, starts=(*used, NOW - 300))).hold


# Whatever is known, and whatever fails in whatever order

STEPS = st.integers(min_value=0, max_value=6)


def of_steps(steps: int) -> SpeculationConfig:
    return config(steps) if steps else SpeculationConfig()


@given(
    failures=st.lists(st.sampled_from(sorted(REMEDY)), min_size=1),
    helps=st.sampled_from([True, False, None]),
    left_overs=st.booleans(),
    rungs=st.lists(STEPS, unique=True),
    begin=STEPS,
    allowed=st.booleans(),
    budget=st.builds(Budget, st.integers(0, 4), st.just(3600.0), st.integers(0, 9), st.just(0.0)),
)
def test_every_ladder_ends(
    failures: list[FailureClass],
    helps: bool | None,
    left_overs: bool,
    rungs: list[int],
    begin: int,
    allowed: bool,
    budget: Budget,
) -> None:
    """Everything that is tried fails at once, in the classes that were drawn, over and over: the watchdog starts the
    unit no more often than its budget says, never a config that it went away from, and then holds or leaves it."""
    facts = Facts(NOW, act=True, running=of_steps(begin), left_overs=left_overs, budget=budget)
    facts = replace(facts, known_good=tuple(proven(n) for n in rungs if n), allow_no_speculation=allowed)
    was = [facts.running]
    for failure in itertools.islice(itertools.cycle(failures), 30):
        verdict = diagnosis(failure, helps)
        ceilings = (*facts.ceilings, facts.running) if proves_a_ceiling(verdict) else facts.ceilings
        plan = decide(verdict, replace(facts, ceilings=ceilings))
        if Step.START not in plan.steps:
            return
        if plan.target is not None:
            assert not any(plan.target.same_as(config) for config in (*was, *ceilings))
            was.append(plan.target)
        incident = past(failure, steps=plan.steps, opened=facts.now, target=plan.target, ran=facts.running)
        facts = replace(
            facts,
            now=facts.now + 1,
            running=plan.target or facts.running,
            ceilings=ceilings,
            history=(incident, *facts.history),
            rollbacks=(incident, *facts.rollbacks) if plan.target else facts.rollbacks,
            starts=(facts.now, *facts.starts),
        )
        assert len(facts.starts) <= min(budget.rollbacks, budget.per_day)
    raise AssertionError("it goes on for ever")


# A launch that hangs

HANG = diagnosis(FailureClass.UNRESPONSIVE, None)
HANGS = replace(FACTS, hangs=True, restart_unresponsive=True)


def test_what_hangs_is_ended_and_started_with_the_same_config() -> None:
    plan = decide(HANG, HANGS)
    assert (plan.steps, plan.target, plan.hold) == ((Step.HOLD, Step.FREE, Step.START, Step.VERIFY), None, False)
    assert not demotes(HANG, plan)


def test_what_a_prober_had_killed_is_reported() -> None:
    assert decide(HANG, replace(HANGS, hangs=False)).steps == ()


@pytest.mark.parametrize(
    "change",
    [
        {"restart_unresponsive": False},
        {"act": False},
        {"several_nodes": True},
        {"operator_stopped": True},
        {"paused": "paused until 18:00 UTC"},
        {"starting": True},
        {"own_watchdog": True},
        {"starts": (NOW - 30, NOW - 20, NOW - 10)},
    ],
)
def test_what_hangs_is_left_as_it_is_and_never_held(change: dict[str, Any]) -> None:
    plan = decide(HANG, replace(HANGS, **change))
    assert (plan.steps, plan.hold) == ((), False)
    assert plan.later == ("own_watchdog" in change)
