"""A pause of one unit: until it is over nothing of the unit is touched, and all of it is reported as before.

It is in the ledger, so that it outlives the daemon, and it always ends: by `resume`, or at its time. After a ledger was
found broken all units are paused, without a time.
"""

import asyncio
from datetime import UTC, datetime

from sglang_watchdog import broken_ledger
from sglang_watchdog.host.clock import Clock
from sglang_watchdog.ledger import Ledger


class Pausing:
    """Of one unit. Times are Unix seconds. In one daemon a pause is as long as was asked for, whatever is done to the
    clock meanwhile; over a restart of the daemon it can only go by the clock, and is never longer."""

    def __init__(self, unit: str, ledger: Ledger, clock: Clock) -> None:
        self._unit = unit
        self._ledger = ledger
        self._clock = clock
        span, now = ledger.pause(unit), clock.now()
        self._since = span[0] if span is not None else None
        self._ends = clock.monotonic() + min(span[1] - now, span[1] - span[0]) if span is not None else 0.0
        self.begun = asyncio.Event()  # set while a pause lasts: a step that is under way is given up then
        if self._lasts:
            self.begun.set()

    @property
    def active(self) -> bool:
        return bool(self._ledger.unacknowledged) or self._lasts

    @property
    def _lasts(self) -> bool:
        return self._since is not None and self._clock.monotonic() < self._ends

    @property
    def over(self) -> bool:
        """It has come to its time and was not ended yet."""
        return self._since is not None and not self.active

    @property
    def left(self) -> float | None:
        """Seconds to its time; None where there is no pause, or none that ends by itself."""
        if self._since is None or (self.active and not self._lasts):
            return None
        return max(0.0, self._ends - self._clock.monotonic())

    @property
    def until(self) -> float | None:
        return self._clock.now() + self._ends - self._clock.monotonic() if self._lasts else None

    def begin(self, seconds: float) -> None:
        now = self._clock.now()
        self._since = now if self._since is None else self._since
        self._ends = self._clock.monotonic() + seconds
        self._ledger.save_pause(self._unit, self._since, now + seconds)
        self.begun.set()

    def end(self) -> float | None:
        """Returns since when it was, 0 where the ledger cannot tell; None where there was none."""
        since, self._since = self._since, None
        self.begun.clear()
        if self._ledger.unacknowledged:
            self._ledger.acknowledge()
            since = 0.0
        if since is not None:
            self._ledger.end_pause(self._unit)
        return since

    def in_words(self) -> str:
        """`paused until …`; empty where it is not."""
        paused = f"paused until {in_words(self.until)}" if self.until is not None else ""
        return paused or broken_ledger.in_words(self._ledger)


def in_words(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
