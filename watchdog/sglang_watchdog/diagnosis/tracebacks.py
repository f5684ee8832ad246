"""Puts tracebacks together again, process by process: a fold over log lines, with a bounded memory.

Only the first line of a traceback carries a log prefix, and lines of several processes interleave. Frames also come
without a header (a log that begins in the middle); they are kept for the lines that follow them.
"""

import re
from collections import deque
from dataclasses import dataclass, field

from sglang_watchdog.diagnosis.lines import Line

HEADER = "Traceback (most recent call last):"
_FATAL_HEADERS = ("hit an exception", "warmup error", "Exception in ModelTpServer", "Exception in DetokenizerManager")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]+)",(?: line \d+,?)? in (?P<name>\S+)')
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|[a-z]\w*(?:Error|Exception))(?:: |:?$)")
_PACKAGES = re.compile(r".*/(?:sglang/srt|sglang|(?:site|dist)-packages)/(?=.)")
_MOST_FRAMES = 40
_STALE_AFTER = 3  # lines that are no frames, outside a traceback


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception at the end of a traceback. `cause` is the one before it in a chain.

    `frames` are `path:function`, outermost first, paths within their package. `fatal`: SGLang ends after such a header.
    """

    order: int
    time: float
    header: str
    text: str
    frames: tuple[str, ...]
    rank: str
    fatal: bool
    cause: "Raised | None" = None

    @property
    def root(self) -> "Raised":
        return self.cause.root if self.cause else self


@dataclass(slots=True)
class ProcessLog:
    """The state of one process's output."""

    pid: int | None = None
    rank: str = ""
    benign: bool = False  # the open traceback is part of a good start
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    _header: str | None = None
    _expects: bool = False  # frames of the open traceback are still coming
    _chained: bool = False
    _last: Raised | None = None
    _before: str = ""  # the last line outside a traceback
    _before_benign: bool = False
    _stale: int = 0

    @property
    def in_traceback(self) -> bool:
        return self._header is not None

    def shows_source(self, text: str) -> bool:
        """Whether the line is one of code below a frame: the error that it would raise is not yet the one raised."""
        return self._header is not None and self._expects and text.lstrip().startswith(("raise ", "assert "))

    def feed(self, line: Line, order: int, time: float, *, benign: bool) -> Raised | None:
        """The exception, when its line comes. `benign`: the line belongs to a good start."""
        if line.prefixed:
            self._close()
            self.rank = line.rank
        if HEADER in line.text:
            self._open(line.text, benign)
        elif line.text.startswith(_CHAINED):
            self._chained = True
        elif line.text[:1] in (" ", "\t") or line.text.startswith('File "'):
            self._frame(line.text)
        elif self._header is None:
            self._outside(line.text, benign)
        elif self._expects and _EXCEPTION.match(line.text):
            return self._raised(line.text, order, time)
        return None

    def _open(self, text: str, benign: bool) -> None:
        if not (self._chained and self._header is not None):
            own = text.partition(HEADER)[0].strip()
            self._header = own or self._before
            self.benign = benign or (self._before_benign and not own)  # a header of its own has nothing to do with it
            self._last = None
        self._expects, self._chained = True, False
        self.frames.clear()

    def _frame(self, text: str) -> None:
        found = _FRAME.match(text)
        if found:
            self.frames.append(f"{_PACKAGES.sub('', found['path'])}:{found['name']}")
            self._stale = 0

    def _outside(self, text: str, benign: bool) -> None:
        self._before, self._before_benign = text[:200], benign
        self._stale += 1
        if self._stale > _STALE_AFTER:
            self.frames.clear()

    def _raised(self, text: str, order: int, time: float) -> Raised:
        assert self._header is not None
        fatal = any(words in self._header for words in _FATAL_HEADERS)
        frames = tuple(self.frames)
        self._last = Raised(order, time, self._header, text[:2000], frames, self.rank, fatal, self._last)
        self._expects = False
        return self._last

    def _close(self) -> None:
        self._header, self._last = None, None
        self._expects = self._chained = self.benign = False
        self.frames.clear()
