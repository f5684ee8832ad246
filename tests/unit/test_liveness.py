"""Whether a running launch makes progress: by its log, its bytes, its tokens. In doubt it is no hang."""

from dataclasses import replace

import pytest

from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.recovery.liveness import (
    Budgets,
    Judgement,
    Life,
    Signs,
    Stage,
    hang,
    is_not_told,
    judge,
    may_be_asked,
    own_watchdog_is_due,
)

BEGAN = 1000.0
BUDGETS = Budgets(loading=1800, capturing=1200, warming=900, serving=300)
OFF = Budgets(0, 0, 0, 0)
STARTS = (Phase.STARTING, Phase.LOADING_WEIGHTS, Phase.ALLOCATING_KV, Phase.CAPTURING_GRAPHS, Phase.WARMING_UP)


def after(seconds: float, phase: Phase, **signs: object) -> Signs:
    return replace(Signs(BEGAN + seconds, phase, since=BEGAN), **signs)  # type: ignore[arg-type]


def serving(seconds: float, **signs: object) -> Signs:
    """One that has served, and has left two requests unanswered."""
    known: dict[str, object] = {"served": True, "unanswered": 2, "tokens": BEGAN}
    return after(seconds, Phase.SERVING, **(known | signs))


def life(signs: Signs, budgets: Budgets = BUDGETS) -> Life:
    return judge(signs, budgets).life


@pytest.mark.parametrize("phase", STARTS)
def test_a_start_hangs_once_it_has_said_nothing_for_its_budget_and_not_before(phase: Phase) -> None:
    budget = judge(after(0, phase), BUDGETS).stage
    assert budget is not None
    allowed = BUDGETS.of(budget)
    assert life(after(allowed / 2 - 1, phase)) is Life.LIVE
    assert life(after(allowed - 1, phase)) is Life.UNKNOWN
    assert life(after(allowed, phase)) is Life.HUNG
    assert life(after(allowed + 100, phase, line=BEGAN + 150)) is Life.UNKNOWN


def test_weights_that_still_come_from_a_slow_disk_are_progress() -> None:
    assert life(after(9000, Phase.LOADING_WEIGHTS, bytes_moved=BEGAN + 8990)) is Life.LIVE
    assert life(after(9000, Phase.CAPTURING_GRAPHS, bytes_moved=BEGAN + 8990)) is Life.HUNG


@pytest.mark.parametrize("phase", [Phase.UNKNOWN, Phase.STOPPING])
def test_what_does_not_say_how_far_it_is_or_goes_down_is_not_judged(phase: Phase) -> None:
    assert life(after(1e6, phase)) is Life.UNKNOWN


def test_a_server_hangs_once_it_gives_no_tokens_though_asked() -> None:
    assert life(serving(299)) is Life.UNKNOWN
    judgement = judge(serving(300), BUDGETS)
    assert (judgement.life, judgement.stage) == (Life.HUNG, Stage.SERVING)
    assert "generated nothing for 300 s" in judgement.sentence


@pytest.mark.parametrize(
    "signs",
    [
        {"unanswered": 0},  # nobody asked it
        {"unanswered": 1},
        {"served": False},  # one that never gave the watchdog tokens: of embeddings, say
        {"mute": "its port is not held by its own processes alone"},
        {"mute": "it refuses the watchdog's requests"},
        {"deaf": "the journal cannot be read"},
    ],
)
def test_silence_that_may_have_another_reason_is_unknown(signs: dict[str, object]) -> None:
    assert life(serving(3000, **signs)) is Life.UNKNOWN


def test_a_start_that_cannot_be_heard_is_unknown() -> None:
    assert life(after(9000, Phase.LOADING_WEIGHTS, deaf="the journal cannot be read")) is Life.UNKNOWN


@pytest.mark.parametrize("sign", ["tokens", "prefill"])
def test_tokens_and_long_prefills_of_others_are_progress_whatever_becomes_of_our_requests(sign: str) -> None:
    assert life(serving(3000, **{sign: BEGAN + 2990}, unanswered=40)) is Life.LIVE


def test_lines_that_are_no_tokens_are_no_progress_of_a_server() -> None:
    """Of health checks, or of the weights that it still loads elsewhere."""
    assert life(serving(400, line=BEGAN + 399, bytes_moved=BEGAN + 399)) is Life.HUNG


@pytest.mark.parametrize("phase", [*STARTS, Phase.SERVING])
def test_a_budget_of_0_is_never_used_up(phase: Phase) -> None:
    assert life(after(1e6, phase, served=True, unanswered=9), OFF) is Life.UNKNOWN


def test_the_end_of_a_hang_is_seen_at_once() -> None:
    assert life(serving(3000, tokens=BEGAN + 3000, unanswered=0)) is Life.LIVE


# What becomes of it


def judged(silent: float, stage: Stage = Stage.SERVING) -> Judgement:
    return Judgement(Life.HUNG, "", stage, silent)


def test_sglangs_own_watchdog_goes_first_where_there_is_one() -> None:
    signs = serving(0)
    assert own_watchdog_is_due(judged(459), signs, {})
    assert not own_watchdog_is_due(judged(460), signs, {})
    assert own_watchdog_is_due(judged(900), signs, {"watchdog_timeout": 600})
    assert not own_watchdog_is_due(judged(20), signs, {"watchdog_timeout": 5})
    assert not own_watchdog_is_due(judged(20), serving(0, dead="1 of 4 is gone"), {})
    assert not own_watchdog_is_due(judged(20, Stage.LOADING), signs, {})


@pytest.mark.parametrize(
    "settings", [{"is_embedding": True}, {"disaggregation_mode": "prefill"}, {"enable_memory_saver": True}]
)
def test_what_is_not_made_to_answer_is_not_asked(settings: dict[str, object]) -> None:
    assert may_be_asked(settings)
    assert not may_be_asked({"is_embedding": False, "disaggregation_mode": "null", "enable_memory_saver": False})


@pytest.mark.parametrize(
    ("phase", "settings", "told"),
    [
        (Phase.SERVING, {}, True),
        (Phase.SERVING, {"decode_log_interval": 40}, True),
        (Phase.SERVING, {"decode_log_interval": 100_000}, False),
        (Phase.READY, {}, False),  # not even the watchdog's own request was logged
    ],
)
def test_a_log_that_would_not_tell_of_tokens_makes_no_hang(
    phase: Phase, settings: dict[str, object], told: bool
) -> None:
    """A full server could keep our requests waiting for longer than they wait."""
    assert (is_not_told(phase, settings) == "") is told


def test_a_hang_is_told_with_what_was_seen_of_it() -> None:
    signs = serving(400, dead="1 of 4 is gone")
    known = Diagnosis(FailureClass.UNKNOWN, 0.3, "", Phase.SERVING, effective={"tp_size": 4})
    told = hang(judge(signs, BUDGETS), signs, (), known)
    assert (told.failure, told.phase, dict(told.effective)) == (
        FailureClass.UNRESPONSIVE,
        Phase.SERVING,
        {"tp_size": 4},
    )
    assert "1 of 4 is gone" in told.summary
    assert any("2 requests for a few tokens" in fact.text for fact in told.evidence)
    assert told.rollback_helps is None
