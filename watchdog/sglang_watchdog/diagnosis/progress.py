"""How far a launch has come, and what it printed about memory, rank by rank: a fold over its log lines.

The draft worker loads, allocates and captures a second time. Through 0.5.12 it does so after the target is done, from
0.5.14 on step by step with it, so what a line is about follows from counts: of loads begun and of pools made.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sglang_watchdog.domain.launch import MemoryFigures, Phase, PhaseMark

_MOST_MARKS = 48
_MOST_RANKS = 256
_NOT_SERVING_YET = (Phase.READY, Phase.UNKNOWN)


class Worker(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


@dataclass(slots=True)
class RankProgress:
    """Counts of one rank's lines."""

    phase: Phase = Phase.UNKNOWN
    loads_begun: int = 0
    loads_ended: int = 0
    pools_made: int = 0
    capturing: str = ""

    @property
    def worker(self) -> Worker:
        match self.phase:
            case Phase.LOADING_WEIGHTS:
                draft = self.loads_begun > 1
            case Phase.ALLOCATING_KV:
                draft = self.pools_made > 0
            case Phase.CAPTURING_GRAPHS:
                draft = "draft" in self.capturing
            case Phase.STARTING:
                draft = self.loads_ended > 0
            case _:
                draft = False
        return Worker.DRAFT if draft else Worker.TARGET


_NUMBER = r"(-?\d{1,18}(?:\.\d+)?)"
_AVAILABLE = re.compile(rf"avail mem={_NUMBER} ?GB")
_USAGE = re.compile(rf"mem usage={_NUMBER} ?GB")
_KV_SIZES = re.compile(rf"(?:K|V|KV) size: {_NUMBER} ?GB")
_STATE_SIZES = re.compile(rf"(?<!_)(?:conv_state|ssm_state) size: {_NUMBER} ?GB")
_INTERMEDIATE_SIZES = re.compile(rf"intermediate_\w+ size: {_NUMBER} ?GB")
_SLOTS = re.compile(r"max_mamba_cache_size: (\d{1,18})")
_TOKENS = re.compile(r"max_total_num_tokens=(\d{1,18})")
_REQUESTS = re.compile(r"max_running_requests=(\d{1,18})")
_CAPTURE = re.compile(r"Capture (?P<what>.*?)(?:cuda|CUDA) graph (?P<end>begin|end)\b")
# Of whole graphs, and of piecewise ones, which are compiled first.
_CAPTURING_BARS = ("Capturing batches", "Capturing num tokens", "Compiling num tokens")
# Everything below is behind one of these beginnings: the reader asks for no more than them.
BEGINNINGS = (
    *("server_args=", "Init torch distributed", "Init parallel", "Load weight", "Mamba Cache is", "KV Cache is"),
    *("Memory pool end", "Capture ", "max_total_num_tokens=", "INFO:     Started server", "INFO:     Uvicorn running"),
    *("The server is fired up", "Loading safetensors", "Loading pt checkpoint", "Multi-thread loading shards"),
    *_CAPTURING_BARS,
)


@dataclass(slots=True)
class Progress:
    """Feed it the lines that begin with one of BEGINNINGS, and serving lines by `served`."""

    marks: list[PhaseMark] = field(default_factory=list)
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    ranks: dict[str, RankProgress] = field(default_factory=dict)
    last: RankProgress = field(default_factory=RankProgress)
    drafts: bool = False  # a draft worker was seen

    def at(self, rank: str) -> RankProgress:
        """A rank's own progress; for a line without a rank, of the rank that spoke last."""
        return self.ranks.get(rank) or self.last

    @property
    def phase(self) -> Phase:
        return self.marks[-1].phase if self.marks else Phase.UNKNOWN

    def feed(self, text: str, rank: str, time: float) -> None:
        state = self._state(rank)
        handler = next(handle for beginning, handle in _HANDLERS if text.startswith(beginning))
        handler(self, state, text)
        self.drafts = self.drafts or state.loads_begun > 1 or "draft" in state.capturing
        self.last = state
        self._mark(state.phase, time)

    def served(self, rank: str, time: float) -> None:
        """A prefill or decode line. Before ready it is the warm-up's."""
        phase = self.phase
        if phase in _NOT_SERVING_YET:
            self._mark(Phase.SERVING, time)
            phase = self.phase
        self._state(rank).phase = phase

    def stopping(self, time: float) -> None:
        if self.phase is not Phase.UNKNOWN:
            self._mark(Phase.STOPPING, time)

    def _state(self, rank: str) -> RankProgress:
        state = self.ranks.get(rank)
        if state is None:
            if len(self.ranks) >= _MOST_RANKS:
                return self.last
            state = self.ranks[rank] = RankProgress()
        return state

    def _mark(self, phase: Phase, time: float) -> None:
        if phase is self.phase or phase is Phase.UNKNOWN or self.phase is Phase.STOPPING:
            return
        if self.phase is Phase.SERVING and phase is not Phase.STOPPING:
            return
        if len(self.marks) >= _MOST_MARKS:
            self.marks.pop()
        self.marks.append(PhaseMark(phase, time))

    def _lowest(self, **figures: float | int | None) -> None:
        """The rank that had least decides."""
        for name, value in figures.items():
            known = getattr(self.memory, name)
            if value is not None and (known is None or value < known):
                self.memory = replace(self.memory, **{name: value})  # type: ignore[arg-type]

    def _latest(self, **figures: float | int | None) -> None:
        self.memory = replace(self.memory, **{k: v for k, v in figures.items() if v is not None})  # type: ignore[arg-type]

    def _server_args(self, state: RankProgress, _text: str) -> None:
        state.phase = Phase.STARTING

    def _load(self, state: RankProgress, text: str) -> None:
        available = _first(_AVAILABLE, text)
        if text.startswith("Load weight begin"):
            state.phase, state.loads_begun = Phase.LOADING_WEIGHTS, state.loads_begun + 1
            if state.loads_begun == 1:
                self._lowest(before_weights_gib=available)
        else:
            state.phase, state.loads_ended = Phase.ALLOCATING_KV, state.loads_ended + 1
            state.loads_begun = max(state.loads_begun, state.loads_ended)
            if state.loads_ended == 1:
                self._lowest(after_weights_gib=available)
                self._latest(weights_gib=_first(_USAGE, text))
            else:
                self._lowest(after_draft_gib=available)
                self._latest(draft_weights_gib=_first(_USAGE, text))
        self._latest(available_gib=available)

    def _states(self, state: RankProgress, text: str) -> None:
        state.phase = Phase.ALLOCATING_KV
        slots = _SLOTS.search(text)
        self._latest(
            mamba_gib=_total(_STATE_SIZES, text),
            intermediate_gib=_total(_INTERMEDIATE_SIZES, text),
            mamba_slots=int(slots[1]) if slots else None,
        )

    def _kv(self, state: RankProgress, text: str) -> None:
        state.phase = Phase.ALLOCATING_KV
        if not state.pools_made:
            self._latest(kv_cache_gib=_total(_KV_SIZES, text))

    def _pool(self, state: RankProgress, text: str) -> None:
        """With as many pools as loads there is nothing left to allocate but graphs and their buffers."""
        state.pools_made += 1
        more = state.pools_made < state.loads_ended
        state.phase = Phase.ALLOCATING_KV if more else Phase.CAPTURING_GRAPHS
        self._latest(available_gib=_first(_AVAILABLE, text))

    def _capture(self, state: RankProgress, text: str) -> None:
        found = _CAPTURE.match(text)
        if not found:
            return
        state.phase, state.capturing = Phase.CAPTURING_GRAPHS, found["what"]
        self._latest(available_gib=_first(_AVAILABLE, text))
        if found["end"] == "end":
            self._captured(state, _first(_USAGE, text) or 0.0)

    def _captured(self, state: RankProgress, used: float) -> None:
        """Graph memory is summed for one rank only, the first that captures: all take about the same."""
        if state is next((rank for rank in self.ranks.values() if rank.capturing), state):
            self._latest(graphs_gib=round((self.memory.graphs_gib or 0.0) + used, 2))

    def _sized(self, state: RankProgress, text: str) -> None:
        state.phase = Phase.WARMING_UP
        tokens, requests = _TOKENS.search(text), _REQUESTS.search(text)
        self._lowest(
            max_total_num_tokens=int(tokens[1]) if tokens else None,
            max_running_requests=int(requests[1]) if requests else None,
        )

    def _up(self, state: RankProgress, _text: str) -> None:
        state.phase = Phase.WARMING_UP

    def _loading_bar(self, state: RankProgress, _text: str) -> None:
        """A progress bar carries no rank, and tells a phase only where the line before it is not in the log."""
        if state.phase in (Phase.UNKNOWN, Phase.STARTING):
            state.phase, state.loads_begun = Phase.LOADING_WEIGHTS, 1

    def _capturing_bar(self, state: RankProgress, _text: str) -> None:
        if state.phase in (Phase.UNKNOWN, Phase.STARTING, Phase.LOADING_WEIGHTS):
            state.phase = Phase.CAPTURING_GRAPHS

    def _ready(self, state: RankProgress, _text: str) -> None:
        state.phase = Phase.READY

    def _begun(self, state: RankProgress, _text: str) -> None:
        if state.phase in (Phase.UNKNOWN, Phase.STARTING):
            state.phase = Phase.STARTING


_Handler = Callable[[Progress, RankProgress, str], None]
_HANDLERS: tuple[tuple[str, _Handler], ...] = (
    ("server_args=", Progress._server_args),
    ("Init ", Progress._begun),
    ("Load weight", Progress._load),
    ("Mamba Cache is", Progress._states),
    ("KV Cache is", Progress._kv),
    ("Memory pool end", Progress._pool),
    ("Capture ", Progress._capture),
    ("max_total_num_tokens=", Progress._sized),
    ("INFO: ", Progress._up),
    ("The server is fired up", Progress._ready),
    *((bar, Progress._capturing_bar) for bar in _CAPTURING_BARS),
    *((bar, Progress._loading_bar) for bar in ("Loading safetensors", "Loading pt checkpoint", "Multi-thread loading")),
)


def _first(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found[1]) if found else None


def _total(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.findall(text)
    return round(sum(map(float, found)), 2) if found else None
