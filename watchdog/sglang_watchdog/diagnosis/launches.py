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
        wanted = wanted.lower()
        self._wanted = wanted if wanted.startswith(_TEXT) else wanted.replace("-", "")
        self._unit = unit
        self._readers: dict[str, TimelineReader] = {}

    def feed(self, entry: JournalEntry) -> Timeline | None:
        """The launch that is fed no more, where that of the entry takes its place."""
        if entry.identifier == _OURSELVES:
            return None  # `journalctl -u UNIT` shows our alerts about the unit among its own entries
        invocation = entry.invocation if entry.transport == "stdout" or not entry.from_kernel else ""
        reader = self._readers.get(invocation)
        if reader and invocation:
            reader.feed(entry)
            return None
        if not invocation and self._readers:
            for each in self._readers.values():
                each.feed(entry)
            return None
        self._begin(invocation).feed(entry)
        return self._give_way()

    def _begin(self, invocation: str) -> TimelineReader:
        """A reader that began without an invocation (the file begins with the kernel's lines) becomes the first one."""
        nameless = self._readers.pop("", None)
        reader = self._readers[invocation] = nameless or TimelineReader(self._unit, invocation)
        return reader

    def _give_way(self) -> Timeline | None:
        """The oldest gives way; before it one of another service, of which the journal of a whole host is full."""
        if len(self._readers) <= _KEPT:
            return None
        old = [name for name in list(self._readers)[:-1] if not self._is_wanted(name)] or list(self._readers)[:-1]
        others = [name for name in old if not self._readers[name].tells_of_sglang]
        return self._readers.pop((others or old)[0]).timeline()

    def _is_wanted(self, invocation: str) -> bool:
        """A listing shows the beginning of an id, which is enough."""
        if not self._wanted or self._wanted.startswith(_TEXT):
            return invocation == self._wanted
        return invocation.startswith(self._wanted)

    def rest(self) -> list[Timeline]:
        """The launches that are still fed, in order."""
        return [reader.timeline() for reader in self._readers.values()]

    def chosen(self) -> Timeline:
        """The launch asked for, else the newest that ended, else the newest. Raises UnusableInput without one."""
        if self._wanted:
            chosen = [reader for name, reader in self._readers.items() if self._is_wanted(name)]
            if not chosen:
                raise UnusableInput(f"no entry of invocation {self._wanted} in the file; --all lists the launches")
            if len(chosen) > 1:
                raise UnusableInput(f"several launches begin with {self._wanted}: give more of the id")
            return chosen[0].timeline()
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
    return reader.chosen()


def read_launches(entries: Iterable[JournalEntry], unit: str = "") -> Iterator[Timeline]:
    """Every launch, each as soon as nothing more is read of it, in the order in which they began."""
    reader = LaunchReader(unit=unit)
    for entry in entries:
        if told := reader.feed(entry):
            yield told
    yield from reader.rest()
