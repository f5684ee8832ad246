"""The ledger: what the watchdog saw, decided and did, in one SQLite file.

WAL with synchronous=FULL: what was recorded before an action is there after a power cut. Values are stored as the
JSON of the domain's dataclasses, and the columns beside them are what is searched for.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sglang_watchdog.domain.errors import LedgerBroken, LedgerError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident, Intent, Outcome, Step
from sglang_watchdog.domain.known_good import Ceiling, KnownGood
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig

LEDGER_NAME = "ledger.db"
SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE launches (
    invocation TEXT PRIMARY KEY, unit TEXT NOT NULL, started REAL NOT NULL, ended REAL, failure TEXT,
    record TEXT NOT NULL) STRICT;
CREATE INDEX launches_by_unit ON launches (unit, started);
CREATE TABLE incidents (
    id TEXT PRIMARY KEY, unit TEXT NOT NULL, opened REAL NOT NULL, outcome TEXT NOT NULL, record TEXT NOT NULL) STRICT;
CREATE INDEX incidents_by_unit ON incidents (unit, opened);
CREATE TABLE intents (
    id INTEGER PRIMARY KEY, incident TEXT NOT NULL REFERENCES incidents, step TEXT NOT NULL, begun REAL NOT NULL,
    finished REAL, outcome TEXT NOT NULL DEFAULT '') STRICT;
CREATE TABLE known_good (
    unit TEXT NOT NULL, base TEXT NOT NULL, config TEXT NOT NULL, proven REAL NOT NULL,
    demoted TEXT NOT NULL DEFAULT '', record TEXT NOT NULL, PRIMARY KEY (unit, base, config)) STRICT;
CREATE TABLE ceilings (
    unit TEXT NOT NULL, base TEXT NOT NULL, config TEXT NOT NULL, seen REAL NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (unit, base, config)) STRICT;
CREATE TABLE overrides (unit TEXT PRIMARY KEY, since REAL NOT NULL, replaced TEXT, target TEXT NOT NULL) STRICT;
"""
_SINCE_2 = "CREATE TABLE pauses (unit TEXT PRIMARY KEY, since REAL NOT NULL, until REAL NOT NULL) STRICT"
_SINCE_3 = """
CREATE TABLE witnesses (unit TEXT PRIMARY KEY, invocation TEXT NOT NULL) STRICT;
CREATE TABLE untold (incident TEXT PRIMARY KEY REFERENCES incidents) STRICT;
CREATE TABLE reloads_owed (unit TEXT PRIMARY KEY) STRICT;
CREATE TABLE acknowledged (kept TEXT PRIMARY KEY) STRICT;
"""
_STEPS = (_SCHEMA, _SINCE_2, _SINCE_3)  # from nothing to 1, from 1 to 2, from 2 to 3
_NEWEST_INCIDENTS = "SELECT id FROM incidents WHERE unit=:unit ORDER BY rowid DESC LIMIT :keep"
# A start counts against the day's budget, and a loop of failures makes a thousand incidents in less.
_OF_TODAY = "SELECT incident FROM intents WHERE step='start' AND begun>:now-86400"
_OLD_INCIDENTS = f"unit=:unit AND outcome<>:open AND id NOT IN ({_NEWEST_INCIDENTS}) AND id NOT IN ({_OF_TODAY})"
_PRUNE = (
    f"DELETE FROM intents WHERE incident IN (SELECT id FROM incidents WHERE {_OLD_INCIDENTS})",
    f"DELETE FROM untold WHERE incident IN (SELECT id FROM incidents WHERE {_OLD_INCIDENTS})",
    f"DELETE FROM incidents WHERE {_OLD_INCIDENTS}",
    "DELETE FROM launches WHERE unit=:unit AND invocation NOT IN ("
    "SELECT invocation FROM (SELECT invocation FROM launches WHERE unit=:unit ORDER BY started DESC LIMIT :keep) "
    "UNION SELECT json_extract(record, '$.invocation') FROM incidents WHERE unit=:unit AND outcome=:open "
    "UNION SELECT json_extract(record, '$.invocation') FROM known_good WHERE unit=:unit)",
)
T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Launch, Incident, KnownGood, Ceiling, SpeculationConfig)
}


class Ledger:
    """Raises `LedgerError` in one sentence where the file cannot be used; never alters a file it does not know.
    `unacknowledged`: broken ledgers that were kept aside, by name, of which no person has said yet that they know."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self.unacknowledged: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "Ledger":
        mode = "ro" if read_only else "rwc"
        try:
            db = sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None, timeout=5)
            ledger = cls(db, path)
            ledger._prepare(read_only=read_only)
        except sqlite3.Error as error:
            kind = LedgerBroken if _is_broken(error) else LedgerError
            raise kind(f"the ledger {path} cannot be opened: {_why_not(path, error)}") from error
        return ledger

    @classmethod
    def in_memory(cls) -> "Ledger":
        """Of a daemon that may only observe, because its file cannot be used. Nothing in it outlives the daemon."""
        ledger = cls(sqlite3.connect(":memory:", isolation_level=None), Path(":memory:"))
        ledger._prepare(read_only=False)
        return ledger

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Raises `LedgerBroken` where SQLite finds damage; reads the whole file."""
        try:
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            found = str(error)
        if found != "ok":
            raise LedgerBroken(f"the ledger {self.path} is broken: {found}")

    def _prepare(self, *, read_only: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            self._db.close()
            raise LedgerError(
                f"the ledger {self.path} was written by a newer sglang-watchdog (schema {version}, this one knows "
                f"{SCHEMA_VERSION}); nothing in it was changed. Install that version again, or move the file away."
            )
        if read_only:
            return
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        if version < SCHEMA_VERSION:
            with self._transaction():
                for statement in ";".join(_STEPS[version:]).split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    # Launches

    def save_launch(self, launch: Launch, failure: FailureClass | None = None) -> None:
        self._write(
            "INSERT INTO launches VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (invocation) DO UPDATE SET "
            "ended=excluded.ended, failure=coalesce(excluded.failure, failure), record=excluded.record",
            (launch.invocation, launch.unit, launch.started, launch.ended, failure, _dumped(Launch, launch)),
        )

    def launch(self, invocation: str) -> Launch | None:
        rows = self._rows("SELECT record FROM launches WHERE invocation=?", (invocation,))
        return self._loaded(Launch, "launches", rows[0][0]) if rows else None

    def forget_end(self, invocation: str) -> None:
        """The launch is taken as one that runs, so that its end is diagnosed again. Nothing where there is none."""
        launch = self.launch(invocation)
        if launch is not None:
            self._write(
                "UPDATE launches SET ended=NULL, failure=NULL, record=? WHERE invocation=?",
                (_dumped(Launch, replace(launch, ended=None)), invocation),
            )

    def launches(self, unit: str, limit: int = 50) -> list[tuple[Launch, FailureClass | None]]:
        """Newest first."""
        rows = self._rows(
            "SELECT record, failure FROM launches WHERE unit=? ORDER BY started DESC LIMIT ?", (unit, limit)
        )
        return [(self._loaded(Launch, "launches", record), self._failure(failure)) for record, failure in rows]

    # Incidents and intents

    def open_incident(self, incident: Incident) -> Incident:
        """Stores a new incident under a fresh id."""
        incident = replace(incident, id=uuid.uuid4().hex[:12])
        self._write(
            "INSERT INTO incidents VALUES (?, ?, ?, ?, ?)",
            (incident.id, incident.unit, incident.opened, incident.outcome, _dumped(Incident, incident)),
        )
        return incident

    def plan_incident(
        self, incident: Incident, steps: tuple[Step, ...], target: SpeculationConfig | None, reason: str
    ) -> Incident:
        """Stores what is going to be done about it, before any of it is."""
        planned = replace(incident, steps=steps, target=target, reason=reason)
        self._write("UPDATE incidents SET record=? WHERE id=?", (_dumped(Incident, planned), incident.id))
        return planned

    def close_incident(self, incident: Incident, outcome: Outcome, reason: str = "") -> Incident:
        """Nobody was told of its end yet: `told` says when somebody was."""
        when = incident.closed or time.time()
        closed = replace(incident, outcome=outcome, closed=when, reason=reason or incident.reason)
        try:
            with self._transaction():
                self._write("INSERT OR IGNORE INTO untold VALUES (?)", (incident.id,))
                record = _dumped(Incident, closed)
                self._write("UPDATE incidents SET outcome=?, record=? WHERE id=?", (outcome, record, incident.id))
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be written: {error}") from error
        return closed

    def told(self, incident: Incident) -> None:
        self._write("DELETE FROM untold WHERE incident=?", (incident.id,))

    def untold(self, unit: str) -> list[Incident]:
        """Closed, and whoever closed them died before anybody was told."""
        rows = self._rows(
            "SELECT record FROM incidents JOIN untold ON incidents.id=untold.incident WHERE unit=? ORDER BY opened",
            (unit,),
        )
        return [self._loaded(Incident, "incidents", row[0]) for row in rows]

    def incidents(self, unit: str | None = None, limit: int = 50) -> list[Incident]:
        """Newest first, by the order in which they were opened and not by the clock, which may be set back; of all
        units where `unit` is None."""
        rows = self._rows(
            "SELECT record FROM incidents WHERE ?1 IS NULL OR unit=?1 ORDER BY rowid DESC LIMIT ?2", (unit, limit)
        )
        return [self._loaded(Incident, "incidents", row[0]) for row in rows]

    def rollbacks(self, unit: str, since: float) -> list[Incident]:
        """Incidents whose plan puts another config in force, opened from `since` on (Unix seconds), newest first."""
        rows = self._rows(
            "SELECT record FROM incidents WHERE unit=? AND opened>=? AND json_extract(record, '$.target') IS NOT NULL "
            "ORDER BY rowid DESC",
            (unit, since),
        )
        return [self._loaded(Incident, "incidents", row[0]) for row in rows]

    def open_incidents(self) -> list[Incident]:
        rows = self._rows("SELECT record FROM incidents WHERE outcome=? ORDER BY rowid", (Outcome.OPEN,))
        return [self._loaded(Incident, "incidents", row[0]) for row in rows]

    def begin(self, incident: str, step: Step) -> int:
        """Records a step before it is taken. An intent that is never finished (we were killed) stays open, which is
        what the next start of the daemon looks for."""
        sql = "INSERT INTO intents (incident, step, begun) VALUES (?, ?, ?)"
        return self._write(sql, (incident, step, time.time())).lastrowid or 0

    def finish(self, intent: int, outcome: str) -> None:
        self._write("UPDATE intents SET finished=?, outcome=? WHERE id=?", (time.time(), outcome, intent))

    @contextmanager
    def intent(self, incident: str, step: Step) -> Iterator[None]:
        """Records the step before the body runs and its outcome, `done` or `failed`, after it."""
        intent = self.begin(incident, step)
        try:
            yield
        except BaseException:
            with suppress(LedgerError):  # why the step ended (the operator's stop, say) must not be lost over it
                self.finish(intent, "failed")
            raise
        self.finish(intent, "done")

    def intents(self, incident: str) -> list[Intent]:
        rows = self._rows(
            "SELECT id, incident, step, begun, finished, outcome FROM intents WHERE incident=? ORDER BY id", (incident,)
        )
        with self._understood("intents"):
            return [Intent(row[0], row[1], Step(row[2]), *row[3:]) for row in rows]

    def starts(self, unit: str, since: float) -> list[float]:
        """When we began to start the unit, from `since` on, whatever came of it; not where a person asked for it. Unix
        seconds, newest first."""
        rows = self._rows(
            "SELECT begun FROM intents JOIN incidents ON incidents.id=intents.incident "
            "WHERE unit=? AND step=? AND begun>=? AND json_extract(record, '$.failure')<>? ORDER BY begun DESC",
            (unit, Step.START, since, FailureClass.REQUESTED_STOP),
        )
        return [row[0] for row in rows]

    def ended_for(self, invocation: str) -> str:
        """Why the watchdog brought down a launch that ran, in the words of then; empty where it did not."""
        rows = self._rows(
            "SELECT json_extract(record, '$.summary') FROM incidents JOIN intents ON intents.incident=incidents.id "
            "WHERE json_extract(record, '$.invocation')=? AND json_extract(record, '$.failure')=? "
            "AND step=? AND intents.outcome='done'",
            (invocation, FailureClass.UNRESPONSIVE, Step.HOLD),
        )
        return str(rows[0][0]) if rows else ""

    # What is proven

    def save_known_good(self, good: KnownGood) -> None:
        self._write(
            "INSERT OR REPLACE INTO known_good VALUES (?, ?, ?, ?, '', ?)",
            (good.unit, good.base, _key(good.config), good.proven, _dumped(KnownGood, good)),
        )

    def known_good(self, unit: str, base: str) -> list[KnownGood]:
        """Proven and not demoted, what is best to go back to first: proven under traffic before proven by our probes
        alone, then the newest proof."""
        rows = self._rows(
            "SELECT record FROM known_good WHERE unit=? AND base=? AND demoted='' "
            "ORDER BY coalesce(json_extract(record, '$.traffic'), 0) DESC, proven DESC",
            (unit, base),
        )
        return [self._loaded(KnownGood, "known_good", row[0]) for row in rows]

    def any_known_good(self, unit: str) -> bool:
        """Whether anything was ever proven of the unit and not demoted, on whatever base."""
        return bool(self._rows("SELECT 1 FROM known_good WHERE unit=? AND demoted='' LIMIT 1", (unit,)))

    def last_proof(self, unit: str) -> float:
        """When a config of the unit was last proven, on whatever base and whatever came after; 0 for never."""
        rows = self._rows("SELECT coalesce(max(proven), 0) FROM known_good WHERE unit=?", (unit,))
        return float(rows[0][0])

    def demote(self, good: KnownGood, reason: str) -> None:
        self._write(
            "UPDATE known_good SET demoted=? WHERE unit=? AND base=? AND config=?",
            (reason, good.unit, good.base, _key(good.config)),
        )

    def save_ceiling(self, ceiling: Ceiling) -> None:
        self._write(
            "INSERT OR REPLACE INTO ceilings VALUES (?, ?, ?, ?, ?)",
            (ceiling.unit, ceiling.base, _key(ceiling.config), ceiling.seen, _dumped(Ceiling, ceiling)),
        )

    def forget_ceiling(self, unit: str, base: str, config: SpeculationConfig) -> None:
        self._write("DELETE FROM ceilings WHERE unit=? AND base=? AND config=?", (unit, base, _key(config)))

    def ceilings(self, unit: str, base: str) -> list[Ceiling]:
        rows = self._rows("SELECT record FROM ceilings WHERE unit=? AND base=? ORDER BY seen DESC", (unit, base))
        return [self._loaded(Ceiling, "ceilings", row[0]) for row in rows]

    def ceilings_of(self, unit: str) -> list[Ceiling]:
        """Of whatever base."""
        rows = self._rows("SELECT record FROM ceilings WHERE unit=?", (unit,))
        return [self._loaded(Ceiling, "ceilings", row[0]) for row in rows]

    def overridden(self) -> list[str]:
        """Units with an override of ours, by name."""
        return [row[0] for row in self._rows("SELECT unit FROM overrides ORDER BY unit", ())]

    def save_override(self, unit: str, replaced: SpeculationConfig | None, target: SpeculationConfig) -> None:
        """`replaced` is what the operator's own definition asked for (None where that cannot be known)."""
        self._write(
            "INSERT OR REPLACE INTO overrides VALUES (?, ?, ?, ?)",
            (unit, time.time(), _key(replaced) if replaced is not None else None, _key(target)),
        )

    def override(self, unit: str) -> tuple[SpeculationConfig | None, SpeculationConfig] | None:
        """What our override of the unit replaced, and what it puts in force."""
        rows = self._rows("SELECT replaced, target FROM overrides WHERE unit=?", (unit,))
        if not rows:
            return None
        replaced, target = rows[0]
        before = self._loaded(SpeculationConfig, "overrides", replaced) if replaced else None
        return before, self._loaded(SpeculationConfig, "overrides", target)

    def forget_override(self, unit: str) -> None:
        self._write("DELETE FROM overrides WHERE unit=?", (unit,))

    def forget(self, unit: str, name: str) -> KnownGood | Ceiling | None:
        """Deletes the known-good or the ceiling of that id, of whatever base, and returns it; None where none is."""
        proven = self._rows("SELECT record FROM known_good WHERE unit=?", (unit,))
        too_big = self._rows("SELECT record FROM ceilings WHERE unit=?", (unit,))
        for good in (self._loaded(KnownGood, "known_good", row[0]) for row in proven):
            if good.id == name:
                where = (unit, good.base, _key(good.config))
                self._write("DELETE FROM known_good WHERE unit=? AND base=? AND config=?", where)
                return good
        for ceiling in (self._loaded(Ceiling, "ceilings", row[0]) for row in too_big):
            if ceiling.id == name:
                self.forget_ceiling(unit, ceiling.base, ceiling.config)
                return ceiling
        return None

    def owe_reload(self, unit: str) -> None:
        """A file of ours is about to change that systemd has loaded."""
        self._write("INSERT OR IGNORE INTO reloads_owed VALUES (?)", (unit,))

    def reload_owed(self, unit: str) -> bool:
        return bool(self._rows("SELECT 1 FROM reloads_owed WHERE unit=?", (unit,)))

    def reloaded(self, unit: str) -> None:
        self._write("DELETE FROM reloads_owed WHERE unit=?", (unit,))

    # Pauses

    def save_pause(self, unit: str, since: float, until: float) -> None:
        self._write("INSERT OR REPLACE INTO pauses VALUES (?, ?, ?)", (unit, since, until))

    def pause(self, unit: str) -> tuple[float, float] | None:
        """Since when, and until when (Unix seconds), which may be past: a pause stays until it is ended."""
        rows = self._rows("SELECT since, until FROM pauses WHERE unit=?", (unit,))
        return (rows[0][0], rows[0][1]) if rows else None

    def end_pause(self, unit: str) -> None:
        self._write("DELETE FROM pauses WHERE unit=?", (unit,))

    # Witnesses of a stop

    def save_witness(self, unit: str, invocation: str) -> None:
        """The unit's witness stands, and its newest launch is that one."""
        self._write("INSERT OR REPLACE INTO witnesses VALUES (?, ?)", (unit, invocation))

    def witness(self, unit: str) -> str | None:
        """The launch for which the unit's witness was called; None where none was, or where we sent it away."""
        rows = self._rows("SELECT invocation FROM witnesses WHERE unit=?", (unit,))
        return rows[0][0] if rows else None

    def witnessed(self) -> list[str]:
        """Units with a witness, by name."""
        return [row[0] for row in self._rows("SELECT unit FROM witnesses ORDER BY unit", ())]

    def forget_witness(self, unit: str) -> None:
        self._write("DELETE FROM witnesses WHERE unit=?", (unit,))

    # The file

    def find_unacknowledged(self, kept: Iterable[str]) -> None:
        known = {row[0] for row in self._rows("SELECT kept FROM acknowledged", ())}
        self.unacknowledged = tuple(sorted(name for name in kept if name not in known))

    def acknowledge(self) -> None:
        for name in self.unacknowledged:
            self._write("INSERT OR IGNORE INTO acknowledged VALUES (?)", (name,))
        self.unacknowledged = ()

    def prune(self, unit: str, keep: int = 1000) -> None:
        """Forgets the unit's launches and incidents (with their intents) but for the newest `keep` of each.

        What is still needed stays at any age: an open incident and its launch, a launch that proved a config, and the
        starts of the last day."""
        try:
            with self._transaction():
                for statement in _PRUNE:
                    self._db.execute(statement, {"unit": unit, "keep": keep, "open": Outcome.OPEN, "now": time.time()})
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be written: {error}") from error

    def _loaded(self, kind: type[T], table: str, text: str) -> T:
        with self._understood(table):
            value: T = _ADAPTERS[kind].validate_json(text)
            return value

    def _failure(self, name: str | None) -> FailureClass | None:
        with self._understood("launches"):
            return FailureClass(name) if name else None

    @contextmanager
    def _understood(self, table: str) -> Iterator[None]:
        """A row that says nothing to us was edited by hand, or written by a version that knows more words."""
        try:
            yield
        except ValueError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be read: a row of its table {table} is not understood ({_first(error)})"
            ) from error

    def _rows(self, sql: str, parameters: tuple[object, ...]) -> list[Any]:
        try:
            return self._db.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be read: {error}") from error

    def _write(self, sql: str, parameters: tuple[object, ...]) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, parameters)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be written: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back where the disk is full
                self._db.execute("ROLLBACK")
            raise


def _dumped(kind: type[T], value: T) -> str:
    return _ADAPTERS[kind].dump_json(value).decode()


def _first(error: ValueError) -> str:
    """What is wrong first, in one line: pydantic's own text has several for each error."""
    if not isinstance(error, ValidationError):
        return str(error)
    details = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, details["loc"])), details["msg"])))


def _is_broken(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind, the rest its variant
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _why_not(path: Path, error: sqlite3.Error) -> str:
    """SQLite says "unable to open database file" for everything."""
    if os.geteuid() != 0 and not os.access(path, os.R_OK | os.W_OK):
        return "permission denied; it is root's alone: run this as root"
    return str(error)


def _key(config: SpeculationConfig) -> str:
    return _dumped(SpeculationConfig, config)
