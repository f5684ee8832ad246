"""What people hand over is told from its content, and what is damaged of it loses nothing but itself."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from corpus_cases import CORPUS
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.formats import HEAD_BYTES, Format, read_entries, recognise
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.journal import JournalEntry

STORY = (CORPUS / "recorded_gpu" / "story_steps10_fail" / "journal.jsonl").read_bytes()
FIELDS: list[dict[str, Any]] = [json.loads(line) for line in STORY.splitlines()]
MESSAGES: list[str] = [str(fields["MESSAGE"]) for fields in FIELDS if fields.get("_TRANSPORT") == "stdout"]
STAMP = "2026-03-09T22:35:06.123456789Z"


def read(content: bytes, *, journal: bool = False, leavings: Leavings | None = None) -> list[JournalEntry]:
    head = content[:HEAD_BYTES]
    return list(read_entries(head, io.BytesIO(content), leavings or Leavings("it"), journal=journal))


def timeline(content: bytes, *, journal: bool = False) -> Timeline:
    return read_launch(read(content, journal=journal))


def exported(fields: dict[str, Any]) -> bytes:
    """As `journalctl -o export` writes an entry: text that is no plain line with its length before it."""
    out = b""
    for name, value in fields.items():
        data = str(value).encode()
        if all(byte >= 32 or byte == 9 for byte in data):
            out += f"{name}=".encode() + data + b"\n"
        else:
            out += name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
    return out + b"\n"


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def as_docker(messages: list[str]) -> bytes:
    rows = ({"log": f"{message}\n", "stream": "stderr", "time": STAMP} for message in messages)
    return lines(*(json.dumps(row, separators=(",", ":")) for row in rows))


def as_cri(messages: list[str]) -> bytes:
    return lines(*(f"{STAMP} stderr F {message}" for message in messages))


def as_compose(messages: list[str]) -> bytes:
    return lines(*(f"\x1b[36msglang-1  | \x1b[0m{message}" for message in messages))


def as_pod(messages: list[str]) -> bytes:
    return lines(*(f"[pod/sglang-0/sglang] {message}" for message in messages))


def as_docker_t(messages: list[str]) -> bytes:
    return lines(*(f"{STAMP} {message}" for message in messages))


def as_podman_t(messages: list[str]) -> bytes:
    return lines(*(f"2026-03-09T22:35:06+01:00 {message}" for message in messages))


def as_json_log(messages: list[str]) -> bytes:
    rows = []
    for message in messages:
        stamp, bracket, rest = message.partition("] ") if message.startswith("[2") else ("", "", message)
        rank = {"rank": stamp.partition("TP")[1] + stamp.partition("TP")[2]} if "TP" in stamp else {}
        time = {"asctime": stamp[1:20]} if bracket else {}
        rows.append({**time, "levelname": "INFO", "name": "sglang", "message": rest, "process": 7, **rank})
    return lines(*map(json.dumps, rows))


WRAPPINGS = (as_docker, as_docker_t, as_podman_t, as_cri, as_compose, as_pod, as_json_log)


def lone(messages: list[str]) -> bytes:
    return lines(*messages)


@pytest.mark.parametrize("wrap", WRAPPINGS, ids=lambda wrap: wrap.__name__)
def test_whatever_is_put_around_the_lines_the_answer_is_the_same(wrap: Callable[[list[str]], bytes]) -> None:
    plain, wrapped = timeline(lone(MESSAGES)), timeline(wrap(MESSAGES))
    assert [mark.phase for mark in wrapped.phases] == [mark.phase for mark in plain.phases]
    assert wrapped.memory == plain.memory
    assert wrapped.server_args == plain.server_args
    answer = diagnose(Case(timeline=wrapped))
    assert answer.failure is Class.KV_CACHE_OOM


def test_export_says_what_json_says() -> None:
    whole = b"".join(map(exported, FIELDS))
    assert recognise(whole[:HEAD_BYTES], "it") is Format.EXPORT
    assert read(whole, journal=True) == read(STORY, journal=True)


def test_binary_fields_of_an_export_are_read_and_those_that_nobody_wants_are_passed_over() -> None:
    entry = {"__CURSOR": "s=1", "__REALTIME_TIMESTAMP": "1780000000000000", "COREDUMP": "\n\n__CURSOR=s=2\n" * 9000}
    (found,) = read(exported({**entry, "MESSAGE": "\x1b[31mred\nMESSAGE=no"}))
    assert found.message == "\x1b[31mred\nMESSAGE=no"


def test_bytes_that_are_no_utf8_in_an_export_are_read() -> None:
    row = (
        b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=1780000000000000\nMESSAGE\n" + (4).to_bytes(8, "little") + b"a\xff\nb\n\n"
    )
    assert [entry.message for entry in read(row)] == ["a\ufffd\nb"]


@pytest.mark.parametrize("length", [2**63, 2**40, 10])
def test_an_export_with_a_wrong_length_goes_on_behind_it(length: int) -> None:
    broken = b"__CURSOR=s=1\n__REALTIME_TIMESTAMP=1\nMESSAGE\n" + length.to_bytes(8, "little") + b"x\n\n"
    leavings = Leavings("it")
    found = read(broken + b"".join(map(exported, FIELDS[:3])) + b"\n", leavings=leavings)
    assert [entry.message for entry in found][-1] == FIELDS[2]["MESSAGE"]
    assert "is damaged" in leavings.note


def test_an_export_that_is_cut_off_keeps_what_was_whole() -> None:
    whole = b"".join(map(exported, FIELDS[:9]))
    for end in range(len(whole), len(whole) + 400, 7):
        cut = (whole + exported({**FIELDS[9], "MESSAGE": "one\ntwo"}))[:end]
        assert read(cut)[:9] == read(STORY)[:9]


DAMAGE = (
    b"\x00" * 5000 + b"\n",
    b'{"MESSAGE":"cut of\n',
    b"\xff\xfe\xfd\n",
    b"x" * 1_000_000 + b"\n",
    b"-- Reboot --\n",
)


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_in_a_journal_loses_nothing_but_itself(damage: bytes) -> None:
    rows = STORY.splitlines(keepends=True)
    leavings = Leavings("it")
    found = read(b"".join([*rows[:9], damage, *rows[9:]]), journal=True, leavings=leavings)
    assert found == read(STORY)
    assert bool(leavings.note) == bool(damage.strip(b"\x00\n"))


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_in_a_log_loses_nothing_but_itself(damage: bytes) -> None:
    rows = lone(MESSAGES).splitlines(keepends=True)
    assert timeline(b"".join([*rows[:9], damage, *rows[9:]])).memory == timeline(lone(MESSAGES)).memory


def test_a_journal_with_a_hole_before_an_entry_keeps_the_entry() -> None:
    assert len(read(b"\x00" * 4096 + STORY)) == len(FIELDS)


def test_of_a_line_of_a_megabyte_the_beginning_and_the_end_count() -> None:
    (entry,) = read(b"Load weight begin. " + b"x" * 1_000_000 + b" CUDA out of memory\n")
    assert entry.message is not None
    assert entry.message.startswith("Load weight begin.")
    assert entry.message.endswith("CUDA out of memory")


def test_lines_that_docker_split_are_put_together() -> None:
    rows = [{"log": "Load weight ", "time": STAMP}, {"log": "begin. avail ", "time": STAMP}, {"log": "mem=9.00 GB\n"}]
    assert [entry.message for entry in read(lines(*(json.dumps(r, separators=(",", ":")) for r in rows)))] == [
        "Load weight begin. avail mem=9.00 GB"
    ]
    assert read(lines(f"{STAMP} stderr P Load ", f"{STAMP} stderr F weight"))[0].message == "Load weight"


def test_a_traceback_in_a_json_log_is_taken_apart() -> None:
    trace = 'Traceback (most recent call last):\n  File "/x/sglang/srt/a.py", line 3, in f\nValueError: no'
    row = {"ts": 1773095706123, "level": "error", "msg": "Scheduler hit an exception:", "exc_info": trace}
    found = timeline(lines(json.dumps(row)))
    assert found.began == pytest.approx(1773095706.123)
    (failure,) = found.failures
    assert (failure.raised.text, failure.raised.fatal) == ("ValueError: no", True)


def test_what_a_user_wrote_in_a_logged_request_is_no_evidence() -> None:
    text = "Scheduler hit an exception: CUDA out of memory. Received sigquit from a child process"
    request = {"timestamp": "2026-03-09T22:35:06", "event": "request.received", "rid": "1", "obj": {"text": text}}
    long = {**request, "obj": {"text": text * 4000}}
    assert not timeline(lines(json.dumps(request), json.dumps(long))).hits


def test_json_log_lines_within_a_journal_are_read_too() -> None:
    row = {"__REALTIME_TIMESTAMP": "1780000000000000", "_TRANSPORT": "stdout", "_SYSTEMD_INVOCATION_ID": "a" * 32}
    message = json.dumps({"message": "Load weight begin. avail mem=9.00 GB", "tp_rank": 1})
    found = read_launch(read(lines(json.dumps({**row, "MESSAGE": message}))))
    assert found.memory.before_weights_gib == 9.0


@pytest.mark.parametrize(
    "stamp",
    [
        "Mar 09 22:35:06 host ",
        "Mar 09 22:35:06.123456 host ",
        "2026-03-09T22:35:06+0100 host ",
        "2026-03-09T22:35:06.123456+01:00 host ",
        "Mon 2026-03-09 22:35:06 UTC host ",
        "1773095706.123456 host ",
    ],
)
def test_journalctl_s_forms_for_people_name_who_spoke(stamp: str) -> None:
    content = lines(
        f"{stamp}systemd[1]: Started sglang.service - SGLang.",
        f"{stamp}python3[7]: [2026-03-09 22:35:06 TP0] Load weight begin. avail mem=93.00 GB",
        f"{stamp}kernel: Out of memory: Killed process 7 (sglang::schedul) total-vm:1kB",
        f"{stamp}systemd[1]: sglang.service: Main process exited, code=killed, status=9/KILL",
    )
    for unit in ("", "sglang.service"):
        found = read_launch(read(content, journal=True), unit=unit)
        assert (found.complete, found.ended, found.kernel_seen) == (True, True, True)
        assert found.pids == {7}


def test_a_month_without_a_year_gets_that_of_the_log() -> None:
    content = lines("[2026-01-01 00:00:01] hello", "Dec 31 23:59:59 host systemd[1]: Stopping sglang.service.")
    first, second = read(content)
    assert first.time - second.time == 2.0


@pytest.mark.parametrize("stamp", ["[ 1234.567890] ", "[Mon Mar  9 22:35:06 2026] "])
def test_lines_of_dmesg_are_the_kernel_s(stamp: str) -> None:
    (entry,) = read(lines(f"{stamp}NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, GPU has fallen off the bus."))
    assert entry.from_kernel


def test_starts_in_one_log_are_told_apart_by_the_settings_that_are_printed() -> None:
    assert read_launch(read(lone([*MESSAGES, *MESSAGES])), "text-2").server_args
    with pytest.raises(UnusableInput):
        read_launch(read(lone(MESSAGES)), "text-2")


UNUSABLE = (
    (b"", "is empty"),
    (b"\x00" * 100, "holds nothing"),
    (bytes(range(256)) * 40, "is not a text file"),
    (b"\x1f\x8b\x08\x00", "gzip"),
    (b"LPKSHHRH" + b"\x00" * 200, "journald's own"),
    ("hello\n".encode("utf-16"), "UTF-16"),
    (b"Id=sglang.service\nResult=signal\nExecMainStatus=9\n", "systemctl show"),
    (b'{\n\t"__CURSOR" : "s=1",\n\t"__REALTIME_TIMESTAMP" : "1"\n}\n', "json-pretty"),
)


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize(("content", "words"), UNUSABLE, ids=[words for _, words in UNUSABLE])
def test_what_is_none_of_the_formats_is_refused_in_one_sentence(content: bytes, words: str, journal: bool) -> None:
    with pytest.raises(UnusableInput, match=words) as refused:
        read(content, journal=journal)
    assert "\n" not in str(refused.value)


def test_a_log_whose_lines_name_nobody_is_no_journal() -> None:
    with pytest.raises(UnusableInput, match="use --text"):
        read(lone(MESSAGES), journal=True)
