"""Gathers what is known of one ended launch, has it diagnosed, and records the result.

The diagnosis and the plan are pure; this is what stands between them and the world.
"""

from collections.abc import Callable
from functools import partial

import structlog

from sglang_watchdog import witness
from sglang_watchdog.cards import Cards
from sglang_watchdog.compared import compared_with
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.domain.container import run_command
from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.known_good import Ceiling, KnownGood, base_of
from sglang_watchdog.domain.launch import Definition, Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.domain.visible import seen_before
from sglang_watchdog.host import containers, surroundings, unit_files
from sglang_watchdog.host.server_files import ServerFiles
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.parts import Parts
from sglang_watchdog.pausing import Pausing
from sglang_watchdog.recovery.freed import out_of_reach
from sglang_watchdog.recovery.gate import refused
from sglang_watchdog.recovery.policy import DAY_S, Budget, Facts, Plan, decide, demotes, proves_a_ceiling
from sglang_watchdog.reporting.metrics import Sense
from sglang_watchdog.settings import UnitSettings

# PID 1 logs the end of the main process within a millisecond or so of the signal; more is a slow journald.
_JOURNAL_DEADLINE_S = 2.0
_JOURNAL_RETRY_S = 0.05
_ASK_ENGINE_S = 2.0
log = structlog.get_logger()


class Inquest:
    """Of one unit. Nothing here touches the unit."""

    def __init__(
        self,
        unit: str,
        settings: UnitSettings,
        parts: Parts,
        cards: Cards,
        pausing: Pausing,
        obstacle: Callable[[UnitSnapshot], str],
    ) -> None:
        self._pausing = pausing
        self._unit = unit
        self._settings = settings
        self._parts = parts
        self._cards = cards
        self._obstacle = obstacle
        self.managed = frozenset[str](settings.managed_flags)
        self._in_sync: Definition | None = None  # the last definition whose bytes on disk were the loaded ones

    def begin(self, snapshot: UnitSnapshot, known: Launch | None = None) -> LaunchWatch:
        """`known` is what an earlier daemon recorded of the same launch."""
        definition = unit_files.definition(snapshot, self._in_sync)
        if not snapshot.need_daemon_reload:
            self._in_sync = definition
        return LaunchWatch(snapshot, definition, self.managed, known)

    async def identify(self, launch: LaunchWatch) -> None:
        """Reads what a proof is bound to beside the command: once in a launch, and again where a wrapper has become the
        server."""
        if not launch.raw_argv or (launch.files is not None and launch.files_of == launch.argv):
            return
        launch.files_of = launch.argv
        launch.files = await self._parts.files.read(launch.raw_argv)
        self._parts.metrics.sees(Sense.MODEL, well=not launch.files.unknown)
        if launch.files.unknown:
            log.warning("the model cannot be read", unit=self._unit, why=launch.files.unknown)

    async def find_container(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        """Asks the engine for the container of the command's name, where neither a monitor nor a file tells of it. An
        image may have to be pulled first, so less and less often."""
        command, now = run_command(snapshot.exec_start), self._parts.clock.now()
        if command is None or launch.containers or now < launch.ask_engine_at:
            return
        launch.ask_engine_at = now + max(_ASK_ENGINE_S, (now - launch.started) / 4)
        if container := await containers.named(command, launch.started):
            launch.see_container(container)

    async def read_to_the_end(self, launch: LaunchWatch) -> None:
        """Pulls the journal until PID 1's word of the end is in it, or for as long as that may take."""
        deadline = self._parts.clock.monotonic() + _JOURNAL_DEADLINE_S
        while True:
            await self.pull(launch)
            if launch.journal_complete or self._parts.clock.monotonic() > deadline:
                return
            await self._parts.clock.sleep(_JOURNAL_RETRY_S)

    async def pull(self, launch: LaunchWatch) -> bool:
        """Whether the journal could be read."""
        try:
            await launch.pull(self._parts.journal)
        except WatchdogError as error:
            log.warning("the journal cannot be read", unit=self._unit, error=str(error))
            self._parts.metrics.sees(Sense.JOURNAL, well=False)
            return False
        self._parts.metrics.sees(Sense.JOURNAL, well=True)
        return True

    def diagnose(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> Diagnosis:
        """Why the launch ended, or, where it runs, what is surprising about it."""
        if snapshot.refused and launch.invocation == snapshot.invocation and (ceiling := self.ceiling_of(launch)):
            return refused(ceiling)
        compared, record = compared_with(self._parts.ledger, self._unit, self.base(launch)), launch.record()
        return diagnose(
            Case(
                unit=snapshot,
                timeline=launch.timeline,
                launch=record,
                gpu_before=seen_before(record),
                held_before=launch.held_before,
                held_when_proven=compared.held,
                memory_when_proven=compared.memory,
                loaded=launch.definition,
                on_disk=unit_files.definition_on_disk(snapshot),
                disk_changed=unit_files.disk_changed(snapshot),
                intended=self._intended(snapshot),
                shadowed=unit_files.shadowed_config(snapshot, self.managed),
                ended_for=self._parts.ledger.ended_for(launch.invocation),
                surprise_told=launch.surprise_told,
                known_good=compared.config,
                inside=surroundings.container(),
                has_ledger=True,
                managed=self.managed,
            )
        )

    def open_incident(self, launch: LaunchWatch, diagnosis: Diagnosis) -> Incident:
        return self._parts.ledger.open_incident(
            Incident(
                "",
                self._unit,
                launch.invocation,
                self._parts.clock.now(),
                diagnosis.failure,
                diagnosis.summary,
                diagnosis=diagnosis.to_json(),
                ran=launch.config,
            )
        )

    def learn_ceiling(self, launch: LaunchWatch, diagnosis: Diagnosis) -> None:
        """A start on known cards that proves that the config does not fit its base."""
        # What was on the cards is part of the proof, and so is the model.
        if proves_a_ceiling(diagnosis) and launch.gpu_before is not None and not launch.base_unknown:
            base, now = self.base(launch), self._parts.clock.now()
            ceiling = Ceiling(self._unit, base, launch.config, diagnosis.failure, launch.invocation, now)
            self._parts.ledger.save_ceiling(ceiling)

    def learn_known_good(self, launch: LaunchWatch, diagnosis: Diagnosis, plan: Plan) -> None:
        """A known-good that failed by its own fault is none any more."""
        if not demotes(diagnosis, plan) or (proves_a_ceiling(diagnosis) and launch.gpu_before is None):
            return
        for good in self._known_good(launch):
            if good.config.same_as(launch.config):
                self._parts.ledger.demote(good, f"{diagnosis.failure} in launch {launch.invocation}")

    def ceiling_of(self, launch: LaunchWatch) -> Ceiling | None:
        """The proof that what this launch runs does not fit, if there is one."""
        ceilings = self._parts.ledger.ceilings(self._unit, self.base(launch))
        return next((ceiling for ceiling in ceilings if ceiling.config.same_as(launch.config)), None)

    async def plan(self, launch: LaunchWatch, snapshot: UnitSnapshot, diagnosis: Diagnosis, incident: Incident) -> Plan:
        base, now = self.base(launch), self._parts.clock.now()
        ledger = self._parts.ledger
        known_good = tuple(ledger.known_good(self._unit, base))
        unread = launch.base_unknown if self._cards.uuids else "The cards"
        if unread and not known_good and ledger.any_known_good(self._unit):
            return Plan(
                f"{unread} cannot be read, so what was proven cannot be compared; systemd's own policy goes on."
            )
        history = [past for past in ledger.incidents(self._unit) if past.id != incident.id and not past.undone]
        left = await self._cards.left_overs(snapshot)
        return decide(
            diagnosis,
            self._facts(launch, now)(
                known_good=known_good,
                ceilings=tuple(ceiling.config for ceiling in ledger.ceilings(self._unit, base)),
                history=tuple(history),
                begun=frozenset(intent.step for past in history[:1] for intent in ledger.intents(past.id)),
                rollbacks=tuple(ledger.rollbacks(self._unit, self._day(now))),
                operator_stopped=(snapshot.active_state is ActiveState.INACTIVE and not snapshot.refused)
                or witness.saw_a_stop(self._parts.systemd, ledger, snapshot),
                left_overs=bool(left.end),
                out_of_reach=out_of_reach(left),
                override_obstacle=self._obstacle(snapshot),
                allow_no_speculation=self._settings.allow_no_speculation,
            ),
        )

    def plan_of_hang(
        self, launch: LaunchWatch, snapshot: UnitSnapshot, diagnosis: Diagnosis, *, own_watchdog: bool
    ) -> Plan:
        """For a launch that runs and hangs. The cards are not read: it may hang in their driver."""
        return decide(
            diagnosis,
            self._facts(launch, self._parts.clock.now())(
                operator_stopped=witness.saw_a_stop(self._parts.systemd, self._parts.ledger, snapshot),
                hangs=True,
                restart_unresponsive=self._settings.restart_unresponsive,
                starting=snapshot.active_state is not ActiveState.ACTIVE,
                own_watchdog=own_watchdog,
            ),
        )

    def _facts(self, launch: LaunchWatch, now: float) -> "partial[Facts]":
        """What counts for every plan."""
        ledger = self._parts.ledger
        return partial(
            Facts,
            now=now,
            act=self._settings.act and self._parts.may_act,
            running=launch.config,
            starts=tuple(ledger.starts(self._unit, self._day(now))),
            proven=ledger.last_proof(self._unit),
            budget=_budget(self._settings),
            paused=self._pausing.in_words(),
            several_nodes=launch.several_nodes or self._settings.several_nodes,
        )

    def _day(self, now: float) -> float:
        """Since when recoveries count, in Unix seconds."""
        return now - max(DAY_S, self._settings.rollback_window)

    def base(self, launch: LaunchWatch) -> str:
        return self.base_of(launch.argv, launch.files)

    def base_of(self, argv: tuple[str, ...], files: ServerFiles | None) -> str:
        """`argv` without secrets."""
        return base_of(
            argv,
            self.managed,
            version=files.version if files else "",
            driver=self._cards.driver,
            gpus=self._cards.uuids,
            model_digest=(files.model_digest or "") if files else "",
        )

    def _intended(self, snapshot: UnitSnapshot) -> SpeculationConfig | None:
        """What the files ask for; None where they cannot tell, or where an override of ours is not loaded yet: that is
        no definition anybody believed in."""
        unloaded = snapshot.need_daemon_reload and self._parts.ledger.override(self._unit) is not None
        return None if unloaded or self._obstacle(snapshot) else unit_files.intended_config(snapshot, self.managed)

    def _known_good(self, launch: LaunchWatch) -> list[KnownGood]:
        return self._parts.ledger.known_good(self._unit, self.base(launch))


def _budget(settings: UnitSettings) -> Budget:
    return Budget(settings.rollbacks, settings.rollback_window, settings.rollbacks_per_day, settings.cool_down)
