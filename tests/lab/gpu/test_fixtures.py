"""What the machine with a GPU left is diagnosed here, without one."""

import json
from pathlib import Path

import pytest

from corpus_cases import CORPUS, CorpusCase

CASES = sorted((CORPUS / "gpu").glob("*/case.json"))


def _case(path: Path) -> CorpusCase:
    facts = json.loads(path.read_text())
    return CorpusCase(
        name=facts["id"],
        journal=path.with_name("journal.jsonl").read_bytes(),
        show=path.with_name("show.txt").read_text(),
        expected=facts["expected_class"],
        acceptable=frozenset(facts["also_acceptable"]),
        rollback_helps=facts["rollback_helps"],
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: str(path.parent.name))
def test_a_launch_recorded_on_a_gpu_is_called_what_it_was(path: Path) -> None:
    case = _case(path)
    diagnosis = case.diagnosis()
    assert diagnosis.failure == case.expected
    assert diagnosis.rollback_helps is case.rollback_helps
    assert diagnosis.confidence == 0.3 if case.expected == "unknown" else diagnosis.confidence >= 0.85


def test_there_are_cases_of_a_real_server_and_of_real_allocations() -> None:
    real = [path for path in CASES if path.parent.name.startswith("real_")]
    assert real
    assert len(real) < len(CASES)


def test_a_kill_by_systemd_oomd_is_not_told_as_the_kernel_s() -> None:
    summary = _case(CORPUS / "gpu/oomd_kill/case.json").diagnosis().summary
    assert summary.startswith("systemd-oomd killed")
