"""Puts what the operator does, what systemd and the cards show, and what the watchdog says into one order.

Three sources run at their own pace, and the journal is half a second behind: so a row waits a moment before it goes
out, and rows go out by the time at which they happened.
"""

import heapq
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from demo.story import Line
from lab.host import CHECKOUT
from lab_product.installed import CARDS, InferenceHost, SeenAlert
from sglang_watchdog.reporting.alerts import AlertId

SETTLE_S = 0.8
PULSE_S = 0.1
GIB = 1 << 30
# systemd's own words that a person would look for; the rest of its talk only repeats the state.
TELLING = ("timed out", "Scheduled restart job", "Found left-over process")


class Voice(StrEnum):
    """Who a row is from."""

    CHAPTER = "chapter"
    COMMAND = "command"
    OPERATOR = "operator"
    SYSTEMD = "systemd"
    STATE = "state"
    DIAGNOSIS = "diagnosis"
    ACTION = "action"
    NOTE = "note"


DIAGNOSES = frozenset({AlertId.LAUNCH_ENDED, AlertId.STALE_DEFINITION, AlertId.DEGRADED_START})
ACTIONS = frozenset({AlertId.ACTION, AlertId.INCIDENT_CLOSED, AlertId.HOLDING})


@dataclass(frozen=True)
class Glance:
    """What systemd and the cards show at one moment."""

    state: str = "inactive/dead"
    result: str = "success"
    gpu_bytes: int = 0

    @property
    def words(self) -> str:
        """ActiveState/SubState, and Result where it says something."""
        return self.state if self.result == "success" else f"{self.state} {self.result}"

    @property
    def gpu(self) -> str:
        return f"{self.gpu_bytes / GIB:.1f} GiB"


@dataclass(frozen=True)
class Row:
    """One line of the timeline; `seconds` since its start."""

    seconds: float
    voice: Voice
    text: str
    glance: Glance


@dataclass
class Timeline:
    """`show` gets each row in order, from one thread."""

    inference: InferenceHost
    show: Callable[[Row], None]
    began: float = field(default_factory=time.time)
    now: Glance = Glance()
    _waiting: list[tuple[float, int, Voice, str, Glance | None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: "itertools.count[int]" = field(default_factory=itertools.count)
    _entries_seen: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _shown: Glance = Glance()

    @contextmanager
    def running(self) -> Iterator["Timeline"]:
        """Follows the host while the block runs; what was still waiting goes out at its end."""
        command = (sys.executable, "-m", "demo.observer", self.inference.unit)
        environment = {"PYTHONPATH": str(CHECKOUT / "tests"), "SIM_NVML_DIR": str(CARDS)}
        with self.inference.host.popen(*command, env=environment, stdout=subprocess.PIPE) as observer:
            threads = [threading.Thread(target=self._observe, args=(observer,), daemon=True)]
            threads.append(threading.Thread(target=self._pulse, daemon=True))
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                self._over.wait(SETTLE_S)
                self._over.set()
                observer.kill()
                for thread in threads:
                    thread.join()

    def say(self, line: Line, text: str) -> None:
        """What the operator does or believes, as it happens."""
        self._add(time.time(), Voice(line.value), text)

    def _add(self, at: float, voice: Voice, text: str, glance: Glance | None = None) -> None:
        with self._lock:
            heapq.heappush(self._waiting, (at, next(self._count), voice, text, glance))

    def _observe(self, observer: "subprocess.Popen[str]") -> None:
        assert observer.stdout is not None
        for line in observer.stdout:
            seen = json.loads(line)
            self.now = Glance(f"{seen['active']}/{seen['sub']}", seen["result"], seen["gpu_bytes"])
            self._add(seen["time"], Voice.STATE, "", self.now)

    def _pulse(self) -> None:
        while not self._over.wait(PULSE_S):
            self._take_entries()
            self._send_out(time.time() - SETTLE_S)
        self._take_entries()
        self._send_out(time.time())

    def _take_entries(self) -> None:
        entries = self.inference.followed.entries[self._entries_seen :]
        self._entries_seen += len(entries)
        for entry in entries:
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if "SGLANG_WATCHDOG_UNIT" in entry:
            alert = SeenAlert.of(entry)
            self._add(alert.time, _voice(alert), alert.message.removeprefix(f"{self.inference.unit}: "))
        elif entry["_PID"] == "1" and any(word in str(entry["MESSAGE"]) for word in TELLING):
            text = str(entry["MESSAGE"]).removeprefix(f"{self.inference.unit}: ")
            self._add(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, Voice.SYSTEMD, text)

    def _send_out(self, until: float) -> None:
        while self._waiting and self._waiting[0][0] <= until:
            with self._lock:
                at, _, voice, text, glance = heapq.heappop(self._waiting)
            if glance is not None:
                self._glance(at, glance)
            else:
                self.show(Row(at - self.began, voice, text, self._shown))

    def _glance(self, at: float, glance: Glance) -> None:
        """Bytes alone make no row: while weights load they change ten times a second."""
        changed = glance.words != self._shown.words
        self._shown = glance
        if changed:
            self.show(Row(at - self.began, Voice.STATE, "", glance))


def _voice(alert: SeenAlert) -> Voice:
    if alert.message_id in DIAGNOSES:
        return Voice.DIAGNOSIS
    return Voice.ACTION if alert.message_id in ACTIONS else Voice.NOTE
