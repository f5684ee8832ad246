"""The ledger keeps what it was given, across restarts and across a killed daemon, and refuses what it does not know."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_watchdog.domain.errors import LedgerError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import Ceiling, KnownGood
from sglang_watchdog.domain.launch import Definition, Launch, Phase, PhaseMark, ProcessId, RecordedProcess
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.ledger import SCHEMA_VERSION, Ledger

UNIT = "sglang.service"
STEPS4 = SpeculationConfig.of(["--speculative-num-steps", "4"])
LAUNCH = Launch(
    UNIT,
    "a" * 32,
    started=100.0,
    argv=("python", "-m", "sglang.launch_server"),
    server_args={"tp_size": 4, "api_key": None, "speculative_num_steps": 10},
    definition=Definition("/etc/systemd/system/sglang.service", {"/etc/systemd/system/sglang.service": "f" * 64}),
    phases=(PhaseMark(Phase.LOADING_WEIGHTS, 101.5),),
    processes=(RecordedProcess(ProcessId(7, 1234), "sglang::scheduler_TP0", Phase.LOADING_WEIGHTS),),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def incident(opened: float = 200.0) -> Incident:
    return Incident("", UNIT, LAUNCH.invocation, opened, FailureClass.KV_CACHE_OOM, "No room.", target=STEPS4)


def test_what_is_stored_is_read_back_equal_after_a_reopen(path: Path) -> None:
    first = Ledger.open(path)
    first.save_launch(LAUNCH, FailureClass.KV_CACHE_OOM)
    stored = first.open_incident(incident())
    good = KnownGood(UNIT, "base", STEPS4, LAUNCH.invocation, 150.0, 295931, 17)
    first.save_known_good(good)
    ceiling = Ceiling(UNIT, "base", STEPS4, FailureClass.KV_CACHE_OOM, LAUNCH.invocation, 160.0)
    first.save_ceiling(ceiling)
    first.close()
    again = Ledger.open(path)
    assert again.launch(LAUNCH.invocation) == LAUNCH
    assert again.launches(UNIT) == [(LAUNCH, FailureClass.KV_CACHE_OOM)]
    assert again.incidents(UNIT) == [stored]
    assert again.known_good(UNIT, "base") == [good]
    assert again.ceilings(UNIT, "base") == [ceiling]


def test_a_later_save_of_a_launch_keeps_its_diagnosis(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.save_launch(LAUNCH, FailureClass.STOP_TIMEOUT_SIGKILL)
    ledger.save_launch(LAUNCH)
    assert ledger.launches(UNIT)[0][1] is FailureClass.STOP_TIMEOUT_SIGKILL


def test_incidents_come_newest_first_and_each_has_its_own_id(path: Path) -> None:
    ledger = Ledger.open(path)
    older, newer = ledger.open_incident(incident(1.0)), ledger.open_incident(incident(2.0))
    assert [i.id for i in ledger.incidents(UNIT)] == [newer.id, older.id]
    assert older.id != newer.id


def test_a_closed_incident_is_no_longer_open(path: Path) -> None:
    ledger = Ledger.open(path)
    stored = ledger.open_incident(incident())
    assert ledger.open_incidents() == [stored]
    closed = ledger.close_incident(stored, Outcome.CONTAINED, "Serves steps 4 again.")
    assert ledger.open_incidents() == []
    assert ledger.incidents(UNIT) == [closed]


KILLED_INSIDE = """
import os, signal, sys
from pathlib import Path
from sglang_watchdog.domain.incident import Step
from sglang_watchdog.ledger import Ledger
with Ledger.open(Path(sys.argv[1])).intent(sys.argv[2], Step.HOLD):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_daemon_killed_inside_a_step_leaves_its_intent_open(path: Path) -> None:
    stored = Ledger.open(path).open_incident(incident())
    killed = subprocess.run([sys.executable, "-c", KILLED_INSIDE, path, stored.id], timeout=30, check=False)
    assert killed.returncode == -signal.SIGKILL
    found = Ledger.open(path).intents(stored.id)
    assert [(intent.step, intent.finished, intent.outcome) for intent in found] == [(Step.HOLD, None, "")]


def test_a_step_that_failed_is_recorded_as_failed(path: Path) -> None:
    ledger = Ledger.open(path)
    stored = ledger.open_incident(incident())
    with pytest.raises(ZeroDivisionError), ledger.intent(stored.id, Step.FREE):
        raise ZeroDivisionError
    with ledger.intent(stored.id, Step.START):
        pass
    assert [intent.outcome for intent in ledger.intents(stored.id)] == ["failed", "done"]


def test_a_demoted_config_is_no_longer_known_good(path: Path) -> None:
    ledger = Ledger.open(path)
    good = KnownGood(UNIT, "base", STEPS4, LAUNCH.invocation, 150.0)
    ledger.save_known_good(good)
    ledger.demote(good, "it failed with kv_cache_oom")
    assert ledger.known_good(UNIT, "base") == []
    assert ledger.known_good(UNIT, "another base") == []


def test_a_ledger_from_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger.open(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=f"newer sglang-watchdog \\(schema {SCHEMA_VERSION + 1}"):
        Ledger.open(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_by_name(path: Path) -> None:
    path.write_text("not a database, and long enough to be looked at " * 20)
    with pytest.raises(LedgerError, match=str(path)):
        Ledger.open(path)


def test_every_commit_is_synced_to_the_disk(path: Path) -> None:
    Ledger.open(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()
