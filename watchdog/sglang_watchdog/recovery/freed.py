"""What a freeing came to, in words: who was ended, who was left alone and why, and what a human can do about the rest.
Pure."""

from collections.abc import Sequence
from itertools import groupby

from sglang_watchdog.domain.outside import held_from_outside
from sglang_watchdog.domain.ownership import Owner
from sglang_watchdog.recovery.freeing import Ending, FreePlan, Spared, Stage, Unnamed

_GIB = 2**30
_RESET = "`nvidia-smi --gpu-reset` with the card idle, or a reboot, gives it back"


def sentences(
    plan: FreePlan,
    ended: Sequence[Ending],
    stage: Stage | None,
    *,
    blind: str = "",
    stuck: Sequence[int] = (),
    left: Sequence[Unnamed] = (),
    inside: str = "",
) -> list[str]:
    """`stage` is where it ended, None where the unit was started meanwhile. `blind`: why NVML did not answer. `stuck`:
    pids that outlived SIGKILL. `left`: bytes that stayed. `inside`: the kind of container that we are in, if any."""
    said = []
    for container, endings in groupby(sorted(ended, key=_place), _place):
        said.append(_ended(container, list(endings)))
    if plan.spared:
        said.append("Left alone: " + "; ".join(map(_spared, plan.spared)) + ".")
    match stage:
        case None:
            said.append("The unit was started meanwhile, so the rest was left alone.")
        case _ if blind:
            said.append(f"NVML did not answer ({blind}), so whether the cards are free cannot be told.")
        case Stage.FREED:
            said.append("NVML shows our bytes back.")
        case Stage.NOT_ENDED:
            pids = ", ".join(map(str, stuck)) or "A process"
            said.append(f"Outlived SIGKILL: {pids}, stuck in the driver; {_RESET}.")
        case Stage.RESPAWNED:
            said.append("Something starts them again as often as they are ended: find and stop what supervises them.")
        case _ if by_hand := [spared.by_hand for spared in plan.spared if spared.by_hand]:
            said.append(f"The cards are not free before {' and '.join(dict.fromkeys(f'`{one}`' for one in by_hand))}.")
        case _ if left:
            bytes_ = ", ".join(f"{_size(unnamed.bytes)} of {unnamed.uuid}" for unnamed in left)
            said.append(f"No visible process holds {bytes_}: {held_from_outside(inside)}.")
        case _:
            said.append("The driver has not given all bytes back in time.")
    return said


def out_of_reach(plan: FreePlan) -> str:
    """What is of an ended launch and cannot be ended by us, with what a person can do; empty where nothing is."""
    left = [spared for spared in plan.spared if spared.by_hand]
    return f"Left over, and not to be ended by the watchdog: {'; '.join(map(_spared, left))}." if left else ""


def _place(ending: Ending) -> str:
    return f"{ending.container.engine} container {ending.container.short}" if ending.container else ""


def _ended(container: str, endings: Sequence[Ending]) -> str:
    pids = ", ".join(dict.fromkeys(str(ending.process.pid) for ending in endings))
    size = _size(sum(ending.bytes for ending in endings))
    if container:
        return f"The left-over {container} was ended through its engine (processes {pids}, {size})."
    return f"Left-over processes {pids} were ended ({size})."


def _spared(spared: Spared) -> str:
    who = f"process {spared.pid}" if spared.pid is not None else "an unnamed process"
    return f"{who} with {_size(spared.bytes)} ({spared.reason}){_what_to_do(spared)}"


def _what_to_do(spared: Spared) -> str:
    match spared.owner:
        case Owner.UNKNOWN:
            return ", which only its own container or the host can name and end"
        case _ if spared.by_hand:
            return f"; `{spared.by_hand}` ends it"
        case Owner.STRANGER:
            return ", which is its owner's to end"
        case _:
            return ""


def _size(amount: int) -> str:
    return f"{amount / _GIB:.1f} GiB" if amount else "an unknown amount"
