"""The diagnosis on launches that really happened: recorded from real servers, and from public reports."""

import pytest

from corpus_cases import CorpusCase, calibration, everything, recorded, reported, snippets
from sglang_watchdog.domain.failure import FailureClass as Class

# These must be right; of the others "unknown" would do.
SURE = frozenset(
    {Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.GPU_MEMORY_HELD, Class.STOP_TIMEOUT_SIGKILL, Class.STALE_UNIT_FILE}
    | {Class.REQUESTED_STOP, Class.EXTERNAL_KILL, Class.UNKNOWN}
)
CASES = everything()
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_corpus_is_whole() -> None:
    assert len([*recorded(), *reported()]) == 75
    assert len([*snippets()]) > 100


@EVERY_CASE
def test_the_class_is_right_or_honestly_unknown(case: CorpusCase) -> None:
    allowed = case.acceptable if case.expected in SURE else case.acceptable | {Class.UNKNOWN}
    assert case.diagnosis().failure in allowed


@EVERY_CASE
def test_a_rollback_is_never_promised_where_it_would_not_help(case: CorpusCase) -> None:
    assert not (case.rollback_helps is False and case.diagnosis().rollback_helps)


@EVERY_CASE
def test_nothing_is_called_out_of_memory_that_is_not(case: CorpusCase) -> None:
    given = case.diagnosis().failure
    assert not ("oom" in given and given not in case.acceptable)


def test_of_the_answers_given_a_confidence_as_many_are_right() -> None:
    """Ten answers are the least that say anything; sure answers are never to be wrong more often than they say."""
    told = calibration((case, case.diagnosis()) for case in CASES)
    assert sum(of.answers for of in told if of.confidence >= 0.9) > 60
    assert [of for of in told if of.answers >= 10 and of.right < of.confidence * of.answers] == []
    assert sum(of.right for of in told) >= 0.9 * len(CASES)


@EVERY_CASE
def test_every_answer_says_why(case: CorpusCase) -> None:
    answer = case.diagnosis()
    assert answer.summary.endswith(".")
    assert answer.evidence or answer.failure is Class.UNKNOWN
    assert all(ruled_out.failure is not answer.failure for ruled_out in answer.ruled_out)
