"""One watched unit: its launches from start to end, what is proven of them, and its incidents.

A turn looks at the unit once and does what that asks for. Turns are woken by bus signals, and by a clock only while
there is something to wait for (a launch that is not ready yet, a soak, a verification): the state of a healthy unit is
not polled.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sglang_watchdog.cards import Cards
from sglang_watchdog.domain.errors import BusLost, LedgerError, WatchdogError
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.gpu import GpuReading
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Launch, Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.hand_back import owes_a_start
from sglang_watchdog.host.bus import Hint, HintKind
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.overriding import Overriding
from sglang_watchdog.parts import Parts
from sglang_watchdog.proof import Proof
from sglang_watchdog.recovery.executor import Executor, OwnJobs, StepFailed, Task, Yielded
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.metrics import Sense
from sglang_watchdog.settings import UnitSettings

# How often a turn is taken while something is awaited (seconds).
_STARTING_S = 0.5
_PROVING_S = 1.0
_SERVING_S = 10.0
_IDLE_S = 15.0
# Fewer tokens than this share of what the config had when it was proven is a degraded start.
_DEGRADED_BELOW = 0.95
_ASKED_FOR = frozenset({FailureClass.REQUESTED_STOP, FailureClass.STOP_TIMEOUT_SIGKILL})
log = structlog.get_logger()


class UnitWatcher:
    """Runs until cancelled. `turn_done` is called after every turn: systemd's watchdog is fed from it."""

    def __init__(self, unit: str, settings: UnitSettings, parts: Parts, turn_done: Callable[[], None]) -> None:
        self.unit = unit
        self.launch: LaunchWatch | None = None
        self.snapshot: UnitSnapshot | None = None
        self.verifying: Incident | None = None
        self.settings = settings
        self.degraded = False
        self._parts = parts
        self._turn_done = turn_done
        self._awake = asyncio.Event()
        self._jobs = OwnJobs()
        self.cards = Cards(unit, settings, parts)
        self._overriding = Overriding(unit, settings, parts)
        self._inquest = Inquest(unit, settings, parts, self.cards, self._overriding.obstacle)
        self.executor = Executor(unit, parts.systemd, parts.ledger, parts.metrics, self._jobs)
        self._proof: Proof | None = None
        self._verify_since = 0.0
        self._verify_intent = 0

    def hint(self, hint: Hint) -> None:
        """A signal of the bus: look again. Jobs are noted, because a foreign one means that the operator acts."""
        if hint.kind is HintKind.JOB_NEW:
            self._jobs.saw(hint.job)
        self._awake.set()

    async def run(self) -> None:
        await self._turn(self._take_up)
        while True:
            self._turn_done()
            if await self._woken() or self._waits_for_something():
                self._awake.clear()
                await self._turn(self._look)
            if not self._needs_cards():
                await self._parts.probe.close()

    async def _take_up(self) -> None:
        self._parts.systemd.ref(self.unit)
        await self.cards.read()  # which cards and driver there are is part of what a proof holds for
        await self._resume()
        await self._look()

    async def _resume(self) -> None:
        """Takes up what an earlier daemon left open: it finishes a recovery that it had begun, and drops one that it
        had not, since the launch that follows will tell."""
        for incident in self._parts.ledger.open_incidents():
            if incident.unit != self.unit:
                continue
            intents = self._parts.ledger.intents(incident.id)
            failed = self._parts.ledger.launch(incident.invocation)
            if owes_a_start(intents) and failed is not None and self._parts.may_act:
                log.info("resuming", unit=self.unit, incident=incident.id)
                config = SpeculationConfig.of(failed.argv, self._inquest.managed)
                await self._recover(incident, config, failed.gpu_before)
            elif any(intent.step is Step.START for intent in intents):
                self._await_tokens(incident)
            else:
                self._close(incident, Outcome.REPORTED, "The watchdog ended before it acted.")

    async def _woken(self) -> bool:
        try:
            async with asyncio.timeout(self._pause()):
                return await self._awake.wait()
        except TimeoutError:
            return False

    def _waits_for_something(self) -> bool:
        return self.launch is not None and self.launch.ended is None

    def _needs_cards(self) -> bool:
        """A healthy server has nobody beside it who talks to the driver."""
        starting = self._waits_for_something() and (self._proof is None or not self._proof.serving)
        return starting or self.verifying is not None

    @property
    def _may_act(self) -> bool:
        return self.settings.act and self._parts.may_act

    def _pause(self) -> float:
        if not self._waits_for_something():
            return _IDLE_S
        if self._proof is None or not self._proof.serving:
            return _STARTING_S
        return _SERVING_S if self._proof.settled else _PROVING_S

    # One turn

    async def _turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """A turn that fails costs nothing but itself, and the next one looks again. A lost bus is the daemon's to mend,
        and what is no error of the outside world is a defect, which ends the daemon."""
        try:
            await work()
        except BusLost:
            raise
        except WatchdogError as error:
            log.error("a turn failed", unit=self.unit, error=str(error))

    async def _look(self) -> None:
        snapshot = self.snapshot = self._parts.systemd.snapshot(self.unit)
        self._parts.metrics.saw_state(self.unit, snapshot.active_state)
        if self._may_act and (followed := await self._overriding.follow_operator(snapshot)):
            log.info("override follows the operator", unit=self.unit, why=followed)
            alerts.send(alerts.yielded(self.unit, followed))
        launch = self.launch
        if launch is not None and launch.ended is None and launch.invocation != snapshot.invocation:
            await self._ended(launch, snapshot)  # the bus shows the newest launch only
        if snapshot.invocation and (launch is None or launch.invocation != snapshot.invocation):
            await self._begin(snapshot)
        launch = self.launch
        if launch is None or launch.ended is not None or launch.invocation != snapshot.invocation:
            return
        launch.see_processes(snapshot)
        if snapshot.ended:
            await self._ended(launch, snapshot)
        else:
            await self._inquest.pull(launch)
            if launch.phase in (Phase.UNKNOWN, Phase.STARTING):
                # Again until the weights come: what an ended launch held goes while this one still imports.
                launch.gpu_before, launch.held_before = await self.cards.before(snapshot)
            await self._prove(launch, snapshot)

    async def _begin(self, snapshot: UnitSnapshot) -> None:
        known = self._parts.ledger.launch(snapshot.invocation)
        if snapshot.ended and not _worth_a_report(snapshot, known):
            return
        self.launch = self._inquest.begin(snapshot, known)
        self._proof = None
        self._set_degraded(False)
        self._parts.metrics.launches.labels(self.unit).inc()
        log.info("launch", unit=self.unit, invocation=snapshot.invocation, main_pid=snapshot.main_pid)
        if not snapshot.ended and known is None:
            self._parts.ledger.save_launch(self.launch.record())

    # A launch that runs

    async def _prove(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        if self._proof is None and launch.raw_argv and launch.timeline.reached(Phase.READY):
            self._proof = Proof(launch.raw_argv, self.settings)
        if self._proof is None or self._proof.settled:
            self._check_deadline()
            return
        if not self._proof.serving:
            if await self._proof.generates(snapshot):
                await self._serving(launch, snapshot, self._proof)
            else:
                self._check_deadline()
        elif self._proof.soaked(self._parts.clock.now()) and await self._proof.generates(snapshot):
            self._proven(launch, self._proof)

    async def _serving(self, launch: LaunchWatch, snapshot: UnitSnapshot, proof: Proof) -> None:
        proof.served(self._parts.clock.now())
        self._parts.metrics.runs(self.unit, launch.config)
        self._parts.ledger.save_launch(launch.record())
        log.info("serving", unit=self.unit, invocation=launch.invocation, config=launch.config.describe())
        if self.verifying is not None:
            self._verified(self.verifying, launch)
        if shortfall := self._shortfall(launch):
            proof.refuse()
            self._set_degraded(True)
            alerts.send(alerts.degraded(self.unit, launch.invocation, shortfall))
        self._report_surprise(launch, snapshot)

    def _verified(self, incident: Incident, launch: LaunchWatch) -> None:
        config = launch.config.describe()
        if incident.target is not None:
            self._parts.metrics.rollbacks.labels(self.unit).inc()
            sentence = f"{config} serves again, which is not what was asked for; tokens came from its own process."
            self._verification_over(Outcome.CONTAINED, sentence)
        else:
            self._verification_over(Outcome.RECOVERED, f"{config} serves again; tokens came from its own process.")

    def _verification_over(self, outcome: Outcome, sentence: str) -> None:
        if self.verifying is None:
            return
        incident, self.verifying = self.verifying, None
        good = outcome in (Outcome.CONTAINED, Outcome.RECOVERED)
        self._parts.ledger.finish(self._verify_intent, "done" if good else "failed")
        self._parts.metrics.step_seconds.labels(self.unit, Step.VERIFY).observe(
            self._parts.clock.now() - self._verify_since
        )
        self._close(incident, outcome, sentence)

    def _check_deadline(self) -> None:
        """Until it is ready the start may take its time; from then on tokens have to come soon."""
        if self.verifying is None:
            return
        marks = self.launch.timeline.phases if self.launch else ()
        ready = next((mark.time for mark in marks if mark.phase is Phase.READY), None)
        begun, allowed, what = (
            (self._verify_since, self.settings.start_deadline, "the start")
            if ready is None
            else (max(ready, self._verify_since), self.settings.verify_deadline, "it said to be ready")
        )
        if self._parts.clock.now() - begun > allowed:
            self._verification_over(
                Outcome.FAILED, f"no tokens within {allowed:.0f} s since {what}; it is left running."
            )

    def _shortfall(self, launch: LaunchWatch) -> str:
        """Fewer tokens or requests than this config had when it was proven, in words; empty where there is no such
        proof or nothing is missing."""
        figures = launch.timeline.memory
        for good in self._parts.ledger.known_good(self.unit, self._inquest.base(launch)):
            if not good.config.same_as(launch.config):
                continue
            for what, now, then in (
                ("tokens of KV pool", figures.max_total_num_tokens, good.max_total_num_tokens),
                ("running requests", figures.max_running_requests, good.max_running_requests),
            ):
                if now is not None and then is not None and now < then * _DEGRADED_BELOW:
                    return f"{now} {what} where {then} were proven{_held_by(launch)}"
        return ""

    def _report_surprise(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        """A healthy server whose command is not what its definition says now: said, and left in peace."""
        diagnosis = self._inquest.diagnose(launch, snapshot)
        if diagnosis.failure is not FailureClass.STALE_UNIT_FILE:
            return
        launch.surprise_told = True
        incident = self._inquest.open_incident(launch, diagnosis)
        alerts.send(alerts.stale_definition(self.unit, launch.invocation, diagnosis, incident.id))
        self._parts.metrics.failures.labels(self.unit, diagnosis.failure).inc()
        self._close(incident, Outcome.REPORTED, "The server is healthy and is left alone.")

    def _proven(self, launch: LaunchWatch, proof: Proof) -> None:
        proof.proven()
        good = KnownGood(
            self.unit,
            self._inquest.base(launch),
            launch.config,
            launch.invocation,
            self._parts.clock.now(),
            launch.timeline.memory.max_total_num_tokens,
            launch.timeline.memory.max_running_requests,
        )
        self._parts.ledger.save_known_good(good)
        self._parts.ledger.save_launch(launch.record())
        self._parts.metrics.proven(self.unit, good.config)
        alerts.send(alerts.known_good(self.unit, launch.invocation, f"{good.config.describe()} is known-good"))

    # A launch that ended

    async def _ended(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        launch.ended = self._parts.clock.now()
        await self._inquest.read_to_the_end(launch)
        self._set_degraded(False)
        self._parts.metrics.runs(self.unit, None)
        if launch.invocation in self.executor.brought_down:
            self._parts.ledger.save_launch(launch.record())
            return
        diagnosis = self._inquest.diagnose(launch, snapshot)
        self._parts.metrics.failures.labels(self.unit, diagnosis.failure).inc()
        incident = self._recorded(launch, diagnosis)
        alerts.send(alerts.launch_ended(self.unit, launch.invocation, diagnosis, incident.id if incident else ""))
        if incident is None:
            return
        if diagnosis.failure in _ASKED_FOR:
            self._verification_over(Outcome.YIELDED, f"the operator stopped it: {diagnosis.failure}.")
        else:
            self._verification_over(Outcome.FAILED, f"the launch ended again: {diagnosis.failure}.")
        log.info("launch ended", unit=self.unit, invocation=launch.invocation, failure=str(diagnosis.failure))
        self._inquest.learn(launch, diagnosis)
        plan = await self._inquest.plan(launch, snapshot, diagnosis, incident)
        incident = self._parts.ledger.plan_incident(incident, plan.steps, plan.target, plan.reason)
        if not plan.steps:
            self._close(incident, Outcome.REPORTED, plan.reason)
            return
        await self._recover(incident, launch.config, launch.gpu_before)

    def _recorded(self, launch: LaunchWatch, diagnosis: Diagnosis) -> Incident | None:
        """The incident of an end, in the ledger; None where that cannot be written, and then nothing is done."""
        try:
            self._parts.ledger.save_launch(launch.record(), diagnosis.failure)
            incident = self._inquest.open_incident(launch, diagnosis)
        except LedgerError as error:
            log.error("observing only", unit=self.unit, error=str(error))
            self._parts.metrics.sees(Sense.LEDGER, well=False)
            return None
        self._parts.metrics.sees(Sense.LEDGER, well=self._parts.may_act)
        return incident

    async def _recover(self, incident: Incident, failed: SpeculationConfig, baseline: GpuReading | None) -> None:
        alerts.send(alerts.action(incident, "plan", incident.reason))
        task = Task(
            incident,
            doomed=lambda snapshot: self._doomed(failed, snapshot),
            free=lambda: self.cards.free(baseline),
            put_in_force=self._overriding.put_in_force,
            reload=self._overriding.reload,
        )
        try:
            await self.executor.execute(task)
        except Yielded as error:
            self._close(incident, Outcome.YIELDED, f"{error}.")
        except StepFailed as error:
            self._close(incident, Outcome.HELD, f"{error}; a human has to look.")
        else:
            self._after_steps(incident)

    def _after_steps(self, incident: Incident) -> None:
        if Step.VERIFY in incident.steps:
            self._await_tokens(incident)
        elif Step.HOLD in incident.steps:
            self._close(incident, Outcome.HELD, incident.reason)
        else:
            self._close(incident, Outcome.REPORTED, incident.reason)

    def _await_tokens(self, incident: Incident) -> None:
        self.verifying = incident
        self._verify_since = self._parts.clock.now()
        self._verify_intent = self._parts.ledger.begin(incident.id, Step.VERIFY)
        self._awake.set()

    def _doomed(self, failed: SpeculationConfig, snapshot: UnitSnapshot) -> bool:
        """The launch that runs now repeats the config that has just failed."""
        watch = self._inquest.begin(snapshot)
        return bool(watch.raw_argv) and watch.config.same_as(failed)

    def _close(self, incident: Incident, outcome: Outcome, reason: str) -> None:
        closed = self._parts.ledger.close_incident(incident, outcome, reason)
        self._parts.metrics.incidents.labels(self.unit, outcome).inc()
        if outcome is not Outcome.REPORTED or incident.steps:
            alerts.send(alerts.closed(closed))

    # What commands ask for

    async def free_by_hand(self, *, dry_run: bool) -> dict[str, object]:
        """Frees what is proven this unit's, or says what that would be. Refused while an incident is worked on."""
        plan = await self.cards.plan()
        if isinstance(plan, str):
            raise WatchdogError(f"the cards could not be read: {plan}")
        summary = (
            "Nothing was touched."
            if dry_run
            else await self.cards.free(self.launch.gpu_before if self.launch else None)
        )
        return {
            "ended": [{"pid": e.process.pid, "bytes": e.bytes, "why": e.reason} for e in plan.end],
            "spared": [{"pid": s.pid, "bytes": s.bytes, "why": s.reason} for s in plan.spared],
            "summary": summary,
        }

    def status(self) -> dict[str, object]:
        snapshot, launch = self.snapshot, self.launch
        running = launch is not None and launch.ended is None
        base = self._inquest.base(launch) if launch is not None else ""
        good = self._parts.ledger.known_good(self.unit, base)
        last = next(iter(self._parts.ledger.incidents(self.unit, 1)), None)
        return {
            "unit": self.unit,
            "act": self._may_act,
            "state": _state(snapshot),
            "invocation": launch.invocation if launch else "",
            "phase": launch.phase if launch and running else "",
            "running": launch.config.describe() if launch and running else "",
            "serving": self._proof is not None and self._proof.serving,
            "known_good": good[0].config.describe() if good else "",
            "degraded": self.degraded,
            "incident": self.verifying.id if self.verifying else "",
            "last_incident": {"id": last.id, "class": last.failure, "outcome": last.outcome} if last else None,
        }

    def _set_degraded(self, degraded: bool) -> None:
        self.degraded = degraded
        self._parts.metrics.degraded.labels(self.unit).set(degraded)


def _state(snapshot: UnitSnapshot | None) -> str:
    if snapshot is None:
        return "unknown"
    if not snapshot.loaded:
        return f"{snapshot.load_state}: no such unit is loaded"
    return f"{snapshot.active_state} ({snapshot.sub_state})"


def _held_by(launch: LaunchWatch) -> str:
    held = [
        f"{memory.who} held {memory.held_bytes / 2**30:.1f} GiB of card {memory.gpu}" for memory in launch.held_before
    ]
    return f": {', '.join(held)} when it started" if held else ""


def _worth_a_report(ended: UnitSnapshot, known: Launch | None) -> bool:
    """Of a launch that ended before we looked: what was diagnosed is not diagnosed again, and an ordinary end that
    nobody watched is no news. A failure is, and so is the end of a launch that an earlier daemon saw begin."""
    if known is not None:
        return known.ended is None
    return ended.active_state is ActiveState.FAILED or ended.in_auto_restart
