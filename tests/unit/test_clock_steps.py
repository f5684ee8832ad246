"""The clock of the host is set, by hours, forwards or back, while the watchdog works: no soak, deadline, pause or
budget is shorter for it, and none lasts for ever."""

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Outcome, Step
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.pausing import Pausing
from sglang_watchdog.recovery.policy import Budget, decide
from sglang_watchdog.reporting.metrics import Metrics
from sglang_watchdog.settings import UnitSettings
from sim_host.adapters import SimFiles, install
from sim_host.daemon import SimDaemon
from sim_host.oracle import Oracle
from sim_host.virtual_time import VirtualLoop
from sim_host.world import UNIT, World
from unit.test_pausing import Clock
from unit.test_policy import FACTS, NOW, diagnosis, past, proven

HOUR_S = 3600.0
SETTINGS = UnitSettings(act=True, soak=60, start_deadline=120, verify_deadline=30, free_deadline=3)
METRICS = Metrics((UNIT,), "0")
set_by = pytest.mark.parametrize("hours", [2, -2])


class Host:
    """Steps 4 serve, and fit; the clock can be set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.world = World(VirtualLoop(), steps=4, fits=5, restart_s=1.0, drop_in=True)
        self.oracle = Oracle(self.world, SETTINGS)
        db = sqlite3.connect(":memory:", isolation_level=None)
        Ledger(db, Path(":memory:"))._prepare(read_only=False)
        files = SimFiles(self.world, self.oracle, lambda: self.daemon.ledger)
        install(patch, self.world, files, self.oracle, [])
        self.world.start(by="operator")
        self.daemon = SimDaemon(self.world, self.oracle, SETTINGS, db, METRICS)

    def set_clock(self, hours: int) -> None:
        self.world.clock_set_by += hours * HOUR_S

    @property
    def anything_proven(self) -> bool:
        return self.daemon.ledger.any_known_good(UNIT)

    def deploy(self, steps: int) -> None:
        self.world.on_disk = steps
        self.world.reload()
        self.world.restart(by="operator")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host(monkeypatch)
    yield host
    host.daemon.kill()
    host.daemon.bury()
    host.world.loop.close()


@set_by
def test_a_soak_takes_its_time_and_no_more(host: Host, hours: int) -> None:
    host.daemon.run_for(30)
    assert host.daemon.watcher is not None
    assert host.daemon.watcher.proof is not None
    assert host.daemon.watcher.proof.serving
    host.set_clock(hours)
    host.daemon.run_for(15)
    assert not host.anything_proven
    host.daemon.run_for(60)
    assert host.anything_proven


@set_by
@pytest.mark.parametrize("after_s", [2.0, 5.0, 8.0])
def test_a_recovery_comes_to_its_end(host: Host, hours: int, after_s: float) -> None:
    host.daemon.run_for(100)
    assert host.anything_proven
    host.deploy(10)
    host.daemon.run_for(after_s)
    host.set_clock(hours)
    host.daemon.run_for(100)
    newest = host.daemon.ledger.incidents(UNIT, 1)[0]
    assert (newest.outcome, newest.steps[-1]) == (Outcome.CONTAINED, Step.VERIFY)
    assert host.world.running is not None
    assert host.world.running.steps == 4


@set_by
def test_a_start_that_never_serves_is_given_up_at_its_deadline(
    host: Host, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    host.daemon.run_for(100)
    monkeypatch.setattr(host.world, "_ready", lambda _start: None)
    host.deploy(10)
    host.daemon.run_for(20)
    host.set_clock(hours)
    host.daemon.run_for(60)
    assert [incident.steps[-1] for incident in host.daemon.ledger.open_incidents()] == [Step.VERIFY]
    host.daemon.run_for(60)
    assert host.daemon.ledger.open_incidents() == []


@pytest.mark.parametrize("hours", [2, -2, 1000])
def test_a_pause_lasts_as_long_as_was_asked_for(tmp_path: Path, hours: int) -> None:
    class Settable(Clock):
        by = 0.0

        def now(self) -> float:
            return self.time + self.by

    clock, ledger = Settable(), Ledger.open(tmp_path / "ledger.db")
    clock.time = 1e6
    pausing = Pausing(UNIT, ledger, clock)
    pausing.begin(HOUR_S)
    clock.by = hours * HOUR_S
    clock.time += HOUR_S - 1
    assert (pausing.active, pausing.until) == (True, clock.now() + 1)
    left_of_another_daemon = Pausing(UNIT, ledger, clock).left
    assert left_of_another_daemon is not None
    assert left_of_another_daemon <= HOUR_S
    clock.time += 1
    assert pausing.over


BUDGET = Budget(rollbacks=2, window=HOUR_S, per_day=6, cool_down=0)
SPENT = replace(FACTS, budget=BUDGET, starts=(NOW - 60, NOW - 120))


def test_a_budget_that_is_used_up_stays_so_when_the_clock_is_set_back() -> None:
    back = replace(SPENT, now=NOW - 2 * HOUR_S)
    assert decide(diagnosis(FailureClass.KV_CACHE_OOM), back).steps == (Step.HOLD,)


def test_a_proof_of_a_time_that_is_yet_to_come_gives_no_budget_back() -> None:
    back = replace(SPENT, now=NOW, proven=NOW + HOUR_S, known_good=(proven(4, NOW + HOUR_S),))
    assert decide(diagnosis(FailureClass.KV_CACHE_OOM), back).steps == (Step.HOLD,)
    assert decide(diagnosis(FailureClass.KV_CACHE_OOM), replace(back, proven=NOW - 1)).target is not None


def test_the_newest_incident_is_the_one_opened_last_whatever_the_clock_said(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.db")
    first = ledger.open_incident(past(opened=NOW))
    second = ledger.open_incident(past(opened=NOW - 2 * HOUR_S))
    assert [one.id for one in ledger.incidents(UNIT)] == [second.id, first.id]
