"""Holding a unit: one move for each reading, and never against the operator."""

import pytest

from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.recovery.hold import HoldMove, next_move

FAILED = "f" * 32
NEXT = "e" * 32


def unit(active: ActiveState, sub: str = "", *, job: str = "", invocation: str = FAILED) -> UnitSnapshot:
    return UnitSnapshot(
        "sglang.service",
        active_state=active,
        sub_state=sub,
        job=1 if job else 0,
        job_type=job,
        invocation=invocation,
    )


@pytest.mark.parametrize(
    ("seen", "doomed", "move"),
    [
        (unit(ActiveState.ACTIVATING, "auto-restart"), False, HoldMove.STOP),
        # systemd refuses a stop while its restart job is queued: the launch that follows is brought down instead
        (unit(ActiveState.ACTIVATING, "auto-restart", job="restart"), False, HoldMove.WAIT),
        (unit(ActiveState.ACTIVATING, "auto-restart-queued", job="start"), False, HoldMove.WAIT),
        (unit(ActiveState.FAILED, "failed"), False, HoldMove.HELD),
        (unit(ActiveState.INACTIVE, "dead"), False, HoldMove.HELD),
        (unit(ActiveState.INACTIVE, "dead", job="start"), False, HoldMove.YIELD),
        (unit(ActiveState.DEACTIVATING, "stop-sigterm"), False, HoldMove.WAIT),
        (unit(ActiveState.ACTIVE, "running", invocation=NEXT), True, HoldMove.KILL),
        (unit(ActiveState.ACTIVE, "running", invocation=NEXT), False, HoldMove.YIELD),
        (unit(ActiveState.ACTIVATING, "start", invocation=NEXT), True, HoldMove.KILL),
        (unit(ActiveState.ACTIVE, "running", job="stop", invocation=NEXT), True, HoldMove.YIELD),
        # the reading is a moment old: the diagnosed launch is still on its way down
        (unit(ActiveState.ACTIVE, "running"), True, HoldMove.WAIT),
        (unit(ActiveState.MAINTENANCE), False, HoldMove.YIELD),
    ],
)
def test_each_state_has_its_move(seen: UnitSnapshot, doomed: bool, move: HoldMove) -> None:
    assert next_move(seen, FAILED, doomed=doomed) is move
