"""What `sglang-watchdog diagnose` answers, whatever it was asked from."""

from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.effective import speculation_of
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.explanation import Explanation, explain_choice
from sglang_watchdog.domain.failure import Diagnosis

MOST_LAUNCHES = 500  # of one listing; of more the newest are shown


@dataclass(frozen=True, slots=True)
class Answer:
    """A diagnosis, and of what. `began` and `last` are Unix seconds of the first and the last entry, 0 where the input
    has no times. `ran` says which speculation ran, empty where nothing tells. `of_sglang`: it was a server."""

    diagnosis: Diagnosis
    unit: str
    invocation: str
    began: float = 0.0
    last: float = 0.0
    ran: str = ""
    of_sglang: bool = True
    explanation: Explanation | None = None

    def to_json(self) -> dict[str, object]:
        """The documented JSON of one diagnosis, with `explain` where that was asked for."""
        explain = {"explain": self.explanation.to_json()} if self.explanation else {}
        return {**self.diagnosis.to_json(), **explain}

    def listed(self) -> dict[str, object]:
        """The same as one of a list, which has to say of which launch it is."""
        of = {"unit": self.unit, "invocation": self.invocation, "began": self.began or None, "last": self.last or None}
        return {**self.to_json(), **of}


def answer(case: Case, unit: str = "", *, explain: bool = False) -> Answer:
    """The diagnosis of a case. `unit`: its name, where the log itself does not say it."""
    diagnosis = diagnose(case)
    speculation = speculation_of(case)
    return Answer(
        diagnosis=diagnosis,
        unit=case.timeline.unit or unit,
        invocation=case.timeline.invocation,
        began=case.timeline.began,
        last=case.timeline.last,
        ran="" if speculation.on is None else speculation.describe(),
        of_sglang=case.timeline.tells_of_sglang,
        explanation=explain_choice(case, diagnosis) if explain else None,
    )


def newest_first(answers: list[Answer], unit: str) -> list[Answer]:
    """A listing: the launches of the unit; without its name, of the units that run SGLang, if any of them does."""
    units = {unit} if unit else {answer.unit for answer in answers if answer.of_sglang}
    return [answer for answer in reversed(answers) if not units or answer.unit in units]
