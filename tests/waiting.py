"""Waiting for a condition with a deadline: the only way in which tests let time pass."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Between two looks. Short, because most conditions come true within tens of milliseconds.
LOOK_EVERY_S = 0.02
# Deadlines are those of an idle machine. They only end what would never come, so a busy machine may take its time.
PATIENCE = 3.0


def wait_until(condition: Callable[[], T], deadline_s: float, what: str, every_s: float = LOOK_EVERY_S) -> T:
    """Looks until `condition()` is true and returns what it returned. A look that costs much is taken more rarely.

    Raises AssertionError, which names `what` and the last value seen, after `deadline_s` seconds times PATIENCE.
    """
    end = time.monotonic() + deadline_s * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"waited {deadline_s * PATIENCE:g} s in vain: {what} (last seen: {value!r})")
        time.sleep(every_s)
