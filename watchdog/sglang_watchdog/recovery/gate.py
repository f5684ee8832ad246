"""Whether a start may go on, decided for the start gate of a unit. Pure: `sglang_watchdog.gate` looks and answers.

The gate is systemd's `ExecCondition=`: a refusal leaves the unit inactive, without a failure and without a
restart. It refuses what is proven not to fit, and waits for what the unit's own ended launches still
hold of the cards. Strangers never keep a start back, and neither does anything that cannot be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.gpu import HeldMemory
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.launch import Phase

_GIB = 2**30


class GateMove(StrEnum):
    START = "start"
    WAIT = "wait"  # ask again soon
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """`reason` is one sentence; empty where there is nothing to say."""

    move: GateMove
    reason: str = ""


def decide(*, may_act: bool, ceiling: Ceiling | None, held: Sequence[HeldMemory]) -> GateAnswer:
    """`ceiling`: the proof that what would start does not fit. `held`: what is on the cards, and whose."""
    if not may_act:
        return GateAnswer(GateMove.START)
    if ceiling is not None:
        return GateAnswer(GateMove.REFUSE, _refusal(ceiling))
    ours = sum(one.held_bytes for one in held if one.ours)
    if ours:
        return GateAnswer(GateMove.WAIT, f"An ended launch of the unit still holds {ours / _GIB:.1f} GiB.")
    return GateAnswer(GateMove.START)


def refused(ceiling: Ceiling) -> Diagnosis:
    """Of a start that was refused: what it would have ended by."""
    return Diagnosis(
        ceiling.failure,
        0.95,
        _refusal(ceiling),
        Phase.STARTING,
        rollback_helps=True,
        advice=(f"To try it all the same: sglang-watchdog forget {ceiling.unit} {ceiling.id}, then start the unit.",),
    )


def _refusal(ceiling: Ceiling) -> str:
    return (
        f"The start was refused: {ceiling.config.describe()} is proven not to fit ({ceiling.failure} in launch "
        f"{ceiling.invocation})."
    )
