"""How reports look to a person: short, and coloured on a terminal only."""

from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.failure import Diagnosis, FailureClass

_LINES_THAT_MATTER = 3
_LINES_RULED_OUT = 3
_ROLLBACK = {
    True: "Less or no speculation would have avoided this.",
    False: "Less or no speculation would not have avoided this.",
    None: "Whether less or no speculation would have avoided this cannot be told from here.",
}
_HARMLESS = frozenset({FailureClass.REQUESTED_STOP})


def console() -> Console:
    """Lines are wrapped by the terminal, not by us, so that a pipe gets them whole."""
    return Console(soft_wrap=True, highlight=False, emoji=False, markup=False)


def print_diagnosis(diagnosis: Diagnosis, unit: str, invocation: str, out: Console | None = None) -> None:
    """What happened, why we think so, what it was not, what to do."""
    out = out or console()
    colour = "green" if diagnosis.failure in _HARMLESS else "yellow" if diagnosis.confidence < 0.5 else "red"
    out.print(Text(diagnosis.failure.value, style=f"bold {colour}"), Text(_about(diagnosis, unit, invocation)))
    out.print(Text(diagnosis.summary))
    _section(out, "Why", [_line(e) for e in diagnosis.evidence[:_LINES_THAT_MATTER]])
    ruled_out = diagnosis.ruled_out[:_LINES_RULED_OUT]
    _section(out, "It was not", [f"{r.failure.value}: {r.because}" for r in ruled_out])
    _section(out, "What to do", list(diagnosis.advice))
    if diagnosis.failure not in _HARMLESS:
        out.print()
        out.print(Text(_ROLLBACK[diagnosis.rollback_helps]))
    if diagnosis.effective:
        out.print(Text("Ran with: " + ", ".join(f"{k}={v}" for k, v in diagnosis.effective.items()), style="dim"))


def _about(diagnosis: Diagnosis, unit: str, invocation: str) -> str:
    launch = f", launch {invocation[:12]}" if invocation else ""
    return f" {unit}{launch}, {diagnosis.phase.value.replace('_', ' ')}, confidence {diagnosis.confidence:.0%}"


def _section(out: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    out.print()
    out.print(Text(title, style="bold"))
    for line in lines:
        out.print(Text(f"  {line}"))


def _line(evidence: Evidence) -> str:
    clock = datetime.fromtimestamp(evidence.time, UTC).strftime("%H:%M:%S ") if evidence.time else ""
    return f"{clock}{evidence.source.value}: {evidence.text}"
