"""What of the GPUs is to be freed, when they are free, and how long to wait for it. Pure.

Bytes everywhere. "Freed" has two halves: no process of ours holds anything, *and* what NVML counts is back to what it
was before the launch, plus what named strangers took since. The driver releases later than the process ends.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from sglang_watchdog.domain.container import Container
from sglang_watchdog.domain.gpu import Gpu, GpuAnswer, GpuHolder, GpuReading
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.domain.ownership import Owner, Ownership
from sglang_watchdog.domain.visible import only

MIB = 1 << 20
# What the driver keeps for itself where no earlier reading tells (615 MiB on an H200), and less than that plus the
# smallest CUDA context (526 MiB there), so that no holder hides in it.
_DRIVER_RESERVE = 1024 * MIB
# A mere cuInit adds 3 MiB without being listed; a context has some 8 MiB more than the list says.
_CARD_NOISE = 16 * MIB
_HOLDER_NOISE = 16 * MIB

Verdicts = Mapping[int, Ownership]
_NOT_SEEN = Ownership(Owner.UNKNOWN, "nothing is known of it")
_NAMELESS = Ownership(Owner.UNKNOWN, "NVML cannot name the process: it is in another PID namespace")


# What to end


class Means(StrEnum):
    """How a holder is ended."""

    SIGNAL = "signal"  # by us: pidfd, proof, signal
    SYSTEMD = "systemd"  # by KillUnit, with all that is in the unit's cgroup
    ENGINE = "engine"  # by the engine of its container, with all that is in that


@dataclass(frozen=True, slots=True)
class Ending:
    """A holder that may be ended. `bytes` is over all cards."""

    process: ProcessId
    bytes: int
    means: Means
    reason: str
    container: Container | None = None  # exactly where the means is its engine


@dataclass(frozen=True, slots=True)
class Spared:
    """A holder that is left alone, and why. `pid` is None where NVML cannot name it. One that is OURS is in a container
    that cannot be ended; `by_hand` is the command that a person may end it with."""

    pid: int | None
    bytes: int
    owner: Owner
    reason: str
    by_hand: str = ""


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Bytes of a card that belong to no process in NVML's list: held from outside, or being released."""

    uuid: str
    bytes: int


@dataclass(frozen=True, slots=True)
class FreePlan:
    """`end` is in order: a parent before its children, which it might start again."""

    end: tuple[Ending, ...] = ()
    spared: tuple[Spared, ...] = ()
    unnamed: tuple[Unnamed, ...] = ()

    @property
    def complete(self) -> bool:
        """NVML has named everybody who holds anything, and all of them could be seen."""
        return not self.unnamed and all(spared.owner is not Owner.UNKNOWN for spared in self.spared)


def free_plan(
    reading: GpuReading,
    verdicts: Verdicts,
    baseline: GpuReading | None = None,
    *,
    whole_group: bool = False,
    unlisted: Collection[int] = (),
    silent: Mapping[str, str] = MappingProxyType({}),
    cards: frozenset[str] | None = None,
) -> FreePlan:
    """`verdicts` by pid; a holder without one is left alone. `baseline` is the reading before the launch.

    `unlisted` are processes that NVML does not name: what they hold is not known, and is told as 0 bytes.

    `whole_group`: systemd's own stop would end all of the unit's cgroup, so KillUnit may. Not beside a holder in it
    that is spared: then each is signalled by itself, with its own proof. A container is ended as a whole or not at all.

    `cards`: those that the unit uses, by uuid, where that is known: bytes of nobody on other ones are not its matter.

    `silent`: why the engine of a container cannot end it, by the container's id."""
    whole_group = whole_group and not any(
        ownership.in_unit_cgroup and ownership.owner is not Owner.OURS for ownership in verdicts.values()
    )
    kept = {**_not_to_end(verdicts), **silent}
    end: list[Ending] = []
    spared: list[Spared] = []
    for pid, held in (dict.fromkeys(unlisted, 0) | _held(reading)).items():
        ownership = _verdict(pid, verdicts)
        container = ownership.container
        if ownership.owner is not Owner.OURS or ownership.process is None:
            spared.append(Spared(pid, held, ownership.owner, ownership.reason))
        elif container is None:
            means = Means.SYSTEMD if whole_group and ownership.in_unit_cgroup else Means.SIGNAL
            end.append(Ending(ownership.process, held, means, ownership.reason))
        elif container.id not in kept:
            end.append(Ending(ownership.process, held, Means.ENGINE, ownership.reason, container))
        else:
            reason = f"{ownership.reason}, but {kept[container.id]}"
            spared.append(Spared(pid, held, ownership.owner, reason, by_hand=container.kill))
    end.sort(key=lambda ending: (ending.process.start_ticks, ending.process.pid))
    return FreePlan(tuple(end), tuple(spared), _unnamed(only(reading, cards), baseline))


def _not_to_end(verdicts: Verdicts) -> dict[str, str]:
    """Containers in which somebody is spared, and who that is."""
    return {
        ownership.container.id: f"process {pid} in it is spared: {ownership.reason}"
        for pid, ownership in verdicts.items()
        if ownership.container is not None and ownership.owner is not Owner.OURS
    }


def _held(reading: GpuReading) -> dict[int | None, int]:
    held: dict[int | None, int] = {}
    for holder in (holder for gpu in reading.gpus for holder in gpu.holders):
        held[holder.pid] = held.get(holder.pid, 0) + holder.used_bytes
    return held


def _unnamed(reading: GpuReading, baseline: GpuReading | None) -> tuple[Unnamed, ...]:
    found = []
    for gpu in reading.gpus:
        named = [holder for holder in gpu.holders if holder.pid is not None]
        excess = _unlisted(gpu, named) - _usual_rest(gpu, baseline)
        if excess > _CARD_NOISE + len(named) * _HOLDER_NOISE:
            found.append(Unnamed(gpu.uuid, excess))
    return tuple(found)


# When it is free


def is_clean(
    answer: GpuAnswer,
    verdicts: Verdicts,
    baseline: GpuReading | None = None,
    cards: frozenset[str] | None = None,
) -> bool:
    """Whether nothing of ours is left on any card. An unknown reading is never clean.

    Without a baseline: no holder of ours, and no bytes that nobody is named for beyond the driver's own. `cards`: see
    `free_plan`; a holder of ours counts on any card.
    """
    if not isinstance(answer, GpuReading):
        return False
    if any(_verdict(holder.pid, verdicts).owner is Owner.OURS for gpu in answer.gpus for holder in gpu.holders):
        return False
    present = {gpu.uuid for gpu in answer.gpus}
    if baseline and any(gpu.uuid not in present for gpu in only(baseline, cards).gpus):
        return False  # a card is missing: what it holds cannot be told
    return all(_card_is_clean(gpu, verdicts, baseline) for gpu in only(answer, cards).gpus)


def _card_is_clean(gpu: Gpu, verdicts: Verdicts, baseline: GpuReading | None) -> bool:
    before = _card(gpu.uuid, baseline)
    known_before = {holder.pid for holder in before.holders} if before else set()
    named = [holder for holder in gpu.holders if _is_named(holder, verdicts, known_before)]
    noise = _CARD_NOISE + len(named) * _HOLDER_NOISE
    return _unlisted(gpu, named) <= _usual_rest(gpu, baseline) + noise


def _is_named(holder: GpuHolder, verdicts: Verdicts, known_before: set[int | None]) -> bool:
    """A stranger, so that its bytes are its own. One of whom nothing is known counts only if it was there before the
    launch: else it may be ours, in the middle of its release."""
    owner = _verdict(holder.pid, verdicts).owner
    if owner is Owner.UNKNOWN:
        return holder.pid is not None and holder.pid in known_before
    return owner in (Owner.STRANGER, Owner.CURRENT_LAUNCH)


def _usual_rest(gpu: Gpu, baseline: GpuReading | None) -> int:
    """What the card had in use before the launch beyond what its list named: the driver's own, and outsiders'."""
    before = _card(gpu.uuid, baseline)
    if before is None:
        return _DRIVER_RESERVE
    return _unlisted(before, [holder for holder in before.holders if holder.pid is not None])


def _unlisted(gpu: Gpu, holders: list[GpuHolder]) -> int:
    return gpu.used_bytes - sum(holder.used_bytes for holder in holders)


def _card(uuid: str, reading: GpuReading | None) -> Gpu | None:
    return next((gpu for gpu in reading.gpus if gpu.uuid == uuid), None) if reading else None


def _verdict(pid: int | None, verdicts: Verdicts) -> Ownership:
    return _NAMELESS if pid is None else verdicts.get(pid, _NOT_SEEN)


# How long to wait


class Stage(StrEnum):
    """Where a freeing stands. The last four are its ends."""

    TERMINATE = "terminate"  # SIGTERM was sent
    KILL = "kill"  # SIGKILL was sent
    RELEASE = "release"  # the processes have ended, the driver has yet to release
    FREED = "freed"
    NOT_RELEASED = "not_released"  # bytes stayed: driver, outsiders, wedged card
    NOT_ENDED = "not_ended"  # a process outlived SIGKILL: stuck in the driver (D state)
    RESPAWNED = "respawned"  # another process of ours holds memory by now

    @property
    def over(self) -> bool:
        return self in (Stage.FREED, Stage.NOT_RELEASED, Stage.NOT_ENDED, Stage.RESPAWNED)


class Event(StrEnum):
    CLEAN = "clean"
    ENDED = "ended"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that each stage may take. After SIGKILL only a process in the driver needs any time to end."""

    terminate: float = 2.0
    kill: float = 10.0
    release: float = 60.0

    def of(self, stage: Stage) -> float:
        return {Stage.TERMINATE: self.terminate, Stage.KILL: self.kill, Stage.RELEASE: self.release}.get(stage, 0.0)


_TABLE = {
    (Stage.TERMINATE, Event.CLEAN): Stage.FREED,
    (Stage.TERMINATE, Event.ENDED): Stage.RELEASE,
    (Stage.TERMINATE, Event.LATE): Stage.KILL,
    (Stage.KILL, Event.CLEAN): Stage.FREED,
    (Stage.KILL, Event.ENDED): Stage.RELEASE,
    (Stage.KILL, Event.LATE): Stage.NOT_ENDED,
    (Stage.RELEASE, Event.CLEAN): Stage.FREED,
    (Stage.RELEASE, Event.LATE): Stage.NOT_RELEASED,
}


def next_stage(stage: Stage, waited: float, patience: Patience, *, ended: bool, clean: bool) -> Stage:
    """`waited` is seconds in this stage; `ended`: all processes of the plan have; `clean`: see `is_clean`."""
    event = _event(stage, waited, patience, ended=ended, clean=clean)
    return stage if event is None else _TABLE.get((stage, event), stage)


def _event(stage: Stage, waited: float, patience: Patience, *, ended: bool, clean: bool) -> Event | None:
    if ended and clean:
        return Event.CLEAN
    if ended and stage is not Stage.RELEASE:
        return Event.ENDED
    return Event.LATE if waited >= patience.of(stage) else None
