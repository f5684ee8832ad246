"""The cards, seen from one unit: who holds memory, whose that is, and the freeing of what an ended launch left.

Verdicts and the plan are pure (`recovery.ownership`, `recovery.freeing`); this reads, signals and waits.
"""

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import structlog

from sglang_watchdog.domain.container import Container
from sglang_watchdog.domain.gpu import GpuAnswer, GpuReading, GpuUnknown, HeldMemory
from sglang_watchdog.domain.launch import Launch, ProcessId
from sglang_watchdog.domain.ownership import Owner, Ownership, ProcessFacts, Proof
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.domain.visible import cards_of
from sglang_watchdog.host import containers, processes, surroundings
from sglang_watchdog.host.processes import SignalOutcome
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.freed import sentences
from sglang_watchdog.recovery.freeing import Ending, FreePlan, Means, Patience, Stage, free_plan, is_clean, next_stage
from sglang_watchdog.recovery.ownership import of_this_boot, verdict
from sglang_watchdog.settings import UnitSettings

_POLL_S = 0.05
# How often a holder that is started again is ended again.
_MOST_ROUNDS = 3
# How many launches back a left-over may be from. More are read only to find none.
_LAUNCHES = 50
# After that a listed pid that is not there is somebody's of another PID namespace, who has the number by chance.
_RELEASES_WITHIN_S = 60.0
Verdicts = dict[int, Ownership]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Before:
    """The cards without what the launch itself holds by now (`own_bytes`), and who held what of them."""

    reading: GpuReading
    held: tuple[HeldMemory, ...]
    own_bytes: int


@dataclass(frozen=True, slots=True)
class _Look:
    """`verdicts` grow with who comes while the freeing lasts."""

    plan: FreePlan
    verdicts: Verdicts
    cards: frozenset[str] | None  # that the unit uses, and where holders of it are listed; None: it cannot be told


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Those that a signal was sent to, where the freeing ended (None where the unit was started), and what NVML said
    last."""

    ended: list[Ending]
    stage: Stage | None
    answer: GpuAnswer | None


class Cards:
    """Of one unit. Ends processes in `free` only, and there only with proof."""

    def __init__(self, unit: str, settings: UnitSettings, parts: Parts, progress: Callable[[], None]) -> None:
        self._unit = unit
        self._patience = Patience(release=settings.free_deadline)
        self._parts = parts
        self._progress = progress
        self._facts: dict[int, ProcessFacts] = {}
        self.driver = ""
        self.uuids: tuple[str, ...] = ()

    async def read(self) -> GpuAnswer:
        answer = await self._parts.probe.read_gpus()
        self._parts.metrics.saw_gpus(answer)
        if isinstance(answer, GpuReading):
            self.driver, self.uuids = answer.driver, tuple(gpu.uuid for gpu in answer.gpus)
        return answer

    async def before(self, snapshot: UnitSnapshot) -> Before | None:
        """What was on the cards before the launch that has just begun: its own processes are taken out. None where the
        cards cannot be read."""
        answer = await self.read()
        if not isinstance(answer, GpuReading):
            return None
        self._facts = {}
        verdicts = await self.verdicts(answer, snapshot)
        own = {pid for pid, ownership in verdicts.items() if ownership.owner is Owner.CURRENT_LAUNCH}
        held_by_it = sum(h.used_bytes for gpu in answer.gpus for h in gpu.holders if h.pid in own)
        return Before(_without(answer, own), _held(answer, verdicts, own), held_by_it)

    async def held(self, snapshot: UnitSnapshot) -> tuple[HeldMemory, ...]:
        """What others than the unit's running launch hold, and whose it is. Nothing where the cards cannot be read."""
        answer = await self.read()
        if not isinstance(answer, GpuReading):
            return ()
        verdicts = await self.verdicts(answer, snapshot)
        own = {pid for pid, ownership in verdicts.items() if ownership.owner is Owner.CURRENT_LAUNCH}
        return _held(answer, verdicts, own)

    async def verdicts(self, reading: GpuReading, snapshot: UnitSnapshot | None = None) -> Verdicts:
        """Whose each holder is, by pid."""
        return await self._judge(_listed(reading), snapshot or self._parts.systemd.snapshot(self._unit))

    async def left_overs(self, snapshot: UnitSnapshot) -> FreePlan:
        """What is proven to be of an ended launch, lives on and holds memory, and who else does."""
        plan = (await self._look(await self.read(), snapshot)).plan
        return replace(plan, end=tuple(ending for ending in plan.end if processes.lives(ending.process)))

    async def free(self, baseline: GpuReading | None, *, patience: Patience | None = None) -> str:
        """Ends what is proven ours and waits until NVML has the bytes back. Returns sentences: what was ended, what was
        left alone, and whether the cards are free.

        A holder that comes back all the same is ended again, a few times at most."""
        patience = patience or self._patience
        ended: list[Ending] = []
        for _ in range(_MOST_ROUNDS):
            answer = await self.read()
            look = await self._look(answer, baseline=baseline)
            blind = "" if isinstance(answer, GpuReading) else answer.reason
            only_by_hand = not look.plan.end and any(spared.by_hand for spared in look.plan.spared)
            if blind or only_by_hand:
                patience = replace(patience, release=0.0)  # nothing will tell of the bytes, or give them back
            outcome = await self._carry_out(look, baseline, patience)
            ended += outcome.ended
            if outcome.stage is not Stage.RESPAWNED:
                break
        self._parts.metrics.spared.labels(self._unit).inc(len(look.plan.spared))
        stuck = [ending.process.pid for ending in look.plan.end if processes.lives(ending.process)]
        last = outcome.answer
        left = (
            free_plan(last, look.verdicts, baseline, cards=look.cards).unnamed if isinstance(last, GpuReading) else ()
        )
        inside = surroundings.container()
        words = sentences(look.plan, ended, outcome.stage, blind=blind, stuck=stuck, left=left, inside=inside)
        return " ".join(words)

    async def plan(self) -> FreePlan | str:
        """What `free` would do now, or why that cannot be told."""
        answer = await self.read()
        return (await self._look(answer)).plan if isinstance(answer, GpuReading) else answer.reason

    async def _judge(self, pids: Collection[int], snapshot: UnitSnapshot) -> Verdicts:
        self._facts |= await self._parts.probe.describe(pids)
        launches = self._launches()
        return {pid: _dying(pid, launches) or verdict(self._facts.get(pid), snapshot, launches) for pid in pids}

    async def _look(
        self,
        answer: GpuAnswer,
        snapshot: UnitSnapshot | None = None,
        *,
        baseline: GpuReading | None = None,
    ) -> "_Look":
        """Who holds what and what is to be ended. Where NVML does not name everybody, the second source does: who has
        the driver's memory device open. What is above a holder of ours, and is ours itself, is ended with it: it might
        start it again."""
        snapshot = snapshot or self._parts.systemd.snapshot(self._unit)
        reading = answer if isinstance(answer, GpuReading) else GpuReading(answer.time, "", ())
        self._facts = {}
        verdicts = await self.verdicts(reading, snapshot)
        unlisted: set[int] = set()
        uses = self._uses(reading)
        plan = free_plan(reading, verdicts, baseline, cards=uses)
        if not (isinstance(answer, GpuReading) and plan.complete):
            found = await self._parts.probe.device_holders()
            hidden = {one.pid for one in found} - set(verdicts) if not isinstance(found, GpuUnknown) else set()
            verdicts |= await self._judge(hidden, snapshot)
            unlisted |= hidden
        above = await self._judge(self._above(verdicts), snapshot)
        silent = await self._silent(verdicts)
        proven = {pid: ownership for pid, ownership in above.items() if ownership.owner is Owner.OURS}
        verdicts |= proven
        unlisted |= set(proven)
        plan = free_plan(
            reading,
            verdicts,
            baseline,
            whole_group=snapshot.stop_ends_all,
            unlisted=sorted(unlisted),
            silent=silent,
            cards=uses,
        )
        ours = {ending.process.pid for ending in plan.end}
        reached = {gpu.uuid for gpu in reading.gpus if any(holder.pid in ours for holder in gpu.holders)}
        return _Look(plan, verdicts, uses | reached if uses is not None else None)

    def _uses(self, reading: GpuReading) -> frozenset[str] | None:
        """The cards of the newest launch."""
        newest = next(iter(self._launches()), None)
        return cards_of(newest.argv, newest.server_args, newest.cuda, reading.gpus) if newest else None

    async def _silent(self, verdicts: Verdicts) -> dict[str, str]:
        """Containers of ours whose engines cannot end them, by id, and why."""
        silent = {}
        for container in {one.container for one in verdicts.values() if one.container and one.owner is Owner.OURS}:
            self._progress()  # an engine may take its time, each of them
            if why := await containers.silence(container):
                silent[container.id] = why
        return silent

    def _above(self, verdicts: Verdicts) -> set[int]:
        """Of the holders that are ours, the processes above them."""
        ours = {pid for pid, ownership in verdicts.items() if ownership.owner is Owner.OURS}
        facts = (self._facts[pid] for pid in ours if pid in self._facts)
        return {ancestor.id.pid for one in facts for ancestor in one.ancestors if ancestor.id.pid > 1} - set(verdicts)

    async def _carry_out(self, look: "_Look", baseline: GpuReading | None, patience: Patience) -> "_Outcome":
        clock, plan, verdicts = self._parts.clock, look.plan, look.verdicts
        ended_by_us = await self._signal_all(plan, signal.SIGTERM)
        self._parts.metrics.ended.labels(self._unit).inc(len(ended_by_us))
        stage = Stage.TERMINATE if ended_by_us else Stage.RELEASE
        entered = clock.monotonic()
        while True:
            self._progress()
            if not self._still_down():
                return _Outcome(ended_by_us, None, None)
            answer = await self.read()
            ended = not any(processes.lives(ending.process) for ending in plan.end)
            if ended and await self._came_since(answer, verdicts):
                return _Outcome(ended_by_us, Stage.RESPAWNED, answer)
            # Those that ended may still be listed while the driver releases: the verdicts on them stay.
            clean = is_clean(answer, verdicts, baseline, look.cards)
            following = next_stage(stage, clock.monotonic() - entered, patience, ended=ended, clean=clean)
            if following is not stage:
                stage, entered = following, clock.monotonic()
                if stage is Stage.KILL:
                    await self._signal_all(plan, signal.SIGKILL)
            if stage.over:
                return _Outcome(ended_by_us, stage, answer)
            await clock.sleep(_POLL_S)

    async def _came_since(self, answer: GpuAnswer, verdicts: Verdicts) -> bool:
        """Whether another process of ours holds memory by now. Adds the verdicts on all who came: of a stranger that
        took some meanwhile it is known then that the bytes are its own."""
        new = _listed(answer) - set(verdicts) if isinstance(answer, GpuReading) else set()
        if not new:
            return False
        came = await self._judge(new, self._parts.systemd.snapshot(self._unit))
        verdicts |= came
        return any(one.owner is Owner.OURS and one.process and processes.lives(one.process) for one in came.values())

    async def _signal_all(self, plan: FreePlan, number: signal.Signals) -> list[Ending]:
        reached = []
        orders: dict[str, SignalOutcome] = {}  # one for each container, whoever in it holds memory
        for ending in plan.end:
            if (container := ending.container) is None:
                outcome = self._signal(ending, number)
            elif container.id in orders:
                outcome = orders[container.id]
            elif (outcome := await self._order(ending.process, container, number)) is SignalOutcome.SENT:
                orders[container.id] = outcome
            if outcome is SignalOutcome.GONE:
                continue
            log.info(
                "left-over signalled",
                unit=self._unit,
                pid=ending.process.pid,
                signal=number.name,
                outcome=str(outcome),
                why=ending.reason,
            )
            if outcome is SignalOutcome.SENT:
                reached.append(ending)
        return reached

    def _signal(self, ending: Ending, number: signal.Signals) -> SignalOutcome:
        if ending.means is Means.SYSTEMD:
            if not self._still_down():
                return SignalOutcome.NOT_PROVEN
            self._parts.systemd.kill(self._unit, number)
            return SignalOutcome.SENT
        return processes.signal_process(ending.process, number, lambda: self._still_ours(ending.process))

    async def _order(self, process: ProcessId, container: Container, number: signal.Signals) -> SignalOutcome:
        """Has the engine signal the container, with the proof of one of its processes read again just before."""
        if not processes.lives(process):
            return SignalOutcome.GONE
        if not self._still_ours(process):
            return SignalOutcome.NOT_PROVEN
        self._progress()
        if why := await containers.kill(container, number):
            log.warning("the engine did not signal", unit=self._unit, container=container.id, why=why)
            return SignalOutcome.DENIED
        return SignalOutcome.SENT

    def _still_down(self) -> bool:
        return _down(self._parts.systemd.snapshot(self._unit))

    def _still_ours(self, process: ProcessId) -> bool:
        """The whole proof again, with the pidfd already open and the unit read anew. Only the words of the process (its
        environment and command line) are of the first look: they are what a stuck process could hold us up with."""
        before, now = self._facts.get(process.pid), processes.facts(process.pid)
        snapshot = self._parts.systemd.snapshot(self._unit)
        if not _down(snapshot) or before is None or now is None or {before.id, now.id} != {process}:
            return False
        # What it descended from by then counts as well: its parent may just have been ended by us.
        ancestors = (*before.ancestors, *now.ancestors)
        facts = replace(now, argv=before.argv, invocation=before.invocation, ancestors=ancestors)
        return verdict(facts, snapshot, self._launches()).owner is Owner.OURS

    def _launches(self) -> tuple[Launch, ...]:
        known = (launch for launch, _ in self._parts.ledger.launches(self._unit, _LAUNCHES))
        return of_this_boot(known, processes.boot_id(), processes.boot_time())


def _down(snapshot: UnitSnapshot) -> bool:
    return snapshot.ended and not snapshot.job


def _dying(pid: int, launches: tuple[Launch, ...]) -> Ownership | None:
    """A process of an ended launch that is gone, while the driver still lists it: it takes its time to release, most of
    it for pinned host memory (4.4 s were seen on an H200)."""
    if processes.start_ticks(pid) is not None:
        return None
    lately = (launch for launch in launches if launch.ended and time.time() - launch.ended < _RELEASES_WITHIN_S)
    recorded = (process.id for launch in lately for process in launch.processes)
    process = next((process for process in recorded if process.pid == pid), None)
    if process is None:
        return None
    return Ownership(Owner.OURS, "it has ended, and the driver is releasing it", process, Proof.RECORDED_PROCESS)


def _listed(reading: GpuReading) -> set[int]:
    return {holder.pid for gpu in reading.gpus for holder in gpu.holders if holder.pid is not None}


def _without(reading: GpuReading, own: set[int]) -> GpuReading:
    gpus = []
    for gpu in reading.gpus:
        ours = sum(holder.used_bytes for holder in gpu.holders if holder.pid in own)
        others = tuple(holder for holder in gpu.holders if holder.pid not in own)
        gpus.append(replace(gpu, used_bytes=gpu.used_bytes - ours, holders=others))
    return replace(reading, gpus=tuple(gpus))


def _held(reading: GpuReading, verdicts: Verdicts, own: set[int]) -> tuple[HeldMemory, ...]:
    found = []
    for gpu in reading.gpus:
        for holder in gpu.holders:
            if holder.pid in own:
                continue
            ownership = verdicts.get(holder.pid) if holder.pid is not None else None
            who = f"process {holder.pid}" if holder.pid is not None else "a process that NVML cannot name"
            ours = ownership is not None and ownership.owner is Owner.OURS
            if ours and ownership and (container := ownership.container):
                who += f" in {container.engine} container {container.short}, which `{container.kill}` ends"
            found.append(HeldMemory(gpu.index, holder.used_bytes, who, ours, holder.pid, gpu.uuid))
    return tuple(found)
