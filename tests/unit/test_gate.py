"""What the start gate answers, from what it is told; and its command, which lets everything pass that it cannot ask."""

from pathlib import Path

import pytest
import typer

from sglang_watchdog.cli import may_start
from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.gpu import HeldMemory
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.unit import ActiveState, ServiceResult, UnitSnapshot
from sglang_watchdog.recovery.gate import GateMove, decide, refused
from sglang_watchdog.recovery.hold import HoldMove, next_move
from sglang_watchdog.recovery.policy import proves_a_ceiling
from unit.test_policy import config

UNIT = "sglang.service"
CEILING = Ceiling(UNIT, "base", config(10), FailureClass.KV_CACHE_OOM, "a" * 32, 1000.0)
OURS = HeldMemory(0, 2**30, "process 7", True, 7)
STRANGERS = HeldMemory(0, 90 * 2**30, "process 8", False, 8)


@pytest.mark.parametrize(
    ("may_act", "ceiling", "held", "move"),
    [
        (True, None, (), GateMove.START),
        (True, CEILING, (), GateMove.REFUSE),
        (True, CEILING, (OURS,), GateMove.REFUSE),
        (True, None, (OURS, STRANGERS), GateMove.WAIT),
        (True, None, (STRANGERS,), GateMove.START),
        (False, CEILING, (OURS,), GateMove.START),
    ],
)
def test_a_start_is_kept_back_only_by_a_proof_and_by_its_own_bytes(
    may_act: bool, ceiling: Ceiling | None, held: tuple[HeldMemory, ...], move: GateMove
) -> None:
    assert decide(may_act=may_act, ceiling=ceiling, held=held).move is move


def test_a_refused_start_is_told_with_the_way_around_it() -> None:
    diagnosis = refused(CEILING)
    assert diagnosis.failure is CEILING.failure
    assert "steps 10 is proven not to fit" in diagnosis.summary
    assert f"sglang-watchdog forget {UNIT} {CEILING.id}" in diagnosis.advice[0]
    assert proves_a_ceiling(diagnosis)


def test_a_unit_that_a_condition_kept_down_was_not_stopped_by_hand() -> None:
    down = UnitSnapshot(UNIT, active_state=ActiveState.INACTIVE, result=ServiceResult.EXEC_CONDITION)
    assert next_move(down, "f" * 32, doomed=False, stopped_by_us=False) is HoldMove.HELD


def answers(monkeypatch: pytest.MonkeyPatch, *given: dict[str, str] | WatchdogError) -> list[str]:
    """The daemon's, one after the other, the last one for ever; returns what is asked for."""
    asked: list[str] = []

    def ask(_config: Path, _method: str, path: str, **_limits: float) -> dict[str, str]:
        asked.append(path)
        answer = given[min(len(asked), len(given)) - 1]
        if isinstance(answer, WatchdogError):
            raise answer
        return answer

    monkeypatch.setattr(may_start, "ask", ask)
    monkeypatch.setattr("sglang_watchdog.cli.may_start.time.sleep", lambda _seconds: None)
    return asked


def test_the_command_says_no_by_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, {"move": "refuse", "reason": "It does not fit."})
    with pytest.raises(typer.Exit) as ended:
        may_start.may_start("a b.service")
    assert ended.value.exit_code == may_start.REFUSED
    assert asked == ["/v1/units/a%20b.service/may-start"]
    assert "It does not fit." in capsys.readouterr().out


def test_the_command_waits_until_the_bytes_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, {"move": "wait", "reason": ""}, {"move": "wait", "reason": ""}, {"move": "start"})
    may_start.may_start(UNIT)
    assert len(asked) == 3


def test_the_command_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, {"move": "wait", "reason": ""})
    may_start.may_start(UNIT, wait="0s")
    assert len(asked) == 1


def test_what_cannot_be_asked_lets_the_start_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, WatchdogError("the ledger is broken"))
    may_start.may_start(UNIT)
    assert "the start goes on unchecked: the ledger is broken" in capsys.readouterr().err
