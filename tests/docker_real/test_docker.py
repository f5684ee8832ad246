"""A unit of `docker run` on a real Docker: what it leaves behind is ended by Docker, and nobody else is hit."""

from collections.abc import Iterator

import pytest

from conftest import LabFactory
from docker_real import engine
from lab.host import CHECKOUT, MIB, LabHost
from lab_product.conftest import GIB, deploy, override, proven
from lab_product.installed import CARD_COUNT, CARDS, PYTHON, inference_host
from sim_sglang.simulation import Simulation

pytestmark = pytest.mark.lab

SIMULATION = Simulation(nvml=CARDS)
SOMEBODYS = "somebodys"
HELD = 2 * GIB


@pytest.fixture
def host(lab_factory: LabFactory) -> Iterator[LabHost]:
    unpacked = engine.folder()
    with lab_factory("docker", binds=(unpacked,), memory_bytes=1536 * MIB) as host:
        engine.set_up(host, unpacked)
        yield host


@pytest.mark.parametrize(
    "named", [("--name=sgl",), ("--cidfile=/run/sgl.cid",)], ids=["by its name", "by the file of its id"]
)
def test_a_left_over_container_is_ended_by_docker_and_the_proven_config_comes_back(
    host: LabHost, named: tuple[str, ...]
) -> None:
    wrapper = engine.run("--rm", *named, variables=(*SIMULATION.environment(), "PYTHONDONTWRITEBYTECODE"))
    acting = {"act": True, "soak": 0.5}
    service = ("ExecStartPre=/bin/rm -f /run/sgl.cid",)
    with inference_host(
        host,
        settings=acting,
        simulation=SIMULATION,
        wrapper=wrapper,
        service=service,
        timeout_stop_s=1.0,
        restart="on-failure",
    ) as inference:
        variables = (f"--env=PYTHONPATH={CHECKOUT}/tests", f"--env=SIM_NVML_DIR={CARDS}")
        hold = (PYTHON, "-m", "sim_nvml", "hold", f"--gpu={CARD_COUNT - 1}", f"--bytes={HELD}")
        host.run(*engine.run("--detach", "--rm", f"--name={SOMEBODYS}", *variables), *hold)
        try:
            proven(inference)
            inference.load(4, tokens=200_000)
            inference.stop()  # which takes the client away and leaves the server
            inference.wait_alert(CLASS="stop_timeout_sigkill")
            told = inference.wait_alert(ACTION="free")
            assert "docker container" in told.message
            assert "was ended through its engine" in told.message
            assert inference.gpu_used()[0] < GIB
            inference.start()
            deploy(inference, 10)
            inference.wait_alert(CLASS="kv_cache_oom", OUTCOME="contained")
            assert "--speculative-num-steps 4" in override(inference)
            assert SOMEBODYS in host.run(engine.DOCKER, "ps", "--format={{.Names}}").stdout
        finally:
            host.run(engine.DOCKER, "rm", "--force", SOMEBODYS, check=False)
