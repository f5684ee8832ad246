"""A unit that runs its server by podman: what it leaves behind is ended by podman, or named, and nobody else is hit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.host import CHECKOUT, LabHost
from lab_product import podman
from lab_product.conftest import GIB, Inference, proven
from lab_product.installed import CARD_COUNT, CARDS, PYTHON, InferenceHost
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = pytest.mark.lab

ACTING = {"act": True, "soak": 0.5}
SOMEBODYS = "somebodys"
KIND = "/run/systemd/container"
SIMULATION = Simulation(nvml=CARDS)
HELD = 2 * GIB


@contextmanager
def in_container(inference: Inference) -> Iterator[InferenceHost]:
    """A server in a container, proven, beside one of somebody else's that holds memory too. Its stop times out at
    once, which takes podman's client and monitor away and leaves the server."""
    wrapper = podman.run("--rm", variables=(*SIMULATION.environment(), "PYTHONDONTWRITEBYTECODE"))
    with inference(settings=ACTING, simulation=SIMULATION, wrapper=wrapper, timeout_stop_s=1.0, restart="no") as host:
        variables = (f"--env=PYTHONPATH={CHECKOUT}/tests", f"--env=SIM_NVML_DIR={CARDS}")
        hold = (PYTHON, "-m", "sim_nvml", "hold", f"--gpu={CARD_COUNT - 1}", f"--bytes={HELD}")
        host.host.run(*podman.run("--detach", f"--name={SOMEBODYS}", *variables), *hold)
        proven(host)
        yield host


def stop_in_vain(host: InferenceHost) -> None:
    host.load(4, tokens=200_000)
    host.stop()
    assert host.state() == "failed/failed"


def running(host: LabHost) -> list[str]:
    """Names of the containers that run."""
    shown = json.loads(host.run("podman", "ps", "--format=json").stdout or "[]")
    return [container["Names"][0] for container in shown]


def test_a_left_over_container_is_ended_by_its_engine_and_somebodys_lives(containers: Inference) -> None:
    with in_container(containers) as host:
        stop_in_vain(host)
        host.wait_alert(CLASS="stop_timeout_sigkill")
        alert = host.wait_alert(ACTION="free")
        assert "podman container" in alert.message
        assert "was ended through its engine" in alert.message
        assert "NVML shows our bytes back" in alert.message
        assert host.gpu_used()[0] < GIB
        assert HELD < host.gpu_used()[CARD_COUNT - 1] < HELD + GIB
        assert SOMEBODYS in running(host.host)


def test_without_an_engine_that_answers_a_left_over_container_is_named_and_left_alone(containers: Inference) -> None:
    with in_container(containers) as host:
        host.host.write(podman.BEFORE_PODMAN, "#!/bin/sh\necho out of order >&2\nexit 1\n", mode=0o755)
        stop_in_vain(host)
        alert = host.wait_alert(ACTION="plan")
        assert "out of order" in alert.message
        assert "`podman kill " in alert.message
        assert host.alerts(ACTION="free") == []
        assert all(used > GIB for used in host.gpu_used())
        host.host.run("rm", podman.BEFORE_PODMAN)
        wait_until(lambda: SOMEBODYS in running(host.host), 10, "somebody's container runs")


def test_on_a_host_that_is_itself_a_container_a_kill_without_a_word_is_unknown(inference: Inference) -> None:
    with inference(settings=ACTING, restart="no") as host:
        host.start()
        host.host.write(KIND, "lxc")  # as systemd does there
        host.host.run("kill", "-KILL", host.show("MainPID")["MainPID"])
        alert = host.wait_alert(CLASS="unknown")
        host.host.run("rm", KIND)
        assert "pct config CTID" in alert.get("ADVICE")
