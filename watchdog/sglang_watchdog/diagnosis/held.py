"""Whether GPU memory was held by others when a launch ran out of it.

SGLang's fraction applies to what is free, so a card that is partly taken fails in the same words as one that is too
small; only the figures tell them apart.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.effective import argv_of, server_args_of
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.gpu import GpuReading

_GIB = 1 << 30
# An idle card is not at 0: the driver reserves some, and each context takes half a GiB beside what it allocates.
_NOT_WORTH_BYTES = _GIB
_NOT_WORTH_SHARE = 0.1
_IN_USE = re.compile(r"Process (?P<pid>\d+) has (?P<held>[\d.]+ [KMG]iB) memory in use")
_UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 1024, "GiB": 1.0}
# SGLang's default of --chunked-prefill-size tells the least memory that the card has (GiB, as it counts them).
_CARD_BY_CHUNK = {16384: 160.0, 8192: 60.0, 4096: 35.0}


@dataclass(frozen=True, slots=True)
class Held:
    """`who` for people. `ours`: left by an earlier launch of the same unit, None where that is not known."""

    gib: float
    who: str
    ours: bool | None
    evidence: Evidence
    confidence: float


def held_memory(case: Case, cause: Cause) -> Held | None:
    """The best proof that the memory was not free to begin with, None without one."""
    return next(_proofs(case, cause), None)


def _proofs(case: Case, cause: Cause) -> Iterator[Held]:
    yield from _recorded(case)
    clean = isinstance(case.gpu_before, GpuReading) and not any(_recorded(case))
    yield from _named(case, cause)
    if not clean:
        yield from _short_of_total(case, cause)
        yield from _short_of_class(case)


def _recorded(case: Case) -> Iterator[Held]:
    """NVML just before the start."""
    holders = [holder for holder in case.held_before if holder.held_bytes > 0]
    gib = sum(holder.held_bytes for holder in holders) / _GIB
    if holders and gib * _GIB >= _NOT_WORTH_BYTES:
        who = ", ".join(dict.fromkeys(holder.who for holder in holders))
        text = f"before the start {gib:.1f} GiB of GPU memory were in use: {who}"
        yield Held(gib, who, all(h.ours for h in holders), Evidence(Source.NVML, text, _time(case)), 0.95)


def _time(case: Case) -> float | None:
    return case.gpu_before.time if case.gpu_before else None


def _named(case: Case, cause: Cause) -> Iterator[Held]:
    """PyTorch names other processes on the card. Another rank of the same launch is no stranger."""
    missing = _missing(cause)
    recorded = {process.id.pid for process in case.launch.processes} if case.launch else set()
    for found in _IN_USE.finditer(cause.text):
        gib, pid = to_gib(found["held"]), int(found["pid"])
        if pid in case.timeline.pids or pid in recorded or gib < max(missing, 0.25):
            continue
        who = f"process {pid}"
        text = f"{who} had {gib:.1f} GiB of the card in use, and {missing:.2f} GiB were missing"
        yield Held(gib, who, None, Evidence(cause.source, text, cause.time), 0.9)


def _missing(cause: Cause) -> float:
    groups = cause.hit.groups if cause.hit else {}
    return max(0.0, to_gib(groups.get("tried", "")) - to_gib(groups.get("free", "")))


def _short_of_total(case: Case, cause: Cause) -> Iterator[Held]:
    """Free memory before the target's weights, against the card's size in the same log."""
    total = to_gib(cause.hit.groups.get("total", "")) if cause.hit else 0.0
    before = case.timeline.memory.before_weights_gib
    if total and before is not None and total - before > max(2.0, total * _NOT_WORTH_SHARE):
        text = f"only {before:.1f} of the card's {total:.1f} GiB were free before the weights were loaded"
        yield Held(total - before, "another process", None, Evidence(Source.SGLANG, text), 0.9)


def _short_of_class(case: Case) -> Iterator[Held]:
    """As above where the card's size is not printed: a default that depends on it is."""
    settings, before = server_args_of(case), case.timeline.memory.before_weights_gib
    chosen = any(word.startswith("--chunked-prefill-size") for word in argv_of(case))
    chunk = settings.get("chunked_prefill_size")
    if chosen or not argv_of(case) or before is None or settings.get("dp_size") != 1:
        return
    least = _CARD_BY_CHUNK.get(chunk, 0.0) if isinstance(chunk, int) else 0.0
    if least and before < least / 2:
        text = (
            f"only {before:.1f} GiB were free before the weights were loaded, on a card of {least:.0f} GiB or more "
            f"(SGLang chose chunked_prefill_size={chunk} for it)"
        )
        yield Held(least - before, "another process", None, Evidence(Source.SGLANG, text), 0.7)


def to_gib(text: str) -> float:
    """`448.00 MiB` in GiB; 0 for no figure."""
    number, _, unit = text.partition(" ")
    return float(number) * _UNITS[unit] if unit in _UNITS else 0.0


def seen_held(case: Case) -> bool:
    """Whether the log itself says that others were on the card."""
    return case.timeline.first(Meaning.HELD, Meaning.UNBALANCED) is not None
