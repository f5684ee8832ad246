"""What an input is, told from its content: the one place that knows. Does not open files."""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import IO

from sglang_watchdog.diagnosis.entries import NotAnEntry, parse_entry, read_journal
from sglang_watchdog.diagnosis.export import read_export
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.diagnosis.plain import names_somebody, read_text
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry

HEAD_BYTES = 256 * 1024
# A line that is longer is cut: nothing that is wanted comes near this, and a file without line ends must not be read
# into memory whole.
_LONGEST_LINE = 6 * 1024 * 1024
_LOOKED_AT = 64  # lines
_MOSTLY = 0.7


class Format(StrEnum):
    """How entries are written down."""

    JSON = "json"
    EXPORT = "export"
    SYSLOG = "syslog"  # a plain log whose lines name who wrote them, as journalctl's default form
    PLAIN = "plain"


_FOREIGN = (
    (b"\x1f\x8b", "is compressed (gzip): unpack it first"),
    (b"\xfd7zXZ", "is compressed (xz): unpack it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed (zstd): unpack it first"),
    (b"BZh", "is compressed (bzip2): unpack it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"LPKSHHRH", "is a file of journald's own: give what `journalctl --file FILE -o json --all` prints of it"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8 first"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8 first"),
)
_SHOW_ROW = re.compile(rb"[A-Z][A-Za-z]+=.*")
_EXPORT_ROW = re.compile(rb"\x00*(?:__CURSOR=s=|__REALTIME_TIMESTAMP=\d|__MONOTONIC_TIMESTAMP=\d)")
_CONTROL = bytes(set(range(32)) - {7, 8, 9, 10, 12, 13, 27}) + b"\x7f"


def recognise(head: bytes, name: str) -> Format:
    """What an input is that begins so. Raises UnusableInput, in one sentence, for what is none of the formats."""
    for magic, words in _FOREIGN:
        if head.startswith(magic):
            raise UnusableInput(f"{name} {words}")
    content = head.replace(b"\x00", b"")
    lines = [line for line in content.split(b"\n")[:_LOOKED_AT] if line.strip()]
    if not lines:
        raise UnusableInput(f"{name} is empty" if not head else f"{name} holds nothing that can be read")
    if any(map(_EXPORT_ROW.match, lines)):
        return Format.EXPORT
    if any(map(_is_entry, lines)):
        return Format.JSON
    if lines[0].strip() == b"{" and b'"__REALTIME_TIMESTAMP" :' in content:
        raise UnusableInput(f"{name} is what `journalctl -o json-pretty` prints: use -o json")
    if sum(bool(_SHOW_ROW.fullmatch(line)) for line in lines) >= _MOSTLY * len(lines):
        raise UnusableInput(f"{name} is what `systemctl show` printed: give it by --show, beside a journal or a log")
    if _unprintable(content) > (1 - _MOSTLY) * len(content):
        raise UnusableInput(f"{name} is not a text file")
    named = sum(names_somebody(line.decode("utf-8", "replace").rstrip("\r")) for line in lines)
    return Format.SYSLOG if named >= _MOSTLY * len(lines) else Format.PLAIN


def _is_entry(line: bytes) -> bool:
    try:
        parse_entry(line)
    except NotAnEntry:
        return False
    return b'"__REALTIME_TIMESTAMP"' in line or b'"_TRANSPORT"' in line


def _unprintable(content: bytes) -> int:
    """Bytes that no text has: control characters, and what is no UTF-8."""
    text = content.decode("utf-8", "replace")
    return len(content) - len(content.translate(None, _CONTROL)) + text.count("\ufffd")


def read_entries(head: bytes, stream: IO[bytes], leavings: Leavings, *, journal: bool) -> Iterator[JournalEntry]:
    """Entries of the stream, which begins with `head`, in order.

    `journal`: the input was said to be a journal, so that a log whose lines name nobody is a mistake.
    Raises UnusableInput, at once for what is no journal or log, at the end where there was no entry.
    """
    name = leavings.name
    match recognise(head, name):
        case Format.EXPORT:
            return read_export(stream, name, leavings)
        case Format.JSON:
            return read_journal(lines_of(stream), name, leavings)
        case Format.PLAIN if journal:
            raise UnusableInput(
                f"{name} is no journal: wanted is what `journalctl -o json --all` (or `-o export`) prints; "
                "for a plain log use --text"
            )
        case Format.SYSLOG | Format.PLAIN:
            return read_text(lines_of(stream), name, leavings)


def lines_of(stream: IO[bytes]) -> Iterable[bytes]:
    """Lines of a stream; of one that is too long the beginning."""
    readline = stream.readline
    while line := readline(_LONGEST_LINE):
        yield line
        while not line.endswith(b"\n") and (line := readline(_LONGEST_LINE)):
            pass
