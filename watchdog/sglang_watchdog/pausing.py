"""A pause of one unit: until it is over nothing of the unit is touched, and all of it is reported as before.

It is in the ledger, so that it outlives the daemon, and it always ends: by `resume`, or at its time.
"""

import asyncio
from datetime import UTC, datetime

from sglang_watchdog.host.clock import Clock
from sglang_watchdog.ledger import Ledger


class Pausing:
    """Of one unit. Times are Unix seconds."""

    def __init__(self, unit: str, ledger: Ledger, clock: Clock) -> None:
        self._unit = unit
        self._ledger = ledger
        self._clock = clock
        self._span = ledger.pause(unit)
        self.begun = asyncio.Event()  # set while a pause lasts: a step that is under way is given up then
        if self.active:
            self.begun.set()

    @property
    def active(self) -> bool:
        return self._span is not None and self._clock.now() < self._span[1]

    @property
    def over(self) -> bool:
        """It has come to its time and was not ended yet."""
        return self._span is not None and not self.active

    @property
    def left(self) -> float | None:
        """Seconds to its time; None where there is no pause."""
        return None if self._span is None else max(0.0, self._span[1] - self._clock.now())

    @property
    def until(self) -> float | None:
        return self._span[1] if self._span is not None and self.active else None

    def begin(self, seconds: float) -> None:
        now = self._clock.now()
        since = self._span[0] if self._span is not None else now
        self._ledger.save_pause(self._unit, since, now + seconds)
        self._span = since, now + seconds
        self.begun.set()

    def end(self) -> float | None:
        """Returns since when it was; None where there was none."""
        span, self._span = self._span, None
        self.begun.clear()
        if span is None:
            return None
        self._ledger.end_pause(self._unit)
        return span[0]

    def in_words(self) -> str:
        """`paused until …`; empty where it is not."""
        return f"paused until {in_words(self._span[1])}" if self._span is not None and self.active else ""


def in_words(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
