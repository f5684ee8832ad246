"""An event loop whose time moves only when nothing else is to be done, and then at once."""

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.SelectSelector):
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.loop.elapsed += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`elapsed` is seconds since it was made."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.elapsed

    def run_for(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))
