"""The product's adapters over a simulated host. Each call is a point at which the daemon can be killed, before and
after what it does."""

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.gpu import Gpu, GpuAnswer, GpuHolder, GpuReading, GpuUnknown
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.known_good import Ceiling, KnownGood
from sglang_watchdog.domain.launch import Definition, ProcessId
from sglang_watchdog.domain.ownership import ProcessFacts
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import override, processes, systemctl, unit_files
from sglang_watchdog.host.gpu import DeviceHolder
from sglang_watchdog.host.override import Override, OverrideKind
from sglang_watchdog.host.processes import SignalOutcome
from sglang_watchdog.host.server import Generated, HealthState
from sglang_watchdog.host.server_files import ServerFiles
from sglang_watchdog.ledger import Ledger
from sim_host.oracle import Oracle
from sim_host.world import CARD, DROP_IN, UNIT, World, config_of

T = TypeVar("T")
_MEMORY = frozenset({FailureClass.KV_CACHE_OOM, FailureClass.RUNTIME_CUDA_OOM})
_SOFTWARE = frozenset({FailureClass.CUDA_ERROR, FailureClass.SOFTWARE_EXCEPTION})


class SimClock:
    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now()

    def monotonic(self) -> float:
        return self._world.loop.elapsed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimLedger(Ledger):
    """The real one, over a database that outlives its daemons. A write is there, or it is not."""

    def __init__(self, db: sqlite3.Connection, world: World, oracle: Oracle) -> None:
        super().__init__(db, Path("/var/lib/sglang-watchdog/ledger.db"))
        self._world = world
        self._oracle = oracle

    def _write(self, sql: str, parameters: tuple[object, ...]) -> sqlite3.Cursor:
        self._world.point()
        cursor = super()._write(sql, parameters)
        self._world.point()
        return cursor

    def save_known_good(self, good: KnownGood) -> None:
        super().save_known_good(good)
        self._oracle.proves(good)

    def all_ceilings(self, unit: str) -> list[Ceiling]:
        rows = self._rows("SELECT record FROM ceilings WHERE unit=?", (unit,))
        return [self._loaded(Ceiling, "ceilings", row[0]) for row in rows]


class SimSystemd:
    def __init__(self, world: World, oracle: Oracle, ledger: SimLedger) -> None:
        self._world, self._oracle, self._ledger = world, oracle, ledger

    def open(self) -> None:
        self._call(lambda: None)

    def close(self) -> None:
        pass

    def ref(self, _unit: str) -> None:
        self._call(lambda: None)

    def snapshot(self, _unit: str) -> UnitSnapshot:
        return self._call(self._world.snapshot)

    def start(self, _unit: str) -> int:
        return self._act(lambda: self._oracle.starts(self._ledger), lambda: self._world.start(by="watchdog"))

    def stop(self, _unit: str) -> int:
        return self._act(self._oracle.stops, lambda: self._world.stop(by="watchdog"))

    def restart(self, _unit: str) -> int:
        return self._act(self._oracle.restarts, lambda: self._world.restart(by="watchdog"))

    def kill(self, _unit: str, _signal: int, *, whole_group: bool = True) -> None:
        assert whole_group, "systemd's own stop of this unit ends the whole group"
        self._act(self._oracle.kills_group, self._world.kill_group)

    def reset_failed(self, _unit: str) -> None:
        self._call(self._world.reset_failed)

    def witness_stands(self, _unit: str) -> bool:
        return self._call(lambda: self._world.witness)

    def call_witness(self, _unit: str) -> None:
        self._act(self._oracle.calls_a_witness, lambda: setattr(self._world, "witness", True))

    def dismiss_witness(self, _unit: str) -> None:
        self._call(lambda: setattr(self._world, "witness", False))

    def _act(self, rules: Callable[[], None], do: Callable[[], T]) -> T:
        def both() -> T:
            rules()
            return do()

        return self._call(both)

    def _call(self, do: Callable[[], T]) -> T:
        self._world.point()
        self._world.need_bus()
        done = do()
        self._world.point()
        return done


class SimJournal:
    def __init__(self, world: World) -> None:
        self._world = world

    async def pull(
        self, invocation: str, feed: Callable[[JournalEntry], None], *, since: float, cursor: str = ""
    ) -> str:
        del since
        self._world.point()
        start = self._world.starts[invocation]
        for entry in start.entries:
            if int(entry.cursor) > int(cursor or 0):
                feed(entry)
                cursor = entry.cursor
        if start.traffic and start.serves and start.hung_since is None:
            feed(JournalEntry(self._world.now(), "Decode batch. #running-req: 1", invocation=invocation, unit=UNIT))
        return cursor


class SimServerFiles:
    """The model and the release never change."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self, _argv: Sequence[str]) -> ServerFiles:
        self._world.point()
        return ServerFiles("digest", "0.5.16")


class SimProbe:
    def __init__(self, world: World) -> None:
        self._world = world

    async def read_gpus(self) -> GpuAnswer:
        self._world.point()
        if self._world.nvml_hangs:
            await asyncio.sleep(5)
            return GpuUnknown(self._world.now(), "no answer from the driver")
        holders = tuple(GpuHolder(p.id.pid, p.holds) for p in self._world.processes.values() if p.holds)
        used = sum(holder.used_bytes for holder in holders) + self._world.releasing
        return GpuReading(self._world.now(), "570", (Gpu(0, "GPU-0", "H200", CARD, used, holders),))

    async def describe(self, pids: Iterable[int]) -> dict[int, ProcessFacts]:
        self._world.point()
        found = {pid: _facts(self._world, pid) for pid in pids}
        return {pid: facts for pid, facts in found.items() if facts is not None}

    async def device_holders(self) -> tuple[DeviceHolder, ...]:
        self._world.point()
        return tuple(DeviceHolder(p.id.pid, ()) for p in self._world.processes.values() if p.holds)

    async def close(self) -> None:
        pass


def _facts(world: World, pid: int) -> ProcessFacts | None:
    process = world.processes.get(pid)
    if process is None:
        return None
    claims = process.claims or None
    return ProcessFacts(process.id, process.started, "python", "S", 0, process.group, (), process.argv, claims)


class SimServer:
    """Takes the place of `proof.Server`; the world is bound by `install`."""

    world: World

    def __init__(self, *_: object) -> None:
        pass

    async def health(self, _deadline: float) -> HealthState:
        self.world.point()
        return HealthState.UP if self._serves else HealthState.REFUSED

    async def generate(self, deadline: float) -> Generated:
        self.world.point()
        running = self.world.running
        if running is not None and running.hung_since is not None:
            await asyncio.sleep(deadline)
            self.world.point()
            return Generated(0, deadline, "no answer", silent=True)
        if running is not None and self._serves:
            self.world.say(running, "Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0")
        return Generated(4 if self._serves else 0, 0.1)

    @property
    def _serves(self) -> bool:
        return self.world.running is not None and self.world.running.serves


class SimFiles:
    """Takes the place of what reads and writes the unit's files."""

    def __init__(self, world: World, oracle: Oracle, ledger: Callable[[], SimLedger]) -> None:
        self._world, self._oracle, self._ledger = world, oracle, ledger

    def render(self, snapshot: UnitSnapshot, config: SpeculationConfig, *_: object) -> Override:
        kind = OverrideKind.DROP_IN if self._world.drop_in else OverrideKind.ENVIRONMENT_FILE
        return Override(snapshot.name, kind, Path(DROP_IN), str(config.steps or 0), 0o644, loaded=False)

    def put_in_force(self, written: Override) -> bool:
        self._world.point()
        steps = int(written.text)
        if self._world.ours_on_disk != steps:
            self._oracle.puts_in_force(config_of(steps), self._ledger())
        self._world.ours_on_disk = steps
        self._world.point()
        return self._world.drop_in and self._world.ours_loaded != steps

    def is_in_force(self, written: Override) -> bool:
        loaded = not self._world.drop_in or self._world.ours_loaded == self._world.ours_on_disk
        return str(self._world.ours_on_disk) == written.text and loaded

    def withdraw(self, *_: object) -> bool:
        self._world.point()
        gone, self._world.ours_on_disk = self._world.ours_on_disk, None
        self._world.point()
        return self._world.drop_in and gone is not None

    def lies_there(self, *_: object) -> bool:
        return self._world.ours_on_disk is not None

    def drop_in_of(self, _unit: str) -> Any:
        there = self._world.drop_in and self._world.ours_on_disk is not None
        return _Path(DROP_IN, there)

    def operators(self, *_: object) -> SpeculationConfig:
        return config_of(self._world.on_disk)

    async def verify(self, *_: object) -> str:
        await asyncio.sleep(0.05)
        return ""

    async def reload(self) -> None:
        self._world.point()
        await asyncio.sleep(0.05)
        self._world.point()
        self._world.reload()
        self._world.point()

    async def stacks(self, *_: object) -> tuple[Evidence, ...]:
        self._world.point()
        self._world.looked_at += 1
        await asyncio.sleep(1)
        self._world.point()
        return ()

    async def awaiting_reload(self) -> tuple[str, ...]:
        return ()


class _Path(str):
    there: bool

    def __new__(cls, path: str, there: bool) -> "_Path":
        made = super().__new__(cls, path)
        made.there = there
        return made

    def exists(self) -> bool:
        return self.there


def diagnose(world: World) -> Callable[[Case], Diagnosis]:
    """Tells the truth, and of a rollback what the real one says."""

    def answer(case: Case) -> Diagnosis:
        assert case.launch is not None
        start = world.starts[case.launch.invocation]
        failure = start.failure or FailureClass.UNKNOWN
        same = case.known_good is not None and case.known_good.same_as(config_of(start.steps))
        helps: bool | None = False
        if failure in _MEMORY | _SOFTWARE and start.steps:
            helps = None if case.known_good is None else not same
        if failure is FailureClass.GPU_MEMORY_HELD:
            helps = False if same else None
        return Diagnosis(failure, 0.95, f"It ended by {failure}.", start.phase, helps)

    return answer


def install(patch: pytest.MonkeyPatch, world: World, files: SimFiles, oracle: Oracle, said: list[str]) -> None:
    """Puts the simulated host below the product's modules."""

    def sent(process: ProcessId, _number: int, proof: Callable[[], bool]) -> SignalOutcome:
        world.point()
        there = world.processes.get(process.pid)
        if there is None or there.id != process:
            return SignalOutcome.GONE
        if not proof():
            return SignalOutcome.NOT_PROVEN
        oracle.signals(process)
        world.drop(there)
        world.point()
        return SignalOutcome.SENT

    def group(_group: str) -> tuple[ProcessId, ...]:
        return tuple(p.id for p in world.processes.values() if p.group.endswith(UNIT))

    def identify(pid: int) -> ProcessId | None:
        return world.processes[pid].id if pid in world.processes else None

    patch.setattr(processes, "signal_process", sent)
    patch.setattr(processes, "facts", lambda pid: _facts(world, pid))
    patch.setattr(processes, "lives", lambda process: identify(process.pid) == process)
    patch.setattr(processes, "start_ticks", lambda pid: one.start_ticks if (one := identify(pid)) else None)
    patch.setattr(processes, "name", lambda _pid: "python")
    patch.setattr(processes, "command_line", lambda pid: world.processes[pid].argv if pid in world.processes else ())
    patch.setattr(processes, "variables", lambda *_: None)
    patch.setattr(processes, "cgroup_processes", group)
    patch.setattr(processes, "cgroup_listens", lambda *_: world.running is not None and world.running.serves)
    patch.setattr(processes, "has_to_itself", lambda *_: world.running is not None and world.running.serves)
    patch.setattr(processes, "bytes_moved", lambda _groups: 0)
    patch.setattr(processes, "doing", lambda pid: f"python ({pid}): S (sleeping), 1 threads")
    patch.setattr("sglang_watchdog.hangs.stacks.save", files.stacks)
    patch.setattr(processes, "is_traced", lambda _pid: False)
    patch.setattr(processes, "boot_id", lambda: "b" * 32)
    patch.setattr(processes, "boot_time", lambda: 0.0)
    for name in ("render", "put_in_force", "is_in_force", "withdraw", "lies_there", "verify"):
        patch.setattr(override, name, getattr(files, name))
    patch.setattr(override, "override_obstacle", lambda *_: "")
    patch.setattr(systemctl, "daemon_reload", files.reload)
    patch.setattr(systemctl, "awaiting_reload", files.awaiting_reload)
    patch.setattr("sglang_watchdog.overriding.operator_config", files.operators)
    patch.setattr("sglang_watchdog.overriding.drop_in_of", files.drop_in_of)
    nothing = SimpleNamespace(fragment="", drop_ins=(), environment_files=(), command=None, environment={})
    patch.setattr(unit_files, "definition", lambda *_: Definition("", {}))
    patch.setattr(unit_files, "definition_on_disk", lambda *_: Definition("", {}))
    patch.setattr(unit_files, "intended_config", lambda *_: None)
    patch.setattr(unit_files, "on_disk", lambda *_, **__: nothing)
    patch.setattr("sglang_watchdog.inquest.diagnose", diagnose(world))
    for module in ("ledger", "cards"):
        patch.setattr(f"sglang_watchdog.{module}.time", SimpleNamespace(time=world.now))
    ticks = itertools.count(step=0.5)
    patch.setattr(
        "sglang_watchdog.hand_back.time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: world.point())
    )
    patch.setattr("sglang_watchdog.reporting.alerts.send", lambda alert: said.append(alert.message))
    patch.setattr("sglang_watchdog.proof.Server", type("Server", (SimServer,), {"world": world}))
