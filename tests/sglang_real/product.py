"""The watchdog as its own service on a lab host beside a real server, and what an operator sees of it."""

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sim_nvml.build
from lab.host import CHECKOUT, LabHost
from lab_product.installed import CARDS, COMMAND, SERVICE, SETTINGS, SHIPPED, settings_text
from sglang_real.following import Entry, wait_for_entry
from sglang_watchdog.reporting.alerts import AlertId
from sim_nvml import SimNvml


@dataclass(frozen=True)
class Watchdog:
    """`metrics_port` is on this machine's loopback, which the host shares."""

    host: LabHost
    metrics_port: int

    def install(self, unit: str, settings: Mapping[str, object]) -> None:
        """The shipped service with the command of this checkout, and two idle simulated cards; returns once ready."""
        SimNvml(self.host.root / CARDS.relative_to("/")).gpus(2)
        for shipped in sorted(SHIPPED.glob("sglang-watchdog*")):
            self.host.copy_in(shipped, f"/etc/systemd/system/{shipped.name}")
        # The simulated driver writes down when it first saw a process gone, hence the writable path.
        self.host.write(
            f"/etc/systemd/system/{SERVICE}.d/lab.conf",
            f"[Service]\nExecStart=\nExecStart={COMMAND} run\nReadWritePaths={CARDS}\nBindReadOnlyPaths={CHECKOUT}\n"
            f"Environment=LD_LIBRARY_PATH={sim_nvml.build.library()} SIM_NVML_DIR={CARDS}\n",
        )
        self.host.write(SETTINGS, settings_text(unit, self.metrics_port, settings))
        self.host.systemctl("daemon-reload")
        self.host.systemctl("restart", SERVICE)  # it may run with another test's settings

    def alerts(self, unit: str) -> list[dict[str, Any]]:
        """The journal alerts about the unit, in order."""
        return self.host.journal(f"SGLANG_WATCHDOG_UNIT={unit}")

    def wait_for(self, alert: AlertId, deadline_s: float, **fields: str) -> Entry:
        """The first alert of that kind whose fields SGLANG_WATCHDOG_NAME= have these values, past ones included."""
        matches = (f"MESSAGE_ID={alert}", *(f"SGLANG_WATCHDOG_{name}={value}" for name, value in fields.items()))
        return wait_for_entry(self.host, matches, lambda _: True, deadline_s, f"alert {alert.name} {fields}")

    def history(self, unit: str) -> "History":
        printed = self.host.run(COMMAND, "history", "--json", unit).stdout
        return History(**json.loads(printed))

    def metrics(self) -> dict[str, float]:
        """Every sample of the exporter by its name and labels, as it prints them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


@dataclass(frozen=True)
class History:
    """What `sglang-watchdog history --json` prints, newest first."""

    launches: list[dict[str, Any]]
    incidents: list[dict[str, Any]]

    def launch(self, invocation: str) -> dict[str, Any]:
        """Empty where it is not recorded."""
        return next((launch for launch in self.launches if launch["invocation"] == invocation), {})

    def incident(self, invocation: str) -> dict[str, Any]:
        """That of the launch's end; empty as long as there is none."""
        return next((incident for incident in self.incidents if incident["invocation"] == invocation), {})
