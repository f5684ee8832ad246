"""Journal entries out of what journalctl prints: `-o json` (the live pull and an offline file are the same), and the
fields of an entry however they were written."""

import json
from collections.abc import Iterable, Iterator, Mapping

from pydantic_core import SchemaValidator
from pydantic_core.core_schema import any_schema, typed_dict_field, typed_dict_schema

from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.domain.journal import JournalEntry

# journald itself splits lines at 48 KiB; of what is longer the beginning and the end are kept.
_LONGEST_MESSAGE = 64 * 1024
_LONGEST_TAIL = 8 * 1024
_LONGEST_NUMBER = 20
# A message of 1 MB that is no UTF-8 comes as numbers, of up to four characters each with the comma.
_LONGEST_LINE = 6 * 1024 * 1024

_WANTED = "Wanted is what `journalctl -o json --all` (or `-o export`) prints; for a plain log use --text"
_READ = (
    *("MESSAGE", "__REALTIME_TIMESTAMP", "__CURSOR", "_TRANSPORT", "SYSLOG_IDENTIFIER", "_COMM", "_PID"),
    *("UNIT", "USER_UNIT", "_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT"),
    *("INVOCATION_ID", "USER_INVOCATION_ID", "_SYSTEMD_INVOCATION_ID"),
    *("MESSAGE_ID", "UNIT_RESULT", "EXIT_CODE", "EXIT_STATUS"),
)
_decode = json.JSONDecoder().raw_decode
# Of some thirty fields only these become objects of Python: of reading a journal, JSON is the largest part.
_decode_read = SchemaValidator(
    typed_dict_schema({name: typed_dict_field(any_schema(), required=False) for name in _READ})
).validate_json


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
        fields = _decode_read(line)
    except ValueError:
        fields = _decode_damaged(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    if not ("MESSAGE" in fields or "__REALTIME_TIMESTAMP" in fields):
        raise NotAnEntry("JSON, but no journal entry")
    return entry_of(fields)


def _decode_damaged(text: str) -> Mapping[str, object]:
    """The fields of a line that is not JSON and nothing else, or that only Python's reader takes for JSON."""
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
    message = get("MESSAGE")
    if type(message) is not str or len(message) > _LONGEST_MESSAGE:
        message = _message(message)
    time = (_number(get("__REALTIME_TIMESTAMP")) or 0) / 1e6
    cursor, transport = _text(get("__CURSOR")), _text(get("_TRANSPORT"))
    identifier, comm, pid = _text(get("SYSLOG_IDENTIFIER")), _text(get("_COMM")), _number(get("_PID"))
    if transport == "stdout" and "UNIT" not in fields and "_SYSTEMD_UNIT" in fields:  # what a process printed
        unit, invocation = get("_SYSTEMD_USER_UNIT") or get("_SYSTEMD_UNIT"), get("_SYSTEMD_INVOCATION_ID")
        return JournalEntry(time, message, cursor, transport, identifier, comm, pid, _text(unit), _text(invocation))
    return JournalEntry(
        *(time, message, cursor, transport, identifier, comm, pid),
        _text(get("UNIT") or get("USER_UNIT") or get("_SYSTEMD_USER_UNIT") or get("_SYSTEMD_UNIT")),
        _text(get("INVOCATION_ID") or get("USER_INVOCATION_ID") or get("_SYSTEMD_INVOCATION_ID")),
        _text(get("MESSAGE_ID")),
        _text(get("UNIT_RESULT")),
        _text(get("EXIT_CODE")),
        _text(get("EXIT_STATUS")),
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
    if value is None:
        return None
    text = value if type(value) is str else _text(value)
    return int(text) if len(text) < _LONGEST_NUMBER and text.isascii() and text.isdigit() else None
