"""Tells the launches in a file apart and chooses the one to be diagnosed. Memory stays bounded: of many launches only
the newest are kept, and the one that was asked for."""

from collections.abc import Iterable

from sglang_watchdog.diagnosis.timeline import Timeline, TimelineReader
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry

_KEPT = 4
_OURSELVES = "sglang-watchdog"


class LaunchReader:
    """Feed it a journal in order. What carries no invocation (the kernel's lines) concerns every launch."""

    def __init__(self, wanted: str = "", unit: str = "") -> None:
        self._wanted = wanted.replace("-", "") if not wanted.startswith("text-") else wanted
        self._unit = unit
        self._readers: dict[str, TimelineReader] = {}

    def feed(self, entry: JournalEntry) -> None:
        if entry.identifier == _OURSELVES:
            return  # `journalctl -u UNIT` shows our alerts about the unit among its own entries
        if not entry.invocation or entry.from_kernel:
            for reader in self._readers.values() or [self._reader("")]:
                reader.feed(entry)
            return
        self._reader(entry.invocation).feed(entry)

    def _reader(self, invocation: str) -> TimelineReader:
        """A reader that began without an invocation (the file begins with the kernel's lines) becomes the first one."""
        if invocation not in self._readers:
            nameless = self._readers.pop("", None)
            self._readers[invocation] = nameless or TimelineReader(self._unit, invocation)
            self._drop_old()
        return self._readers[invocation]

    def _drop_old(self) -> None:
        if len(self._readers) > _KEPT:
            oldest = next(name for name in self._readers if name != self._wanted)
            del self._readers[oldest]

    def chosen(self) -> Timeline:
        """The launch asked for, else the newest that ended, else the newest. Raises UnusableInput without one."""
        timelines = [reader.timeline() for reader in self._readers.values()]
        told = [timeline for timeline in timelines if timeline.lines or timeline.lost_fields]
        if self._wanted:
            chosen = self._readers.get(self._wanted)
            if chosen is None:
                raise UnusableInput(f"no entry of invocation {self._wanted} in the file")
            return chosen.timeline()
        if not told:
            raise UnusableInput("the file holds no entry of a launch")
        return next((timeline for timeline in reversed(told) if timeline.ended), told[-1])


def read_launch(entries: Iterable[JournalEntry], wanted: str = "", unit: str = "") -> Timeline:
    """The timeline of the launch to be diagnosed."""
    reader = LaunchReader(wanted, unit)
    for entry in entries:
        reader.feed(entry)
    return reader.chosen()
