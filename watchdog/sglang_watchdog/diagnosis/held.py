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
from sglang_watchdog.diagnosis.manager import Word
from sglang_watchdog.diagnosis.progress import Worker
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.gpu import GpuReading, HeldMemory
from sglang_watchdog.domain.launch import Phase

_GIB = 1 << 30
# An idle card is not at 0: the driver reserves some, and each context takes half a GiB beside what it allocates.
_NOT_WORTH_BYTES = _GIB
_NOT_WORTH_SHARE = 0.1
_TOLERANCE_GIB = 1.5
_ROUNDED = 0.02  # GiB, of figures with two digits
_NOT_WORTH_LISTED = 4.0  # GiB; a desktop or a small neighbour holds less
_IN_USE = re.compile(r"Process (?P<pid>\d{1,18}) has (?P<held>\d{1,18}(?:\.\d+)? [KMG]iB) memory in use")
_SCHEDULER = re.compile(r"left-over process (\d{1,18}) \((?:sglang::schedul|sgl_)")
NOBODY = "no visible process"
_OURS = re.compile(
    r"Of the allocated memory (?P<used>\d{1,18}(?:\.\d+)? [KMG]iB) is allocated by PyTorch"
    r"(?:.*? and (?P<spare>\d{1,18}(?:\.\d+)? [KMG]iB) is reserved by PyTorch)?"
)
_UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 1024, "GiB": 1.0}
# SGLang's default of --chunked-prefill-size tells the least memory that the card has (GiB, as it counts them).
_CARD_BY_CHUNK = {16384: 160.0, 8192: 60.0, 4096: 35.0}


@dataclass(frozen=True, slots=True)
class Held:
    """`gib` is 0 where nothing tells how much; `who` is for people. `ours`: left by an earlier launch of the same unit,
    None where that is not known."""

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
    yield from _listed(case, cause)
    if not clean:
        yield from _left_over(case)
        yield from _short_of_total(case, cause)
        yield from _short_of_class(case)


def _recorded(case: Case) -> Iterator[Held]:
    """NVML just before the start."""
    holders = [holder for holder in held_by_others(case) if _met(holder, case) and _counts(holder, case)]
    held_bytes = sum(holder.held_bytes for holder in holders)
    if held_bytes >= _NOT_WORTH_BYTES:
        who = ", ".join(dict.fromkeys(holder.who for holder in holders))
        text = f"before the start {held_bytes / _GIB:.1f} GiB of GPU memory were in use: {who}"
        time = case.gpu_before.time if case.gpu_before else None
        ours = all(holder.ours for holder in holders)
        yield Held(held_bytes / _GIB, who, ours, Evidence(Source.NVML, text, time), 0.95)
    elif isinstance(case.gpu_before, GpuReading) and not case.held_before:
        yield from _unaccounted(case.gpu_before)


def held_by_others(case: Case) -> list[HeldMemory]:
    """What was held before the launch, without what turned out to be its own: a rank may have been on the card already
    when that was looked at, and not yet known for one."""
    recorded = {process.id.pid for process in case.launch.processes} if case.launch else set()
    return [held for held in case.held_before if held.pid not in case.timeline.pids | recorded]


def _met(holder: HeldMemory, case: Case) -> bool:
    """Whether the launch can have met that memory: the server printed no more free than the holder had left. A host
    has cards that a server does not use."""
    before = case.timeline.memory.before_weights_gib
    if before is None or not isinstance(case.gpu_before, GpuReading):
        return True
    totals = [gpu.total_bytes for gpu in case.gpu_before.gpus if gpu.index == holder.gpu]
    return not totals or before <= (totals[0] - holder.held_bytes) / _GIB + _TOLERANCE_GIB


def _counts(holder: HeldMemory, case: Case) -> bool:
    """Whether it can have made the difference. A left-over of the unit always can. A neighbour that was there as well
    when the known-good config was proven did not; without such a proof one that takes a tenth of the card does."""
    if holder.ours:
        return True
    others = sum(held.held_bytes for held in held_by_others(case) if held.gpu == holder.gpu and not held.ours)
    if case.held_when_proven is not None:
        return others - case.held_when_proven.get(holder.gpu, 0) >= _NOT_WORTH_BYTES
    gpus = case.gpu_before.gpus if isinstance(case.gpu_before, GpuReading) else ()
    total = next((gpu.total_bytes for gpu in gpus if gpu.index == holder.gpu), 0)
    return others >= max(_NOT_WORTH_BYTES, total * _NOT_WORTH_SHARE)


def _unaccounted(reading: GpuReading) -> Iterator[Held]:
    """Bytes that no process is listed for: a driver that has not released yet, or processes that cannot be seen."""
    by_card = (gpu.used_bytes - sum(holder.used_bytes for holder in gpu.holders) for gpu in reading.gpus)
    gib = sum(max(0, lost - _NOT_WORTH_BYTES) for lost in by_card) / _GIB
    if gib * _GIB >= _NOT_WORTH_BYTES:
        text = f"before the start {gib:.1f} GiB of GPU memory were in use that no process accounts for"
        yield Held(gib, NOBODY, None, Evidence(Source.NVML, text, reading.time), 0.85)


def _named(case: Case, cause: Cause) -> Iterator[Held]:
    """PyTorch names other processes on the card. Another rank of the same launch is no stranger."""
    missing = _missing(cause)
    recorded = {process.id.pid for process in case.launch.processes} if case.launch else set()
    named = [(int(found["pid"]), to_gib(found["held"])) for found in _IN_USE.finditer(cause.text)]
    ours = case.timeline.pids | recorded | _itself(named, cause.text)
    for pid, gib in named:
        if pid in ours or gib < max(missing, 0.25) or _was_no_cause(pid, case):
            continue
        who = f"process {pid}"
        text = f"{who} had {gib:.1f} GiB of the card in use, and {missing:.2f} GiB were missing"
        yield Held(gib, who, None, Evidence(cause.source, text, cause.time), 0.9)


def _itself(named: list[tuple[int, float]], text: str) -> set[int]:
    """Which of them is the process that failed. In a container the driver gives it the host's pid, by which it does not
    know itself; then its share is the one that is not below what PyTorch allocated in it, and nearest to that."""
    ours = _OURS.search(text)
    if not ours or "this process has" in text:
        return set()
    own = to_gib(ours["used"]) + to_gib(ours["spare"] or "")
    near = [(gib - own, pid) for pid, gib in named if gib >= own - _ROUNDED]
    return {min(near)[1]} if near else set()


def _listed(case: Case, cause: Cause) -> Iterator[Held]:
    """Who was listed before the server had begun: by a start script, or by whoever kept the log."""
    early = (Phase.UNKNOWN, Phase.STARTING)
    for hit in case.timeline.hits:
        if hit.means is not Meaning.HOLDER or hit.phase not in early or hit.order > cause.order:
            continue
        gib, pid = float(hit.groups["mib"]) / 1024, int(hit.groups["pid"])
        if pid not in case.timeline.pids and gib >= _NOT_WORTH_LISTED:
            who = f"process {pid} ({hit.groups['name'].strip()})"
            yield Held(gib, who, None, Evidence(Source.SGLANG, hit.text, hit.time or None), 0.8)


def _left_over(case: Case) -> Iterator[Held]:
    """systemd found a scheduler of an earlier launch in the unit's group: such a process has a card."""
    for said in case.timeline.said:
        if said.word is Word.LEFT_OVER and (found := _SCHEDULER.search(said.text)):
            yield Held(0.0, f"process {found[1]}", True, Evidence(Source.SYSTEMD, said.text, said.time or None), 0.7)


def _was_no_cause(pid: int, case: Case) -> bool:
    """It was on the card before the launch already, and does not count there: a bare CUDA context is half a GiB."""
    gpus = case.gpu_before.gpus if isinstance(case.gpu_before, GpuReading) else ()
    cards = {gpu.index for gpu in gpus if any(holder.pid == pid for holder in gpu.holders)}
    return bool(cards) and not any(_counts(held, case) for held in case.held_before if held.gpu in cards)


def _missing(cause: Cause) -> float:
    groups = cause.hit.groups if cause.hit else {}
    return max(0.0, to_gib(groups.get("tried", "")) - to_gib(groups.get("free", "")))


def _short_of_total(case: Case, cause: Cause) -> Iterator[Held]:
    """Free memory before the target's weights, against the card's size in the same log."""
    total = to_gib(cause.hit.groups.get("total", "")) if cause.hit else 0.0
    before = case.timeline.memory.before_weights_gib
    if cause.in_speculation and cause.worker is Worker.TARGET:
        return  # the log begins too late: what was free before "the weights" is what the target had left
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
