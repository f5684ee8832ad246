"""Journal entries out of what journalctl prints: `-o json` (the live pull and an offline file are the same), and the
fields of an entry however they were written."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec

from sglang_watchdog.diagnosis.clock import LATEST, in_calendar
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.numbers import whole

# journald itself splits lines at 48 KiB; of what is longer the beginning and the end are kept.
_LONGEST_MESSAGE = 64 * 1024
_LONGEST_TAIL = 8 * 1024
# A message of 1 MB that is no UTF-8 comes as numbers, of up to four characters each with the comma.
_LONGEST_LINE = 6 * 1024 * 1024

_WANTED = "Wanted is what `journalctl -o json --all` (or `-o export`) prints; for a plain log use --text"
_decode = json.JSONDecoder().raw_decode
_Time = Annotated[int, msgspec.Meta(ge=0, le=LATEST * 10**6)]
_Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Row(
    msgspec.Struct,
    gc=False,
    rename={
        "message": "MESSAGE",
        "time": "__REALTIME_TIMESTAMP",
        "cursor": "__CURSOR",
        "transport": "_TRANSPORT",
        "identifier": "SYSLOG_IDENTIFIER",
        "comm": "_COMM",
        "pid": "_PID",
        "message_id": "MESSAGE_ID",
        "unit": "UNIT",
        "user_unit": "USER_UNIT",
        "by_unit": "_SYSTEMD_UNIT",
        "by_user_unit": "_SYSTEMD_USER_UNIT",
        "launch": "INVOCATION_ID",
        "user_launch": "USER_INVOCATION_ID",
        "by_launch": "_SYSTEMD_INVOCATION_ID",
        "unit_result": "UNIT_RESULT",
        "exit_code": "EXIT_CODE",
        "exit_status": "EXIT_STATUS",
    },
):
    """An entry as nearly all of them are written: every field once, and as text. Of some thirty fields no other becomes
    an object of Python: of reading a journal, JSON is the largest part."""

    message: str | None = None
    time: _Time = 0
    cursor: str = ""
    transport: str = ""
    identifier: str = ""
    comm: str = ""
    pid: _Pid | None = None
    message_id: str = ""
    unit: str = ""
    user_unit: str = ""
    by_unit: str = ""
    by_user_unit: str = ""
    launch: str = ""
    user_launch: str = ""
    by_launch: str = ""
    unit_result: str = ""
    exit_code: str = ""
    exit_status: str = ""


_decode_row = msgspec.json.Decoder(_Row, strict=False).decode  # not strict: journalctl writes numbers as text


class NotAnEntry(ValueError):
    """A line that is no journal entry. The text says what it is instead."""


def read_journal(lines: Iterable[bytes], name: str, leavings: Leavings | None = None) -> Iterator[JournalEntry]:
    """Entries of `journalctl -o json` output, in order. `name` is for messages.

    A line that is no entry (cut off, overwritten, somebody else's) loses nothing but itself, and is counted in
    `leavings`. Raises UnusableInput at the end where there was no entry at all.
    """
    leavings = leavings or Leavings(name)
    number, used = 0, False
    for number, line in enumerate(lines, start=1):
        try:
            yield parse_entry(line)
            used = True
        except NotAnEntry as reason:
            if line.strip(b"\x00 \t\r\n"):
                leavings.left_out(number, str(reason))
    leavings.ended(number, used=used, wanted=_WANTED)


def parse_entry(line: bytes | str) -> JournalEntry:
    """One line of `journalctl -o json`. Raises NotAnEntry."""
    if len(line) > _LONGEST_LINE:
        raise NotAnEntry(f"a line of {len(line)} bytes is no journal entry")
    try:
        row = _decode_row(line)
    except (ValueError, RecursionError):  # not JSON, or a field that is given twice or is no text
        row = None
    if row is None or row.message is None or len(row.message) > _LONGEST_MESSAGE:
        fields = _decode_whole(line if isinstance(line, str) else line.decode("utf-8", "replace"))
        if not ("MESSAGE" in fields or "__REALTIME_TIMESTAMP" in fields):
            raise NotAnEntry("JSON, but no journal entry")
        return entry_of(fields)
    unit = row.unit or row.user_unit or row.by_user_unit or row.by_unit
    launch = row.launch or row.user_launch or row.by_launch
    return JournalEntry._make(
        (
            *(row.time / 1e6, row.message, row.cursor, row.transport, row.identifier, row.comm, row.pid),
            *(unit, launch, row.message_id, row.unit_result, row.exit_code, row.exit_status),
        )
    )


def _decode_whole(text: str) -> Mapping[str, object]:
    """Every field of a line, whatever it holds. Raises NotAnEntry."""
    text = _bare(text)
    try:
        fields, end = _decode(text)
    except (ValueError, RecursionError):
        raise NotAnEntry("not JSON, or cut off") from None
    if type(fields) is not dict:
        raise NotAnEntry("JSON, but no journal entry")
    if text[end:].strip("\x00 \t\r\n"):
        raise NotAnEntry("JSON with something else behind it")
    return fields


def _bare(text: str) -> str:
    """Without what `-o json-seq` and `-o json-sse` put before each entry, and without a hole that a crash left."""
    return text.lstrip("\x00\x1e \t\r\n").removeprefix("data: ")


def entry_or_none(line: bytes) -> JournalEntry | None:
    """As `parse_entry`, for a live pull: a line that is no entry loses nothing but itself."""
    try:
        return parse_entry(line)
    except NotAnEntry:
        return None


def entry_of(fields: Mapping[str, object]) -> JournalEntry:
    """An entry of its fields: text, bytes as a list of numbers, or a list of either where a field was given twice."""
    get = fields.get
    return JournalEntry(
        time=in_calendar((_number(get("__REALTIME_TIMESTAMP")) or 0) / 1e6) or 0.0,
        message=_message(get("MESSAGE")),
        cursor=_text(get("__CURSOR")),
        transport=_text(get("_TRANSPORT")),
        identifier=_text(get("SYSLOG_IDENTIFIER")),
        comm=_text(get("_COMM")),
        pid=_number(get("_PID")),
        unit=_text(get("UNIT") or get("USER_UNIT") or get("_SYSTEMD_USER_UNIT") or get("_SYSTEMD_UNIT")),
        invocation=_text(get("INVOCATION_ID") or get("USER_INVOCATION_ID") or get("_SYSTEMD_INVOCATION_ID")),
        message_id=_text(get("MESSAGE_ID")),
        unit_result=_text(get("UNIT_RESULT")),
        exit_code=_text(get("EXIT_CODE")),
        exit_status=_text(get("EXIT_STATUS")),
    )


def clipped(text: str) -> str:
    """The beginning and the end of a message that is too long: both can tell something."""
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} … {text[-_LONGEST_TAIL:]}"


def _text(value: object) -> str:
    """A field given twice comes as a list, of which the last counts."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and not isinstance(value[-1], int):
        return _text(value[-1])
    return _message(value) or ""


def _message(value: object) -> str | None:
    """journalctl gives bytes that are no UTF-8 as a list of numbers, and a repeated field as a list of either."""
    match value:
        case str():
            return clipped(value)
        case [int(), *_]:
            return clipped(bytes(b & 0xFF for b in value if isinstance(b, int)).decode("utf-8", "replace"))
        case list():
            return clipped("\n".join(part for part in map(_message, value) if part is not None))
        case None:
            return None
        case _:
            return clipped(str(value))


def _number(value: object) -> int | None:
    return whole(_text(value))
