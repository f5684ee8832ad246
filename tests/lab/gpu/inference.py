"""The machine with a real card as an inference host: the shipped watchdog, a server that holds real memory, bystanders.

`GpuInference` is the `InferenceHost` of the lab (`lab_product`), so that what is played on simulated cards, the story
of the demo among it, is played here unchanged. With `Card(simulated=True)` the same runs without a GPU: the rehearsal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim_nvml.build
from lab.gpu import machine
from lab.gpu.server import H200, HOLD
from lab.host import LabHost, free_port
from lab_product.installed import (
    CARDS,
    COMMAND,
    CONTROL,
    INSTALLED,
    SERVICE,
    SETTINGS,
    SHIPPED,
    START_DEADLINE_S,
    STATE,
    Bystander,
    Followed,
    InferenceHost,
    settings_text,
)
from lab_product.sglang_unit import MODEL, OVERRIDES, SglangUnit, Way
from sim_nvml import GIB, SimNvml
from sim_sglang.simulation import Simulation
from waiting import wait_until

SITE = Path(__file__).resolve().parent / "site"
RELEASE = "0.5.16"
NAME = "sglang.service"
# One page pool of the states whatever the cache holds, as in the recorded launches of the real 0.5.16.
FLAGS = ("--disable-radix-cache", "--mem-fraction-static")
FRACTION = "0.8"
# The driver's own on an idle card, and how long what was played before may take to go.
IDLE_BYTES = GIB
FREE_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Card:
    """Which card the processes of the host see."""

    simulated: bool = False

    def prepare(self, host: LabHost) -> None:
        if self.simulated:
            total = 143_771 * (1 << 20)
            SimNvml(host.root / CARDS.relative_to("/")).gpus(1, total, name="NVIDIA H200")

    def environment(self) -> dict[str, str]:
        """Of every process that computes."""
        driver = {"LD_LIBRARY_PATH": str(machine.DRIVER / "lib64")}
        return {"GPU_LAB_CARD": "simulated", "SIM_NVML_DIR": str(CARDS)} if self.simulated else driver

    def drop_in(self) -> str:
        """Of the watchdog: where it finds NVML."""
        if not self.simulated:
            return f"[Service]\nEnvironment=LD_LIBRARY_PATH={machine.DRIVER / 'lib64'}\n"
        variables = f"LD_LIBRARY_PATH={sim_nvml.build.library()} SIM_NVML_DIR={CARDS}"
        return f"[Service]\nEnvironment={variables}\nReadWritePaths={CARDS}\n"


@dataclass
class GpuInference(InferenceHost):
    """Of a bystander `gpu` is ignored: it takes the first card."""

    card: Card

    @contextmanager
    def bystander(self, gpu: int, size: int, **environment: str) -> Iterator[Bystander]:
        found = Bystander(self.host, f"bystander-{gpu}-{len(environment)}.service")
        start_holder(self.host, self.card, found.unit, [sys.executable, str(HOLD), str(size)], environment)
        wait_until(lambda: "holding" in found.said(), START_DEADLINE_S, f"{found.unit} holds its memory")
        try:
            yield found
        finally:
            self.host.systemctl("stop", found.unit, check=False)

    def gpu_used(self) -> list[int]:
        if self.card.simulated:
            return super().gpu_used()
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def start_holder(host: LabHost, card: Card, unit: str, command: list[str], environment: Mapping[str, str]) -> None:
    """In a transient unit. By env(1), since systemd gives every unit an INVOCATION_ID of its own."""
    variables = {**card.environment(), **environment}
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    host.run("systemd-run", f"--unit={unit}", "--collect", *words)


def install(host: LabHost, card: Card) -> None:
    """What stays for all that is played: the shipped units, and the command if the kit has not brought it."""
    for unit in sorted(SHIPPED.glob("sglang-watchdog*.service")):
        host.copy_in(unit, f"/etc/systemd/system/{unit.name}")
    if card.simulated:
        host.run("ln", "--symbolic", "--force", "--no-dereference", COMMAND, INSTALLED)
    host.write(f"/etc/systemd/system/{SERVICE}.d/lab.conf", card.drop_in())
    host.write(f"{MODEL}/config.json", json.dumps({"architectures": [H200.architecture]}))


@contextmanager
def gpu_inference(
    host: LabHost,
    card: Card,
    *,
    settings: Mapping[str, object] | None,
    steps: int | None = 4,
    way: Way = Way.DROP_IN,
    fraction: str = FRACTION,
    environment: Mapping[str, str] | None = None,
    more_flags: tuple[str, ...] = (),
    tp: int = 1,
    **definition: Any,
) -> Iterator[GpuInference]:
    """A clean journal, the unit (loaded, not started) and the running watchdog; None in `settings` runs none."""
    card.prepare(host)
    host.run("sh", "-c", "journalctl --rotate; journalctl --vacuum-time=1ms", check=False)
    python_path = f"{SITE}:/{machine.SITE}"
    variables = {"PYTHONPATH": python_path, **card.environment(), **(environment or {})}
    simulation = Simulation(release=RELEASE, profile=H200.name, control=CONTROL)
    port = free_port()
    sglang = SglangUnit(
        NAME,
        port,
        simulation,
        steps,
        way,
        flags=(*FLAGS, fraction, *more_flags),
        tp=tp,
        environment=variables,
        **definition,
    )
    with Followed.by(host, NAME) as followed:
        inference = GpuInference(host, sglang, free_port(), followed, card)
        inference.write_unit(sglang)
        if settings is not None:
            host.write(SETTINGS, settings_text(NAME, inference.metrics_port, settings))
        inference.reload()
        wait_until(lambda: max(inference.gpu_used()) < IDLE_BYTES, FREE_DEADLINE_S, "the card is free")
        try:
            if settings is not None:
                started = host.systemctl("start", SERVICE, check=False)
                assert started.returncode == 0, f"{SERVICE} does not start:\n{inference.log()}"
            yield inference
        finally:
            host.systemctl("stop", SERVICE, check=False, timeout=60)
            _remove(host, sglang)


def _remove(host: LabHost, sglang: SglangUnit) -> None:
    """Ends it and what it left over, whatever they ignore, and forgets it."""
    script = (
        'systemctl stop --no-block "$1"; systemctl kill --signal=KILL "$1"; systemctl stop "$1";'
        ' echo 1 >/sys/fs/cgroup/system.slice/"$1"/cgroup.kill;'
        ' rm -rf "$2" "$2".d "$3" "$4" "$5"/*; systemctl reset-failed'
    )
    words = (sglang.name, sglang.file_path, str(CONTROL), OVERRIDES, STATE)
    host.run("sh", "-c", script, "remove", *words, check=False, timeout=60)
