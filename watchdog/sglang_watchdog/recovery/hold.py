"""How a unit is kept from starting again, decided one reading at a time. Pure: the executor acts and re-reads.

systemd refuses a stop in mode `fail` while its own restart job is queued, and a unit with a short RestartSec is
running again before a diagnosis is made: so holding is a loop over what is seen, not one call.
"""

from enum import StrEnum

from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot


class HoldMove(StrEnum):
    """What one reading of the unit asks for."""

    HELD = "held"  # it is down and nothing will start it
    STOP = "stop"  # in auto-restart: a stop ends that at once, no process is involved
    KILL = "kill"  # it was started again with the config that just failed: bring it down
    WAIT = "wait"  # on its way down, or systemd's restart job is about to run
    YIELD = "yield"  # the operator's business


def next_move(unit: UnitSnapshot, failed_invocation: str, *, doomed: bool) -> HoldMove:
    """`failed_invocation` is the launch that was diagnosed; `doomed`: the launch that runs now has the same config and
    does not serve yet."""
    if unit.in_auto_restart:
        return HoldMove.WAIT if unit.job else HoldMove.STOP
    match unit.active_state:
        case ActiveState.INACTIVE | ActiveState.FAILED:
            return HoldMove.YIELD if unit.job else HoldMove.HELD
        case ActiveState.DEACTIVATING:
            return HoldMove.WAIT
        case ActiveState.ACTIVE | ActiveState.ACTIVATING:
            if unit.job_type == "stop":
                return HoldMove.YIELD
            if unit.invocation == failed_invocation:
                return HoldMove.WAIT
            return HoldMove.KILL if doomed else HoldMove.YIELD
        case _:
            return HoldMove.YIELD
