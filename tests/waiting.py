"""Waiting for a condition with a deadline: the only way in which tests let time pass."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Between two looks. Short, because most conditions come true within tens of milliseconds.
LOOK_EVERY_S = 0.02
# So many times as long as a look took: many start a process on a host, and waiting shall not be what keeps it busy.
REST = 3
# Deadlines are those of an idle machine. They only end what would never come, so a busy machine may take its time.
PATIENCE = 3.0


def wait_until(condition: Callable[[], T], deadline_s: float, what: str) -> T:
    """Looks until `condition()` is true and returns what it returned.

    Raises AssertionError, which names `what` and the last value seen, after `deadline_s` seconds times PATIENCE.
    """
    end = time.monotonic() + deadline_s * PATIENCE
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"waited {deadline_s * PATIENCE:g} s in vain: {what} (last seen: {value!r})")
        time.sleep(max(LOOK_EVERY_S, REST * (time.monotonic() - began)))
