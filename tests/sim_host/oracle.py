"""The rules, held against what is true of the simulated host at the moment of an act."""

from collections.abc import Callable

from sglang_watchdog.domain.incident import Outcome
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.settings import UnitSettings
from sim_host.world import OWN_WATCHDOG_S, UNIT, Start, World, config_of

DAY_S = 86400.0


class Oracle:
    """`broken` holds what was done against a rule, in words."""

    def __init__(self, world: World, settings: UnitSettings) -> None:
        self._world = world
        self._settings = settings
        self.broken: list[str] = []
        self.paused: Callable[[], bool] = lambda: False
        self.by_hand = False  # a person asked for what is going on now
        self.held_by_us = False
        self.recoveries: list[float] = []
        self.proofs: list[tuple[float, SpeculationConfig]] = []
        self.left: list[tuple[float, SpeculationConfig]] = []

    def _rule(self, holds: bool, words: str) -> None:
        if not holds:
            self.broken.append(f"t={self._world.loop.elapsed:.2f}: {words}")

    def _may_act(self, what: str) -> None:
        self._rule(self._settings.act, f"{what} without act = true")

    # Acts of the product

    def stops(self) -> None:
        self._may_act("a stop")
        self._rule(not self.paused(), "a stop during a pause")
        self._rule(self._world.unit.ended, "a stop of a launch that runs")
        if self._world.unit.in_auto_restart:
            self.held_by_us = True

    def calls_a_witness(self) -> None:
        self._may_act("a witness")
        self._rule(not self._world.witness, "a witness where one stands, which systemd refuses")

    def kills_group(self) -> None:
        self._may_act("KillUnit")
        self._rule(not self.paused(), "KillUnit during a pause")
        running = self._world.running
        if running is not None and running.serves:
            self._may_end_what_hangs(running)
        elif running is not None:
            self._rule(running.by == "systemd", f"KillUnit of a launch that was started by the {running.by}")
            before = [start for start in self._world.starts.values() if start.failure is not None]
            self._rule(bool(before) and before[-1].steps == running.steps, "KillUnit of a command that has not failed")
        self._own(p.id for p in self._world.processes.values() if p.group.endswith(UNIT))

    def _may_end_what_hangs(self, running: Start) -> None:
        hung = None if running.hung_since is None else self._world.loop.elapsed - running.hung_since
        self._rule(self._settings.restart_unresponsive, "KillUnit of a launch that serves, which is not allowed")
        long_enough = hung is not None and hung >= OWN_WATCHDOG_S
        self._rule(long_enough, f"KillUnit of a launch that serves, or hangs for {hung} s only")
        self._rule(not self._world.operator_stopped and not self._world.unit.job, "KillUnit of what the operator stops")
        self.held_by_us = True

    def signals(self, process: ProcessId) -> None:
        self._rule(self._settings.act or self.by_hand, "a signal without act = true")
        self._rule(not self.paused() or self.by_hand, "a signal during a pause")
        self._rule(self._world.unit.ended, "a signal while the unit is up")
        self._own([process])

    def _own(self, processes: object) -> None:
        for one in processes:  # type: ignore[attr-defined]
            truth = self._world.processes.get(one.pid)
            known = truth is not None and truth.owner in self._world.starts
            self._rule(known, f"a signal to pid {one.pid}, which is not the unit's")

    def starts(self, ledger: Ledger) -> None:
        self._may_act("a start")
        self._rule(self._world.unit.ended, "a start of a unit that is up")
        self._rule(not self._world.operator_stopped, "a start of what the operator had stopped")
        self._rule(not self.paused() or self.held_by_us, "a start during a pause, of what was not held")
        self.held_by_us = False
        if not self.by_hand and self._recovers(ledger):
            self._rule(not self.paused(), "a recovery during a pause")
            self._rule(not self._taken_over(ledger), "a recovery of what the operator had started meanwhile")
            self.recoveries.append(self._world.now())
            self._within_budget()

    def _recovers(self, ledger: Ledger) -> bool:
        """Whether a step `start` is under way; else what was held is handed back."""
        open_ones = ledger.open_incidents()
        return any(not i.outcome and i.step == "start" for one in open_ones for i in ledger.intents(one.id))

    def _taken_over(self, ledger: Ledger) -> bool:
        """Whether the operator has started the unit since the launch ended that is recovered."""
        opened = min(incident.opened for incident in ledger.open_incidents())
        return any(start.by == "operator" and start.began > opened for start in self._world.starts.values())

    def _within_budget(self) -> None:
        now, proven = self._world.now(), max((when for when, _ in self.proofs), default=0.0)
        lately = [t for t in self.recoveries if t > max(now - self._settings.rollback_window, proven)]
        today = [t for t in self.recoveries if t > now - DAY_S]
        self._rule(len(lately) <= self._settings.rollbacks, f"{len(lately)} recoveries in one window")
        self._rule(len(today) <= self._settings.rollbacks_per_day, f"{len(today)} recoveries in one day")

    def restarts(self) -> None:
        self._may_act("a restart")
        self._rule(self.by_hand, "a restart that nobody asked for")

    def puts_in_force(self, config: SpeculationConfig, ledger: Ledger) -> None:
        self._may_act("an override")
        self._rule(not self.paused(), "an override during a pause")
        if self.by_hand or self._world.current is None or ledger.override(UNIT) is None:
            return
        ran, now = config_of(self._world.current.steps), self._world.now()
        if not any(incident.target is not None for incident in ledger.open_incidents()):
            return  # an override that is written anew onto another command
        known = [row for row in ledger.all_ceilings(UNIT) if row.config.same_as(config)]  # type: ignore[attr-defined]
        self._rule(not known, f"{config.describe()} is put in force, which does not fit")
        for when, left in self.left:
            proven = any(good.same_as(left) and time > when for time, good in self.proofs)
            again = left.same_as(config) and not proven and now - when < DAY_S
            self._rule(not again, f"back to {config.describe()}, which a rollback went away from")
        if not ran.same_as(config):
            self.left.append((now, ran))

    def proves(self, good: KnownGood) -> None:
        running = self._world.running
        fits = running is not None and running.serves and good.config.same_as(config_of(running.steps))
        self._rule(fits, f"{good.config.describe()} is called known-good, and does not serve")
        self.proofs.append((self._world.now(), good.config))

    # What has to be true once all is quiet

    def nothing_is_owed(self, ledger: Ledger) -> None:
        self._rule(not ledger.open_incidents(), "an incident stays open")
        theirs = self._world.operator_stopped or not self._world.unit.loaded
        if self.held_by_us and self._world.unit.ended and not theirs:
            last = ledger.incidents(UNIT, 1)[0]
            told = last.outcome in (Outcome.HELD, Outcome.FAILED)
            self._rule(told, f"a unit that was held stays down, and the last word is {last.outcome}: {last.reason}")
