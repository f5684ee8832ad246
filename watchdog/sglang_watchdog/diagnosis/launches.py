"""Tells the launches in a file apart and chooses the one to be diagnosed, or hands out all of them. Memory stays
bounded: of many launches only the newest are kept, and the one that was asked for."""

from collections.abc import Iterable, Iterator

from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.diagnosis.timeline import Timeline, TimelineReader
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry

_KEPT = 4
_OURSELVES = "sglang-watchdog"
_TEXT = "text-"
_ENDS = (Meaning.SIGTERM, Meaning.STOPPING, Meaning.OWN_KILL, Meaning.CHILD_DIED)


class LaunchReader:
    """Feed it a journal in order. What carries no invocation (the kernel's lines) concerns every launch."""

    def __init__(self, wanted: str = "", unit: str = "") -> None:
        self._wanted = wanted.replace("-", "") if not wanted.startswith(_TEXT) else wanted
        self._unit = unit
        self._readers: dict[str, TimelineReader] = {}
        self._dropped: list[Timeline] = []

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
        """The oldest gives way; before it one of another service, of which the journal of a whole host is full."""
        if len(self._readers) > _KEPT:
            old = [name for name in list(self._readers)[:-1] if name != self._wanted]
            others = [name for name in old if not self._readers[name].tells_of_sglang]
            self._dropped.append(self._readers.pop((others or old)[0]).timeline())

    def taken(self) -> list[Timeline]:
        """Launches that are too old to be fed on, since the last call, in order."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def rest(self) -> list[Timeline]:
        """The launches that are still fed, in order."""
        return [reader.timeline() for reader in self._readers.values()]

    def chosen(self) -> Timeline:
        """The launch asked for, else the newest that ended, else the newest. Raises UnusableInput without one."""
        if self._wanted:
            chosen = self._readers.get(self._wanted)
            if chosen is None:
                raise UnusableInput(f"no entry of invocation {self._wanted} in the file")
            return chosen.timeline()
        told = launches_among(self.rest(), self._unit)
        if not told:
            raise UnusableInput("the file holds no entry of a launch")
        return next((timeline for timeline in reversed(told) if _is_over(timeline, told[-1])), told[-1])


def _is_over(timeline: Timeline, newest: Timeline) -> bool:
    """systemd says so; in a log without systemd's words, another start follows, or the end is in its own words."""
    if not timeline.invocation.startswith(_TEXT) or timeline.ended:
        return timeline.ended
    fatal = any(failure.raised.fatal for failure in timeline.failures)
    return timeline is not newest or fatal or timeline.first(*_ENDS) is not None


def launches_among(timelines: list[Timeline], unit: str = "") -> list[Timeline]:
    """Those that are launches of the unit; without its name, of the units that run SGLang, if any of them does."""
    told = [timeline for timeline in timelines if timeline.lines or timeline.lost_fields]
    of_sglang = {timeline.unit for timeline in told if timeline.tells_of_sglang}
    units = {unit} if unit and any(timeline.unit == unit for timeline in told) else of_sglang
    return [timeline for timeline in told if not units or timeline.unit in units]


def read_launch(entries: Iterable[JournalEntry], wanted: str = "", unit: str = "") -> Timeline:
    """The timeline of the launch to be diagnosed."""
    reader = LaunchReader(wanted, unit)
    for entry in entries:
        reader.feed(entry)
        reader.taken()
    return reader.chosen()


def read_launches(entries: Iterable[JournalEntry], unit: str = "") -> Iterator[Timeline]:
    """Every launch, each as soon as nothing more is read of it, in the order in which they began."""
    reader = LaunchReader(unit=unit)
    for entry in entries:
        reader.feed(entry)
        yield from reader.taken()
    yield from reader.rest()
