"""A broken ledger is kept, and nothing is acted on by the new one until a person has said that they know."""

import sqlite3
from pathlib import Path

import pytest

from sglang_watchdog import broken_ledger
from sglang_watchdog.domain.errors import LedgerError
from sglang_watchdog.host.clock import SystemClock
from sglang_watchdog.ledger import SCHEMA_VERSION, Ledger
from sglang_watchdog.pausing import Pausing

UNIT = "sglang.service"
NONSENSE = b"this is no database\n" * 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def kept(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.parent.glob("ledger.db.broken-*"))]


def damaged(path: Path) -> None:
    """A sound head, and pages that were written over."""
    ledger = Ledger.open(path)
    for number in range(200):
        ledger.save_pause(f"{number}-{'x' * 200}.service", 1.0, 2.0)
    ledger.close()
    whole = bytearray(path.read_bytes())
    whole[-3 * 4096 :] = b"\xff" * (3 * 4096)
    path.write_bytes(whole)


def test_a_sound_ledger_is_left_where_it_is(path: Path) -> None:
    Ledger.open(path).close()
    ledger = broken_ledger.open_sound(path)
    assert (kept(path), ledger.unacknowledged, broken_ledger.in_words(ledger)) == ([], (), "")


@pytest.mark.parametrize("how", ["nonsense", "pages"])
def test_a_broken_one_is_kept_with_every_byte_and_a_new_one_is_begun(path: Path, how: str) -> None:
    if how == "pages":
        damaged(path)
    else:
        path.write_bytes(NONSENSE)
    before = path.read_bytes()
    ledger = broken_ledger.open_sound(path)
    assert kept(path) == [before]
    assert ledger.unacknowledged == tuple(file.name for file in path.parent.glob("*.broken-*"))
    ledger.save_pause(UNIT, 1.0, 2.0)  # it can be written


def test_what_the_old_one_had_not_moved_into_its_file_is_not_read_into_the_new_one(path: Path) -> None:
    path.write_bytes(NONSENSE)
    log = path.with_name("ledger.db-wal")
    log.write_bytes(b"of the old one")
    broken_ledger.open_sound(path).close()
    assert [file.read_bytes() for file in path.parent.glob("ledger.db-wal.broken-*")] == [b"of the old one"]


def test_units_are_paused_until_it_is_acknowledged_also_for_the_next_daemon(path: Path) -> None:
    path.write_bytes(NONSENSE)
    broken_ledger.open_sound(path).close()
    ledger = broken_ledger.open_sound(path)  # the one that found it may have been killed at once
    pausing = Pausing(UNIT, ledger, SystemClock())
    assert pausing.active
    assert not pausing.over
    assert "broken" in pausing.in_words()
    assert pausing.end() == 0.0
    assert pausing.in_words() == ""
    ledger.close()
    again = broken_ledger.open_sound(path)
    assert not Pausing(UNIT, again, SystemClock()).active
    assert len(kept(path)) == 1


def test_a_pause_of_its_own_does_not_end_it(path: Path) -> None:
    path.write_bytes(NONSENSE)
    pausing = Pausing(UNIT, broken_ledger.open_sound(path), SystemClock())
    pausing.begin(0.0)
    assert pausing.active
    assert not pausing.over
    assert pausing.left is None  # no clock ends it, so none is waited for


def test_said_of_one_unit_it_holds_for_all(path: Path) -> None:
    path.write_bytes(NONSENSE)
    ledger = broken_ledger.open_sound(path)
    one, other = (Pausing(unit, ledger, SystemClock()) for unit in (UNIT, "other.service"))
    one.end()
    assert not other.active
    assert not other.begun.is_set()


def test_a_ledger_of_a_newer_version_is_not_broken(path: Path) -> None:
    Ledger.open(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(LedgerError, match="newer"):
        broken_ledger.open_sound(path)
    assert kept(path) == []
