"""What is owed to a unit whose launch was just killed because it hung: its start, once it is down."""

import itertools
from types import SimpleNamespace
from typing import cast

import pytest

from sglang_watchdog import hand_back
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.hand_back import killed_in, settled, start_if_down
from sglang_watchdog.host.bus import Systemd

KILLED, NEXT = "a" * 32, "b" * 32


class Unit:
    """Of which each reading is the next of these, and the last one stays."""

    def __init__(self, *states: ActiveState, invocation: str = KILLED, job: int = 0) -> None:
        self._states = list(states)
        self._invocation, self._job = invocation, job
        self.started = 0

    def snapshot(self, unit: str) -> UnitSnapshot:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return UnitSnapshot(unit, active_state=state, invocation=self._invocation, job=self._job)

    def start(self, _unit: str) -> int:
        self.started += 1
        return 1

    def ref(self, _unit: str) -> None: ...

    def reset_failed(self, _unit: str) -> None: ...


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=0.5)
    monkeypatch.setattr(
        hand_back, "time", SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _seconds: None)
    )


def started(unit: Unit) -> bool:
    return start_if_down(cast(Systemd, unit), "sglang.service", KILLED)


def test_a_launch_that_was_just_killed_is_waited_for() -> None:
    unit = Unit(ActiveState.ACTIVE, ActiveState.ACTIVE, *[ActiveState.DEACTIVATING] * 9, ActiveState.FAILED)
    assert started(unit)
    assert unit.started == 1


@pytest.mark.parametrize(
    "unit",
    [
        Unit(ActiveState.ACTIVE),  # the kill was never sent
        Unit(ActiveState.DEACTIVATING),  # stuck in the driver
        Unit(ActiveState.ACTIVE, invocation=NEXT),
        Unit(ActiveState.DEACTIVATING, ActiveState.FAILED, job=7),  # of the operator's
    ],
)
def test_what_runs_or_does_not_end_or_is_the_operators_is_not_started(unit: Unit) -> None:
    assert not started(unit)
    assert unit.started == 0


def test_only_a_launch_that_hung_is_ended_while_it_runs() -> None:
    incidents = [Incident("i", "sglang.service", KILLED, 0.0, failure, "") for failure in FailureClass]
    assert [one.failure for one in incidents if killed_in(one)] == [FailureClass.UNRESPONSIVE]
    unit = Unit(ActiveState.ACTIVE, ActiveState.FAILED)
    assert settled(cast(Systemd, unit), "sglang.service", "").active_state is ActiveState.ACTIVE
