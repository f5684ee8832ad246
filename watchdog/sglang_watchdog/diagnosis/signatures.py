"""Signatures: wordings that mean something, as data (the files of `wordings/`), tested by their samples.

A new wording of a known meaning is a new entry there and needs no code (docs/signatures.md). What a meaning makes of a
launch is decided elsewhere, from the phase and the frames in which it was seen.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import itemgetter
from typing import Generic, TypeVar

from sglang_watchdog.domain.evidence import Source


class Meaning(StrEnum):
    """What a wording says, whatever the phase."""

    KV_UNSIZABLE = "kv_unsizable"  # the KV or state pool cannot be sized
    KV_EXHAUSTED = "kv_exhausted"  # the pool ran out fatally while serving
    CUDA_OOM = "cuda_oom"
    UNBALANCED = "unbalanced"  # SGLang's check of free memory over the ranks
    HOLDER = "holder"  # a list of who holds GPU memory: `pid`, `mib`
    HELD = "held"  # somebody says that GPU memory is held
    WEIGHTS_UNFIT = "weights_unfit"  # an engine says that the weights' buffer cannot be allocated
    HOST_ALLOCATION = "host_allocation"  # host memory refused, nothing killed
    DRIVER_NO_MEMORY = "driver_no_memory"  # the driver cannot allocate (unified memory)
    HOST_KILL = "host_kill"  # the kernel's global OOM killer
    CGROUP_KILL = "cgroup_kill"
    KILL_CONTEXT = "kill_context"  # the kernel names the control group of the process that it kills next
    CGROUP_COUNTER = "cgroup_counter"  # memory.events' oom_kill moved
    OOM_KILLED = "oom_killed"  # a supervisor says that the kernel killed in the process's memory group
    MEMORY_MONITOR = "memory_monitor"  # a watcher of the host's memory ended the process
    NO_SPACE = "no_space"
    HARDWARE = "hardware"
    XID = "xid"  # the code decides
    CUDA_FAULT = "cuda_fault"
    NCCL_FAULT = "nccl_fault"
    NATIVE_CRASH = "native_crash"
    ABORTED = "aborted"  # a process gave itself up, mostly because of what it said before
    HANG = "hang"  # SGLang's own watchdog fired
    NO_PROGRESS = "no_progress"
    PROBER_KILL = "prober_kill"
    BAD_ARGUMENT = "bad_argument"
    DRAFT_MISSING = "draft_missing"  # speculation asked for without its draft model
    MISSING = "missing"
    PORT = "port"
    SOFTWARE = "software"
    EVICTED = "evicted"
    OTHER_RANK = "other_rank"  # says that the cause is in another rank's log
    NAME_TAKEN = "name_taken"  # a container of the unit's name is there already
    CHILD_DIED = "child_died"  # group `code`
    OWN_KILL = "own_kill"  # SGLang ends its own tree
    SIGTERM = "sigterm"
    STOP_FORCED = "stop_forced"  # another supervisor's stop took too long, and it sent SIGKILL
    STOPPING = "stopping"  # the server says that it shuts down
    ECHO = "echo"  # what the end of another process causes
    BENIGN = "benign"  # error words in a good start


@dataclass(frozen=True, slots=True)
class Release:
    """A release of SGLang, of which only the numbers count (`0.5.10.post1` is `0.5.10`)."""

    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Release | None":
        found = re.match(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", text)
        return cls(tuple(int(part or 0) for part in found.groups())) if found else None

    def __str__(self) -> str:
        return ".".join(map(str, self.numbers))


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """Releases from `since` up to and with `until`; None leaves that end open."""

    since: Release | None = None
    until: Release | None = None

    @classmethod
    def parse(cls, text: str) -> "ReleaseRange":
        """`0.5.8..0.5.18`, of which either end may be left out, or `all`. Raises ValueError for other text."""
        since, dots, until = text.partition("..")
        if text != "all" and not dots:
            raise ValueError(f"{text!r} is no range of releases")
        return cls() if text == "all" else cls(Release.parse(since), Release.parse(until))

    @property
    def known(self) -> bool:
        return self.since is not None or self.until is not None

    def narrowed(self, other: "ReleaseRange") -> "ReleaseRange":
        """What both allow. Where they exclude each other (a log of two releases) the first one stays."""
        since = max((r for r in (self.since, other.since) if r), key=lambda r: r.numbers, default=None)
        until = min((r for r in (self.until, other.until) if r), key=lambda r: r.numbers, default=None)
        if since and until and since.numbers > until.numbers:
            return self
        return ReleaseRange(since, until)

    def overlaps(self, other: "ReleaseRange") -> bool:
        begins = max(r.since.numbers if r.since else () for r in (self, other))
        ends = [r.until.numbers for r in (self, other) if r.until]
        return not ends or begins <= min(ends)

    def surely_before(self, release: str) -> bool:
        """Every release of the range is older than `release`."""
        limit = Release.parse(release)
        return bool(limit and self.until and self.until.numbers < limit.numbers)

    def surely_from(self, release: str) -> bool:
        limit = Release.parse(release)
        return bool(limit and self.since and self.since.numbers >= limit.numbers)


@dataclass(frozen=True, slots=True)
class Signature:
    """`needles` are literals of which a line must hold one before the pattern is tried: a search for a literal costs
    a fraction of a pattern's, and nearly all lines of a serving launch hold none. `confidence` is the wording's own,
    where it is less sure than its meaning; `advice` what to do about it, where that of its class is too general."""

    id: str
    means: Meaning
    source: Source
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    releases: ReleaseRange
    samples: tuple[str, ...]
    others: tuple[str, ...]
    confidence: float | None = None
    advice: str = ""

    def search(self, text: str) -> re.Match[str] | None:
        if not any(needle in text for needle in self.needles):
            return None
        return self.pattern.search(text)


@dataclass(frozen=True, slots=True)
class ReleaseMark:
    """A wording that only some releases print: tells the release of a log."""

    needle: str
    pattern: re.Pattern[str]
    releases: ReleaseRange
    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """`known` are the releases whose wordings were read: what another one prints may be any of them, or none."""

    signatures: tuple[Signature, ...]
    marks: tuple[ReleaseMark, ...]
    known: ReleaseRange

    @cache  # noqa: B019 (there is one catalog, for good): 20 ms of every launch otherwise
    def of(self, source: Source) -> "Index":
        return Index.of(signature for signature in self.signatures if signature.source is source)


T = TypeVar("T")
_KEY_LENGTH = 4
_LONGEST_BEGINNING, _LONGEST_END = 4096, 1024


class Needles(Generic[T]):
    """Finds which of many literals a text holds, at the cost of a few: each literal holds one of the keys, texts of
    four characters that many of them share, and only the literals of a key that is in the text are looked for."""

    def __init__(self, pairs: Iterable[tuple[str, T]]) -> None:
        self._by_key = tuple(_keyed([(needle, place, item) for place, (needle, item) in enumerate(pairs)]))

    def held(self, text: str) -> list[T]:
        """The items of those literals that the text holds, in order."""
        found = [
            (place, item)
            for key, literals in self._by_key
            if key in text
            for needle, place, item in literals
            if needle in text
        ]
        return [item for _, item in sorted(found, key=itemgetter(0))] if len(found) > 1 else [i for _, i in found]


def _keyed(literals: list[tuple[str, int, T]]) -> Iterator[tuple[str, list[tuple[str, int, T]]]]:
    """Each literal once, by the key that most of them share."""
    keys: dict[str, list[tuple[str, int, T]]] = {}
    for literal in literals:
        needle = literal[0]
        for key in {needle[i : i + _KEY_LENGTH] for i in range(max(1, len(needle) - _KEY_LENGTH + 1))}:
            keys.setdefault(key, []).append(literal)
    covered: set[int] = set()
    for key, sharing in sorted(keys.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        left = [literal for literal in sharing if literal[1] not in covered]
        if left:
            covered.update(place for _, place, _ in left)
            yield key, left


@dataclass(frozen=True, slots=True)
class Index:
    """Signatures by their needles, so that a line that holds none costs no pattern."""

    needles: Needles[Signature]

    @classmethod
    def of(cls, signatures: Iterable[Signature]) -> "Index":
        return cls(Needles((needle, signature) for signature in signatures for needle in signature.needles))

    def matches(self, text: str) -> list[tuple[Signature, re.Match[str]]]:
        """What matches. Where a benign wording does, that one alone: such a line is looked at no further.

        Of a long line the beginning and the end are looked at: some patterns cost the square of its length, and what a
        user wrote may stand in it."""
        if len(text) > _LONGEST_BEGINNING + _LONGEST_END:
            text = f"{text[:_LONGEST_BEGINNING]} … {text[-_LONGEST_END:]}"
        held = {signature.id: signature for signature in self.needles.held(text)}
        found = [(signature, match) for signature in held.values() if (match := signature.pattern.search(text))]
        benign = [pair for pair in found if pair[0].means is Meaning.BENIGN]
        return benign[:1] or found


@cache
def catalog() -> Catalog:
    """The packaged catalog, read once. A mistake in it is a mistake of the package (KeyError, ValueError, re.error)."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in _files()]
    (known,) = (table["known"] for table in tables if "known" in table)
    return Catalog(
        tuple(_signature(row) for table in tables for row in table.get("signature", ())),
        tuple(_mark(row) for table in tables for row in table.get("mark", ())),
        ReleaseRange.parse(known),
    )


def _files() -> list[Traversable]:
    folder = files("sglang_watchdog.diagnosis").joinpath("wordings")
    return sorted((path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name)


def _signature(row: Mapping[str, object]) -> Signature:
    return Signature(
        id=str(row["id"]),
        means=Meaning(str(row["means"])),
        source=Source(str(row.get("source", Source.SGLANG))),
        needles=tuple(_strings(row, "needles")),
        pattern=re.compile(str(row["pattern"])),
        releases=ReleaseRange.parse(str(row["releases"])),
        samples=tuple(_strings(row, "samples")),
        others=tuple(_strings(row, "others")),
        confidence=float(str(row["confidence"])) if "confidence" in row else None,
        advice=str(row.get("advice", "")),
    )


def _mark(row: Mapping[str, object]) -> ReleaseMark:
    return ReleaseMark(
        needle=str(row["needle"]),
        pattern=re.compile(str(row["pattern"])),
        releases=ReleaseRange.parse(str(row["releases"])),
        samples=tuple(_strings(row, "samples")),
    )


def _strings(row: Mapping[str, object], key: str) -> Iterator[str]:
    values = row[key]
    assert isinstance(values, list), f"{key} of {row.get('id')} is no list"
    yield from map(str, values)
