"""`sglang-watchdog diagnose --journal FILE`: from files that anybody can hand over. Needs no root, bus or GPU."""

import codecs
import gc
import io
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import IO

from sglang_watchdog.cli.answer import MOST_LAUNCHES, Answer, answer, newest_first
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.formats import HEAD_BYTES, read_entries
from sglang_watchdog.diagnosis.launches import read_launch, read_launches
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.unit import UnitSnapshot

_STDIN = Path("-")
_LOOKED_AT = 64
_ENOUGH = 4  # entries with times of their own
_BUFFER = 1024 * 1024
_LONGEST_SHOW = 16 * 1024 * 1024


def diagnose_offline(
    *,
    journal: Path | None = None,
    text: Path | None = None,
    show: Path | None = None,
    invocation: str = "",
    explain: bool = False,
) -> Answer:
    """The diagnosis of one launch in files. Of several launches the newest that ended, unless `invocation` names one.

    Raises UnusableInput, which names the file and what is wrong with it.
    """
    source = _source(journal, text)
    unit = _read_show(show) if show else None
    with _opened(source) as (head, stream, leavings):
        entries = _Entries(read_entries(head, stream, leavings, journal=journal is not None), leavings.name)
        timeline = read_launch(entries, invocation, unit.name if unit else "")
        if unit and show:
            entries.must_be_of(unit.name, show)
    return answer(_case(timeline, unit, leavings), unit.name if unit else "", explain=explain)


def list_offline(
    *, journal: Path | None = None, text: Path | None = None, show: Path | None = None, explain: bool = False
) -> list[Answer]:
    """The diagnoses of every launch in files, newest first; of very many the newest. Raises UnusableInput."""
    source = _source(journal, text)
    unit = _read_show(show) if show else None
    name = unit.name if unit else ""
    answers: deque[Answer] = deque(maxlen=MOST_LAUNCHES)
    with _opened(source) as (head, stream, leavings):
        entries = _Entries(read_entries(head, stream, leavings, journal=journal is not None), leavings.name)
        for timeline in read_launches(entries, name):
            answers.append(answer(_case(timeline, unit, leavings), name, explain=explain))
    return newest_first(list(answers), name if any(one.unit == name for one in answers) else "")


class _Entries:
    """Entries as they are read, with what only all of them together can tell of a mistake."""

    def __init__(self, entries: Iterator[JournalEntry], name: str) -> None:
        self._entries = entries
        self._name = name
        self._units: set[str] = set()

    def __iter__(self) -> Iterator[JournalEntry]:
        """Raises UnusableInput where the first ones run backwards in time."""
        first = list(islice(self._entries, _LOOKED_AT))
        times = [entry.time for entry in first if entry.time]
        if len(set(times)) >= _ENOUGH and times == sorted(times, reverse=True):
            raise UnusableInput(f"{self._name} has its newest entry first: write it without --reverse (-r)")
        for entry in chain(first, self._entries):
            if entry.from_manager and entry.unit.endswith(".service") and len(self._units) < _LOOKED_AT:
                self._units.add(entry.unit)
            yield entry

    def must_be_of(self, unit: str, show: Path) -> None:
        """Raises UnusableInput where systemd tells of other units alone. What a process printed names the unit that it
        ran in, which for a container is its engine's."""
        if self._units and len(self._units) < _LOOKED_AT and unit not in self._units:
            others = ", ".join(sorted(self._units)[:3])
            raise UnusableInput(f"{show} tells of {unit}, and {self._name} of {others}: give both of the same unit")


def _source(journal: Path | None, text: Path | None) -> Path:
    if journal and text:
        raise UnusableInput("--journal and --text exclude each other: give the one that you have")
    source = journal or text
    if source is None:
        raise UnusableInput(
            "Nothing to diagnose: give --journal FILE (from `journalctl -o json --all _SYSTEMD_UNIT=UNIT + UNIT=UNIT + "
            "_TRANSPORT=kernel`) or --text FILE"
        )
    return source


def _case(timeline: Timeline, unit: UnitSnapshot | None, leavings: Leavings) -> Case:
    return Case(timeline=timeline, unit=unit, input_notes=(leavings.note,) if leavings.note else ())


def _read_show(path: Path) -> UnitSnapshot | None:
    with _opened(path) as (_, stream, leavings):
        return parse_show(stream.read(_LONGEST_SHOW).decode("utf-8", "replace"), leavings.name)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[bytes, IO[bytes], Leavings]]:
    """The beginning of a file (of standard input for `-`), the whole of it as a stream, and where to count."""
    name = "standard input" if path == _STDIN else str(path)
    gc.freeze()  # what is loaded stays, and need not be looked through again and again while a journal goes by
    try:
        if path == _STDIN and sys.stdin is None:
            raise UnusableInput("standard input is closed")
        with nullcontext(sys.stdin.buffer) if path == _STDIN else path.open("rb") as file:
            head = file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
            yield head, io.BufferedReader(_Rejoined(head, file), _BUFFER), Leavings(name)
    except OSError as error:
        raise UnusableInput(f"{name} cannot be read: {error.strerror or error}") from error


class _Rejoined(io.RawIOBase):
    """A stream of which the beginning was read already, from that beginning on: a pipe cannot be wound back."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if not self._head:
            return self._rest.readinto(view)  # type: ignore[attr-defined, no-any-return]
        piece, self._head = self._head[: len(view)], self._head[len(view) :]
        view[: len(piece)] = piece
        return len(piece)
