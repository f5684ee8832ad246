"""What a soak proves: under traffic, with nobody but our probes, or nothing at all."""

import pytest

from sglang_watchdog.proof import Proof, Standing
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
