"""What one input of the fuzzer is, and what has to hold for every one of them.

An input is a form (its first byte), a log, and after `SHOW` what `systemctl show` printed. `make fuzz` looks for one
that breaks a rule; what it found is kept in `found/`, and the unit tests try it again.
"""

import json
from pathlib import Path

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.errors import UnusableInput

SHOW = b"\n==== show ====\n"
FOUND = Path(__file__).parent / "found"


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
    answer = diagnose(Case(timeline=timeline, unit=unit))
    json.dumps(answer.to_json())
    assert 0 < answer.confidence < 1
    assert answer.summary.endswith(".")
    assert all(ruled_out.failure is not answer.failure for ruled_out in answer.ruled_out)
    assert all(evidence.text.isprintable() for evidence in answer.evidence)
