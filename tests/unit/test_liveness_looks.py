"""What is looked at of a running launch, and when it is asked: each look with the clock in the test's hand."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from sglang_watchdog.domain.launch import Phase, ProcessId
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.host import processes
from sglang_watchdog.liveness import Liveness
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.proof import Answer, Proof
from sglang_watchdog.recovery.liveness import Life
from sglang_watchdog.settings import UnitSettings

RUNNING = UnitSnapshot("sglang.service", active_state=ActiveState.ACTIVE, control_group="/x")
SETTINGS = UnitSettings(loading_budget=1000, capturing_budget=1000, warming_budget=1000, serving_budget=300)


@dataclass
class Launch:
    """As much of a `LaunchWatch` as is looked at."""

    phase: Phase = Phase.LOADING_WEIGHTS
    spoke_at: float = 0.0
    decoded_at: float = 0.0
    prefilled_at: float = 0.0
    served: bool = False
    containers: tuple[()] = ()
    server_args: dict[str, object] = field(default_factory=dict)


@dataclass
class Asked:
    """As much of a `Proof`. `answer` is what comes of each request."""

    answer: Answer = Answer.TOKENS
    roundabout: str = ""
    requests: int = 0

    async def ask(self, *_: object) -> Answer:
        self.requests += 1
        return self.answer


class Looks:
    """One launch that is looked at every ten seconds. `monotonic` is the clock."""

    def __init__(self, launch: Launch, asked: Asked) -> None:
        self.launch, self.asked, self.time, self.heard = launch, asked, 1000.0, True
        self.snapshot = RUNNING
        self.liveness = Liveness(SETTINGS, cast(Any, self))

    def monotonic(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time + 1e9

    def look(self) -> Life:
        launch, proof = cast(LaunchWatch, self.launch), cast(Proof, self.asked)
        return asyncio.run(self.liveness.look(launch, self.snapshot, proof, heard=self.heard)).life

    def go_on(self, seconds: float, each: Callable[[], None] = lambda: None) -> Life:
        end = self.time + seconds
        while self.time < end:
            self.time += 10.0
            each()
            self.look()
        return self.look()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the launch has moved so far; nobody else lives in its group."""
    bytes_ = [5 << 20]
    monkeypatch.setattr(processes, "bytes_moved", lambda _groups: bytes_[0])
    monkeypatch.setattr(processes, "cgroup_processes", lambda _group: ())
    return bytes_


def more(moved: list[int], by: int) -> Callable[[], None]:
    def add() -> None:
        moved[0] += by

    return add


@pytest.mark.parametrize(("each_time", "life"), [(50 << 20, Life.LIVE), (1000, Life.HUNG)])
def test_a_silent_start_lives_as_long_as_it_reads(moved: list[int], each_time: int, life: Life) -> None:
    assert Looks(Launch(), Asked()).go_on(3000, more(moved, each_time)) is life


def test_each_line_and_each_stage_begins_the_count_anew(moved: list[int]) -> None:
    looks = Looks(Launch(), Asked())
    assert moved
    assert looks.go_on(900) is Life.UNKNOWN
    looks.launch.spoke_at += 1  # the same line is no news a second time
    assert looks.go_on(400) is Life.LIVE
    looks.launch.phase = Phase.CAPTURING_GRAPHS
    assert looks.go_on(400) is Life.LIVE
    assert looks.go_on(700) is Life.HUNG


def test_a_host_that_slept_has_not_watched(moved: list[int]) -> None:
    looks = Looks(Launch(), Asked())
    assert moved
    looks.go_on(100)
    looks.time += 5000
    assert looks.look() is Life.LIVE


@pytest.mark.usefixtures("moved")
def test_a_server_that_nobody_uses_is_asked_once_a_minute_and_a_busy_one_never() -> None:
    idle = Looks(Launch(Phase.SERVING, served=True), Asked())
    assert idle.go_on(600) is Life.LIVE
    assert 9 <= idle.asked.requests <= 10
    busy = Looks(Launch(Phase.SERVING, served=True), Asked())

    def decode() -> None:
        busy.launch.decoded_at += 10

    assert busy.go_on(600, decode) is Life.LIVE
    assert busy.asked.requests == 0


@pytest.mark.usefixtures("moved")
def test_a_server_that_does_not_answer_hangs_and_one_prefill_of_others_begins_the_count_anew() -> None:
    looks = Looks(Launch(Phase.SERVING, served=True), Asked(Answer.SILENCE))
    assert looks.go_on(290) is Life.UNKNOWN
    assert looks.go_on(20) is Life.HUNG
    looks.launch.prefilled_at += 1
    assert looks.look() is Life.LIVE
    assert looks.go_on(320) is Life.HUNG


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("answer", [Answer.NO_TOKENS, Answer.NOT_OURS])
def test_an_answer_that_says_nothing_makes_no_hang_also_after_silence(answer: Answer) -> None:
    looks = Looks(Launch(Phase.SERVING, served=True), Asked(Answer.SILENCE))
    looks.go_on(200)
    looks.asked.answer = answer
    assert looks.go_on(2000) is Life.UNKNOWN
    looks.asked.answer = Answer.SILENCE
    assert looks.go_on(200) is Life.HUNG


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize(
    ("launch", "asked"),
    [
        (Launch(Phase.SERVING, served=True, server_args={"enable_memory_saver": True}), Asked(Answer.SILENCE)),
        (Launch(Phase.READY, served=True), Asked(Answer.SILENCE)),
        (Launch(Phase.SERVING, served=True), Asked(Answer.SILENCE, roundabout="by a router")),
        (Launch(Phase.SERVING), Asked(Answer.SILENCE)),  # it has never given the watchdog tokens
    ],
)
def test_what_is_not_to_be_asked_is_not_asked_and_never_hangs(launch: Launch, asked: Asked) -> None:
    looks = Looks(launch, asked)
    assert looks.go_on(3000) is Life.UNKNOWN
    assert asked.requests == 0


@pytest.mark.usefixtures("moved")
def test_schedulers_that_are_gone_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [ProcessId(pid, 1) for pid in range(5)]
    monkeypatch.setattr(processes, "cgroup_processes", lambda _group: tuple(alive))
    monkeypatch.setattr(processes, "name", lambda pid: "python" if pid == 0 else "sglang::schedul")
    looks = Looks(Launch(Phase.SERVING, served=True), Asked(Answer.SILENCE))
    looks.look()
    del alive[2:4]
    looks.go_on(400)
    assert looks.liveness.signs.dead == "2 of 4 are gone"


@pytest.mark.usefixtures("moved")
def test_what_somebody_wants_to_stand_still_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(Launch(Phase.SERVING, served=True), Asked(Answer.SILENCE))
    assert looks.go_on(400) is Life.HUNG
    looks.snapshot = replace(RUNNING, frozen=True)
    assert looks.look() is Life.UNKNOWN
    looks.snapshot = replace(RUNNING, active_state=ActiveState.DEACTIVATING)
    assert looks.look() is Life.UNKNOWN
    looks.snapshot = RUNNING
    monkeypatch.setattr(processes, "cgroup_processes", lambda _group: (ProcessId(7, 1),))
    monkeypatch.setattr(processes, "is_traced", lambda pid: pid == 7)
    assert looks.look() is Life.UNKNOWN


def test_a_process_that_somebody_traces_is_known() -> None:
    code = "import ctypes, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); signal.pause()"  # TRACEME
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.is_traced(process.pid)
        process.kill()
    assert not processes.is_traced(process.pid)
