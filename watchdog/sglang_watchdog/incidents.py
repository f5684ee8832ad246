"""The incidents of one unit, from an ended launch to an outcome: recorded, planned, carried out, verified, closed.

An incident never stays open by accident: whatever ends a recovery (the operator, a failed step, a lost ledger, our own
end) closes it or leaves it to the next start of the daemon, which finishes it or hands the unit back.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from sglang_watchdog import witness
from sglang_watchdog.cards import Cards
from sglang_watchdog.domain.errors import BusLost, LedgerError, UnusableInput, WatchdogError
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.gpu import GpuReading
from sglang_watchdog.domain.incident import UNDONE, Incident, Intent, Outcome, Step
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.hand_back import (
    REBOOTED,
    hand_back,
    killed_in,
    of_earlier_boot,
    owes_a_start,
    settled,
    start_if_down,
    was_started_since,
)
from sglang_watchdog.host import processes
from sglang_watchdog.host.server import address_of
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.liveness import is_on_its_way_down
from sglang_watchdog.observation import LaunchWatch, is_executed
from sglang_watchdog.overriding import Overriding
from sglang_watchdog.parts import Parts
from sglang_watchdog.pausing import Pausing
from sglang_watchdog.recovery.executor import Executor, GivenUp, OwnJobs, StepFailed, Task, Yielded
from sglang_watchdog.recovery.policy import Plan
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.hooks import Event
from sglang_watchdog.reporting.metrics import Sense
from sglang_watchdog.settings import UnitSettings

# A start job that was accepted brings a launch at once, or none at all (a failed condition or dependency).
_NO_LAUNCH_AFTER_S = 10.0
_ASKED_FOR = frozenset({FailureClass.REQUESTED_STOP, FailureClass.STOP_TIMEOUT_SIGKILL})
log = structlog.get_logger()


def _came_through(intents: list[Intent]) -> bool:
    """systemd took the start: the step came to its end."""
    return any(intent.step is Step.START and intent.outcome == "done" for intent in intents)


@dataclass(frozen=True, slots=True)
class Verification:
    """The last step of a recovery, which lasts for as long as the server loads. Monotonic seconds."""

    incident: Incident
    intent: int
    since: float
    ready: float | None = None  # when the launch was first seen ready


@dataclass(frozen=True, slots=True)
class Failed:
    """What is known of the launch that failed: its command (secrets removed), and systemd's count of restarts then."""

    argv: tuple[str, ...]
    restarts: int
    gpu_before: GpuReading | None


@dataclass(frozen=True, slots=True)
class Hanging:
    """A hang that was reported and is not decided yet."""

    incident: Incident
    diagnosis: Diagnosis


class Incidents:
    """Of one unit. `progress` is called while something long goes on."""

    def __init__(
        self,
        unit: str,
        settings: UnitSettings,
        parts: Parts,
        cards: Cards,
        inquest: Inquest,
        overriding: Overriding,
        pausing: Pausing,
        progress: Callable[[], None],
    ) -> None:
        self._pausing = pausing
        self._unit = unit
        self._settings = settings
        self._parts = parts
        self._cards = cards
        self._inquest = inquest
        self._overriding = overriding
        self.jobs = OwnJobs()
        self._executor = Executor(unit, parts.systemd, parts.ledger, parts.metrics, self.jobs, pausing, progress)
        self.verifying: Verification | None = None
        self._hanging: Hanging | None = None
        self._unwritten: dict[str, Incident] = {}  # over, and still open in a ledger that could not be written

    # What an earlier daemon left

    async def resume(self, snapshot: UnitSnapshot) -> None:
        """Finishes a recovery that had begun, where the unit is as it was left; never touches a launch that runs."""
        for incident in self._parts.ledger.incidents(self._unit, 1):
            self._parts.metrics.saw_incident(incident)
        for incident in self._parts.ledger.untold(self._unit):
            self._tell(incident)
        for incident in self._parts.ledger.open_incidents():
            if incident.unit == self._unit:
                await self._resume(incident, snapshot, self._parts.ledger.intents(incident.id))

    async def _resume(self, incident: Incident, snapshot: UnitSnapshot, intents: list[Intent]) -> None:
        begun = {intent.step for intent in intents}
        same = snapshot.invocation == incident.invocation
        if begun and of_earlier_boot(incident, self._parts.ledger):
            self._after_reboot(incident, snapshot)
        elif not begun:
            self._undone(incident, diagnose_again=snapshot.ended and same)
        elif not snapshot.ended:
            if Step.START in begun:
                self._await_tokens(incident)
            elif same and incident.failure is FailureClass.UNRESPONSIVE:
                await self._resume_hang(incident)
            else:
                self._close(incident, Outcome.YIELDED, "The unit was started while the watchdog was away.")
        elif Step.START in begun and not same and (snapshot.invocation or _came_through(intents)):
            # Without an invocation systemd has forgotten the unit since, and no launch followed the one that failed.
            self._close(incident, Outcome.FAILED, "What it started ended while the watchdog was away.")
        elif Step.HOLD not in begun:
            self._close(incident, Outcome.REPORTED, "The watchdog ended in the middle; nothing was held.")
        elif was_started_since(incident, intents, snapshot, self._parts.ledger):
            self._close(incident, Outcome.YIELDED, "The unit was started while the watchdog was away, and ended.")
        else:
            await self._take_up(incident, snapshot)

    async def _resume_hang(self, incident: Incident) -> None:
        """What was killed is gone in a moment, or on its way. What goes on was not, and may be alive by now: it is
        looked at anew."""
        snapshot = settled(self._parts.systemd, self._unit, incident.invocation)
        if snapshot.ended or snapshot.active_state is ActiveState.DEACTIVATING:
            await self._take_up(incident, snapshot)
        else:
            self._close(incident, Outcome.REPORTED, "The watchdog ended before it brought down what hung.")

    def _after_reboot(self, incident: Incident, snapshot: UnitSnapshot) -> None:
        """Nothing is held any more, and what runs is what systemd started at boot, with an override where one lay there
        by then. What is not enabled stays down: that is the operator's word for a reboot."""
        runs = not snapshot.ended or snapshot.job_type == "start"
        if runs and Step.VERIFY in incident.steps:
            self._await_tokens(incident)
        else:
            what = "systemd starts it" if runs else "systemd has not started it again"
            self._close(incident, Outcome.YIELDED, f"{REBOOTED}; {what}.")

    def _undone(self, incident: Incident, *, diagnose_again: bool) -> None:
        self._close(incident, Outcome.REPORTED, UNDONE)
        if diagnose_again:
            self._parts.ledger.forget_end(incident.invocation)

    async def _take_up(self, incident: Incident, snapshot: UnitSnapshot) -> None:
        if incident.failure is FailureClass.UNRESPONSIVE:
            self._executor.brought_down.add(incident.invocation)
        launch = self._parts.ledger.launch(incident.invocation)
        may_act = self._settings.act and self._parts.may_act and not self._pausing.active
        if launch is None or not may_act or witness.saw_a_stop(self._parts.systemd, self._parts.ledger, snapshot):
            tell = functools.partial(self._parts.hooks.tell, Event.CLOSED)
            log.info("handed back", sentence=hand_back(incident, self._parts.ledger, self._parts.systemd, tell=tell))
            return
        log.info("resuming", unit=self._unit, incident=incident.id)
        failed = Failed(launch.argv, snapshot.restarts, launch.gpu_before)
        await self._recover(incident, failed, stopped_by_us=True)

    # A launch that ended

    async def ended(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        """Diagnoses, reports, and does what the policy says."""
        if launch.invocation in self._executor.brought_down:
            self._parts.ledger.save_launch(launch.record())
            return
        diagnosis = self._inquest.diagnose(launch, snapshot)
        self._parts.metrics.failures.labels(self._unit, diagnosis.failure).inc()
        incident = self._recorded(launch, diagnosis)
        alerts.send(alerts.launch_ended(self._unit, launch.invocation, diagnosis, incident.id if incident else ""))
        log.info("launch ended", unit=self._unit, invocation=launch.invocation, failure=str(diagnosis.failure))
        if incident is None:
            return
        if diagnosis.failure in _ASKED_FOR:
            self._verified(Outcome.YIELDED, f"The operator stopped it: {diagnosis.failure}.")
        else:
            self._verified(Outcome.FAILED, f"The launch ended again: {diagnosis.failure}.")
        self._inquest.learn_ceiling(launch, diagnosis)
        plan = await self._inquest.plan(launch, snapshot, diagnosis, incident)
        self._inquest.learn_known_good(launch, diagnosis, plan)
        incident = self._parts.ledger.plan_incident(incident, plan.steps, plan.target, plan.reason)
        if not plan.steps:
            self._leave(incident, plan)
            return
        self._parts.hooks.tell(Event.OPENED, incident)
        await self._recover(incident, Failed(launch.argv, launch.restarts, launch.gpu_before))

    # A launch that hangs

    def hung(self, launch: LaunchWatch, snapshot: UnitSnapshot, diagnosis: Diagnosis, *, own_watchdog: bool) -> None:
        """Reports a launch that runs and makes no progress. If anything is to be done about it, that is for the next
        look, which may find it alive. `own_watchdog`: SGLang's own may still end it."""
        self.jobs.forget()
        self._parts.metrics.failures.labels(self._unit, diagnosis.failure).inc()
        incident = self._recorded(launch, diagnosis)
        known_by = incident.id if incident else ""
        alerts.send(alerts.unresponsive(self._unit, launch.invocation, diagnosis, known_by))
        if incident is None:
            return
        self._verified(Outcome.FAILED, "What was started makes no progress.")
        plan = self._inquest.plan_of_hang(launch, snapshot, diagnosis, own_watchdog=own_watchdog)
        if plan.steps or plan.later:
            self._hanging = Hanging(incident, diagnosis)
        else:
            self._leave(incident, plan)

    async def still_hangs(self, launch: LaunchWatch, *, own_watchdog: bool) -> None:
        """It was reported, and was asked once more since."""
        snapshot, hanging = self._parts.systemd.snapshot(self._unit), self._hanging
        if hanging is None:
            return
        if self.jobs.foreign or snapshot.job:
            self._hanging = None
            self._close(hanging.incident, Outcome.YIELDED, "Somebody queued a job on the unit: the operator wins.")
            return
        if snapshot.invocation != launch.invocation or is_on_its_way_down(snapshot):
            return
        plan = self._inquest.plan_of_hang(launch, snapshot, hanging.diagnosis, own_watchdog=own_watchdog)
        if not plan.later:
            incident = self._parts.ledger.plan_incident(hanging.incident, plan.steps, plan.target, plan.reason)
            self._hanging = None
            if not plan.steps:
                self._leave(incident, plan)
                return
            self._parts.hooks.tell(Event.OPENED, incident)
            await self._recover(incident, Failed(launch.argv, launch.restarts, launch.gpu_before), hangs=True)

    def hang_is_over(self, how: str) -> None:
        """It goes on, or has ended, and nothing was done about it."""
        if self._hanging is not None:
            hanging, self._hanging = self._hanging, None
            self._close(hanging.incident, Outcome.REPORTED, how)

    def _leave(self, incident: Incident, plan: Plan) -> None:
        if plan.by_hand:
            alerts.send(alerts.action(incident, "plan", plan.reason))
        self._close(incident, Outcome.REPORTED, plan.reason)

    def _recorded(self, launch: LaunchWatch, diagnosis: Diagnosis) -> Incident | None:
        """The incident of an end, in the ledger; None where that cannot be written, and then nothing is done."""
        try:
            self._parts.ledger.save_launch(launch.record(), diagnosis.failure)
            incident = self._inquest.open_incident(launch, diagnosis)
        except LedgerError as error:
            log.error("observing only", unit=self._unit, error=str(error))
            self._parts.metrics.sees(Sense.LEDGER, well=False)
            return None
        self._parts.ledger_was_written()
        self._parts.metrics.saw_incident(incident)
        return incident

    def surprise(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        """A healthy server whose command is not what its definition says now: said, and left in peace."""
        diagnosis = self._inquest.diagnose(launch, snapshot)
        if diagnosis.failure is not FailureClass.STALE_UNIT_FILE:
            return
        launch.surprise_told = True
        incident = self._inquest.open_incident(launch, diagnosis)
        alerts.send(alerts.stale_definition(self._unit, launch.invocation, diagnosis, incident.id))
        self._parts.metrics.failures.labels(self._unit, diagnosis.failure).inc()
        self._close(incident, Outcome.REPORTED, "The server is healthy and is left alone.")

    # The recovery

    async def roll_back_by_hand(self, launch: LaunchWatch, target: SpeculationConfig) -> str:
        """Puts `target` in force and restarts the unit, running or not. Returns how that begins; the server is waited
        for as after any start."""
        reason = f"Rolled back by hand from {launch.config.describe()} to {target.describe()}."
        incident = self._parts.ledger.open_incident(
            Incident(
                "",
                self._unit,
                launch.invocation,
                self._parts.clock.now(),
                FailureClass.REQUESTED_STOP,
                reason,
                ran=launch.config,
            )
        )
        steps = (Step.OVERRIDE, Step.RELOAD, Step.START, Step.VERIFY)
        incident = self._parts.ledger.plan_incident(incident, steps, target, reason)
        self._verified(Outcome.YIELDED, "A rollback was asked for meanwhile.")
        self.jobs.forget()
        await self._recover(incident, Failed(launch.argv, launch.restarts, launch.gpu_before), by_hand=True)
        return incident.id

    async def _recover(
        self,
        incident: Incident,
        failed: Failed,
        *,
        stopped_by_us: bool = False,
        by_hand: bool = False,
        hangs: bool = False,
    ) -> None:
        alerts.send(alerts.action(incident, "plan", incident.reason))
        task = Task(
            incident,
            doomed=lambda snapshot: self._doomed(failed, snapshot),
            free=lambda: self._cards.free(failed.gpu_before),
            put_in_force=self._overriding.put_in_force,
            reload=self._overriding.reload,
            changed=self._overriding.change_since(self._parts.systemd.snapshot(self._unit)),
            stopped_by_us=stopped_by_us,
            by_hand=by_hand,
            hangs=hangs,
        )
        try:
            await self._executor.execute(task)
        except asyncio.CancelledError:
            # A host in trouble must not turn the end that was asked for into one more failed turn.
            with contextlib.suppress(WatchdogError):
                self._overriding.undo_unloaded()
            raise
        except BusLost:
            raise  # the incident stays open, and is taken up over the next connection
        except LedgerError as error:
            self._give_back(incident, error)
        except GivenUp as error:
            self._overriding.undo_unloaded()
            self._close(incident, Outcome.YIELDED, f"{error}; {self._handed_back(incident)}.")
        except Yielded as error:
            self._overriding.undo_unloaded()
            self._close(incident, Outcome.YIELDED, f"{error}.")
        except StepFailed as error:
            self._overriding.undo_unloaded()
            outcome = Outcome.FAILED if error.step in (Step.HOLD, None) else Outcome.HELD
            self._close(incident, outcome, f"{error}; a human has to look.")
        else:
            self._after_steps(incident)

    def _handed_back(self, incident: Incident) -> str:
        """A unit that we had stopped is given the start that systemd would have given it, before we keep away."""
        owed = self._executor.stopped and owes_a_start(self._parts.ledger.intents(incident.id))
        killed = killed_in(incident)
        started = owed and not self._is_theirs() and start_if_down(self._parts.systemd, self._unit, killed)
        return "it was held, and is started before it is left alone" if started else "it is left as it is"

    def _is_theirs(self) -> bool:
        """Whether somebody but us has acted on the unit since it was held."""
        systemd = self._parts.systemd
        stopped = witness.saw_a_stop(systemd, self._parts.ledger, systemd.snapshot(self._unit))
        return bool(self.jobs.foreign) or stopped

    def _give_back(self, incident: Incident, error: LedgerError) -> None:
        """Without a ledger no intent can be recorded, so no further step is taken: systemd gets its unit back, where we
        had taken its restart away and nobody else has acted since."""
        log.error("the ledger was lost in the middle", unit=self._unit, incident=incident.id, error=str(error))
        try:
            self._overriding.undo_unloaded()
        except (LedgerError, UnusableInput) as also:
            log.error("what was not loaded could not be taken away", unit=self._unit, error=str(also))
        owed = self._executor.stopped and not self._is_theirs()
        started = owed and start_if_down(self._parts.systemd, self._unit, killed_in(incident))
        what = "the unit was held, and is started" if started else "the unit is left as it is"
        self._close(incident, Outcome.FAILED, f"{error}; {what}, and a human has to look.")

    def _doomed(self, failed: Failed, snapshot: UnitSnapshot) -> bool:
        """systemd's automatic restart (its counter grew, which a start by hand sets to 0) of the very command that has
        just failed, or of one that is not executed yet. Not once it listens: SGLang binds its port when all is there,
        so it serves against what was expected (the diagnosis may have waited for the driver)."""
        if snapshot.restarts <= failed.restarts:
            return False
        argv = processes.command_line(snapshot.main_pid) if snapshot.main_pid else ()
        if not is_executed(argv):
            return True
        serves = processes.cgroup_listens(snapshot.control_group, address_of(argv)[1])
        return redact_argv(argv) == failed.argv and not serves

    def _after_steps(self, incident: Incident) -> None:
        if Step.VERIFY in incident.steps:
            self._await_tokens(incident)
        elif Step.HOLD in incident.steps:
            self._close(incident, Outcome.HELD, incident.reason)
        else:
            self._close(incident, Outcome.REPORTED, incident.reason)

    # The verification

    def _await_tokens(self, incident: Incident) -> None:
        self._verified(Outcome.FAILED, "Another incident began before it was over.")
        intent = self._parts.ledger.begin(incident.id, Step.VERIFY)
        self.verifying = Verification(incident, intent, self._parts.clock.monotonic())

    def served(self, launch: LaunchWatch) -> None:
        """Tokens came from the unit's own process: what was awaited, or what the operator started instead."""
        if self.verifying is None or launch.invocation == self.verifying.incident.invocation:
            return
        target, config = self.verifying.incident.target, launch.config.describe()
        if target is None:
            self._verified(Outcome.RECOVERED, f"{config} serves again; tokens came from its own process.")
        elif launch.config.same_as(target) and self.verifying.incident.failure is FailureClass.REQUESTED_STOP:
            self._verified(Outcome.RECOVERED, f"{config} serves, as was asked for; tokens came from its own process.")
        elif launch.config.same_as(target):
            self._parts.metrics.rollbacks.labels(self._unit).inc()
            self._verified(
                Outcome.CONTAINED,
                f"{config} serves again, which is not what was asked for; tokens came from its own process.",
            )
        else:
            self._verified(Outcome.YIELDED, f"{config} serves, which is not what the watchdog had started.")

    def check(self, snapshot: UnitSnapshot, launch: LaunchWatch | None) -> None:
        """Ends a verification that came to nothing. Until it is ready a start may take its time; from then on tokens
        have to come soon."""
        for closed in self._write_down():
            self._parts.ledger.told(closed)
        if self.verifying is None:
            return
        now, verifying = self._parts.clock.monotonic(), self.verifying
        none_since = snapshot.refused or snapshot.invocation == verifying.incident.invocation
        no_launch = snapshot.ended and not snapshot.job and none_since
        if no_launch and now - verifying.since > _NO_LAUNCH_AFTER_S:
            self._verified(Outcome.FAILED, f"The start brought no launch; the unit is {snapshot.active_state}.")
            return
        if verifying.ready is None and launch and launch.ended is None and launch.timeline.reached(Phase.READY):
            verifying = self.verifying = replace(verifying, ready=now)
        begun, allowed, what = (
            (verifying.since, self._settings.start_deadline, "the start")
            if verifying.ready is None
            else (verifying.ready, self._settings.verify_deadline, "it said that it was ready")
        )
        if now - begun > allowed:
            self._verified(Outcome.FAILED, f"No tokens within {allowed:.0f} s since {what}; it is left as it is.")

    def _verified(self, outcome: Outcome, sentence: str) -> None:
        if self.verifying is None:
            return
        verifying, self.verifying = self.verifying, None
        good = outcome in (Outcome.CONTAINED, Outcome.RECOVERED)
        with contextlib.suppress(LedgerError):  # the incident, which says the same, is closed all the same
            self._parts.ledger.finish(verifying.intent, "done" if good else "failed")
        took = self._parts.clock.monotonic() - verifying.since
        self._parts.metrics.step_seconds.labels(self._unit, Step.VERIFY).observe(took)
        self._close(verifying.incident, outcome, sentence)

    def _close(self, incident: Incident, outcome: Outcome, reason: str) -> None:
        closed = replace(incident, outcome=outcome, closed=self._parts.clock.now(), reason=reason)
        self._unwritten[incident.id] = closed
        self._write_down()
        self._parts.metrics.closed(closed)
        self._tell(closed)

    def _tell(self, closed: Incident) -> None:
        self._parts.hooks.tell(Event.CLOSED, closed)
        if closed.outcome is not Outcome.REPORTED or closed.steps:
            alerts.send(alerts.closed(closed))
        if not self.is_over(closed.id):
            with contextlib.suppress(LedgerError):  # it is told again, which is the lesser evil
                self._parts.ledger.told(closed)

    def _write_down(self) -> list[Incident]:
        """Closes in the ledger what is over, and returns it. Tried again each turn, since an open incident would be
        taken up, or its unit be handed back, long after somebody stopped it."""
        written = []
        for closed in tuple(self._unwritten.values()):
            try:
                self._parts.ledger.close_incident(closed, closed.outcome)
            except LedgerError as error:
                log.error("observing only", unit=self._unit, error=str(error))
                self._parts.metrics.sees(Sense.LEDGER, well=False)
                break
            del self._unwritten[closed.id]
            written.append(closed)
            self._parts.ledger_was_written()
        return written

    def is_over(self, incident: str) -> bool:
        """Whether it is, though the ledger still has it open."""
        return incident in self._unwritten
