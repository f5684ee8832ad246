"""Carries a plan out, step by step: the edge of recovery, and the only place that touches a unit.

Each step is recorded as an intent before it begins. Each is written so that doing it again changes nothing: a daemon
that was killed in the middle runs its plan again from the first step. Before each step the unit is read again; what
the operator did meanwhile wins.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

import structlog

from sglang_watchdog import witness
from sglang_watchdog.domain.errors import BusError, BusLost, JobRefused, LedgerError, WatchdogError
from sglang_watchdog.domain.incident import Incident, Step
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.pausing import Pausing
from sglang_watchdog.recovery.hold import HoldMove, next_move
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.metrics import Metrics

HOLD_DEADLINE_S = 30.0
# What hangs may be stuck in the driver, and then outlives its SIGKILL: systemd gives it up after two of these.
_STOP_TIMEOUTS, _STOP_TIMEOUT_S, _LONGEST_STOP_TIMEOUT_S = 2, 90.0, 300.0
_KILL_AGAIN_S = 5.0
_POLL_S = 0.05
# A witness leaves with our own stop, within milliseconds; longer than that the hold does not wait to call it again.
_WITNESS_LEAVES_S = 2.0
log = structlog.get_logger()


class Yielded(WatchdogError):
    """The operator acted on the unit: the incident is theirs now."""


class GivenUp(Yielded):
    """The operator paused the unit or changed its definition: what we hold is handed back, and theirs is what runs."""


class StepFailed(WatchdogError):
    """A step did not reach its result. `step` is set by the executor."""

    step: Step | None = None


@dataclass(slots=True)
class OwnJobs:
    """Tells our own jobs on a unit from everybody else's. A job that is not ours, seen while we hold the unit, is the
    operator's: systemd itself queues none for a unit that is down.

    Ids grow with time, so a signal that comes late of a job that is older than ours (systemd's own restart job, say) is
    known by its number.
    """

    ours: set[int] = field(default_factory=set)
    foreign: int = 0
    _newest: int = 0
    _settled: int = 0

    def saw(self, job: int) -> None:
        self._newest = max(self._newest, job)
        if job not in self.ours and job > self._settled:
            self.foreign = job

    def own(self, job: int) -> None:
        self.ours.add(job)

    def forget(self) -> None:
        """From now on: what came before does not count."""
        self._settled = max(self._newest, *self.ours, 0)
        self.foreign = 0

    def foreign_since(self, ours: int) -> bool:
        """Whether somebody has queued a job after that one of ours, 0 for none."""
        return bool(ours) and self.foreign > ours


@dataclass(frozen=True, slots=True)
class Task:
    """What one recovery works on. `doomed(snapshot)`: systemd's automatic restart runs again what has just failed.
    `changed(snapshot)`: what the operator did to the unit's definition since, in words; empty where nothing was.
    `stopped_by_us`: an earlier daemon had begun to hold the unit. `by_hand`: a person asked for it, so that a launch
    that runs is restarted. `hangs`: the launch runs, and is to be ended."""

    incident: Incident
    doomed: Callable[[UnitSnapshot], bool]
    free: Callable[[], Awaitable[str]]
    put_in_force: Callable[[SpeculationConfig], Awaitable[str]]
    reload: Callable[[], Awaitable[str]]
    changed: Callable[[UnitSnapshot], str]
    stopped_by_us: bool = False
    by_hand: bool = False
    hangs: bool = False


class Executor:
    """Executes plans for one unit. Raises `Yielded`, `StepFailed`, and what means that nothing can be done any more
    (`BusLost`, `LedgerError`); returns when only VERIFY is left. `progress` is called while a step waits."""

    def __init__(
        self,
        unit: str,
        systemd: Systemd,
        ledger: Ledger,
        metrics: Metrics,
        jobs: OwnJobs,
        pausing: Pausing,
        progress: Callable[[], None],
    ) -> None:
        self._unit = unit
        self._pausing = pausing
        self._systemd = systemd
        self._ledger = ledger
        self._metrics = metrics
        self._jobs = jobs
        self._progress = progress
        self.brought_down: set[str] = set()  # invocations that ended by our own hand
        self.stopped = False  # whether systemd's own restart was taken from the unit in this recovery

    async def execute(self, task: Task) -> None:
        self.stopped = task.stopped_by_us
        for step in task.incident.steps:
            if step is Step.VERIFY:
                return
            if step is not Step.HOLD:
                self._check_operator(step, task)
            with (
                self._ledger.intent(task.incident.id, step),
                self._metrics.step_seconds.labels(self._unit, step).time(),
            ):
                sentence = await self._attempt(step, task)
            log.info("step done", unit=self._unit, incident=task.incident.id, step=str(step), result=sentence)
            if sentence:
                alerts.send(alerts.action(task.incident, step, sentence))

    async def _attempt(self, step: Step, task: Task) -> str:
        """Whatever keeps a step from its result is that step's failure, so that no error of the outside world leaves a
        unit held with nobody to speak for it."""
        try:
            return await self._unless_paused(self._do(step, task))
        except (Yielded, BusLost, LedgerError):
            raise
        except WatchdogError as error:
            failed = error if isinstance(error, StepFailed) else StepFailed(f"{step}: {error}")
            failed.step = step
            raise failed from error

    async def _unless_paused(self, work: Coroutine[None, None, str]) -> str:
        """A pause gives up a step that is under way, as the end of the daemon does."""
        doing, paused = asyncio.create_task(work), asyncio.create_task(self._pausing.begun.wait())
        try:
            await asyncio.wait((doing, paused), return_when=asyncio.FIRST_COMPLETED)
        finally:
            paused.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait((doing,))
        if doing.cancelled():
            raise GivenUp(f"the unit is {self._pausing.in_words()}")
        return doing.result()

    async def _do(self, step: Step, task: Task) -> str:
        self._check_pause()  # once more: a pause may have come since the step was begun
        match step:
            case Step.HOLD:
                return await self._hold(task)
            case Step.FREE:
                return await task.free()
            case Step.OVERRIDE:
                assert task.incident.target is not None
                return await task.put_in_force(task.incident.target)
            case Step.RELOAD:
                return await task.reload()
            case Step.START:
                return self._restart() if task.by_hand else self._start()
            case Step.VERIFY:
                raise AssertionError("verifying is the watcher's")

    def _check_operator(self, step: Step, task: Task) -> None:
        if self._jobs.foreign:
            raise Yielded(f"somebody queued a job on the unit before the step {step}: the operator wins")
        self._check_pause()
        snapshot = self._systemd.snapshot(self._unit)
        if not snapshot.loaded:
            raise Yielded(f"the unit is {snapshot.load_state} before the step {step}")
        if changed := task.changed(snapshot):
            raise GivenUp(f"{changed} before the step {step}")
        if snapshot.job and snapshot.job not in self._jobs.ours:
            raise Yielded(f"a {snapshot.job_type} job that is not ours is queued before the step {step}")
        if not snapshot.ended and not task.by_hand:
            raise Yielded(f"the unit was started by somebody else before the step {step}")
        # A plan that starts nothing frees what a stop left behind: it is that stop that was seen.
        starts = Step.START in task.incident.steps and not task.by_hand
        if starts and witness.saw_a_stop(self._systemd, self._ledger, snapshot):
            raise Yielded(f"the unit was stopped by hand before the step {step}")

    def _check_pause(self) -> None:
        if self._pausing.active:
            raise GivenUp(f"the unit is {self._pausing.in_words()}")

    async def _hold(self, task: Task) -> str:
        now = asyncio.get_running_loop().time
        allowed = _hold_deadline(self._systemd.snapshot(self._unit)) if task.hangs else HOLD_DEADLINE_S
        deadline, witness_by, kill_at = now() + allowed, 0.0, 0.0
        done, our_stop = "", 0
        stopped = task.stopped_by_us
        while True:
            self._progress()
            snapshot = self._systemd.snapshot(self._unit)
            doomed = task.doomed(snapshot)
            match next_move(snapshot, task.incident.invocation, doomed=doomed, stopped_by_us=stopped, hangs=task.hangs):
                case HoldMove.HELD:
                    # Between our stop and its return the witness sees nothing, but a job has a number.
                    by_job = self._jobs.foreign_since(our_stop)
                    if by_job or witness.saw_a_stop(self._systemd, self._ledger, snapshot):
                        raise Yielded("the unit was stopped by another hand than ours")
                    witness_by = witness_by or now() + _WITNESS_LEAVES_S
                    if witness.call(self._systemd, self._ledger, snapshot) or now() > witness_by:
                        self._jobs.forget()
                        return done
                case HoldMove.YIELD:
                    raise Yielded(f"the unit is {_in_words(snapshot)} by another hand than ours")
                case HoldMove.STOP:
                    if job := self._stop():
                        our_stop, stopped = job, True
                        done = "; ".join(filter(None, (done, "the automatic restart is held")))
                case HoldMove.KILL if snapshot.invocation not in self.brought_down or now() >= kill_at:
                    done, kill_at = self._bring_down(snapshot, task), now() + _KILL_AGAIN_S
                case HoldMove.KILL | HoldMove.WAIT:
                    pass  # systemd hears of a death a moment later
            if now() > deadline:
                raise StepFailed(f"the unit could not be held within {allowed:.0f} s")
            await asyncio.sleep(_POLL_S)

    def _stop(self) -> int:
        """Our job, 0 where it was refused."""
        stood_for = self._ledger.witness(self._unit)
        self._ledger.forget_witness(self._unit)  # it leaves with this stop, which is our own
        try:
            job = self._systemd.stop(self._unit)
        except JobRefused:
            if stood_for is not None:
                self._ledger.save_witness(self._unit, stood_for)
            return 0  # its restart job was queued in this instant: the next reading says what came of it
        self._jobs.own(job)
        self.stopped = True
        return job

    def _bring_down(self, snapshot: UnitSnapshot, task: Task) -> str:
        self.brought_down.add(snapshot.invocation)
        self.stopped = True
        try:
            # What the operator wants to outlive the unit does; a left-over that holds memory is freed with proof.
            self._systemd.kill(self._unit, signal.SIGKILL, whole_group=snapshot.stop_ends_all)
        except BusError as error:
            log.info("nothing left to bring down", unit=self._unit, error=str(error))
        if snapshot.invocation == task.incident.invocation:
            return "the launch that hung was brought down"
        return "a launch with the config that had just failed was brought down"

    def _restart(self) -> str:
        """systemd does both halves of it, so that no start is owed where we end in between."""
        snapshot = self._systemd.snapshot(self._unit)
        self.brought_down.add(snapshot.invocation)
        try:
            if snapshot.ended:
                self._systemd.reset_failed(self._unit)
            self._jobs.own(self._systemd.restart(self._unit))
        except JobRefused as error:
            raise Yielded(f"the restart was refused, because somebody else's job is queued: {error}") from error
        return "the unit is restarted"

    def _start(self) -> str:
        try:
            self._systemd.reset_failed(self._unit)
            self._jobs.own(self._systemd.start(self._unit))
        except JobRefused as error:
            raise Yielded(f"the start was refused, because somebody else's job is queued: {error}") from error
        return "the unit is started"


def _hold_deadline(snapshot: UnitSnapshot) -> float:
    timeout = _STOP_TIMEOUT_S if snapshot.stop_timeout is None else snapshot.stop_timeout
    return HOLD_DEADLINE_S + _STOP_TIMEOUTS * min(timeout, _LONGEST_STOP_TIMEOUT_S)


def _in_words(snapshot: UnitSnapshot) -> str:
    job = f", with a {snapshot.job_type} job queued," if snapshot.job_type else ""
    return f"{snapshot.active_state}{job}"
