"""How much GPU memory was short, and what would have fitted: from the figures that SGLang and PyTorch print."""

import re
from pathlib import Path

import pytest

from corpus_cases import CORPUS, recorded
from journal_lines import LaunchLog
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.memory_fit import States
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import MemoryFigures

STARTUP = sorted((CORPUS / "startup").glob("*.log"))
BEFORE = re.compile(r"Load weight begin\. avail mem=([\d.]+)")
OLD = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
NEW = (
    "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5. Raise "
    "--mem-fraction-static above {viable:.3f} (minimum viable = 1 - available/pre = {viable:.4f})."
)
ARGUMENTS = (
    "server_args=ServerArgs(model_path='/m', mem_fraction_static={fraction}, max_running_requests={requests}, "
    "tp_size=1, disable_radix_cache={no_radix}, speculative_algorithm='EAGLE', speculative_num_steps={steps}, "
    "speculative_eagle_topk=1, speculative_num_draft_tokens={tokens}, mamba_radix_cache_strategy='extra_buffer')"
)
HYBRID = (
    "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
    "max_mamba_cache_size=-3 (total_rest_memory=-0.41 GB, mamba_cache_per_req=100.00 MB)."
)
HEADER = "[2026-11-29 12:30:00] Scheduler hit an exception: Traceback (most recent call last):"


def before_weights(log: Path) -> float:
    return float(BEFORE.findall(log.read_text())[0])


def refused(log: Path, *, after: float) -> Diagnosis:
    """The start of a real release, with another figure after its weights, and that release's own refusal."""
    begun = log.read_text().splitlines()
    end = next(index for index, line in enumerate(begun) if "Load weight end." in line)
    ended = re.sub(r"avail mem=[\d.]+ GB", f"avail mem={after:.2f} GB", begun[end])
    release = tuple(map(int, re.findall(r"\d+", log.stem)[:3]))
    words = OLD if release < (0, 5, 14) else NEW.format(viable=1 - after / before_weights(log))
    lines = [*begun[:end], ended, HEADER, words]
    return diagnose(Case(timeline=read_launch(read_text((line.encode() for line in lines), log.name))))


@pytest.mark.parametrize("log", STARTUP, ids=lambda log: log.stem)
def test_each_release_s_figures_tell_how_much_was_short(log: Path) -> None:
    before = before_weights(log)
    answer = refused(log, after=4.0)
    assert answer.failure is Class.KV_CACHE_OOM
    assert f"exceed it by {before / 2 - 4:.1f} GiB (4.0 of {before:.1f} GiB were free after them)" in answer.summary
    assert f"must be above {1 - 4 / before:.3f}" in answer.advice[0]
    assert answer.rollback_helps is False


@pytest.mark.parametrize("log", STARTUP, ids=lambda log: log.stem)
def test_a_fraction_that_leaves_nothing_for_the_work_is_not_advised(log: Path) -> None:
    assert "No --mem-fraction-static helps on this card" in refused(log, after=0.2).advice[0]


def test_the_draft_s_share_of_the_weights_is_told() -> None:
    lines = (
        ARGUMENTS.format(fraction=0.5, requests=8, no_radix=True, steps=3, tokens=4),
        "Load weight begin. avail mem=90.00 GB",
        "Load weight end. elapsed=1.00 s, type=X, avail mem=50.00 GB, mem usage=40.00 GB.",
        "Load weight begin. avail mem=50.00 GB",
        "Load weight end. elapsed=1.00 s, type=XMTP, avail mem=44.00 GB, mem usage=6.00 GB.",
    )
    answer = LaunchLog().started().sglang(*lines).raises(NEW.format(viable=0.511)).ended().diagnosis()
    assert "exceed it by 1.0 GiB" in answer.summary
    assert "6.0 GiB of them are the draft model's: without it 5.0 GiB would be left" in answer.summary
    assert answer.rollback_helps is True


def hybrid(*, no_radix: bool, rest: float = 49.05) -> str:
    """A card of 93 GiB of which the fraction of 0.85 leaves `rest` after the weights."""
    lines = (
        ARGUMENTS.format(fraction=0.85, requests=48, no_radix=no_radix, steps=10, tokens=11),
        "Load weight begin. avail mem=93.00 GB",
        f"Load weight end. elapsed=1.00 s, type=X, avail mem={rest + 93 * 0.15:.2f} GB, mem usage=30.00 GB.",
    )
    return LaunchLog().started().sglang(*lines).raises(HYBRID).ended().diagnosis().summary


def test_states_for_every_request_tell_how_many_steps_or_requests_would_fit() -> None:
    """48 requests with one slot each and 11 drafts in flight, of 100 MiB a state: 56.25 GiB."""
    summary = hybrid(no_radix=True)
    assert "need 56.2 GiB, before the KV cache gets any: 7.2 GiB are short" in summary
    assert "steps 8 or 41 running requests would fit" in summary


def test_states_that_share_what_is_left_fail_only_where_one_request_does_not_fit() -> None:
    """With a radix cache newer releases lower the number of slots: what counts is the states of one request."""
    assert "that was not enough" in hybrid(no_radix=False)
    assert "need 3.3 GiB, before the KV cache gets any: 1.3 GiB are short; steps 3 would fit" in (
        hybrid(no_radix=False, rest=2.0)
    )


def test_releases_up_to_0_5_12_reserve_the_drafts_of_all_requests() -> None:
    old = States(0.1, requests=48, slots=None, slots_per_request=3, share=0.9, every_request=True)
    new = States(0.1, requests=48, slots=None, slots_per_request=5, share=0.9, every_request=False)
    assert old.needed(11) == pytest.approx(0.1 * (48 * 11 + 3 * 1.9 / 0.9))
    assert new.needed(11) == pytest.approx(0.1 * 16 * 1.9 / 0.9)
    assert old.most_steps(30.0, 10) == 5


def test_the_slot_of_the_launch_that_was_proven_tells_what_a_message_does_not() -> None:
    """Recorded on a GPU: steps 3 served and printed its states; steps 10 was refused without a word about them."""
    launches = {case.name: read_launch(read_journal(case.journal.splitlines(), case.name)) for case in recorded()}
    proven, failed = launches["gpu-story_steps3_ok"].memory, launches["gpu-story_steps10_fail"]
    assert "need more" in diagnose(Case(timeline=failed)).summary
    summary = diagnose(Case(timeline=failed, memory_when_proven=proven)).summary
    assert "need 41.5 GiB, before the KV cache gets any: 15.5 GiB are short" in summary
    assert "steps 5 or 30 running requests would fit" in summary


def test_an_allocation_of_the_graphs_tells_how_much_lower_the_fraction_has_to_be() -> None:
    log = LaunchLog().ready()
    log.entries = log.entries[:-3]
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 93.50 "
        "GiB of which 100.00 MiB is free. "
    )
    answer = log.raises(text).ended().diagnosis()
    assert answer.failure is Class.CUDA_GRAPH_OOM
    assert "1.00 GiB were asked for and 100.00 MiB were free: 0.90 GiB were short for that alone" in answer.summary
    assert "at most 0.840 would have left that; it was 0.85" in answer.advice[0]


def test_figures_of_a_proven_launch_without_states_tell_nothing() -> None:
    timeline = LaunchLog().raises(OLD).timeline()
    assert "GiB" not in diagnose(Case(timeline=timeline, memory_when_proven=MemoryFigures())).summary
