"""The clock as a dependency, so that tests own the time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Unix seconds, monotonic seconds, and the wait between two looks."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
