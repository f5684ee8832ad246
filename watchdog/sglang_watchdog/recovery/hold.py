"""How a unit is kept from starting again, decided one reading at a time. Pure: the executor acts and re-reads.

systemd refuses a stop in mode `fail` while its own restart job is queued, and a unit with a short RestartSec is
running again before a diagnosis is made: so holding is a loop over what is seen, not one call.
"""

from enum import StrEnum

from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot

_THEIR_JOBS = frozenset({"stop", "restart", "try-restart", "reload-or-start"})


class HoldMove(StrEnum):
    """What one reading of the unit asks for."""

    HELD = "held"  # it is down and nothing will start it
    STOP = "stop"  # in auto-restart: a stop ends that at once, no process is involved
    KILL = "kill"  # systemd started again what had just failed, or it hangs: bring it down
    WAIT = "wait"  # on its way down, or systemd's restart job is about to run
    YIELD = "yield"  # the operator's business


def next_move(
    unit: UnitSnapshot, failed_invocation: str, *, doomed: bool, stopped_by_us: bool, hangs: bool = False
) -> HoldMove:
    """`failed_invocation` is the launch that was diagnosed, which runs if it `hangs`; `doomed`: systemd's own automatic
    restart runs the same command again. A unit that failed is not `inactive` by itself: somebody stopped it, and
    `stopped_by_us` says who."""
    if unit.in_auto_restart:
        return HoldMove.WAIT if unit.job else HoldMove.STOP
    match unit.active_state:
        case ActiveState.FAILED:
            return HoldMove.YIELD if unit.job else HoldMove.HELD
        case ActiveState.INACTIVE if unit.refused:
            # systemd's own restart was refused by a condition of the unit, and then there is none any more.
            return HoldMove.YIELD if unit.job else HoldMove.HELD
        case ActiveState.INACTIVE:
            return HoldMove.HELD if stopped_by_us and not unit.job else HoldMove.YIELD
        case ActiveState.DEACTIVATING:
            return HoldMove.YIELD if unit.job_type in _THEIR_JOBS and not stopped_by_us else HoldMove.WAIT
        case ActiveState.ACTIVE | ActiveState.ACTIVATING:
            if unit.job_type in _THEIR_JOBS:
                return HoldMove.YIELD
            if unit.invocation == failed_invocation:
                return HoldMove.KILL if hangs and not unit.job else HoldMove.WAIT
            return HoldMove.KILL if doomed else HoldMove.YIELD
        case _:
            return HoldMove.YIELD
