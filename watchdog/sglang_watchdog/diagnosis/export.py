"""Reads `journalctl -o export`: a line `NAME=value` for each field, or, where a value is no plain text, the name alone,
its length as 64-bit little endian number, the bytes and a newline; an empty line ends an entry (systemd's page
"Journal Export Formats")."""

import re
from collections.abc import Iterator
from typing import IO

from sglang_watchdog.diagnosis.entries import entry_of
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.domain.journal import FIELDS, JournalEntry

_WANTED_FIELDS = frozenset({*FIELDS, "__CURSOR", "__REALTIME_TIMESTAMP"})
_NAME = re.compile(rb"[A-Z_][A-Z0-9_]{0,63}\n")
_LONGEST_LINE = 6 * 1024 * 1024
# A field can hold a memory image (systemd-coredump's); nothing that is wanted comes near this.
_LONGEST_VALUE = 6 * 1024 * 1024
_LONGEST_OF_ALL = 768 * 1024 * 1024  # journald's own limit: a greater length is damage
_PIECE = 1024 * 1024


class _Damaged(ValueError):
    """What is wrong with an entry; the reader goes on behind it."""


class _Fields(dict[str, object]):
    """Fields of one entry. A name given twice becomes a list."""

    def put(self, name: str, value: bytes) -> None:
        text = value.decode("utf-8", "replace")
        known = self.get(name)
        self[name] = text if known is None else [*known, text] if isinstance(known, list) else [known, text]


def read_export(stream: IO[bytes], name: str, leavings: Leavings | None = None) -> Iterator[JournalEntry]:
    """Entries of the stream, in order. An entry that is cut off or damaged loses what is damaged of it alone, and is
    counted in `leavings`. Raises UnusableInput at the end where there was no entry at all."""
    leavings = leavings or Leavings(name)
    fields, number, used = _Fields(), 0, False
    while line := stream.readline(_LONGEST_LINE):
        number += 1
        if line.strip(b"\x00") in (b"\n", b"\r\n"):
            if fields:
                used = True
                yield entry_of(fields)
                fields = _Fields()
            continue
        try:
            _field(stream, line, fields)
        except _Damaged as reason:
            leavings.left_out(number, str(reason))
    if "__REALTIME_TIMESTAMP" in fields and "MESSAGE" in fields:
        used = True
        yield entry_of(fields)
    leavings.ended(number, used=used, wanted="Wanted is what `journalctl -o export` (or `-o json --all`) prints")


def _field(stream: IO[bytes], line: bytes, fields: _Fields) -> None:
    """Takes one field in, with the bytes behind its name where it is binary. Raises _Damaged."""
    raw_name, equals, value = line.partition(b"=")
    if equals and _NAME.fullmatch(raw_name.lstrip(b"\x00") + b"\n"):
        _skip_rest(stream, line)
        if (name := raw_name.lstrip(b"\x00").decode()) in _WANTED_FIELDS:
            fields.put(name, value.removesuffix(b"\n"))
        return
    if not _NAME.fullmatch(line):
        _skip_rest(stream, line)
        raise _Damaged("no field of a journal entry")
    length = int.from_bytes(stream.read(8), "little")
    if length > _LONGEST_OF_ALL:
        raise _Damaged("a binary field of impossible length")
    name = line[:-1].decode()
    if name in _WANTED_FIELDS and length <= _LONGEST_VALUE:
        fields.put(name, _exactly(stream, length))
    else:
        _skip(stream, length)
    if stream.read(1) not in (b"\n", b""):
        raise _Damaged("a binary field that does not end where it should")


def _exactly(stream: IO[bytes], length: int) -> bytes:
    value = stream.read(length)
    if len(value) < length:
        raise _Damaged("cut off in a binary field")
    return value


def _skip(stream: IO[bytes], length: int) -> None:
    """A damaged length can be anything: what is skipped is read in pieces, and the end of the file ends it."""
    while length > 0 and (piece := stream.read(min(length, _PIECE))):
        length -= len(piece)


def _skip_rest(stream: IO[bytes], line: bytes) -> None:
    """The rest of a line that is longer than what is read of one."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(_PIECE)
