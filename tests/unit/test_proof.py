"""What a soak proves: under traffic, with nobody but our probes, or nothing at all."""

import asyncio

import pytest

from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import processes
from sglang_watchdog.host.server import Generated
from sglang_watchdog.proof import Answer, Proof, Standing
from sglang_watchdog.settings import UnitSettings

SOAK_S = 600.0
BEGAN = 1000.0
OVER = BEGAN + SOAK_S


@pytest.fixture
def proof() -> Proof:
    proof = Proof(("python", "-m", "sglang.launch_server"), UnitSettings(soak=SOAK_S))
    proof.served(BEGAN, BEGAN)
    return proof


def test_a_soak_under_traffic_is_good(proof: Proof) -> None:
    proof.saw(BEGAN + 5, BEGAN + 6)
    assert not proof.due(OVER - 1)
    assert proof.due(OVER)
    proof.proven()
    assert (proof.standing, proof.traffic, proof.settled) == (Standing.PROVEN, True, True)
    assert not proof.outgrew_idle(OVER + 10 * SOAK_S)


def test_a_soak_that_only_probes_asked_is_a_lesser_proof(proof: Proof) -> None:
    proof.saw(BEGAN - 1, BEGAN + 6)  # a decode line of the warm-up
    proof.proven()
    assert (proof.standing, proof.traffic, proof.settled) == (Standing.IDLE, False, True)
    assert not proof.due(OVER + 10 * SOAK_S)


def test_traffic_for_another_soak_time_makes_a_full_proof_of_it(proof: Proof) -> None:
    proof.proven()
    proof.saw(OVER + 100, OVER + 101)
    proof.saw(OVER + 200, OVER + 201)
    assert not proof.outgrew_idle(OVER + 100 + SOAK_S)
    assert proof.outgrew_idle(OVER + 101 + SOAK_S)
    proof.proven()
    assert proof.standing is Standing.PROVEN
    assert not proof.outgrew_idle(OVER + 10 * SOAK_S)


def test_a_degraded_start_proves_nothing_however_much_it_serves(proof: Proof) -> None:
    proof.refuse()
    proof.saw(BEGAN + 5, BEGAN + 6)
    assert not proof.due(OVER)
    assert not proof.outgrew_idle(OVER + 10 * SOAK_S)


class Asked:
    """A server that is asked at BEGAN + 100, and takes 2 s."""

    def __init__(self, *_: object) -> None:
        self.generated = Generated(4, 2.0)

    async def generate(self, _deadline: float) -> Generated:
        return self.generated


async def answer(proof: Proof, monkeypatch: pytest.MonkeyPatch, generated: Generated, *, alone: bool = True) -> Answer:
    monkeypatch.setattr(processes, "has_to_itself", lambda *_: alone)
    server = Asked()
    server.generated = generated
    proof._server = server  # type: ignore[assignment]
    times = iter((BEGAN + 100, BEGAN + 102))
    return await proof.ask(UnitSnapshot("sglang.service"), (), 30.0, lambda: next(times))


@pytest.mark.parametrize(
    ("generated", "alone", "said"),
    [
        (Generated(4, 0.1), True, Answer.TOKENS),
        (Generated(4, 0.1), False, Answer.NOT_OURS),
        (Generated(0, 30.0, "no answer", silent=True), True, Answer.SILENCE),
        (Generated(0, 0.1, "HTTP 503"), True, Answer.NO_TOKENS),
    ],
)
def test_only_tokens_of_its_own_are_life_and_only_silence_is_silence(
    proof: Proof, monkeypatch: pytest.MonkeyPatch, generated: Generated, alone: bool, said: Answer
) -> None:
    assert asyncio.run(answer(proof, monkeypatch, generated, alone=alone)) is said


def test_a_decode_line_that_came_with_our_own_request_is_no_traffic(
    proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang logs one every so many steps, whoever they were for."""
    asyncio.run(answer(proof, monkeypatch, Generated(4, 2.0)))
    proof.saw(BEGAN + 101, BEGAN + 105)
    assert not proof.traffic
    proof.saw(BEGAN + 120, BEGAN + 121)
    assert proof.traffic


def test_silence_of_what_is_asked_through_another_port_may_not_be_the_servers_own() -> None:
    command = ("python", "-m", "sglang.launch_server", "--port", "30001")
    asked = {url: Proof(command, UnitSettings(url=url)).roundabout for url in ("http://10.0.0.1:30001", "http://a:80")}
    assert [bool(roundabout) for roundabout in asked.values()] == [False, True]
    assert not Proof(command, UnitSettings()).roundabout
