"""Reads what a person or `journalctl` hands over, line by line, into journal entries. Does not open files.

Two forms: `journalctl -o json` (one object a line; the live pull and an offline file are the same) and a plain log.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from sglang_watchdog.diagnosis.clock import first_time
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry

# journald itself splits lines at 48 KiB; what is longer in a file made by something else is no message of SGLang.
_LONGEST_MESSAGE = 64 * 1024
_LONGEST_NUMBER = 20
_LONGEST_LINE = 4 * 1024 * 1024


class NotAnEntry(ValueError):
    """A line that is no journal entry. The text says what it is instead."""


def read_journal(lines: Iterable[bytes], name: str) -> Iterator[JournalEntry]:
    """Entries of `journalctl -o json` output, in order. `name` is for messages.

    A last line that was cut off is left out (a file copied while it was written ends so).
    Raises UnusableInput, with the line's number, for anything else that is no entry, and for a file without entries.
    """
    broken: tuple[int, NotAnEntry] | None = None
    seen = False
    for number, line in enumerate(lines, start=1):
        if broken:
            raise _unusable(name, *broken)
        if not line.strip():
            continue
        try:
            yield parse_entry(line)
            seen = True
        except NotAnEntry as reason:
            broken = (number, reason)
    if not seen:
        if broken:
            raise _unusable(name, *broken)
        raise UnusableInput(f"{name} holds no journal entries")


def _unusable(name: str, number: int, reason: NotAnEntry) -> UnusableInput:
    return UnusableInput(
        f"{name}, line {number}: {reason}. Wanted is what `journalctl -o json --all` prints; for a plain log use --text"
    )


def parse_entry(line: bytes | str) -> JournalEntry:
    """One line of `journalctl -o json`. Raises NotAnEntry."""
    if len(line) > _LONGEST_LINE:
        raise NotAnEntry(f"a line of {len(line)} bytes is no journal entry")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise NotAnEntry("not JSON, or cut off") from None
    if not isinstance(fields, dict) or not ("MESSAGE" in fields or "__REALTIME_TIMESTAMP" in fields):
        raise NotAnEntry("JSON, but no journal entry")
    return _entry(fields)


def entry_or_none(line: bytes) -> JournalEntry | None:
    """As `parse_entry`, for a live pull: a line that is no entry loses nothing but itself."""
    try:
        return parse_entry(line)
    except NotAnEntry:
        return None


def _entry(fields: Mapping[str, object]) -> JournalEntry:
    get = fields.get
    return JournalEntry(
        time=_micros(get("__REALTIME_TIMESTAMP")) or 0.0,
        message=_message(get("MESSAGE")),
        cursor=_text(get("__CURSOR")),
        monotonic=_micros(get("__MONOTONIC_TIMESTAMP")),
        boot_id=_text(get("_BOOT_ID")),
        transport=_text(get("_TRANSPORT")),
        identifier=_text(get("SYSLOG_IDENTIFIER")),
        comm=_text(get("_COMM")),
        pid=_number(get("_PID")),
        unit=_text(get("UNIT") or get("USER_UNIT") or get("_SYSTEMD_USER_UNIT") or get("_SYSTEMD_UNIT")),
        invocation=_text(get("INVOCATION_ID") or get("USER_INVOCATION_ID") or get("_SYSTEMD_INVOCATION_ID")),
        message_id=_text(get("MESSAGE_ID")),
        priority=_number(get("PRIORITY")) or 6,
        unit_result=_text(get("UNIT_RESULT")),
        exit_code=_text(get("EXIT_CODE")),
        exit_status=_text(get("EXIT_STATUS")),
        job_type=_text(get("JOB_TYPE")),
        job_result=_text(get("JOB_RESULT")),
    )


def _text(value: object) -> str:
    """A field given twice comes as a list, of which the last counts."""
    if type(value) is str:
        return value
    if isinstance(value, list) and value and not isinstance(value[-1], int):
        return _text(value[-1])
    return _message(value) or ""


def _message(value: object) -> str | None:
    """journalctl gives bytes that are no UTF-8 as a list of numbers, and a repeated field as a list of either."""
    if type(value) is str:
        return value if len(value) <= _LONGEST_MESSAGE else value[:_LONGEST_MESSAGE]
    match value:
        case [int(), *_]:
            return bytes(b & 0xFF for b in value[:_LONGEST_MESSAGE] if isinstance(b, int)).decode("utf-8", "replace")
        case list():
            parts = [part for part in map(_message, value) if part is not None]
            return "\n".join(parts)[:_LONGEST_MESSAGE]
        case None:
            return None
        case _:
            return str(value)[:_LONGEST_MESSAGE]


def _micros(value: object) -> float | None:
    number = _number(value)
    return None if number is None else number / 1e6


def _number(value: object) -> int | None:
    if value is None:
        return None
    text = _text(value)
    return int(text) if text.isdecimal() and len(text) < _LONGEST_NUMBER else None


_SYSLOG = re.compile(
    r"(?:(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)|(?P<iso>\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?)) \S+ "
    r"(?P<identifier>[\w.@/:-]+?)(?:\[(?P<pid>\d+)\])?: (?P<message>.*)",
    re.DOTALL,
)
_TAGGED = re.compile(r"(?P<identifier>systemd|kernel)(?:\[(?P<pid>\d+)\])?: (?P<message>.*)", re.DOTALL)
_DOCKER = re.compile(r"(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}Z) (?P<message>.*)", re.DOTALL)
_STARTED = re.compile(r"Start(?:ing|ed) \S+")


def read_text(lines: Iterable[bytes], name: str) -> Iterator[JournalEntry]:
    """Entries of a plain log: what SGLang or `docker logs` printed, or `journalctl` in its default form.

    A log has no invocation ids: each start that systemd reports after an end is taken for a new launch, named
    `text-1`, `text-2` and so on. Raises UnusableInput where there is no line, or where the file is no text.
    """
    launch, ended, clock, seen = 1, False, 0.0, False
    for number, line in enumerate(lines, start=1):
        text = line[:_LONGEST_MESSAGE].decode("utf-8", "replace").rstrip("\r\n")
        if "\x00" in text:
            raise UnusableInput(f"{name}, line {number}: not a text file")
        seen = seen or bool(text.strip())
        entry = _text_entry(text, clock)
        clock = entry.time
        if entry.from_manager and entry.message:
            starts = bool(_STARTED.match(entry.message))
            launch, ended = (launch + 1, False) if ended and starts else (launch, ended or _tells_an_end(entry.message))
        yield JournalEntry(
            time=entry.time,
            message=entry.message,
            transport=entry.transport,
            identifier=entry.identifier,
            comm=entry.comm,
            pid=entry.pid,
            invocation=f"text-{launch}",
        )
    if not seen:
        raise UnusableInput(f"{name} is empty")


def _tells_an_end(message: str) -> bool:
    return "Failed with result" in message or "Deactivated successfully" in message or "Main process exited" in message


def _text_entry(text: str, clock: float) -> JournalEntry:
    match = _SYSLOG.fullmatch(text) or _TAGGED.fullmatch(text) or _DOCKER.fullmatch(text)
    parts = match.groupdict() if match else {"message": text}
    identifier = parts.get("identifier") or ""
    # SGLang's own clock carries no zone. It is read as UTC: only differences are used.
    time = first_time(parts.get("iso") or "") or first_time(parts["message"][:32]) or clock
    pid = _number(parts.get("pid"))
    manager = identifier == "systemd"
    return JournalEntry(
        time=time,
        message=parts["message"],
        transport="kernel" if identifier == "kernel" else "stdout",
        identifier=identifier,
        comm="systemd" if manager else "",
        pid=pid,
    )
