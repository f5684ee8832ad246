"""The cards, seen from one unit: who holds memory, whose that is, and the freeing of what an ended launch left.

Verdicts and the plan are pure (`recovery.ownership`, `recovery.freeing`); this reads, signals and waits.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from sglang_watchdog.domain.gpu import GpuAnswer, GpuReading, HeldMemory
from sglang_watchdog.domain.launch import Launch, ProcessId
from sglang_watchdog.domain.ownership import Owner, Ownership, ProcessFacts, Proof
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import processes
from sglang_watchdog.host.processes import SignalOutcome
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.freeing import Ending, FreePlan, Means, Patience, Stage, free_plan, is_clean, next_stage
from sglang_watchdog.recovery.ownership import of_this_boot, verdict
from sglang_watchdog.settings import UnitSettings

_POLL_S = 0.05
_GIB = 2**30
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
        verdicts = await self.verdicts(answer, snapshot)
        own = {pid for pid, ownership in verdicts.items() if ownership.owner is Owner.CURRENT_LAUNCH}
        held_by_it = sum(h.used_bytes for gpu in answer.gpus for h in gpu.holders if h.pid in own)
        return Before(_without(answer, own), _held(answer, verdicts, own), held_by_it)

    async def verdicts(self, reading: GpuReading, snapshot: UnitSnapshot | None = None) -> Verdicts:
        """Whose each holder is, by pid."""
        snapshot = snapshot or self._parts.systemd.snapshot(self._unit)
        pids = {holder.pid for gpu in reading.gpus for holder in gpu.holders if holder.pid is not None}
        self._facts = await self._parts.probe.describe(pids)
        launches = self._launches()
        return {pid: _dying(pid, launches) or verdict(self._facts.get(pid), snapshot, launches) for pid in pids}

    async def left_overs(self, snapshot: UnitSnapshot) -> bool:
        """Whether a proven process of an ended launch lives on and holds memory."""
        answer = await self.read()
        if not isinstance(answer, GpuReading):
            return False
        verdicts = await self.verdicts(answer, snapshot)
        return any(o.owner is Owner.OURS and o.process and processes.lives(o.process) for o in verdicts.values())

    async def free(self, baseline: GpuReading | None, *, patience: Patience | None = None) -> str:
        """Ends what is proven ours and waits until NVML has the bytes back. Returns one sentence: what was ended, what
        was left alone, and whether the cards are free."""
        answer = await self.read()
        if not isinstance(answer, GpuReading):
            return f"the cards could not be read ({answer.reason}), so nothing was ended"
        snapshot = self._parts.systemd.snapshot(self._unit)
        verdicts = await self.verdicts(answer, snapshot)
        plan = free_plan(answer, verdicts, baseline, whole_group=snapshot.stop_ends_all)
        self._parts.metrics.spared.labels(self._unit).inc(len(plan.spared))
        ended, stage = await self._carry_out(plan, verdicts, baseline, patience or self._patience)
        return " ".join(_sentences(plan, ended, stage))

    async def plan(self) -> FreePlan | str:
        """What `free` would do now, or why that cannot be told."""
        answer = await self.read()
        if not isinstance(answer, GpuReading):
            return answer.reason
        return free_plan(answer, await self.verdicts(answer))

    async def _carry_out(
        self, plan: FreePlan, verdicts: Verdicts, baseline: GpuReading | None, patience: Patience
    ) -> tuple[list[Ending], Stage | None]:
        """Returns those that a signal was sent to, and where the freeing ended: None where the unit was started."""
        clock = self._parts.clock
        ended_by_us = self._signal_all(plan, signal.SIGTERM)
        self._parts.metrics.ended.labels(self._unit).inc(len(ended_by_us))
        stage = Stage.TERMINATE if ended_by_us else Stage.RELEASE
        entered = clock.monotonic()
        while True:
            self._progress()
            if not self._still_down():
                return ended_by_us, None
            answer = await self.read()
            # Those that ended may still be listed while the driver releases: the verdicts on them stay.
            clean = is_clean(answer, verdicts, baseline)
            ended = not any(processes.lives(ending.process) for ending in plan.end)
            following = next_stage(stage, clock.monotonic() - entered, patience, ended=ended, clean=clean)
            if following is not stage:
                stage, entered = following, clock.monotonic()
                if stage is Stage.KILL:
                    self._signal_all(plan, signal.SIGKILL)
            if stage.over:
                return ended_by_us, stage
            await clock.sleep(_POLL_S)

    def _signal_all(self, plan: FreePlan, number: signal.Signals) -> list[Ending]:
        reached = []
        for ending in plan.end:
            outcome = self._signal(ending, number)
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

    def _still_down(self) -> bool:
        snapshot = self._parts.systemd.snapshot(self._unit)
        return snapshot.ended and not snapshot.job

    def _still_ours(self, process: ProcessId) -> bool:
        """The whole proof again, with the pidfd already open and the unit read anew. Only the words of the process (its
        environment and command line) are of the first look: they are what a stuck process could hold us up with."""
        before, now = self._facts.get(process.pid), processes.facts(process.pid)
        if not self._still_down() or before is None or now is None or now.id != process:
            return False
        facts = replace(now, argv=before.argv, invocation=before.invocation)
        return verdict(facts, self._parts.systemd.snapshot(self._unit), self._launches()).owner is Owner.OURS

    def _launches(self) -> tuple[Launch, ...]:
        known = (launch for launch, _ in self._parts.ledger.launches(self._unit, _LAUNCHES))
        return of_this_boot(known, processes.boot_id(), processes.boot_time())


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
            found.append(HeldMemory(gpu.index, holder.used_bytes, who, ours, holder.pid))
    return tuple(found)


def _sentences(plan: FreePlan, ended: list[Ending], stage: Stage | None) -> list[str]:
    said = []
    if ended:
        pids = ", ".join(str(ending.process.pid) for ending in ended)
        said.append(f"Left-over processes {pids} were ended ({_size(sum(ending.bytes for ending in ended))}).")
    if plan.spared:
        said.append(
            "Left alone: "
            + "; ".join(
                f"{spared.pid or 'an unnamed process'} with {_size(spared.bytes)} ({spared.reason})"
                for spared in plan.spared
            )
            + "."
        )
    match stage:
        case None:
            said.append("The unit was started meanwhile, so the rest was left alone.")
        case Stage.FREED:
            said.append("NVML shows our bytes back.")
        case Stage.NOT_ENDED:
            said.append("A process outlived SIGKILL: it is stuck in the driver, and only a reboot or a reset helps.")
        case _:
            held = sum(unnamed.bytes for unnamed in plan.unnamed)
            said.append(f"{_size(held)} stay held by no visible process: the driver's, or from outside of this host.")
    return said


def _size(amount: int) -> str:
    return f"{amount / _GIB:.1f} GiB"
