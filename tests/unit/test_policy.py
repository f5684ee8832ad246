"""The plan for an ended launch: what is rolled back, what is only freed, and where every ladder ends."""

from dataclasses import replace

import pytest

from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.recovery.policy import CURABLE, PROVES_A_CEILING, Budget, Facts, decide

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
) -> Incident:
    return Incident("id", "sglang.service", "i", opened, failure, "", outcome, steps=steps, target=target)


FACTS = Facts(now=NOW, act=True, running=config(10), known_good=(proven(4),))


@pytest.mark.parametrize("failure", sorted(CURABLE))
def test_a_class_that_another_config_cures_goes_back_to_known_good(failure: FailureClass) -> None:
    plan = decide(diagnosis(failure), FACTS)
    assert plan.target == config(4)
    assert plan.steps == (Step.HOLD, Step.FREE, Step.OVERRIDE, Step.RELOAD, Step.START, Step.VERIFY)


@pytest.mark.parametrize("failure", sorted(set(FailureClass) - CURABLE - {FailureClass.GPU_MEMORY_HELD}))
def test_no_other_class_ever_changes_the_config(failure: FailureClass) -> None:
    plan = decide(diagnosis(failure), replace(FACTS, left_overs=True))
    assert plan.target is None
    assert Step.OVERRIDE not in plan.steps
    assert Step.START not in plan.steps


@pytest.mark.parametrize("failure", sorted(FailureClass))
def test_nothing_is_touched_without_act(failure: FailureClass) -> None:
    assert decide(diagnosis(failure), replace(FACTS, act=False, left_overs=True)).steps == ()


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


class TestHeldMemory:
    VERDICT = diagnosis(FailureClass.GPU_MEMORY_HELD)

    def test_own_left_overs_are_freed_and_the_same_config_is_tried_once(self) -> None:
        plan = decide(self.VERDICT, replace(FACTS, left_overs=True))
        assert plan.steps == (Step.HOLD, Step.FREE, Step.START, Step.VERIFY)
        assert plan.target is None

    def test_the_second_time_in_a_row_it_rolls_back(self) -> None:
        freed = past(FailureClass.GPU_MEMORY_HELD, steps=(Step.HOLD, Step.FREE, Step.START, Step.VERIFY))
        assert decide(self.VERDICT, replace(FACTS, left_overs=True, history=(freed,))).target == config(4)

    def test_a_freeing_that_worked_does_not_count_against_the_config(self) -> None:
        freed = past(FailureClass.GPU_MEMORY_HELD, steps=(Step.HOLD, Step.FREE), outcome=Outcome.RECOVERED)
        assert decide(self.VERDICT, replace(FACTS, left_overs=True, history=(freed,))).target is None

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
