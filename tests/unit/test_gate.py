"""What the start gate answers, from what it is told; and its command, which lets everything pass that it cannot ask."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sglang_watchdog.cli import may_start
from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.gpu import HeldMemory
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState, ServiceResult, UnitSnapshot
from sglang_watchdog.gate import Gate
from sglang_watchdog.host import unit_files
from sglang_watchdog.host.server_files import ServerFiles
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.recovery.gate import GateMove, decide, refused
from sglang_watchdog.recovery.hold import HoldMove, next_move
from sglang_watchdog.recovery.policy import proves_a_ceiling
from sglang_watchdog.settings import UnitSettings
from unit.test_policy import config

UNIT = "sglang.service"
CEILING = Ceiling(UNIT, "base", config(10), FailureClass.KV_CACHE_OOM, "a" * 32, 1000.0)
NEW = "b" * 32
FILES = ServerFiles("digest", "0.5.16")
TEN = ("python", "-m", "sglang.launch_server", *config(10).words())
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


class Host:
    """A unit whose start is in its condition, and a ledger that knows a ceiling: what runs, steps 10, is one."""

    def __init__(self, folder: Path, argv: tuple[str, ...]) -> None:
        self.ledger = Ledger.open(folder / "ledger.db")
        self.snapshot = UnitSnapshot(UNIT, active_state=ActiveState.ACTIVATING, sub_state="condition", invocation=NEW)
        self.settings = UnitSettings(act=True)
        self.uuids: tuple[str, ...] = ("GPU-0",)
        self.driver = "570"
        parts: Any = SimpleNamespace(
            systemd=SimpleNamespace(snapshot=lambda _unit: self.snapshot),
            ledger=self.ledger,
            clock=SimpleNamespace(now=lambda: 2000.0),
            files=SimpleNamespace(read=self.read),
        )
        cards: Any = self
        pausing: Any = None
        inquest = Inquest(UNIT, self.settings, parts, cards, pausing, lambda _snapshot: "")
        self.gate = Gate(UNIT, parts, cards, inquest, lambda: self.settings.act)
        base = inquest.base_of(argv, FILES)
        self.ledger.save_ceiling(replace(CEILING, base=base, config=SpeculationConfig.of(argv)))

    async def held(self, _snapshot: UnitSnapshot) -> tuple[HeldMemory, ...]:
        return (STRANGERS,)

    async def read(self, _argv: tuple[str, ...]) -> ServerFiles:
        return FILES

    def answer(self, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> GateMove:
        monkeypatch.setattr(unit_files, "planned_argv", lambda _snapshot: argv)
        return asyncio.run(self.gate.answer()).move


def test_what_is_refused_is_on_record_so_that_its_end_is_known_for_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, TEN)
    assert host.answer(monkeypatch, TEN) is GateMove.REFUSE
    recorded = host.ledger.launch(NEW)
    assert recorded is not None
    assert (recorded.argv, recorded.ended) == (TEN, None)


def test_what_only_a_person_asks_leaves_the_record_of_the_last_launch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, TEN)
    last = Launch(UNIT, NEW, 1000.0, argv=("python", "four"), ended=1500.0)
    host.ledger.save_launch(last)
    host.snapshot = replace(host.snapshot, active_state=ActiveState.INACTIVE, sub_state="dead")
    assert host.answer(monkeypatch, TEN) is GateMove.REFUSE
    assert host.ledger.launch(NEW) == last


@pytest.mark.parametrize(
    "argv",
    [(*TEN[:-2], "--speculative-eagle-topk", "2"), (*TEN, "--tp-size", "8"), (*TEN, "--nnodes", "2"), ()],
    ids=["another config", "another base", "several nodes", "unknown"],
)
def test_what_no_proof_is_of_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    assert Host(tmp_path, TEN).answer(monkeypatch, argv) is GateMove.START


def test_a_ceiling_of_several_nodes_is_not_acted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = (*TEN, "--nnodes", "2")
    assert Host(tmp_path, two).answer(monkeypatch, two) is GateMove.START


def test_without_the_cards_nothing_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, TEN)
    host.uuids = ()
    assert host.answer(monkeypatch, TEN) is GateMove.START


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


def typed(*words: str) -> Result:
    return CliRunner().invoke(may_start.may_start, words, catch_exceptions=False)


def test_the_command_says_no_by_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, {"move": "refuse", "reason": "It does not fit."})
    done = typed("a b.service")
    assert done.exit_code == may_start.REFUSED
    assert asked == ["/v1/units/a%20b.service/may-start"]
    assert "It does not fit." in done.stdout


def test_the_command_waits_until_the_bytes_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, {"move": "wait", "reason": ""}, {"move": "wait", "reason": ""}, {"move": "start"})
    assert typed(UNIT).exit_code == 0
    assert len(asked) == 3


def test_the_command_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, {"move": "wait", "reason": ""})
    assert typed(UNIT, "--wait=0s").exit_code == 0
    assert len(asked) == 1


def test_what_cannot_be_asked_lets_the_start_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, WatchdogError("the ledger is broken"))
    done = typed(UNIT)
    assert done.exit_code == 0
    assert "the start goes on unchecked: the ledger is broken" in done.stderr
