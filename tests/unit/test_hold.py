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
        (unit(ActiveState.FAILED, "failed", job="start"), False, HoldMove.YIELD),
        (unit(ActiveState.INACTIVE, "dead", job="start"), False, HoldMove.YIELD),
        (unit(ActiveState.DEACTIVATING, "stop-sigterm"), False, HoldMove.WAIT),
        (unit(ActiveState.DEACTIVATING, "stop-sigterm", job="stop"), False, HoldMove.YIELD),
        (unit(ActiveState.ACTIVE, "running", invocation=NEXT), True, HoldMove.KILL),
        (unit(ActiveState.ACTIVE, "running", invocation=NEXT), False, HoldMove.YIELD),
        (unit(ActiveState.ACTIVATING, "start-pre", invocation=NEXT), True, HoldMove.KILL),
        (unit(ActiveState.ACTIVE, "running", job="stop", invocation=NEXT), True, HoldMove.YIELD),
        (unit(ActiveState.ACTIVE, "running", job="restart", invocation=NEXT), True, HoldMove.YIELD),
        # the reading is a moment old: the diagnosed launch is still on its way down
        (unit(ActiveState.ACTIVE, "running"), True, HoldMove.WAIT),
        (unit(ActiveState.MAINTENANCE), False, HoldMove.YIELD),
    ],
)
def test_each_state_has_its_move(seen: UnitSnapshot, doomed: bool, move: HoldMove) -> None:
    assert next_move(seen, FAILED, doomed=doomed, stopped_by_us=False) is move


def test_an_inactive_unit_was_stopped_and_the_question_is_by_whom() -> None:
    down = unit(ActiveState.INACTIVE, "dead")
    assert next_move(down, FAILED, doomed=False, stopped_by_us=True) is HoldMove.HELD
    assert next_move(down, FAILED, doomed=False, stopped_by_us=False) is HoldMove.YIELD


@pytest.mark.parametrize(
    ("seen", "move"),
    [
        (unit(ActiveState.ACTIVE, "running"), HoldMove.KILL),
        (unit(ActiveState.ACTIVE, "running", job="restart"), HoldMove.YIELD),
        (unit(ActiveState.ACTIVE, "running", job="reload"), HoldMove.WAIT),
        (unit(ActiveState.ACTIVE, "running", invocation=NEXT), HoldMove.YIELD),  # somebody has started it anew
        (unit(ActiveState.DEACTIVATING, "final-sigkill"), HoldMove.WAIT),
        (unit(ActiveState.DEACTIVATING, "stop-sigterm", job="stop"), HoldMove.YIELD),
        (unit(ActiveState.FAILED, "failed"), HoldMove.HELD),
        (unit(ActiveState.INACTIVE, "dead"), HoldMove.YIELD),
    ],
)
def test_what_hangs_is_killed_itself_and_nobody_else(seen: UnitSnapshot, move: HoldMove) -> None:
    assert next_move(seen, FAILED, doomed=False, stopped_by_us=False, hangs=True) is move
