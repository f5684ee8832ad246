"""One daemon after the other over a simulated host: watched, killed, ended and started again."""

import asyncio
import sqlite3
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

from sglang_watchdog import witness
from sglang_watchdog.by_hand import ByHand
from sglang_watchdog.domain.errors import BusLost, WatchdogError
from sglang_watchdog.hand_back import hand_back
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.gpu import ProbeWorker
from sglang_watchdog.host.journal import Journal
from sglang_watchdog.host.server_files import ServerFilesReader
from sglang_watchdog.parts import Parts
from sglang_watchdog.reporting.hooks import Hooks
from sglang_watchdog.reporting.metrics import Metrics
from sglang_watchdog.settings import HookSettings, UnitSettings
from sglang_watchdog.watcher import UnitWatcher
from sim_host.adapters import SimClock, SimJournal, SimLedger, SimProbe, SimServerFiles, SimSystemd
from sim_host.oracle import Oracle
from sim_host.world import UNIT, Killed, World

_RECONNECT_S = 2.0
_RESTART_S = 0.5


class SimDaemon:
    """As `sglang-watchdog.service` with Restart=always, with one unit."""

    def __init__(
        self, world: World, oracle: Oracle, settings: UnitSettings, db: sqlite3.Connection, metrics: Metrics
    ) -> None:
        self._world, self._oracle, self._settings, self._db, self._metrics = world, oracle, settings, db, metrics
        self.lives = 0
        self.start()

    def start(self) -> None:
        world = self._world
        world.dead = False
        self.lives += 1
        self.ledger = SimLedger(self._db, world, self._oracle)
        self.systemd = SimSystemd(world, self._oracle, self.ledger)
        self.parts = Parts(
            systemd=cast(Systemd, self.systemd),
            journal=cast(Journal, SimJournal(world)),
            probe=cast(ProbeWorker, SimProbe(world)),
            files=cast(ServerFilesReader, SimServerFiles(world)),
            clock=SimClock(world),
            ledger=self.ledger,
            metrics=self._metrics,
            hooks=Hooks(HookSettings(), self._metrics),
            state_dir=Path("/var/lib/sglang-watchdog"),
        )
        self.watcher: UnitWatcher | None = None
        self.commands: list[asyncio.Task[str]] = []
        self.task = world.loop.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                self.watcher = UnitWatcher(UNIT, self._settings, self.parts, lambda: None)
                self._world.listener = self.watcher.hint
                self._oracle.paused = lambda: self.watcher is not None and self.watcher.pausing.active
                await self.watcher.run()
            except BusLost:
                await asyncio.sleep(_RECONNECT_S)

    def run_for(self, seconds: float) -> None:
        """Time passes; a daemon that was killed is started again by systemd."""
        loop = self._world.loop
        end = loop.elapsed + seconds
        while loop.elapsed < end:
            loop.run_until_complete(self._until_it_ends(end - loop.elapsed))
            if self._world.dead:
                self.bury()
                loop.run_for(_RESTART_S)
                self.start()
            elif self.task.done():
                self.task.result()  # a defect: nothing else ends it

    async def _until_it_ends(self, seconds: float) -> None:
        await asyncio.wait([self.task, *self.commands], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.commands = [command for command in self.commands if not self._answered(command)]

    def _answered(self, command: "asyncio.Task[str]") -> bool:
        if not command.done():
            return False
        if not command.cancelled() and (error := command.exception()) is not None:
            assert isinstance(error, WatchdogError | Killed), repr(error)
        return True

    def kill(self) -> None:
        self._world.dead = True

    def bury(self) -> None:
        """Whatever its tasks still do on their way out happens to nobody: the process is gone."""
        self._oracle.by_hand = False
        for task in (self.task, *self.commands):
            task.cancel()
        gone = asyncio.gather(self.task, *self.commands, return_exceptions=True)
        self._world.loop.run_until_complete(gone)
        self.watcher = None

    def ask(self, command: Coroutine[Any, Any, str]) -> None:
        """A command comes in over the control socket; its client waits, the host goes on."""
        self.commands.append(self._world.loop.create_task(self._asked(command)))

    async def _asked(self, command: Coroutine[Any, Any, str]) -> str:
        self._oracle.by_hand = True
        try:
            return await command
        finally:
            self._oracle.by_hand = False

    @property
    def by_hand(self) -> ByHand | None:
        return ByHand(self.watcher, self.parts) if self.watcher is not None else None

    def terminate(self) -> None:
        """SIGTERM: what is held is handed back, and systemd starts another one."""
        self._bury_alive()
        try:
            for incident in self.ledger.open_incidents():
                theirs = self.watcher is not None and bool(self.watcher.incidents.jobs.foreign)
                hand_back(incident, self.ledger, cast(Systemd, self.systemd), theirs=theirs)
            for unit in self.ledger.witnessed():
                witness.dismiss(cast(Systemd, self.systemd), self.ledger, unit)
        except (WatchdogError, Killed):
            pass  # OnFailure= would try again; here the next daemon does
        self._world.loop.run_for(_RESTART_S)
        self.start()

    def _bury_alive(self) -> None:
        for task in (self.task, *self.commands):
            task.cancel()
        gone = asyncio.gather(self.task, *self.commands, return_exceptions=True)
        self._world.loop.run_until_complete(gone)
        self._oracle.by_hand = False
