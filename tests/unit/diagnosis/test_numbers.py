"""Numbers in a log, in arguments and in an environment are whatever somebody put there: none of them ends the reader,
which is the daemon's as well."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_cases import everything
from fuzz.one_input import SHOW, check
from sglang_watchdog.diagnosis.entries import parse_entry
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.diagnosis.signatures import catalog
from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.speculation import SpeculationConfig, more_than_one
from sglang_watchdog.host.server import address_of

LONG, HUGE, NO_DIGIT = "9" * 5000, "9" * 400, "²"  # too long for int(), too large for float, and a digit to isdigit()
ODD = pytest.mark.parametrize("number", [LONG, HUGE, NO_DIGIT], ids=["long", "huge", "no digit"])
NUMBER = re.compile(r"\d+")
CASES = [*everything()]
# What precedes the text stays, or the line would not be read as one of the server, of systemd or of the kernel.
BEGINNING = re.compile(r"(?:\[[\d:. -]+\w*\] |systemd\[\d+\]: |kernel: )?")


def shapes() -> list[str]:
    """Every line of the corpus and of the signatures' samples, once for all that differ in numbers alone."""
    lines = [line for case in CASES for line in case.text()]
    lines += [
        "[ 5203.208813] host kernel: NVRM: Xid (PCI:0000:dc:00): 79",
        "[ 5203.208813] host systemd[1]: Started a.",
    ]
    lines += [line for signature in catalog().signatures for line in signature.samples]
    return [*{NUMBER.sub("0", line): line for line in lines}.values()]


@ODD
def test_a_line_may_hold_any_number(number: str) -> None:
    for line in shapes():
        check(f" {NUMBER.sub(number, line[:400])}".encode())
        found = BEGINNING.match(line)
        begins = found.end() if found else 0
        check(f" {line[:begins]}{NUMBER.sub(number, line[begins : begins + 400])}".encode())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=st.sampled_from([case for case in CASES if len(case.journal) < 200_000]), data=st.data())
def test_any_number_of_a_launch_may_be_any_other(case: object, data: st.DataObject) -> None:
    journal, show = case.journal.decode(), case.show  # type: ignore[attr-defined]
    others = st.sampled_from([LONG, HUGE, NO_DIGIT, "0"])
    check(f"{{{_with_others(journal, data, others)}{SHOW.decode()}{_with_others(show, data, others)}".encode())


def _with_others(text: str, data: st.DataObject, others: st.SearchStrategy[str]) -> str:
    places = [match.span() for match in NUMBER.finditer(text)]
    if not places:
        return text
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=12, unique=True))
    for begin, end in sorted(chosen, reverse=True):
        text = text[:begin] + data.draw(others) + text[end:]
    return text


@pytest.mark.parametrize(
    "line",
    [
        "[0000-01-01 00:00:00 TP0] RuntimeError: CUDA error",
        "0001-01-01T00:00:00+05:00 RuntimeError: CUDA error",
        "9999-12-31T23:59:59-05:00 RuntimeError: CUDA error",
        '{"message": "RuntimeError: CUDA error", "created": 1e999}',
        f'{{"message": "RuntimeError: CUDA error", "created": {HUGE}}}',
        '{"message": "RuntimeError: CUDA error", "created": NaN}',
    ],
)
def test_a_time_that_no_calendar_has_is_no_time(line: str) -> None:
    (entry,) = read_text([line.encode()], "log")
    assert entry.time == 0
    assert "RuntimeError: CUDA error" in (entry.message or "")
    check(f" {line}".encode())


@pytest.mark.parametrize("stamp", ["9999999999999999999", "300000000000000000", "-1", HUGE, NO_DIGIT])
def test_a_time_of_the_journal_that_no_calendar_has_is_no_time(stamp: str) -> None:
    line = json.dumps({"MESSAGE": "x", "__REALTIME_TIMESTAMP": stamp}).encode()
    assert parse_entry(line).time == 0
    check(b"{" + line)


@ODD
def test_a_command_line_may_hold_any_number(number: str) -> None:
    config = SpeculationConfig.of(("--speculative-algorithm", "NEXTN", "--speculative-num-steps", number))
    assert config.steps is None
    assert not more_than_one(number)
    assert address_of(["python", "-m", "sglang.launch_server", "--port", number]) == address_of([])


def test_a_whole_number_is_of_ascii_digits_alone() -> None:
    texts = ("0", "007", "9" * 18, "9" * 19, "", "-1", "1.0", " 1", "²", "١")
    assert [whole(text) for text in texts] == [0, 7, 10**18 - 1, None, None, None, None, None, None, None]
