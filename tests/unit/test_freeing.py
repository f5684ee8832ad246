"""What is freed, when the cards are clean, and how long is waited."""

import pytest

from sglang_watchdog.domain.container import Container, Engine
from sglang_watchdog.domain.gpu import Gpu, GpuHolder, GpuReading, GpuUnknown
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.domain.ownership import Owner, Ownership, Proof
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.recovery.freed import out_of_reach, sentences
from sglang_watchdog.recovery.freeing import MIB, Means, Patience, Stage, free_plan, is_clean, next_stage

GIB = 1024 * MIB
RESERVE = 615 * MIB
WORKER, PARENT, IN_GROUP = ProcessId(30, 300), ProcessId(20, 200), ProcessId(40, 250)
STRANGER, CURRENT, UNKNOWN = 50, 60, 70
VERDICTS = {
    process.pid: Ownership(Owner.OURS, "recorded", process, Proof.RECORDED_PROCESS, in_unit_cgroup=process is IN_GROUP)
    for process in (WORKER, PARENT, IN_GROUP)
} | {
    STRANGER: Ownership(Owner.STRANGER, "nothing proves it"),
    CURRENT: Ownership(Owner.CURRENT_LAUNCH, "it runs now"),
    UNKNOWN: Ownership(Owner.UNKNOWN, "cannot be read"),
}


def card(holders: dict[int | None, int], unlisted: int = RESERVE, index: int = 0) -> Gpu:
    listed = tuple(GpuHolder(pid, held) for pid, held in holders.items())
    return Gpu(index, f"GPU-{index}", "H200", 140 * GIB, unlisted + sum(holders.values()), listed)


def reading(*gpus: Gpu) -> GpuReading:
    return GpuReading(1000.0, "580", gpus)


IDLE = reading(card({}))


# The plan


def test_ours_are_ended_parents_first_and_in_the_units_cgroup_by_systemd() -> None:
    plan = free_plan(reading(card({30: GIB, 20: GIB, 40: GIB}), card({30: GIB}, index=1)), VERDICTS, whole_group=True)
    assert [(ending.process, ending.bytes, ending.means) for ending in plan.end] == [
        (PARENT, GIB, Means.SIGNAL),
        (IN_GROUP, GIB, Means.SYSTEMD),
        (WORKER, 2 * GIB, Means.SIGNAL),
    ]


def test_a_spared_process_in_the_units_cgroup_is_not_hit_by_a_signal_to_all_of_it() -> None:
    cache = Ownership(Owner.STRANGER, "outlives an engine by design", ProcessId(STRANGER, 260), in_unit_cgroup=True)
    plan = free_plan(reading(card({40: GIB, STRANGER: GIB})), VERDICTS | {STRANGER: cache}, whole_group=True)
    assert [(ending.process, ending.means) for ending in plan.end] == [(IN_GROUP, Means.SIGNAL)]


@pytest.mark.parametrize("kill_mode", ["control-group", "mixed", "process", "none", ""])
def test_systemd_ends_the_units_cgroup_only_where_its_own_stop_would(kill_mode: str) -> None:
    unit = UnitSnapshot("sglang.service", kill_mode=kill_mode)
    plan = free_plan(reading(card({40: GIB})), VERDICTS, whole_group=unit.stop_ends_all)
    means = Means.SYSTEMD if kill_mode in ("control-group", "mixed") else Means.SIGNAL
    assert [ending.means for ending in plan.end] == [means]


def test_everybody_else_is_spared_and_named_with_bytes_and_reason() -> None:
    unseen = 99
    plan = free_plan(reading(card({STRANGER: GIB, CURRENT: 2 * GIB, UNKNOWN: 3 * GIB, unseen: 4 * GIB})), VERDICTS)
    assert plan.end == ()
    assert [(spared.pid, spared.bytes, spared.owner) for spared in plan.spared] == [
        (STRANGER, GIB, Owner.STRANGER),
        (CURRENT, 2 * GIB, Owner.CURRENT_LAUNCH),
        (UNKNOWN, 3 * GIB, Owner.UNKNOWN),
        (unseen, 4 * GIB, Owner.UNKNOWN),
    ]
    assert all(spared.reason for spared in plan.spared)
    assert plan.unnamed == ()


def test_bytes_without_a_visible_pid_are_told_by_card() -> None:
    plan = free_plan(reading(card({None: 3 * GIB}), card({}, RESERVE + 5 * GIB, 1), card({}, index=2)), VERDICTS)
    assert [(unnamed.uuid, unnamed.bytes // GIB) for unnamed in plan.unnamed] == [("GPU-0", 2), ("GPU-1", 4)]
    plan = free_plan(reading(card({}, RESERVE + 5 * GIB)), VERDICTS, IDLE)
    assert [unnamed.bytes for unnamed in plan.unnamed] == [5 * GIB]


# Clean


def test_an_idle_card_is_clean_with_and_without_a_baseline() -> None:
    assert is_clean(IDLE, {})
    assert is_clean(IDLE, {}, IDLE)


def test_a_holder_of_ours_makes_it_unclean_however_little_it_holds() -> None:
    for baseline in (None, IDLE):
        assert not is_clean(reading(card({WORKER.pid: 1 * MIB})), VERDICTS, baseline)


def test_bytes_that_the_driver_still_keeps_make_it_unclean() -> None:
    """The pid is gone from the list, the bytes are not."""
    for baseline in (None, IDLE):
        assert not is_clean(reading(card({}, RESERVE + 2 * GIB)), VERDICTS, baseline)


def test_the_noise_of_cuda_is_no_memory_held() -> None:
    assert is_clean(reading(card({}, RESERVE + 3 * MIB)), {}, IDLE)
    assert not is_clean(reading(card({}, RESERVE + 100 * MIB)), {}, IDLE)


def test_what_a_named_stranger_took_since_is_the_strangers() -> None:
    baseline = reading(card({STRANGER: 10 * GIB}))
    grown = reading(card({STRANGER: 30 * GIB, CURRENT: GIB}, RESERVE + 8 * MIB))
    assert is_clean(grown, VERDICTS, baseline)
    assert is_clean(grown, VERDICTS)


def test_what_a_stranger_gave_back_is_not_hidden_room_for_our_bytes() -> None:
    baseline = reading(card({STRANGER: 30 * GIB}))
    assert not is_clean(reading(card({}, RESERVE + 20 * GIB)), VERDICTS, baseline)


def test_our_left_over_in_the_baseline_is_no_excuse_for_its_bytes() -> None:
    baseline = reading(card({WORKER.pid: 30 * GIB}))
    assert not is_clean(reading(card({}, RESERVE + 30 * GIB)), VERDICTS, baseline)


def test_one_of_whom_nothing_is_known_counts_as_others_only_if_it_was_there_before() -> None:
    now = reading(card({UNKNOWN: 5 * GIB}))
    assert is_clean(now, VERDICTS, now)
    assert not is_clean(now, VERDICTS, IDLE)
    assert not is_clean(now, VERDICTS)


def test_outsiders_without_a_pid_stay_as_they_were() -> None:
    baseline = reading(card({None: 40 * GIB}))
    assert is_clean(baseline, {}, baseline)
    assert not is_clean(reading(card({None: 50 * GIB})), {}, baseline)


def test_every_card_counts_and_a_missing_one_is_not_clean() -> None:
    both = reading(card({}), card({}, index=1))
    assert is_clean(both, {}, both)
    assert not is_clean(reading(card({}), card({}, RESERVE + GIB, 1)), {}, both)
    assert not is_clean(IDLE, {}, both)


def test_an_unknown_reading_is_never_clean() -> None:
    assert not is_clean(GpuUnknown(1000.0, "NVML hangs"), {}, None)


# The stages

PATIENCE = Patience(terminate=2, kill=10, release=60)


@pytest.mark.parametrize(
    ("stage", "waited", "ended", "clean", "then"),
    [
        (Stage.TERMINATE, 1, False, False, Stage.TERMINATE),
        (Stage.TERMINATE, 1, True, False, Stage.RELEASE),
        (Stage.TERMINATE, 1, True, True, Stage.FREED),
        (Stage.TERMINATE, 2, False, False, Stage.KILL),
        (Stage.TERMINATE, 2, True, False, Stage.RELEASE),
        (Stage.KILL, 9, False, False, Stage.KILL),
        (Stage.KILL, 10, False, False, Stage.NOT_ENDED),
        (Stage.KILL, 10, True, False, Stage.RELEASE),
        (Stage.KILL, 1, True, True, Stage.FREED),
        (Stage.RELEASE, 59, True, False, Stage.RELEASE),
        (Stage.RELEASE, 60, True, False, Stage.NOT_RELEASED),
        (Stage.RELEASE, 60, True, True, Stage.FREED),
    ],
)
def test_each_stage_goes_on_by_what_is_seen(stage: Stage, waited: float, ended: bool, clean: bool, then: Stage) -> None:
    assert next_stage(stage, waited, PATIENCE, ended=ended, clean=clean) is then


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage.over])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_an_end_stays_the_end(stage: Stage, ended: bool, clean: bool) -> None:
    assert next_stage(stage, 1e6, PATIENCE, ended=ended, clean=clean) is stage


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_comes_to_an_end_by_time_alone(stage: Stage) -> None:
    for _ in Stage:
        stage = next_stage(stage, 1e6, PATIENCE, ended=False, clean=False)
    assert stage.over


def test_clean_cards_while_a_process_of_ours_still_lives_are_not_freed() -> None:
    assert next_stage(Stage.TERMINATE, 0, PATIENCE, ended=False, clean=True) is Stage.TERMINATE


# The words


def test_an_unlisted_process_is_ended_if_it_is_ours_and_named_if_not() -> None:
    plan = free_plan(IDLE, VERDICTS, unlisted=[WORKER.pid, STRANGER])
    assert [(ending.process, ending.bytes) for ending in plan.end] == [(WORKER, 0)]
    assert [(spared.pid, spared.bytes) for spared in plan.spared] == [(STRANGER, 0)]


def test_a_plan_is_complete_only_where_everybody_is_named_and_seen() -> None:
    assert free_plan(reading(card({STRANGER: GIB, WORKER.pid: GIB})), VERDICTS).complete
    for hidden in (card({None: GIB}), card({UNKNOWN: GIB}), card({}, RESERVE + 5 * GIB)):
        assert not free_plan(reading(hidden), VERDICTS).complete


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("", "nvidia-smi --gpu-reset"),
        ("docker", "held from outside of this docker container, by its host"),
        ("lxc", "pct exec CTID -- sglang-watchdog gpus"),
    ],
)
def test_bytes_of_nobody_visible_are_told_with_what_a_human_can_do_from_here(inside: str, words: str) -> None:
    left = free_plan(reading(card({}, RESERVE + 5 * GIB)), {}, IDLE).unnamed
    said = " ".join(sentences(free_plan(IDLE, {}), (), Stage.NOT_RELEASED, left=left, inside=inside))
    assert "5.0 GiB of GPU-0" in said
    assert words in said


def test_of_a_holder_of_another_pid_namespace_it_is_said_who_can_end_it() -> None:
    plan = free_plan(reading(card({UNKNOWN: GIB})), VERDICTS)
    assert "only its own container or the host" in " ".join(sentences(plan, (), Stage.NOT_RELEASED))


def test_a_holder_that_comes_back_each_time_is_told_so() -> None:
    said = " ".join(sentences(free_plan(IDLE, {}), (), Stage.RESPAWNED))
    assert "find and stop what supervises them" in said


# Containers


CONTAINER = Container("c3" * 32, Engine.PODMAN)
INSIDE = {
    pid: Ownership(Owner.OURS, "recorded", ProcessId(pid, pid), Proof.CONTAINER, container=CONTAINER)
    for pid in (80, 81)
}


def test_a_container_is_ended_by_its_engine() -> None:
    plan = free_plan(reading(card({80: GIB, 81: GIB, STRANGER: GIB})), VERDICTS | INSIDE, whole_group=True)
    assert [(ending.process.pid, ending.means, ending.container) for ending in plan.end] == [
        (80, Means.ENGINE, CONTAINER),
        (81, Means.ENGINE, CONTAINER),
    ]
    assert [spared.pid for spared in plan.spared] == [STRANGER]
    said = " ".join(sentences(plan, plan.end, Stage.FREED))
    assert "left-over podman container c3c3c3c3c3c3 was ended through its engine (processes 80, 81, 2.0 GiB)" in said


@pytest.mark.parametrize("owner", [Owner.STRANGER, Owner.UNKNOWN])
def test_a_container_with_somebody_in_it_who_is_spared_is_left_alone(owner: Owner) -> None:
    somebody = {82: Ownership(owner, "outlives an engine by design", ProcessId(82, 82), container=CONTAINER)}
    plan = free_plan(reading(card({80: GIB, 82: GIB})), INSIDE | somebody)
    assert plan.end == ()
    assert [(spared.pid, spared.owner) for spared in plan.spared] == [(80, Owner.OURS), (82, owner)]
    assert "process 82 in it is spared" in plan.spared[0].reason


def test_without_an_engine_a_container_is_named_with_what_a_person_can_do() -> None:
    plan = free_plan(reading(card({80: GIB, 30: GIB})), VERDICTS | INSIDE, silent={CONTAINER.id: "podman is away"})
    assert [ending.process for ending in plan.end] == [WORKER]
    assert "process 80 with 1.0 GiB (recorded, but podman is away); `podman kill c3c3c3c3c3c3` ends it" in out_of_reach(
        plan
    )
    said = " ".join(sentences(plan, plan.end, Stage.NOT_RELEASED))
    assert "not free before `podman kill c3c3c3c3c3c3`" in said
    assert out_of_reach(free_plan(reading(card({30: GIB, STRANGER: GIB})), VERDICTS)) == ""


# The cards that the unit uses


def test_bytes_of_nobody_on_a_card_that_the_unit_does_not_use_keep_nobody_waiting() -> None:
    others = reading(card({}), card({}, RESERVE + 5 * GIB, 1))
    own = frozenset({"GPU-0"})
    assert not is_clean(others, {})
    assert is_clean(others, {}, cards=own)
    assert is_clean(reading(card({})), {}, reading(card({}), card({}, index=1)), own)  # it may even be gone
    assert free_plan(others, {}).unnamed
    assert free_plan(others, {}, cards=own).unnamed == ()


def test_a_holder_of_ours_counts_on_any_card() -> None:
    elsewhere = reading(card({}), card({30: GIB}, index=1))
    assert not is_clean(elsewhere, VERDICTS, cards=frozenset({"GPU-0"}))
    assert [ending.process for ending in free_plan(elsewhere, VERDICTS, cards=frozenset({"GPU-0"})).end] == [WORKER]
