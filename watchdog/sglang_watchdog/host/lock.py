"""One watchdog for one state directory: the daemon, or `hand-back` in its place, never both."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_watchdog.domain.errors import WatchdogError


class AlreadyRuns(WatchdogError):
    """Another process watches by the same ledger."""


@contextlib.contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Holds a lock on the folder itself (flock(2)), which needs no write access and ends with the process, however it
    ends. Raises `AlreadyRuns`. A folder that cannot be opened is left to the ledger, which tells of it."""
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        _take(folder, state_dir)
        yield
    finally:
        os.close(folder)


def _take(folder: int, state_dir: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AlreadyRuns(f"another sglang-watchdog works with {state_dir}: two never act on one unit") from error
