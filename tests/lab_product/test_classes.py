"""Each of the classes, provoked on a real systemd, and told right twice: by `sglang-watchdog diagnose UNIT` from the
live journal, and by the daemon, which watches all of the units and only observes.

One host and one daemon for all: a provocation is a unit of its own (`lab_product.provocations`).
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import LabFactory
from lab.host import MIB, LabHost, free_port
from lab.kernel_log import KernelLog
from lab_product.installed import INSTALLED, SERVICE, SETTINGS, Followed, InferenceHost, inference_host
from lab_product.provocations import CASES, PROVOCATIONS, REPLAYED, Provocation, Stage
from lab_product.sglang_unit import SglangUnit
from sglang_watchdog.domain.failure import FailureClass as Class
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = pytest.mark.lab

# These can depend on how much speculation there is; of every other class a rollback would be an outage for nothing.
DEPENDS_ON_SPECULATION = {
    *(Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.WEIGHTS_OOM, Class.RUNTIME_CUDA_OOM, Class.SOFTWARE_EXCEPTION),
}
# Provoked in tests of their own below, since they need a host of their own.
ELSEWHERE = {Class.CGROUP_OOM_KILL}
# The daemon leaves a running server in peace and has no word for it yet.
NO_ALERT = {"a_dead_scheduler_that_main_does_not_notice"}
FAST = Simulation(release="0.5.16", profile="tiny", time_scale=0.02)
ALERT_S = 30.0


@dataclass(frozen=True)
class Bench:
    """The host of all provocations, with the daemon that watches their units."""

    daemon: InferenceHost
    kernel: KernelLog

    def stage(self, provocation: Provocation) -> Stage:
        """Its unit, written and loaded."""
        host, control = self.daemon.host, Path(f"/run/{provocation.name}.control")
        simulation = dataclasses.replace(
            FAST, nvml=self.daemon.sglang.simulation.nvml, control=control, **provocation.simulation
        )
        definition: dict[str, Any] = {"steps": None, "tp": 1, "restart": "no", **provocation.definition}
        unit = SglangUnit(unit_of(provocation), free_port(), simulation, **definition)
        followed = Followed(unit.name, self.daemon.followed.entries)
        inference = InferenceHost(host, unit, self.daemon.metrics_port, followed)
        inference.write_unit(unit)
        inference.reload()
        return Stage(inference, control, self.kernel)


def unit_of(provocation: Provocation) -> str:
    return f"{provocation.name.replace('_', '-')}.service"


@pytest.fixture(scope="module")
def bench(module_lab: LabFactory) -> Iterator[Bench]:
    with (
        module_lab("classes", memory_bytes=1536 * MIB) as host,
        KernelLog.of(host) as kernel,
        inference_host(host, settings={"act": False}) as daemon,
    ):
        tables = "".join(f'[units."{unit_of(one)}"]\n' for one in PROVOCATIONS)
        host.write(f"{Path(SETTINGS).parent}/config.d/classes.toml", tables)
        host.systemctl("restart", SERVICE)
        yield Bench(daemon, kernel)


@pytest.mark.parametrize("provocation", PROVOCATIONS, ids=lambda one: one.name)
def test_what_was_provoked_is_what_diagnose_and_the_daemon_say(bench: Bench, provocation: Provocation) -> None:
    stage = bench.stage(provocation)
    try:
        provocation.act(stage)
        told = diagnosed(stage.host, stage.inference.unit)
        assert told["class"] == provocation.expected, told
        assert told["confidence"] >= 0.5 or provocation.expected is Class.UNKNOWN, told
        assert told["evidence"] or provocation.expected is Class.UNKNOWN, told
        if provocation.expected not in DEPENDS_ON_SPECULATION:
            assert told["rollback_helps"] is not True, told
        if provocation.name not in NO_ALERT:
            stage.inference.wait_alert(ALERT_S, CLASS=provocation.expected)
    finally:
        remove(stage)


def diagnosed(host: LabHost, unit: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(host.run(INSTALLED, "diagnose", unit, "--json").stdout)
    return answer


def remove(stage: Stage) -> None:
    """Ends what runs. Its unit stays known, since the daemon watches it."""
    unit = stage.inference.unit
    stage.host.systemctl("kill", "--signal=KILL", unit, check=False)
    stage.host.systemctl("stop", unit, check=False)
    stage.host.run("rm", "-f", stage.control)


def test_a_memory_limit_is_enforced_by_the_kernel_and_told_as_that(module_lab: LabFactory) -> None:
    """The host's own memory group, whose kernel lines are the machine's."""
    with module_lab("small", memory_bytes=320 * MIB, kmsg=True) as host:
        simulation = dataclasses.replace(FAST, faults="eat_memory 2048")
        small: dict[str, Any] = {"simulation": simulation, "steps": None, "tp": 1, "restart": "no"}
        with inference_host(host, settings={"act": False}, **small) as one:
            one.start(wait=False)
            wait_until(lambda: one.state().startswith("failed"), 60, "the launch is over")
            told = diagnosed(host, one.unit)
            assert told["class"] == Class.CGROUP_OOM_KILL, told
            assert told["rollback_helps"] is False
            one.wait_alert(ALERT_S, CLASS=Class.CGROUP_OOM_KILL)


def test_every_class_is_provoked_and_what_is_replayed_is_recorded() -> None:
    assert {one.expected for one in PROVOCATIONS} | ELSEWHERE == set(Class)
    assert len({one.name for one in PROVOCATIONS}) == len(PROVOCATIONS)
    for failure, (case, _) in REPLAYED.items():
        assert json.loads((CASES / case).read_text())["expected_class"] == failure
