"""How a diagnosis came about, for authors of signatures: what matched where, and why every other class lost."""

from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause, weighed_causes
from sglang_watchdog.domain.evidence import Source
from sglang_watchdog.domain.failure import Diagnosis, FailureClass, RuledOut
from sglang_watchdog.domain.secrets import redact_text

_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Matched:
    """A wording where it matched. `line` counts the launch's lines of every source from 1 on, `time` is in Unix
    seconds (0: not known), `pid` and `rank` are of who wrote it, as far as that is known. `signature` is empty for an
    exception that no signature knows."""

    signature: str
    means: str
    source: Source
    line: int
    time: float
    pid: int | None
    rank: str
    phase: str
    text: str

    def to_json(self) -> dict[str, object]:
        return {
            "signature": self.signature or None,
            "means": self.means,
            "source": self.source.value,
            "line": self.line,
            "time": self.time or None,
            "pid": self.pid,
            "rank": self.rank,
            "phase": self.phase,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """`lost` has every class but the one that was given."""

    matched: tuple[Matched, ...]
    lost: tuple[RuledOut, ...]

    def to_json(self) -> dict[str, object]:
        """The value of `explain` in `sglang-watchdog diagnose --json --explain`."""
        return {
            "matched": [matched.to_json() for matched in self.matched],
            "lost": [{"class": lost.failure.value, "because": lost.because} for lost in self.lost],
        }


def explain_choice(case: Case, diagnosis: Diagnosis) -> Explanation:
    """`diagnosis` is what the engine made of `case`."""
    causes = sorted(weighed_causes(case), key=lambda pair: pair[0].order)
    winner = next((cause for cause, went_on in causes if cause.failure is diagnosis.failure and not went_on), None)
    lost = (
        RuledOut(failure, _because(failure, causes, winner, diagnosis))
        for failure in FailureClass
        if failure is not diagnosis.failure
    )
    return Explanation(_matched(case), tuple(lost))


def _matched(case: Case) -> tuple[Matched, ...]:
    timeline = case.timeline
    hits = [
        Matched(
            hit.signature.id,
            hit.means.value,
            hit.signature.source,
            hit.order,
            hit.time,
            hit.pid,
            hit.rank,
            hit.phase.value,
            _shown(hit.text),
        )
        for hit in timeline.hits
    ]
    raised = [
        Matched("", "exception", Source.SGLANG, f.raised.order, f.raised.time, None, f.raised.rank, f.phase.value, text)
        for f in timeline.failures
        if not f.recognised and (text := _shown(f.raised.text))
    ]
    return tuple(sorted((*hits, *raised), key=lambda matched: matched.line))


def _shown(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return redact_text(printable).strip()[:_LONGEST]


def _because(
    failure: FailureClass, causes: list[tuple[Cause, bool]], winner: Cause | None, diagnosis: Diagnosis
) -> str:
    """The rule that had the last word, the one that the report gives first."""
    told = next((ruled_out.because for ruled_out in diagnosis.ruled_out if ruled_out.failure is failure), "")
    of_it = [(cause, went_on) for cause, went_on in causes if cause.failure is failure]
    if told or not of_it:
        return told or _without_proof(failure)
    if all(went_on for _, went_on in of_it):
        return f"line {of_it[0][0].order} says so, but the launch went on after it"
    first = next(cause for cause, went_on in of_it if not went_on)
    if winner is None:
        return f"line {first.order} says so, but what {diagnosis.failure} rests on came before or explains it"
    if winner.order < first.order:
        return f"line {first.order} says so, after the cause in line {winner.order}"
    return f"line {first.order} says so, but line {winner.order} tells what was behind it"


def _without_proof(failure: FailureClass) -> str:
    if failure is FailureClass.UNKNOWN:
        return "a class is proven"
    return "no line and no property of the unit proves it"
