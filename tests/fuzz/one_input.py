"""What one input of the fuzzer is, and what has to hold for every one of them.

An input is a form (its first byte), a log, and after `SHOW` what `systemctl show` printed. `make fuzz` looks for one
that breaks a rule; what it found is kept in `found/`, and the unit tests try it again.
"""

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from sglang_watchdog.cli.answer import answer
from sglang_watchdog.cli.terminal import print_diagnosis, print_list
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.errors import UnusableInput

SHOW = b"\n==== show ====\n"
FOUND = Path(__file__).parent / "found"
NOBODY = Console(file=StringIO(), soft_wrap=True)


def check(data: bytes) -> None:
    """Raises if the input breaks a rule. That an input is refused with a sentence is no breach."""
    form, (log, _, show) = data[:1], data[1:].partition(SHOW)
    reader = read_journal if form == b"{" else read_text
    lines = log.split(b"\n")
    try:
        unit = parse_show(show.decode("utf-8", "replace"), "show")
        timeline = read_launch(reader(lines, "log"))
    except UnusableInput:
        return
    found = answer(Case(timeline=timeline, unit=unit), explain=True)
    json.dumps([found.to_json(), found.listed()])
    print_diagnosis(found, NOBODY)
    print_list([found], NOBODY)
    diagnosis = found.diagnosis
    assert 0 < diagnosis.confidence < 1
    assert diagnosis.summary.endswith(".")
    assert all(ruled_out.failure is not diagnosis.failure for ruled_out in diagnosis.ruled_out)
    assert all(evidence.text.isprintable() for evidence in diagnosis.evidence)
