"""The main process's view of the engine: requests on their way, what came back, and whether all is well.

Owns the pipe to scheduler 0 and the thread that reads what the detokenizer hands on. HTTP is web.py's business, the
process's life launcher.py's.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

from sim_sglang.flags import ServerArgs
from sim_sglang.logs import Log
from sim_sglang.messages import Abort, AskInfo, Info, Kind, Output, Request, Stats
from sim_sglang.settings import Settings

HEALTH_WINDOW_S = 20.0


class Status(Enum):
    """What the health endpoint goes by."""

    STARTING = auto()
    UP = auto()
    UNHEALTHY = auto()


@dataclass
class Stream:
    """One request of the server, as its HTTP handler sees it."""

    rid: str
    kind: Kind
    prompt_tokens: int
    arrived: queue.SimpleQueue[tuple[int, bool]] = field(default_factory=queue.SimpleQueue)

    def next(self, timeout_s: float) -> tuple[int, bool] | None:
        """New tokens and whether they were the last; None if nothing came in time."""
        try:
            return self.arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Engine:
    """Requests by id, between HTTP threads and scheduler 0."""

    def __init__(self, args: ServerArgs, info: dict[str, Any], to_scheduler: Connection, settings: Settings) -> None:
        self.args, self.info, self.settings = args, info, settings
        self.status = Status.STARTING
        self.draining = False
        self.answering: set[str] = set()
        self.stats = Stats()
        self.on_first_request: Callable[[], None] = lambda: None
        self._to_scheduler = to_scheduler
        self._streams: dict[str, Stream] = {}
        self._answers: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._last_output = time.monotonic()

    def listen(self, source: Connection) -> None:
        """Read what the detokenizer hands on, in a thread of its own, for as long as there is one."""
        threading.Thread(target=self._read, args=(source,), daemon=True).start()

    def remaining(self) -> list[str]:
        """Ids of clients' requests that are not done, and of those whose answer is still being written: looks at them
        are so close together here that an answer could be cut off, as the real server's, five seconds apart, are not.
        """
        with self._lock:
            running = [one.rid for one in self._streams.values() if one.kind is not Kind.HEALTH]
        return [*running, *(self.answering.copy() - set(running))]

    def submit(self, kind: Kind, prompt_tokens: int, max_tokens: int) -> Stream:
        if kind is not Kind.HEALTH:
            self.on_first_request()
        stream = Stream(uuid.uuid4().hex, kind, prompt_tokens)
        with self._lock:
            self._streams[stream.rid] = stream
        self._send(Request(stream.rid, kind, prompt_tokens, max(1, max_tokens)))
        return stream

    def abandon(self, stream: Stream) -> None:
        """The client is gone, or nobody waits for this any more."""
        with self._lock:
            known = self._streams.pop(stream.rid, None)
        if known:
            self._send(Abort(stream.rid))

    def healthy(self, log: Log) -> bool:
        """As the health endpoint does: any output within the window will do, so a busy server is not disturbed."""
        asked = time.monotonic()
        stream = self.submit(Kind.HEALTH, 1, 1)
        end = asked + HEALTH_WINDOW_S * self.settings.time_scale
        while time.monotonic() < end:
            if stream.next(0.01) or self._last_output > asked:
                self.status = Status.UP
                return True
        self.abandon(stream)
        self.status = Status.UNHEALTHY
        tic, beat = (time.strftime("%H:%M:%S", time.localtime(time.time() - (end - at))) for at in (asked, asked))
        log.say(
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
            f" tic start time: {tic}. last_heartbeat time: {beat}"
        )
        return False

    def internal_state(self) -> dict[str, Any]:
        """Scheduler 0's own account; waits for ever if there is none, as the real one does."""
        rid = uuid.uuid4().hex
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._answers[rid] = answer
        self._send(AskInfo(rid))
        return answer.get()

    def _send(self, message: Request | Abort | AskInfo) -> None:
        # A dead scheduler does not answer; the real main process notices no more than this.
        with self._lock, suppress(BrokenPipeError, ConnectionResetError):
            self._to_scheduler.send(message)

    def _read(self, source: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                match source.recv():
                    case Output(tokens, stats):
                        self._hand_out(tokens, stats)
                    case Info(rid, state, stats):
                        self.stats = stats
                        self._answers.pop(rid).put(state)

    def _hand_out(self, tokens: list[tuple[str, int, bool]], stats: Stats) -> None:
        self._last_output = time.monotonic()
        self.stats = stats
        for rid, new, done in tokens:
            with self._lock:
                stream = self._streams.pop(rid, None) if done else self._streams.get(rid)
            if stream:
                stream.arrived.put((new, done))
