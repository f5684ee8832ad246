"""What must not change a diagnosis, and what must not break it, tried on the whole corpus."""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_cases import INVOCATION, CorpusCase, everything, recorded, reported, snippets
from fuzz.one_input import FOUND, SHOW, check
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import entry_of, parse_entry, read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.diagnosis.signatures import Meaning, catalog
from sglang_watchdog.domain.failure import FailureClass as Class

Entry = dict[str, Any]
TRIES = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
CASES = [*reported(), *snippets()]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ANY_CASE = st.sampled_from(CASES)
BENIGN = [line for s in catalog().signatures if s.means is Meaning.BENIGN for line in s.samples]
# Advice and accounting that SGLang, PyTorch and CUDA print beside any failure.
ADVICE = [
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace may be wrong.",
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
    "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
    "Of the allocated memory 8.11 GiB is allocated by PyTorch, and 12.61 MiB is reserved by PyTorch but unallocated.",
    "max_running_requests was reduced from the requested 48 to 16 due to the available KV cache capacity.",
]
ECHO = (
    "[2026-02-03 03:12:10 TP7] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 3190, in run_scheduler_process',
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41822",
)


def entries_of(case: CorpusCase) -> list[Entry]:
    return [json.loads(line) for line in case.journal.splitlines()]


def judged(entries: list[Entry], case: CorpusCase) -> Class:
    lines = [json.dumps(entry).encode() for entry in entries]
    timeline = read_launch(read_journal(lines, case.name))
    return diagnose(Case(timeline=timeline, unit=parse_show(case.show, case.name))).failure


def beside(entry: Entry, message: str, pid: str) -> Entry:
    """An entry of another process of the unit, at the time of `entry`."""
    own = {"_PID": pid, "SYSLOG_IDENTIFIER": "python3", "_SYSTEMD_UNIT": "sglang.service", "MESSAGE": message}
    clock = {name: entry[name] for name in ("__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "_BOOT_ID")}
    return {"__CURSOR": "s=1", "_SYSTEMD_INVOCATION_ID": INVOCATION, "_TRANSPORT": "stdout", **own, **clock}


@TRIES
@given(case=ANY_CASE, data=st.data())
def test_benign_lines_change_no_class(case: CorpusCase, data: st.DataObject) -> None:
    entries = entries_of(case)
    for line in data.draw(st.lists(st.sampled_from(BENIGN + ADVICE), min_size=1, max_size=6)):
        place = data.draw(st.integers(1, len(entries)))  # after systemd's word that it started
        entries.insert(place, beside(entries[place - 1], line, "99990"))
    assert judged(entries, case) is case.diagnosis().failure


FAULTS = [
    case
    for case in CASES
    if case.expected
    in {Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.WEIGHTS_OOM, Class.RUNTIME_CUDA_OOM, Class.CUDA_ERROR}
]


@TRIES
@given(case=st.sampled_from(FAULTS), data=st.data())
def test_a_rank_that_breaks_off_because_another_failed_changes_no_class(case: CorpusCase, data: st.DataObject) -> None:
    entries = entries_of(case)
    place = data.draw(st.integers(1, len(entries)))
    entries[place:place] = [beside(entries[place - 1], line, "99991") for line in ECHO]
    assert judged(entries, case) is case.diagnosis().failure


_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ((?:DP|PP|TP|EP)\d+[^\]]*)\]")


def by_rank(entries: list[Entry]) -> Iterator[tuple[tuple[str, str], list[Entry]]]:
    """Runs of entries: of one rank in one second, with what continues them; and those of nobody's rank."""
    mark = ("", "")
    marked: list[tuple[tuple[str, str], Entry]] = []
    for entry in entries:
        text = entry.get("MESSAGE")
        stamp = _STAMP.match(text) if isinstance(text, str) else None
        own = entry.get("_TRANSPORT") == "stdout"
        continues = own and isinstance(text, str) and not text.startswith("[") and mark[0]
        mark = (stamp[1], stamp[2]) if stamp else mark if continues else ("", str(len(marked)))
        marked.append((mark, entry))
    for key, run in groupby(marked, key=lambda pair: pair[0]):
        yield key, [entry for _, entry in run]


@TRIES
@given(case=ANY_CASE, random=st.randoms(use_true_random=False))
def test_the_order_of_ranks_within_a_second_changes_no_class(case: CorpusCase, random: Any) -> None:
    """Ranks log through one pipe: within a second their lines come in any order."""
    shuffled: list[Entry] = []
    for second, group in groupby(by_rank(entries_of(case)), key=lambda run: run[0][0]):
        runs = list(group)
        if second:
            ranks = {rank: [r for r in runs if r[0][1] == rank] for rank in {r[0][1] for r in runs}}
            order = [run[0][1] for run in runs]
            random.shuffle(order)
            runs = [ranks[rank].pop(0) for rank in order]
        shuffled += [entry for _, run in runs for entry in run]
    times = sorted(entry["__REALTIME_TIMESTAMP"] for entry in shuffled)
    assert judged(
        [entry | {"__REALTIME_TIMESTAMP": time} for entry, time in zip(shuffled, times, strict=True)], case
    ) is (case.diagnosis().failure)


PREFIXES = [
    "sglang-1  | ",
    "0|sglang  | ",
    "[pod/sglang-0/sglang] ",
    "(SGLangActor pid=616, ip=192.168.1.9) ",
    "\x1b[36m(WorkerDict pid=616)\x1b[0m ",
    "2026-03-09T22:35:06.123456789Z stderr F ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_a_container_or_a_launcher_writes_before_each_line_changes_no_class(prefix: str) -> None:
    for case in CASES:
        entries = entries_of(case)
        for entry in entries:
            if entry["_TRANSPORT"] == "stdout" and isinstance(entry["MESSAGE"], str):
                entry["MESSAGE"] = prefix + entry["MESSAGE"]
        assert judged(entries, case) is case.diagnosis().failure, case.name


@EVERY_CASE
def test_a_plain_log_is_judged_as_the_journal_is(case: CorpusCase) -> None:
    timeline = read_launch(read_text((line.encode() for line in case.text()), case.name))
    assert diagnose(Case(timeline=timeline, unit=parse_show(case.show, case.name))).failure is case.diagnosis().failure


LINES = [line for case in everything() for line in case.text()[-40:]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_cut_and_spliced_logs_are_diagnosed(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(LINES), max_size=12))
    cut = [line[data.draw(st.integers(0, 40)) :] if data.draw(st.booleans()) else line for line in chosen]
    show = data.draw(st.sampled_from(list(recorded()))).show if data.draw(st.booleans()) else ""
    check(b" " + "\n".join(cut).encode() + SHOW + show.encode())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(form=st.sampled_from([b"{", b" "]), log=st.binary(max_size=400), show=st.binary(max_size=80))
def test_any_bytes_are_diagnosed_or_refused(form: bytes, log: bytes, show: bytes) -> None:
    check(form + log + SHOW + show)


_FIELDS = st.sampled_from(
    (
        *("MESSAGE", "__REALTIME_TIMESTAMP", "_PID", "PRIORITY", "UNIT", "INVOCATION_ID", "MESSAGE_ID", "EXIT_CODE"),
        *("SYSLOG_IDENTIFIER", "_COMM", "_TRANSPORT", "_SYSTEMD_INVOCATION_ID", "EXIT_STATUS", "UNIT_RESULT"),
    )
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(LINES),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(_FIELDS, _VALUES, max_size=8), max_size=8))
def test_any_journal_fields_are_diagnosed_or_refused(entries: list[Entry]) -> None:
    check(b"{" + "\n".join(map(json.dumps, entries)).encode())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(_FIELDS, _VALUES, max_size=8), st.sampled_from(["", "data: ", "\0\0", "\x1e"]))
def test_an_entry_is_the_same_whichever_reader_of_json_takes_it(fields: Entry, before: str) -> None:
    """What stands before an entry is for the one that reads damaged lines."""
    fields["__REALTIME_TIMESTAMP"] = "1764460000000000"
    assert parse_entry(f"{before}{json.dumps(fields)}\n") == entry_of(fields)


def test_the_corpus_and_what_the_fuzzer_found_keep_the_rules() -> None:
    for case in everything():
        check(b"{" + case.journal + SHOW + case.show.encode())
        check(b" " + "\n".join(case.text()).encode() + SHOW + case.show.encode())
    for path in FOUND.glob("*-*"):
        check(path.read_bytes())
