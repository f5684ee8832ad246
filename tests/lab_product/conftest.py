"""An inference host for each test: the machine is the shared lab host, the unit and the watchdog are the test's own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from lab.host import CHECKOUT, LabHost
from lab_product import podman
from lab_product.installed import CARDS, PYTHON, STATE, InferenceHost, inference_host
from lab_product.sglang_unit import OVERRIDES

Inference = Callable[..., AbstractContextManager[InferenceHost]]
GIB = 2**30


@pytest.fixture
def inference(lab: LabHost) -> Iterator[Inference]:
    """`inference(settings=…, steps=…)`: as `inference_host`. What one test's watchdog learned is not the next one's,
    and what another test's left-over still holds is not on the cards that all of them share."""
    # Inside, where the pids are what they were there.
    simulated = {"PYTHONPATH": str(CHECKOUT / "tests"), "SIM_NVML_DIR": str(CARDS)}
    lab.run(PYTHON, "-c", "from sim_nvml import SimNvml; SimNvml().release_all()", env=simulated)
    yield lambda **options: inference_host(lab, **options)
    lab.systemctl("stop", "sglang-watchdog.service", "sglang.service", check=False)
    lab.run("sh", "-c", "journalctl --rotate; journalctl --vacuum-time=1ms")
    lab.run("sh", "-c", f"rm -rf {STATE}/* {OVERRIDES} /etc/systemd/system/sglang.service* /run/sim-sglang.control")


@pytest.fixture
def containers(lab: LabHost, inference: Inference) -> Iterator[Inference]:
    """As `inference`, on a host on which podman works."""
    podman.set_up(lab)
    yield inference
    lab.run("rm", "-f", podman.BEFORE_PODMAN)
    lab.run("podman", "rm", "--all", "--force", "--time=0", check=False)


def proven(host: InferenceHost) -> None:
    """Starts the unit and waits until its config is known-good."""
    host.start()
    host.wait_known_good()


def deploy(host: InferenceHost, steps: int) -> None:
    """What an operator does to try another number of steps."""
    host.change(steps=steps)
    host.reload()
    host.restart(wait=False)


def leaves_a_child_that_is_freed(host: InferenceHost, fault: str) -> None:
    """Main is killed with `fault` in force, beside a child that keeps its memory; the same config serves again."""
    host.ask_for(fault)
    proven(host)
    host.ask_for()
    host.kill()
    alert = host.wait_alert(CLASS="gpu_memory_held")
    host.wait_alert(since=alert.time, ACTION="free")
    host.wait_alert(since=alert.time, OUTCOME="recovered")


def override(host: InferenceHost) -> str:
    """What the watchdog has put in force; empty where nothing is."""
    files = f"{OVERRIDES}/{host.unit}.env {host.sglang.file_path}.d/90-sglang-watchdog.conf"
    return host.host.run("sh", "-c", f"cat {files} 2>/dev/null", check=False).stdout
