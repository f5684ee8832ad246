"""How reports look to a person: short, and coloured on a terminal only."""

from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from sglang_watchdog.cli.answer import Answer
from sglang_watchdog.diagnosis.explanation import Explanation, Matched
from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.launch import Phase

_LINES_THAT_MATTER = 3
_LINES_RULED_OUT = 3
_SHORTEST = 60
_USUAL_WIDTH = 80
_ROLLBACK = {
    True: "Less or no speculation would have avoided this.",
    False: "Less or no speculation would not have avoided this.",
    None: "Whether less or no speculation would have avoided this cannot be told from here.",
}
_HARMLESS = frozenset({FailureClass.REQUESTED_STOP})


def console() -> Console:
    """Lines are wrapped by the terminal, not by us, so that a pipe gets them whole."""
    out = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    out.width = out.width or _USUAL_WIDTH  # COLUMNS=0 is what a shell without a terminal hands down
    return out


def print_diagnosis(answer: Answer, out: Console | None = None) -> None:
    """What happened, why we think so, what it was not, what to do."""
    out = out or console()
    diagnosis = answer.diagnosis
    out.print(Text(diagnosis.failure.value, style=f"bold {_colour(diagnosis)}"), Text(_about(answer)))
    out.print(Text(diagnosis.summary))
    _section(out, "Why", [_cut(_line(e), out) for e in diagnosis.evidence[:_LINES_THAT_MATTER]])
    ruled_out = diagnosis.ruled_out[:_LINES_RULED_OUT]
    _section(out, "It was not", [f"{r.failure.value}: {r.because}" for r in ruled_out])
    _section(out, "What to do", list(diagnosis.advice))
    if diagnosis.failure not in _HARMLESS:
        out.print()
        out.print(Text(_ROLLBACK[diagnosis.rollback_helps]))
    if diagnosis.effective:
        out.print(Text("Ran with: " + ", ".join(f"{k}={v}" for k, v in diagnosis.effective.items()), style="dim"))
    if answer.explanation:
        _print_explanation(answer.explanation, out)


def print_list(answers: list[Answer], out: Console | None = None) -> None:
    """A launch a line, newest first: when it was last heard of, what ended it, how sure that is, what ran."""
    out = out or console()
    if not answers:
        out.print(Text("No launch is to be found."))
        return
    rows = [("last entry, UTC", "class", "sure", "ran", "launch")]
    for one in answers:
        when = datetime.fromtimestamp(one.last, UTC).strftime("%Y-%m-%d %H:%M:%S") if one.last else "-"
        sure = f"{one.diagnosis.confidence:.0%}"
        rows.append((when, one.diagnosis.failure.value, sure, one.ran or "-", one.invocation[:12]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    styles = ["bold", *(_colour(one.diagnosis) for one in answers)]
    units = {one.unit for one in answers}
    for number, (row, style) in enumerate(zip(rows, styles, strict=True)):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        of = f"  {answers[number - 1].unit}" if number and len(units) > 1 else ""
        out.print(
            Text(f"{cells[0]}  "), Text(cells[1], style=style), Text("  ".join(["", *cells[2:]]).rstrip() + of), sep=""
        )


def _print_explanation(explanation: Explanation, out: Console) -> None:
    rows = [
        f"line {m.line}{_clock(m.time)} {_who(m)}: {m.signature or 'no signature'} ({m.means}, {m.phase}): {m.text}"
        for m in explanation.matched
    ]
    _section(out, "What matched", [_cut(row, out) for row in rows] or ["nothing"])
    _section(out, "Why not another class", [f"{lost.failure.value}: {lost.because}" for lost in explanation.lost])


def _who(matched: Matched) -> str:
    pid = f"pid {matched.pid}" if matched.pid else ""
    return " ".join(word for word in (matched.source.value, pid, matched.rank) if word)


def _colour(diagnosis: Diagnosis) -> str:
    return "green" if diagnosis.failure in _HARMLESS else "yellow" if diagnosis.confidence < 0.5 else "red"


def _about(answer: Answer) -> str:
    diagnosis = answer.diagnosis
    launch = f"launch {answer.invocation[:12]}" if answer.invocation else ""
    phase = diagnosis.phase.value.replace("_", " ") if diagnosis.phase is not Phase.UNKNOWN else ""
    parts = (answer.unit, launch, phase, f"confidence {diagnosis.confidence:.0%}")
    return ", ".join(part for part in parts if part)


def _section(out: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    out.print()
    out.print(Text(title, style="bold"))
    for line in lines:
        out.print(Text(f"  {line}"))


def _cut(line: str, out: Console) -> str:
    """A log line on a terminal takes two rows at most, of which the beginning tells; a pipe gets it whole."""
    longest = max(2 * out.width - 4, _SHORTEST) if out.is_terminal else len(line)
    return line if len(line) <= longest else f"{line[: longest - 2]} …"


def _line(evidence: Evidence) -> str:
    return f"{_clock(evidence.time or 0.0).lstrip()} {evidence.source.value}: {evidence.text}".lstrip()


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime(" %H:%M:%SZ") if time else ""
