"""A ledger that is broken is kept aside under another name, and a new one is begun. What was proven, held and put in
force is not in that: nothing is acted on until a person has said that they know (`sglang-watchdog resume UNIT`).

Whether they have is told by the files that were kept: one whose name the new ledger does not hold is not acknowledged,
also where the watchdog was killed in between.
"""

import os
import time
from pathlib import Path

import structlog

from sglang_watchdog.domain.errors import LedgerBroken, LedgerError
from sglang_watchdog.ledger import Ledger

log = structlog.get_logger()
# The log of SQLite goes first: beside a new database an old one would be read into it.
_PARTS = ("-wal", "-shm", "")


def open_sound(path: Path) -> Ledger:
    """Raises `LedgerError` where the ledger cannot be used, or a broken one cannot be moved."""
    try:
        ledger = _checked(path)
    except LedgerBroken as error:
        log.error("the ledger is broken", kept=_set_aside(path), error=str(error))
        ledger = _checked(path)
    ledger.find_unacknowledged(kept.name for kept in path.parent.glob(f"{path.name}*.broken-*"))
    return ledger


def _checked(path: Path) -> Ledger:
    ledger = Ledger.open(path)
    try:
        ledger.check()
    except LedgerError:
        ledger.close()
        raise
    return ledger


def _set_aside(path: Path) -> list[str]:
    suffix = time.strftime(".broken-%Y%m%dT%H%M%SZ", time.gmtime())
    kept = []
    try:
        for part in _PARTS:
            if os.path.exists(f"{path}{part}"):
                os.rename(f"{path}{part}", f"{path}{part}{suffix}")
                kept.append(f"{path.name}{part}{suffix}")
    except OSError as error:
        raise LedgerError(f"the ledger {path} is broken and cannot be moved aside: {error.strerror}") from error
    return kept


def in_words(ledger: Ledger) -> str:
    """For a person; empty where nothing is to be acknowledged."""
    if not ledger.unacknowledged:
        return ""
    kept = ", ".join(ledger.unacknowledged)
    return f"left alone because the ledger was found broken (kept as {kept}), until `sglang-watchdog resume` is said"
