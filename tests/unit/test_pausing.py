"""A pause lasts until its time or until it is ended, whatever becomes of the daemon meanwhile."""

from pathlib import Path

import pytest

from sglang_watchdog.ledger import Ledger
from sglang_watchdog.pausing import Pausing

UNIT = "sglang.service"


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.db")


def test_it_lasts_until_its_time(ledger: Ledger, clock: Clock) -> None:
    pausing = Pausing(UNIT, ledger, clock)
    assert (pausing.active, pausing.over, pausing.left, pausing.in_words()) == (False, False, None, "")
    pausing.begin(60)
    clock.time += 59
    assert (pausing.active, pausing.over, pausing.left) == (True, False, 1.0)
    assert pausing.in_words() == "paused until 1970-01-01 00:17:40 UTC"
    clock.time += 1
    assert (pausing.active, pausing.over, pausing.left, pausing.until) == (False, True, 0.0, None)
    assert pausing.end() == 1000.0
    assert (pausing.over, pausing.end()) == (False, None)


def test_another_daemon_knows_of_it_and_of_its_end(ledger: Ledger, clock: Clock) -> None:
    Pausing(UNIT, ledger, clock).begin(60)
    again = Pausing(UNIT, ledger, clock)
    assert again.active
    assert again.begun.is_set()
    clock.time += 100
    late = Pausing(UNIT, ledger, clock)
    assert (late.active, late.over, late.begun.is_set()) == (False, True, False)
    assert late.end() == 1000.0
    assert not Pausing(UNIT, ledger, clock).over


def test_a_longer_pause_is_one_with_the_first(ledger: Ledger, clock: Clock) -> None:
    pausing = Pausing(UNIT, ledger, clock)
    pausing.begin(60)
    clock.time += 30
    pausing.begin(60)
    clock.time += 59
    assert pausing.active
    assert pausing.end() == 1000.0
