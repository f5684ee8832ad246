"""The ledger keeps what it was given, across restarts and across a killed daemon, and refuses what it does not know."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("table", "spoil", "read"),
    [
        ("launches", "UPDATE launches SET record='{}'", lambda ledger: ledger.launch(LAUNCH.invocation)),
        ("launches", "UPDATE launches SET record='no json'", lambda ledger: ledger.launches(UNIT)),
        ("launches", "UPDATE launches SET failure='of_tomorrow'", lambda ledger: ledger.launches(UNIT)),
        ("incidents", "UPDATE incidents SET record='{}'", lambda ledger: ledger.open_incidents()),
        ("intents", "UPDATE intents SET step='of_tomorrow'", lambda ledger: ledger.intents(ledger.incidents()[0].id)),
        ("known_good", "UPDATE known_good SET record='[]'", lambda ledger: ledger.known_good(UNIT, "base")),
        ("ceilings", "UPDATE ceilings SET record='[]'", lambda ledger: ledger.ceilings(UNIT, "base")),
        ("overrides", "UPDATE overrides SET target='[]'", lambda ledger: ledger.override(UNIT)),
    ],
)
def test_a_row_that_says_nothing_to_us_is_told_by_file_and_table(
    path: Path, table: str, spoil: str, read: Callable[[Ledger], object]
) -> None:
    ledger = filled(path)
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute(spoil).rowcount == 1
    db.close()
    with pytest.raises(LedgerError, match=f"{path} cannot be read: .*table {table} ") as caught:
        read(ledger)
    assert "\n" not in str(caught.value)


def filled(path: Path) -> Ledger:
    ledger = Ledger.open(path)
    ledger.save_launch(LAUNCH, FailureClass.KV_CACHE_OOM)
    with ledger.intent(ledger.open_incident(incident()).id, Step.HOLD):
        pass
    ledger.save_known_good(KnownGood(UNIT, "base", STEPS4, LAUNCH.invocation, 150.0))
    ledger.save_ceiling(Ceiling(UNIT, "base", STEPS4, FailureClass.KV_CACHE_OOM, LAUNCH.invocation, 160.0))
    ledger.save_override(UNIT, None, STEPS4)
    return ledger


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_who_may_not_read_the_file_is_told_to_be_root(path: Path) -> None:
    Ledger.open(path).close()
    nobody = 65534
    os.setresuid(nobody, nobody, 0)
    try:
        with pytest.raises(LedgerError, match=r"cannot be opened: permission denied.*run this as root"):
            Ledger.open(path, read_only=True)
    finally:
        os.setresuid(0, 0, 0)


# Versions of the schema


def test_a_ledger_of_schema_1_is_taken_over_with_all_that_it_holds(path: Path) -> None:
    ledger = Ledger.open(path)
    stored = ledger.open_incident(incident())
    ledger.close()
    db = sqlite3.connect(path)
    db.executescript(
        "DROP TABLE pauses; DROP TABLE witnesses; DROP TABLE untold; DROP TABLE reloads_owed;"
        "DROP TABLE acknowledged; PRAGMA user_version=1;"
    )
    db.close()
    again = Ledger.open(path)
    assert again.pause(UNIT) is None
    again.save_pause(UNIT, 1.0, 2.0)
    assert Ledger.open(path).pause(UNIT) == (1.0, 2.0)
    assert again.incidents(UNIT) == [stored]


# What was begun, and what may be forgotten


def test_starts_are_those_of_the_unit_since_a_time_newest_first(path: Path) -> None:
    ledger = Ledger.open(path)
    ours = [ledger.open_incident(incident(float(number))).id for number in range(2)]
    others = ledger.open_incident(replace(incident(), unit="other.service")).id
    for owner in (ours[0], others, ours[1]):
        ledger.begin(owner, Step.HOLD)
        with ledger.intent(owner, Step.START):
            pass
    with pytest.raises(ZeroDivisionError), ledger.intent(ours[1], Step.START):
        raise ZeroDivisionError
    begun = [i.begun for owner in ours for i in ledger.intents(owner) if i.step is Step.START]
    assert ledger.starts(UNIT, 0.0) == sorted(begun, reverse=True)
    assert len(begun) == 3
    assert ledger.starts(UNIT, begun[-1]) == [begun[-1]]
    assert ledger.starts(UNIT, begun[-1] + 1) == []


def launch(number: int, unit: str = UNIT) -> Launch:
    return replace(LAUNCH, unit=unit, invocation=f"{unit[0]}{number:031d}", started=float(number))


def test_pruning_keeps_the_newest_of_each_unit(path: Path) -> None:
    ledger = Ledger.open(path)
    for number in range(6):
        ledger.save_launch(launch(number))
        ledger.save_launch(launch(number, "other.service"))
        stored = ledger.open_incident(replace(incident(float(number)), invocation=launch(number).invocation))
        with ledger.intent(stored.id, Step.HOLD):
            pass
        ledger.close_incident(stored, Outcome.CONTAINED)
    ledger.prune(UNIT, keep=2)
    assert [kept.started for kept, _ in ledger.launches(UNIT)] == [5.0, 4.0]
    assert [kept.opened for kept in ledger.incidents(UNIT)] == [5.0, 4.0]
    assert len(ledger.launches("other.service")) == 6
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(*) FROM intents").fetchone() == (2,)
    db.close()


def test_pruning_keeps_what_is_still_needed_at_any_age(path: Path) -> None:
    ledger = Ledger.open(path)
    for number in range(6):
        ledger.save_launch(launch(number))
    ledger.save_known_good(KnownGood(UNIT, "base", STEPS4, launch(0).invocation, 150.0))
    stored = ledger.open_incident(replace(incident(1.0), invocation=launch(1).invocation))
    ledger.begin(stored.id, Step.HOLD)
    ledger.close_incident(ledger.open_incident(incident(9.0)), Outcome.REPORTED)
    ledger.prune(UNIT, keep=1)
    assert [kept.started for kept, _ in ledger.launches(UNIT)] == [5.0, 1.0, 0.0]
    assert ledger.open_incidents() == [stored]
    assert len(ledger.intents(stored.id)) == 1


def test_pruning_leaves_the_days_budget_as_it_is(path: Path) -> None:
    ledger = Ledger.open(path)
    started = ledger.open_incident(incident(1.0))
    with ledger.intent(started.id, Step.START):
        pass
    ledger.close_incident(started, Outcome.FAILED)
    for number in range(3):
        ledger.close_incident(ledger.open_incident(incident(9.0 + number)), Outcome.REPORTED)
    ledger.prune(UNIT, keep=1)
    assert len(ledger.starts(UNIT, 0.0)) == 1
    assert [kept.opened for kept in ledger.incidents(UNIT)] == [11.0, 1.0]


def test_what_is_best_to_go_back_to_comes_first(path: Path) -> None:
    ledger = Ledger.open(path)
    idle, busy = (SpeculationConfig.of(["--speculative-num-steps", steps]) for steps in "56")
    ledger.save_known_good(KnownGood(UNIT, "base", busy, "a", 100.0, traffic=True))
    ledger.save_known_good(KnownGood(UNIT, "base", STEPS4, "b", 200.0))
    ledger.save_known_good(KnownGood(UNIT, "base", idle, "c", 300.0))
    assert [good.config for good in ledger.known_good(UNIT, "base")] == [busy, idle, STEPS4]
    assert ledger.last_proof(UNIT) == 300.0
    assert ledger.last_proof("other.service") == 0.0


def test_rollbacks_are_the_incidents_that_changed_the_config_since_a_time(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.open_incident(incident(100.0))
    newer = ledger.open_incident(incident(200.0))
    ledger.open_incident(replace(incident(300.0), target=None))
    assert ledger.rollbacks(UNIT, 150.0) == [newer]
    assert len(ledger.rollbacks(UNIT, 0.0)) == 2
    assert ledger.rollbacks("other.service", 0.0) == []


def test_a_ceiling_can_be_forgotten(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.save_ceiling(Ceiling(UNIT, "base", STEPS4, FailureClass.KV_CACHE_OOM, LAUNCH.invocation, 160.0))
    ledger.forget_ceiling(UNIT, "another base", STEPS4)
    assert len(ledger.ceilings(UNIT, "base")) == 1
    ledger.forget_ceiling(UNIT, "base", STEPS4)
    assert ledger.ceilings(UNIT, "base") == []


def test_an_end_that_is_forgotten_is_to_be_diagnosed_again(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.save_launch(replace(LAUNCH, ended=120.0), FailureClass.UNKNOWN)
    ledger.forget_end(LAUNCH.invocation)
    assert ledger.launches(UNIT) == [(LAUNCH, None)]
    ledger.save_launch(replace(LAUNCH, ended=120.0), FailureClass.KV_CACHE_OOM)
    assert ledger.launches(UNIT) == [(replace(LAUNCH, ended=120.0), FailureClass.KV_CACHE_OOM)]
    ledger.forget_end("f" * 32)


def test_whether_anything_is_known_good_counts_any_base_and_no_demoted_config(path: Path) -> None:
    ledger = Ledger.open(path)
    assert not ledger.any_known_good(UNIT)
    good = KnownGood(UNIT, "an older base", STEPS4, LAUNCH.invocation, 150.0)
    ledger.save_known_good(good)
    assert ledger.any_known_good(UNIT)
    assert not ledger.any_known_good("other.service")
    ledger.demote(good, "it failed with kv_cache_oom")
    assert not ledger.any_known_good(UNIT)


def test_what_a_person_names_is_forgotten_and_nothing_else(path: Path) -> None:
    ledger = Ledger.open(path)
    good = KnownGood(UNIT, "base", STEPS4, LAUNCH.invocation, 150.0)
    ceiling = Ceiling(UNIT, "base", STEPS4, FailureClass.KV_CACHE_OOM, LAUNCH.invocation, 160.0)
    other = replace(ceiling, base="another base")
    ledger.save_known_good(good)
    ledger.save_ceiling(ceiling)
    ledger.save_ceiling(other)
    assert ledger.forget("other.service", good.id) is None
    assert ledger.forget(UNIT, "gffffffff") is None
    assert ledger.forget(UNIT, ceiling.id) == ceiling
    assert (ledger.ceilings(UNIT, "base"), ledger.ceilings(UNIT, "another base")) == ([], [other])
    assert ledger.forget(UNIT, good.id) == good
    assert ledger.known_good(UNIT, "base") == []


def test_a_rollback_that_a_person_asked_for_is_no_start_of_ours(path: Path) -> None:
    ledger = Ledger.open(path)
    asked = ledger.open_incident(replace(incident(), failure=FailureClass.REQUESTED_STOP))
    with ledger.intent(asked.id, Step.START):
        pass
    assert ledger.starts(UNIT, 0.0) == []


def test_a_launch_that_the_watchdog_ended_itself_is_known_by_a_hold_that_came_to_its_end(path: Path) -> None:
    ledger = Ledger.open(path)
    hung = ledger.open_incident(replace(incident(), failure=FailureClass.UNRESPONSIVE, summary="It hung."))
    assert ledger.ended_for(LAUNCH.invocation) == ""  # reported only
    ledger.finish(ledger.begin(hung.id, Step.HOLD), "failed")  # the operator was first
    assert ledger.ended_for(LAUNCH.invocation) == ""
    ledger.finish(ledger.begin(ledger.open_incident(incident()).id, Step.HOLD), "done")  # of one that had ended
    assert ledger.ended_for(LAUNCH.invocation) == ""
    ledger.finish(ledger.begin(hung.id, Step.HOLD), "done")
    assert ledger.ended_for(LAUNCH.invocation) == "It hung."
    assert ledger.ended_for("b" * 32) == ""
