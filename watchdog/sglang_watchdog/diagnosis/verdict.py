"""What a rule answers: the class, how sure, the sentence, and the lines that prove it."""

from dataclasses import dataclass

from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.manager import Said
from sglang_watchdog.diagnosis.timeline import Hit
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import FailureClass, RuledOut
from sglang_watchdog.domain.launch import Phase

_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` is None where no line of the log names one."""

    failure: FailureClass
    confidence: float
    summary: str
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    phase: Phase | None = None  # None: as far as the launch came
    cause: Cause | None = None


def of_said(said: Said) -> Evidence:
    times = f" ({said.count} times)" if said.count > 1 else ""
    return Evidence(Source.SYSTEMD, said.text[:_LONGEST] + times, said.time or None)


def of_hit(hit: Hit) -> Evidence:
    return Evidence(hit.signature.source, hit.text[:_LONGEST], hit.time or None)


def of_cause(cause: Cause) -> Evidence:
    return Evidence(cause.source, cause.text[:_LONGEST], cause.time or None)


def of_unit(text: str) -> Evidence:
    return Evidence(Source.UNIT, text)
