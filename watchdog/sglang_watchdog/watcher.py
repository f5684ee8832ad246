"""One watched unit: its launches from start to end, and what is proven of them. What comes of an end is `incidents`'s.

A turn looks at the unit once and does what that asks for. Turns are woken by bus signals, and by a clock only while
there is something to wait for (a launch that is not ready yet, a soak, a verification): the state of a healthy unit is
not polled.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from sglang_watchdog import witness
from sglang_watchdog.cards import Cards
from sglang_watchdog.domain.errors import BusLost, WatchdogError
from sglang_watchdog.domain.known_good import Ceiling, KnownGood
from sglang_watchdog.domain.launch import Launch, Phase
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.gate import Gate
from sglang_watchdog.hangs import Hangs
from sglang_watchdog.host.bus import Hint, HintKind
from sglang_watchdog.incidents import Incidents
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.liveness import Liveness
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.overriding import Overriding
from sglang_watchdog.parts import Parts
from sglang_watchdog.pausing import Pausing
from sglang_watchdog.proof import Proof
from sglang_watchdog.reporting import alerts
from sglang_watchdog.settings import UnitSettings

# How often a turn is taken while something is awaited (seconds).
_STARTING_S = 0.5
_PROVING_S = 1.0
_SERVING_S = 10.0
_IDLE_S = 15.0
# How long a command waits for a turn to end. A look is over sooner; a recovery is not.
_COMMAND_WAITS_S = 5.0
# The cards are read again until the launch itself holds that much: a context alone is half a GiB.
_OWN_MEMORY_BYTES = 2**30
# Where the log tells no phase (it goes to a file, say) that has to do; imports take seconds, not minutes.
_BEFORE_THE_WEIGHTS_S = 120.0
# Fewer tokens than this share of what the config had when it was proven is a degraded start.
_DEGRADED_BELOW = 0.95
log = structlog.get_logger()


class UnitWatcher:
    """Runs until cancelled. `progress` is called after every turn and in long steps: it feeds systemd's watchdog."""

    def __init__(self, unit: str, settings: UnitSettings, parts: Parts, progress: Callable[[], None]) -> None:
        self.unit = unit
        self.launch: LaunchWatch | None = None
        self.snapshot: UnitSnapshot | None = None
        self.settings = settings
        self.degraded = False
        self._parts = parts
        self._progress = progress
        self._awake = asyncio.Event()
        self._taken_up = False
        self._turning = asyncio.Lock()  # a command that acts comes between two turns, never into one
        self.pausing = Pausing(unit, parts.ledger, parts.clock)
        self.cards = Cards(unit, settings, parts, progress)
        self._overriding = Overriding(unit, settings, parts)
        self.inquest = Inquest(unit, settings, parts, self.cards, self.pausing, self._overriding.obstacle)
        self.incidents = Incidents(
            unit, settings, parts, self.cards, self.inquest, self._overriding, self.pausing, progress
        )
        self.gate = Gate(unit, parts, self.cards, self.inquest, lambda: self.may_act and not settings.several_nodes)
        self.hangs = Hangs(unit, parts, self.inquest, self.incidents)
        self.proof: Proof | None = None
        self.liveness = Liveness(settings, parts.clock)

    def hint(self, hint: Hint) -> None:
        """A signal of the bus: look again. Jobs are noted, because a foreign one means that the operator acts."""
        if hint.kind is HintKind.JOB_NEW:
            self.incidents.jobs.saw(hint.job)
        self._awake.set()

    async def run(self) -> None:
        while True:
            self._awake.clear()
            async with self._turning:
                await self._turn(self._look if self._taken_up else self._take_up)
            if not self._needs_cards():
                await self._parts.probe.close()
            self._progress()
            while not await self._woken() and self._nothing_awaited() and not self.pausing.over:
                self._progress()

    async def _woken(self) -> bool:
        try:
            async with asyncio.timeout(self._until_next_look()):
                return await self._awake.wait()
        except TimeoutError:
            return False

    def _until_next_look(self) -> float:
        if self._nothing_awaited():
            return _IDLE_S if self.pausing.left is None else min(_IDLE_S, self.pausing.left)
        if self.proof is None or not self.proof.serving:
            return _STARTING_S
        return min(_SERVING_S, self.liveness.every) if self.proof.settled else _PROVING_S

    def _nothing_awaited(self) -> bool:
        running = self.launch is not None and self.launch.ended is None
        return self._taken_up and not running and self.incidents.verifying is None

    def _needs_cards(self) -> bool:
        """A healthy server has nobody beside it who talks to the driver."""
        starting = not self._nothing_awaited() and (self.proof is None or not self.proof.serving)
        return starting or self.incidents.verifying is not None

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

    async def _take_up(self) -> None:
        """The first turn: what an earlier daemon left open comes before everything new."""
        self._parts.systemd.ref(self.unit)
        snapshot = self._parts.systemd.snapshot(self.unit)
        if not snapshot.loaded:
            alerts.send(
                alerts.blind(f"{self.unit}, which is {snapshot.load_state}: nothing to watch until it is loaded.")
            )
        self._parts.ledger.prune(self.unit)
        if not self._acts and self._parts.ledger.witness(self.unit) is not None:
            witness.dismiss(self._parts.systemd, self._parts.ledger, self.unit)
        await self.cards.read()  # which cards and driver there are is part of what a proof holds for
        await self.incidents.resume(snapshot)
        self._taken_up = True
        await self._look()

    async def _look(self) -> None:
        snapshot = self.snapshot = self._parts.systemd.snapshot(self.unit)
        self._parts.metrics.saw_state(self.unit, snapshot.active_state)
        if self.pausing.over:
            self.end_pause(snapshot)
        await self._turn(lambda: self._follow_operator(snapshot))
        self._parts.metrics.overridden.labels(self.unit).set(self._overriding.in_force)
        launch = self.launch
        if launch is not None and launch.ended is None and launch.invocation != snapshot.invocation:
            await self._ended(launch, snapshot)  # the bus shows the newest launch only
            snapshot = self.snapshot = self._parts.systemd.snapshot(self.unit)  # that may have taken long
        new = launch is None or launch.invocation != snapshot.invocation
        if snapshot.invocation and new and not snapshot.in_condition:
            self._begin(snapshot)
        launch = self.launch
        if launch is not None and launch.ended is None and launch.invocation == snapshot.invocation:
            await self._watch(launch, snapshot)
        self.incidents.check(snapshot, self.launch)

    async def _watch(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        known = launch.containers
        launch.see_processes(snapshot)
        if snapshot.ended:
            await self._ended(launch, snapshot)
            return
        await self.inquest.find_container(launch, snapshot)
        if launch.containers != known:  # whose a process in it is, is told by the ledger
            self._parts.ledger.save_launch(launch.record())
        heard = await self.inquest.pull(launch)
        if self._before_the_weights(launch):
            await self._see_cards(launch, snapshot)
        await self.inquest.identify(launch)
        self._tell_ceiling(launch)
        await self._prove(launch, snapshot)
        self._progress()  # each of these may wait for a server that does not answer
        await self.liveness.look(launch, snapshot, self.proof, heard=heard)
        self._progress()
        await self.hangs.see(launch, snapshot, self.liveness)

    async def _follow_operator(self, snapshot: UnitSnapshot) -> None:
        if self.may_act and (followed := await self._overriding.follow_operator(snapshot)):
            log.info("override follows the operator", unit=self.unit, why=followed)
            alerts.send(alerts.yielded(self.unit, followed))

    @property
    def _acts(self) -> bool:
        """But for a pause."""
        return self.settings.act and self._parts.may_act

    @property
    def may_act(self) -> bool:
        return self._acts and not self.pausing.active

    def end_pause(self, snapshot: UnitSnapshot) -> bool:
        """What failed during the pause, and is still down, is diagnosed and planned for now. False: there was none."""
        since = self.pausing.end()
        if since is None:
            return False
        alerts.send(alerts.pause(self.unit, "resume", "the pause is over"))
        self.hangs.over("The pause is over.")
        self._parts.ledger_was_written()
        last = next(iter(self._parts.ledger.incidents(self.unit, 1)), None)
        still = last is not None and last.invocation == snapshot.invocation and last.opened >= since
        stopped = snapshot.active_state is ActiveState.INACTIVE or self._saw_a_stop(snapshot)
        if still and snapshot.ended and not stopped:
            self._parts.ledger.forget_end(snapshot.invocation)
            self.launch = None
        self._awake.set()
        return True

    def _saw_a_stop(self, snapshot: UnitSnapshot) -> bool:
        return witness.saw_a_stop(self._parts.systemd, self._parts.ledger, snapshot)

    def _begin(self, snapshot: UnitSnapshot) -> None:
        known = self._parts.ledger.launch(snapshot.invocation)
        if self._acts and not snapshot.ended:
            witness.call(self._parts.systemd, self._parts.ledger, snapshot)
        if snapshot.ended and not _worth_a_report(snapshot, known):
            return
        self.launch = self.inquest.begin(snapshot, known)
        self.proof = None
        self.liveness = Liveness(self.settings, self._parts.clock)
        self._set_degraded(False)
        self._parts.metrics.launches.labels(self.unit).inc()
        log.info("launch", unit=self.unit, invocation=snapshot.invocation, main_pid=snapshot.main_pid)
        if not snapshot.ended and known is None:
            self._parts.ledger.save_launch(self.launch.record())

    def _tell_ceiling(self, launch: LaunchWatch) -> None:
        """Somebody started what is proven not to fit. It stays blocked for us, and theirs to try: the proof may be old.
        A base holds the cards and the model, so without them nothing can be said."""
        if launch.ceiling_told or launch.files is None or not self.cards.uuids:
            return
        launch.ceiling_told = True
        if ceiling := self.inquest.ceiling_of(launch):
            alerts.send(alerts.known_ceiling(self.unit, launch.invocation, ceiling))

    def _before_the_weights(self, launch: LaunchWatch) -> bool:
        early = self._parts.clock.now() - launch.started < _BEFORE_THE_WEIGHTS_S
        return early and launch.phase in (Phase.UNKNOWN, Phase.STARTING) and launch.holds_bytes < _OWN_MEMORY_BYTES

    async def _see_cards(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        """What was on the cards before the launch, again until it holds memory itself: what an ended launch held goes
        while this one still imports."""
        before = await self.cards.before(snapshot)
        if before is None or before.own_bytes >= _OWN_MEMORY_BYTES:
            launch.holds_bytes = before.own_bytes if before else 0
            return
        uses = launch.uses(before.reading)
        held = tuple(one for one in before.held if uses is None or one.uuid in uses)
        changed = launch.gpu_before is None or launch.held_before != held
        launch.gpu_before, launch.held_before, launch.holds_bytes = before.reading, held, before.own_bytes
        if changed:
            self._parts.ledger.save_launch(launch.record())

    # A launch that runs

    async def _prove(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        if self.proof is None and launch.raw_argv and launch.timeline.reached(Phase.READY):
            self.proof = Proof(launch.raw_argv, self.settings)
        proof, now = self.proof, self._parts.clock.monotonic()
        if proof is None:
            return
        proof.saw(launch.decoded_at, now)
        if proof.outgrew_idle(now):
            self._proven(launch, proof)
        if not proof.due(now):
            return
        if not await proof.generates(snapshot, launch.containers, now):
            return
        if proof.serving:
            self._proven(launch, proof)
        else:
            self._serving(launch, snapshot, proof)

    def _serving(self, launch: LaunchWatch, snapshot: UnitSnapshot, proof: Proof) -> None:
        proof.served(self._parts.clock.monotonic(), self._parts.clock.now())
        launch.served = True
        self.incidents.served(launch)
        self._parts.metrics.runs(self.unit, launch.config)
        log.info("serving", unit=self.unit, invocation=launch.invocation, config=launch.config.describe())
        self._parts.ledger.save_launch(launch.record())
        if shortfall := self._shortfall(launch):
            proof.refuse()
            self._set_degraded(True)
            alerts.send(alerts.degraded(self.unit, launch.invocation, shortfall))
        self.incidents.surprise(launch, snapshot)

    def _shortfall(self, launch: LaunchWatch) -> str:
        """Fewer tokens or requests than this config had when it was proven, in words; empty where there is no such
        proof or nothing is missing."""
        figures = launch.timeline.memory
        for good in self._parts.ledger.known_good(self.unit, self.inquest.base(launch)):
            if not good.config.same_as(launch.config):
                continue
            for what, now, then in (
                ("tokens of KV pool", figures.max_total_num_tokens, good.max_total_num_tokens),
                ("running requests", figures.max_running_requests, good.max_running_requests),
            ):
                if now is not None and then is not None and now < then * _DEGRADED_BELOW:
                    return f"{now} {what} where {then} were proven{_held_by(launch)}"
        return ""

    def _proven(self, launch: LaunchWatch, proof: Proof) -> None:
        if launch.base_unknown:
            proof.refuse()
            return
        good = KnownGood(
            self.unit,
            self.inquest.base(launch),
            launch.config,
            launch.invocation,
            self._parts.clock.now(),
            launch.timeline.memory.max_total_num_tokens,
            launch.timeline.memory.max_running_requests,
            proof.traffic,
        )
        self._parts.ledger.save_launch(launch.record())
        self._parts.ledger.save_known_good(good)
        proof.proven()
        self._parts.metrics.proven(self.unit, good.config)
        how = "" if good.traffic else "; nobody but the watchdog's probes asked it so far"
        if ceiling := self.inquest.ceiling_of(launch):
            self._parts.ledger.forget_ceiling(ceiling.unit, ceiling.base, ceiling.config)
            how += f"; it fits after all, so that it failed with {ceiling.failure} is forgotten"
        alerts.send(alerts.known_good(self.unit, launch.invocation, f"{good.config.describe()} is known-good{how}"))

    # A launch that ended

    async def _ended(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> None:
        self.incidents.jobs.forget()  # the job that ended it, if one did, is history
        launch.ended = self._parts.clock.now()
        self._set_degraded(False)
        self.hangs.over("It ended.")
        self._parts.metrics.runs(self.unit, None)
        await self.inquest.identify(launch)
        self._tell_ceiling(launch)  # what dies at once is seen by its end alone
        if not snapshot.refused:  # what never ran has said nothing
            await self.inquest.read_to_the_end(launch)
        await self.incidents.ended(launch, snapshot)

    def _set_degraded(self, degraded: bool) -> None:
        self.degraded = degraded
        self._parts.metrics.degraded.labels(self.unit).set(degraded)

    # What commands ask for

    @contextlib.asynccontextmanager
    async def between_turns(self) -> AsyncIterator[None]:
        """For a command that acts. Raises `WatchdogError` where a turn goes on: a recovery is under way."""
        try:
            async with asyncio.timeout(_COMMAND_WAITS_S):
                await self._turning.acquire()
        except TimeoutError as error:
            raise WatchdogError(f"{self.unit} is just being recovered; `pause` ends that, `status` shows it") from error
        try:
            yield
        finally:
            self._turning.release()
            self._awake.set()

    def known(self, snapshot: UnitSnapshot) -> LaunchWatch | None:
        """The newest launch, watched by us or only recorded; None where nothing is known of it."""
        if self.launch is not None and self.launch.invocation == snapshot.invocation:
            return self.launch
        recorded = self._parts.ledger.launch(snapshot.invocation) if snapshot.invocation else None
        return self.inquest.begin(snapshot, recorded) if recorded is not None else None

    def good_by_hand(self, launch: LaunchWatch, proof: Proof) -> None:
        """A person's word stands for the rest of the soak, and for traffic."""
        proof.vouched()
        self._proven(launch, proof)

    def status(self) -> dict[str, object]:
        launch = self.launch
        running = launch is not None and launch.ended is None
        base = self.inquest.base(launch) if launch is not None else ""
        good = self._parts.ledger.known_good(self.unit, base)
        last = next(iter(self._parts.ledger.incidents(self.unit, 1)), None)
        return {
            "unit": self.unit,
            "act": self.may_act,
            "state": state_in_words(self.snapshot),
            "invocation": launch.invocation if launch else "",
            "phase": launch.phase if launch and running else "",
            "running": launch.config.describe() if launch and running else "",
            "serving": self.proof is not None and self.proof.serving and running,
            "known_good": good[0].config.describe() if good else "",
            "proven": [_good_json(one) for one in good],
            "ceilings": [_ceiling_json(one) for one in self._parts.ledger.ceilings(self.unit, base)],
            "paused_until": self.pausing.until,
            "paused": self.pausing.in_words(),
            "degraded": self.degraded,
            "progress": {"life": self.liveness.judgement.life, "why": self.liveness.judgement.sentence}
            if running
            else None,
            "incident": self.incidents.verifying.incident.id if self.incidents.verifying else "",
            "last_incident": {"id": last.id, "class": last.failure, "outcome": last.outcome} if last else None,
        }


def _good_json(good: KnownGood) -> dict[str, object]:
    return {"id": good.id, "config": good.config.describe(), "proven": good.proven, "traffic": good.traffic}


def _ceiling_json(ceiling: Ceiling) -> dict[str, object]:
    return {"id": ceiling.id, "config": ceiling.config.describe(), "seen": ceiling.seen, "class": ceiling.failure}


def state_in_words(snapshot: UnitSnapshot | None) -> str:
    if snapshot is None:
        return "unknown"
    if not snapshot.loaded:
        return f"{snapshot.load_state}: no such unit is loaded"
    return f"{snapshot.active_state} ({snapshot.sub_state})"


def _held_by(launch: LaunchWatch) -> str:
    held = [f"{held.who} held {held.held_bytes / 2**30:.1f} GiB of card {held.gpu}" for held in launch.held_before]
    return f": {', '.join(held)} when it started" if held else ""


def _worth_a_report(ended: UnitSnapshot, known: Launch | None) -> bool:
    """Of a launch that ended before we looked: what was diagnosed is not diagnosed again, and an ordinary end that
    nobody watched is no news. A failure is, and so is the end of a launch that an earlier daemon saw begin."""
    if known is not None:
        return known.ended is None
    return ended.active_state is ActiveState.FAILED or ended.in_auto_restart
