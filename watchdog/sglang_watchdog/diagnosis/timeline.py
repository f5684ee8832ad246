"""One launch as a typed timeline, made from its journal entries as they come. Decides nothing.

The reader keeps a bounded amount whatever the launch prints: a server logs for weeks, and the daemon feeds it live.
Lines that a serving launch repeats are told apart by how they begin, before anything else is looked at.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sglang_watchdog.diagnosis import manager
from sglang_watchdog.diagnosis.lines import Line, parse_line
from sglang_watchdog.diagnosis.manager import Said, Word
from sglang_watchdog.diagnosis.progress import BEGINNINGS, Progress, Worker
from sglang_watchdog.diagnosis.server_args import PREFIX as SERVER_ARGS
from sglang_watchdog.diagnosis.server_args import parse_server_args
from sglang_watchdog.diagnosis.signatures import Catalog, Meaning, Needles, ReleaseRange, Signature, catalog
from sglang_watchdog.diagnosis.structured import read_structured
from sglang_watchdog.diagnosis.tracebacks import ProcessLog, Raised
from sglang_watchdog.domain.evidence import Source
from sglang_watchdog.domain.journal import JournalEntry, MessageId
from sglang_watchdog.domain.launch import MemoryFigures, Phase, PhaseMark

_MOST_HITS = 8  # of each signature
_MOST_RAISED = 24
_LONG_AGO = 300.0  # seconds after which a line gives way to newer ones of its kind
_MOST_SAID = 64
_MOST_PROCESSES = 512
_MOST_TEXT = 2000
_FAR, _BEFORE = 300, 100  # characters: of a line that tells something far behind its beginning, that part is kept
_OOMD_KILL = MessageId.OOMD_KILL.value
_KERNEL_LATE = 2.0  # seconds by which a line of the kernel may be logged after the end that it is about
Matches = list[tuple[Signature, re.Match[str]]]


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that matched a signature, with where the launch stood. `order` counts lines of every source."""

    signature: Signature
    order: int
    time: float
    text: str
    phase: Phase = Phase.UNKNOWN
    worker: Worker = Worker.TARGET
    rank: str = ""
    pid: int | None = None
    frames: tuple[str, ...] = ()
    at: int = 0  # where in `text` the signature begins to match
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def means(self) -> Meaning:
        return self.signature.means


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a traceback, with where its rank stood. `recognised`: a signature matched in it."""

    raised: Raised
    phase: Phase
    worker: Worker
    recognised: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Requests in flight while the server drained, as it counted them itself."""

    first: int
    last: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """One decode line. Tokens per second are of the whole batch; `accept_len` is mean tokens per verify step."""

    running: int
    tokens: int | None
    queued: int
    rate: float | None
    accept_len: float | None
    accept_rate: float | None
    time: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one launch's entries say."""

    unit: str = ""
    invocation: str = ""
    began: float = 0.0
    last: float = 0.0
    lines: int = 0
    own_lines: int = 0  # of the launch's own processes
    complete: bool = False  # from the manager's word that it started
    ended: bool = False
    phases: tuple[PhaseMark, ...] = ()
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    server_args: Mapping[str, object] = field(default_factory=dict)
    drafts: bool = False
    releases: ReleaseRange = field(default_factory=ReleaseRange)
    hits: tuple[Hit, ...] = ()
    failures: tuple[Failure, ...] = ()
    said: tuple[Said, ...] = ()
    drain: Drain | None = None
    decoding: Decoding | None = None  # the last decode line
    decoding_at_stop: Decoding | None = None
    verifying: Decoding | None = None  # the last decode line that tells drafts accepted
    alive: float = 0.0  # the last sign of generation
    alive_by_rank: Mapping[str, float] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()
    lost_fields: int = 0  # messages that journalctl gave as null
    suppressed: bool = False  # journald dropped lines
    kernel_seen: bool = False

    @property
    def phase(self) -> Phase:
        return self.phases[-1].phase if self.phases else Phase.UNKNOWN

    @property
    def tells_of_sglang(self) -> bool:
        """Whether anything in it is of a server, and not of some other service."""
        return bool(self.phases or self.server_args or any(hit.signature.source is Source.SGLANG for hit in self.hits))

    def reached(self, phase: Phase) -> bool:
        return any(mark.phase is phase for mark in self.phases)

    def first(self, *meanings: Meaning) -> Hit | None:
        return next((hit for hit in self.hits if hit.means in meanings), None)

    def word(self, *words: Word) -> Said | None:
        return next((said for said in self.said if said.word in words), None)


class TimelineReader:
    """Feed it the entries of one launch, of the manager about it and of the kernel, in order.

    Entries of another invocation are left out. Without an invocation the first one seen is taken.
    """

    def __init__(self, unit: str = "", invocation: str = "", signatures: Catalog | None = None) -> None:
        chosen = signatures or catalog()
        self._own = chosen.of(Source.SGLANG)
        self._kernel = chosen.of(Source.KERNEL)
        self._marks = Needles((mark.needle, mark) for mark in chosen.marks)
        self._unit = unit
        self._invocation = invocation
        self._lines = self._own_lines = 0
        self._began = self._last = self._alive = self._ended_at = 0.0
        self._complete = self._ended = self._over = False
        self._progress = Progress()
        self._server_args: dict[str, object] = {}
        self._releases = ReleaseRange()
        self._hits: dict[str, list[Hit]] = {}
        self._failures: list[Failure] = []
        self._said: list[Said] = []
        self._processes: dict[int | None, ProcessLog] = {}
        self._drains: list[tuple[float, int]] = []
        self._decoded = self._decoded_at_stop = self._verified = ("", 0.0)
        self._alive_by_rank: dict[str, float] = {}
        self._pids: set[int] = set()
        self._lost = 0
        self._own_began = self._spoke = self._prefilled = 0.0
        self._suppressed = self._kernel_seen = False

    @property
    def phase(self) -> Phase:
        """How far the launch has come by now."""
        return self._progress.phase

    @property
    def tells_of_sglang(self) -> bool:
        """Whether anything so far is of a server, and not of some other service."""
        own = (kept[0].signature.source is Source.SGLANG for kept in self._hits.values())
        return bool(self._progress.marks or self._server_args) or any(own)

    @property
    def decoded_at(self) -> float:
        """When a decode batch was last logged (Unix seconds), 0 for never."""
        return self._decoded[1]

    @property
    def prefilled_at(self) -> float:
        """When a prefill batch was last logged that is larger than a probe or a health check (Unix seconds), or 0."""
        return self._prefilled

    @property
    def spoke_at(self) -> float:
        """When the server last said anything but an answer to a client (Unix seconds), or 0."""
        return self._spoke

    @property
    def server_args(self) -> Mapping[str, object]:
        """The effective settings, empty until they are printed."""
        return self._server_args

    def feed(self, entry: JournalEntry) -> None:
        """Takes one entry in. Entries of a later start of the same unit are left out."""
        if self._over:
            return
        # What a process of the launch printed, which is nearly everything, is asked nothing more.
        printed = entry.transport == "stdout" and entry.invocation == self._invocation and self._unit
        from_kernel = not printed and entry.from_kernel
        if not printed and (self._is_another_time(entry) if from_kernel else not self._concerns(entry)):
            return
        self._last = entry.time or self._last
        self._began = self._began or entry.time
        if entry.message is None:
            self._lost += 1
        elif printed:
            self._own_entry(entry, entry.message)
        elif from_kernel:
            self._kernel_seen = True
            self._lines += 1
            self._match(self._kernel.matches(entry.message), Line(entry.message), entry.time)
        elif entry.from_manager or entry.message_id == _OOMD_KILL:
            self._lines += 1
            self._manager(entry)
        else:
            self._own_entry(entry, entry.message)

    def _concerns(self, entry: JournalEntry) -> bool:
        """Of an entry that is not the kernel's."""
        if entry.message_id == _OOMD_KILL:
            return bool(self._unit and self._unit in (entry.message or ""))
        if entry.identifier == "systemd-journald":
            self._suppressed = self._suppressed or bool(self._unit and f"from {self._unit}" in (entry.message or ""))
            return False
        if entry.invocation and not self._invocation:
            self._invocation = entry.invocation
        self._unit = self._unit or entry.unit
        return not entry.invocation or entry.invocation == self._invocation

    def _is_another_time(self, entry: JournalEntry) -> bool:
        """The kernel's lines carry no launch: those after its end are about what ran later."""
        return self._ended and entry.time > self._ended_at + _KERNEL_LATE

    def _forget_before(self, began: float) -> None:
        """The launch begins: what the kernel, or oomd, said before was about others. What an earlier one left behind is
        found by this start, before systemd says that it is made."""
        self._began = began
        later = {name: [hit for hit in kept if hit.time >= began] for name, kept in self._hits.items()}
        self._hits = {name: kept for name, kept in later.items() if kept}
        self._said = [said for said in self._said if said.time >= began or said.word is Word.LEFT_OVER]

    def _manager(self, entry: JournalEntry) -> None:
        said = manager.read(entry, self._lines)
        if said is None:
            return
        if self._ended and said.word in (Word.STARTING, Word.STARTED):
            self._over = True
            return
        if said.word in _FIRST_WORDS and not self._complete:
            # A process that cannot be executed may say so before systemd says that it was started.
            self._complete = said.word is not Word.RESOURCES and not self._own_lines
            self._forget_before(min(entry.time, self._own_began) if self._own_lines else entry.time)
        if said.word in (Word.MAIN_EXIT, Word.FAILED, Word.SUCCEEDED):
            self._ended, self._ended_at = True, entry.time
        if said.word is Word.STOPPING:
            self._stop_begins(entry.time)
        self._keep_said(said)

    def _keep_said(self, said: Said) -> None:
        if self._said and self._said[-1].word is said.word is Word.KILLING:
            self._said[-1] = replace(self._said[-1], count=self._said[-1].count + 1)
        elif len(self._said) < _MOST_SAID:
            self._said.append(said)

    def _stop_begins(self, time: float) -> None:
        if not self._decoded_at_stop[0]:
            self._decoded_at_stop = self._decoded
        self._progress.stopping(time)

    def _own_entry(self, entry: JournalEntry, message: str) -> None:
        self._own_began = self._own_began or entry.time
        if entry.pid and len(self._pids) < _MOST_PROCESSES:
            self._pids.add(entry.pid)
        if message.startswith("{") and (structured := read_structured(message)):
            message = structured.text
        for text in message.split("\n") if "\n" in message else (message,):
            self._lines += 1
            self._own_lines += 1
            self._own_line(parse_line(text), entry)

    def _own_line(self, line: Line, entry: JournalEntry) -> None:
        text = line.text
        if text.startswith(("Decode batch", "Prefill batch")):
            self._serving(text, line.rank, entry.time)
        elif text.startswith("INFO:     ") and '" 200' in text:
            self._answered(text, entry.time)
        elif text.startswith(_REQUEST_LOG):
            self._process(entry.pid).feed(line, self._lines, entry.time, benign=True)
            self._spoke = entry.time
        else:
            self._telling(line, entry)

    def _serving(self, text: str, rank: str, time: float) -> None:
        self._alive = self._spoke = time
        if rank in self._alive_by_rank or len(self._alive_by_rank) < _MOST_PROCESSES:
            self._alive_by_rank[rank] = time
        self._progress.served(rank, time)
        if text.startswith("Decode"):
            self._decoded = (text, time)
            if "accept rate" in text and "accept rate: 0.00" not in text:
                self._verified = self._decoded
        elif not _is_small(text):
            self._prefilled = time

    def _answered(self, text: str, time: float) -> None:
        """What only a living scheduler answers; `/model_info` and the like come from main alone."""
        if "POST /" in text or "GET /health" in text:
            self._alive = time

    def _telling(self, line: Line, entry: JournalEntry) -> None:
        process = self._process(entry.pid)
        if line.text.startswith(BEGINNINGS):
            self._progress.feed(line.text, line.rank, entry.time)
            if line.text.startswith(SERVER_ARGS):
                self._server_args = self._server_args or parse_server_args(line.text)
        self._narrow(line.text)
        matches = [] if process.shows_source(line.text) else self._own.matches(line.text)
        benign = bool(matches) and matches[0][0].means is Meaning.BENIGN
        raised = process.feed(line, self._lines, entry.time, benign=benign)
        recognised = False
        if not benign and not process.benign:
            recognised = self._match(matches, line, entry.time, process)
        if raised and not process.benign:
            self._failed(raised, recognised)
        if line.text.startswith("Gracefully exiting"):
            self._drained(line.text, entry.time)
        if "HTTP/1." not in line.text:
            self._spoke = entry.time

    def _process(self, pid: int | None) -> ProcessLog:
        process = self._processes.get(pid)
        if process is None:
            if len(self._processes) >= _MOST_PROCESSES:
                self._processes.pop(next(iter(self._processes)))
            process = self._processes[pid] = ProcessLog(pid)
        return process

    def _narrow(self, text: str) -> None:
        for mark in self._marks.held(text):
            if mark.pattern.search(text):
                self._releases = self._releases.narrowed(mark.releases)

    def _match(self, matches: Matches, line: Line, time: float, process: ProcessLog | None = None) -> bool:
        """Keeps what matches. Whether anything did."""
        for signature, found in matches:
            self._keep(self._hit(signature, found, line, time, process))
        return bool(matches)

    def _hit(
        self, signature: Signature, found: re.Match[str], line: Line, time: float, process: ProcessLog | None
    ) -> Hit:
        begin = found.start() - _BEFORE if found.start() > _FAR else 0
        rank = line.rank or (process.rank if process and process.in_traceback else "")
        state = self._progress.at(rank)
        return Hit(
            signature=signature,
            order=self._lines,
            time=time,
            text=found.string[begin : begin + _MOST_TEXT],
            phase=self._progress.phase if self._progress.phase in _LATE else state.phase,
            worker=state.worker,
            rank=rank,
            pid=process.pid if process else None,
            frames=tuple(process.frames) if process else (),
            at=found.start() - begin,
            groups={name: value for name, value in found.groupdict().items() if value is not None},
        )

    def _keep(self, hit: Hit) -> None:
        kept = self._hits.setdefault(hit.signature.id, [])
        if len(kept) >= _MOST_HITS:
            kept.pop(0 if kept[0].time < hit.time - _LONG_AGO else -1)
        kept.append(hit)
        if hit.means in (Meaning.SIGTERM, Meaning.STOPPING):
            self._stop_begins(hit.time)

    def _failed(self, raised: Raised, recognised: bool) -> None:
        if self._failures and raised.cause and self._failures[-1].raised is raised.cause:
            recognised = self._failures.pop().recognised or recognised
        if self._failures and self._failures[0].raised.time < raised.time - _LONG_AGO:
            self._failures.pop(0)
        if len(self._failures) < _MOST_RAISED:
            state = self._progress.at(raised.rank)
            phase = self._progress.phase if self._progress.phase in _LATE else state.phase
            self._failures.append(Failure(raised, phase, state.worker, recognised))

    def _drained(self, text: str, time: float) -> None:
        found = _REMAINING.search(text)
        if found:
            self._drains[1:] = [(time, int(found[1]))]

    def timeline(self) -> Timeline:
        """The launch as read so far. The reader can be fed on."""
        hits = sorted((hit for kept in self._hits.values() for hit in kept), key=lambda hit: hit.order)
        return Timeline(
            unit=self._unit,
            invocation=self._invocation,
            began=self._began,
            last=self._last,
            lines=self._lines,
            own_lines=self._own_lines,
            complete=self._complete,
            ended=self._ended,
            phases=tuple(self._progress.marks),
            memory=self._progress.memory,
            server_args=dict(self._server_args),
            drafts=self._progress.drafts,
            releases=self._releases,
            hits=tuple(hits),
            failures=tuple(self._failures),
            said=tuple(self._said),
            drain=_drain(self._drains),
            decoding=_decoding(*self._decoded),
            decoding_at_stop=_decoding(*self._decoded_at_stop),
            verifying=_decoding(*self._verified),
            alive=self._alive,
            alive_by_rank=dict(self._alive_by_rank),
            pids=frozenset(self._pids),
            lost_fields=self._lost,
            suppressed=self._suppressed,
            kernel_seen=self._kernel_seen,
        )


_FIRST_WORDS = (Word.STARTING, Word.STARTED, Word.RESOURCES)  # the last where there was nothing to start
_LATE = (Phase.READY, Phase.SERVING, Phase.STOPPING)
_REQUEST_LOG = ("Receive: obj=", "Finish: obj=")  # whole prompts, which are long and evidence of nothing
_REMAINING = re.compile(r"[Rr]emaining number of requests (\d{1,18})")
_RUNNING = re.compile(r"#running-req: (\d{1,18})")
_PREFILL = re.compile(r"#new-seq: (\d{1,18}), #new-token: (\d{1,18})")
_SMALL_PREFILL = 256  # tokens: those of one probe or health check, also where they are counted in whole pages
_QUEUED = re.compile(r"#queue-req: (\d{1,18})")
_TOKENS = re.compile(r"#(?:full )?token: (\d{1,18})")
_RATE = re.compile(r"gen throughput \(token/s\): (\d{1,18}(?:\.\d+)?)")
_ACCEPT_LEN = re.compile(r"(?<!block )accept len: (\d{1,18}(?:\.\d+)?)")
_ACCEPT_RATE = re.compile(r"accept rate: (\d{1,18}(?:\.\d+)?)")


def _drain(lines: list[tuple[float, int]]) -> Drain | None:
    return Drain(lines[0][1], lines[-1][1], lines[-1][0] - lines[0][0]) if lines else None


def _is_small(text: str) -> bool:
    """A prefill that may be of a request that only asks whether the server lives."""
    found = _PREFILL.search(text)
    return found is not None and found[1] == "1" and int(found[2]) <= _SMALL_PREFILL


def _decoding(text: str, time: float) -> Decoding | None:
    if not text:
        return None

    def number(pattern: re.Pattern[str]) -> float | None:
        found = pattern.search(text)
        return float(found[1]) if found else None

    tokens = number(_TOKENS)
    return Decoding(
        running=int(number(_RUNNING) or 0),
        tokens=None if tokens is None else int(tokens),
        queued=int(number(_QUEUED) or 0),
        rate=number(_RATE),
        accept_len=number(_ACCEPT_LEN),
        accept_rate=number(_ACCEPT_RATE),
        time=time,
    )
