"""Prometheus metrics. Names and units by Prometheus' conventions; every label value is from a closed set or is a unit
that the settings name, and every counter is there at 0 before anything happens. docs/metrics.md is written from here.

The one value that is not from a closed set, an incident's id, stands in a single series for each unit, which the next
incident replaces.
"""

import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.gpu import GpuAnswer, GpuReading
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState

_PREFIX = "sglang_watchdog"
_STEP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Sense(StrEnum):
    """What the watchdog needs to see or reach. The values are metric names."""

    BUS = "bus_connected"
    NVML = "nvml_known"
    LEDGER = "ledger_writable"
    JOURNAL = "journal_readable"
    MODEL = "model_readable"


_SENSES = {
    Sense.BUS: "1 while systemd's bus can be reached; 0: nothing is watched",
    Sense.NVML: "1 where NVML answered when last asked",
    Sense.LEDGER: "1 while the ledger can be written, and no broken one awaits `resume`; 0: the watchdog only observes",
    Sense.JOURNAL: "1 where the last pull of the journal worked",
    Sense.MODEL: "1 where the files of the model last launched could be read within 10 s",
}


class HookKind(StrEnum):
    COMMAND = "command"
    WEBHOOK = "webhook"


class Delivery(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"  # after the last retry
    DROPPED = "dropped"  # too many were waiting


@dataclass(frozen=True, slots=True)
class Described:
    """One line of the reference. `labels` are named in the order in which they are documented."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """All metrics of one daemon, in a registry of its own."""

    def __init__(
        self, units: tuple[str, ...], version: str, on_blind: Callable[[Sense], None] = lambda _: None
    ) -> None:
        """`on_blind` is called when a sense is lost, once until it is back."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample beside every counter, which nobody reads
        self._on_blind = on_blind
        self.registry = CollectorRegistry()
        self.described: list[Described] = []
        self._units = units
        self.unit_state = self._gauge(
            "unit_state", "1 for systemd's present ActiveState of the unit, 0 for the others", "unit", "state"
        )
        self.launches = self._counter("launches", "Launches seen by this daemon", "unit")
        self.failures = self._counter(
            "failures",
            "Ended launches by class; requested_stop is among them, and so are a healthy server that was found "
            "stale_unit_file and a running one that was found unresponsive",
            "unit",
            "class",
        )
        self.incidents = self._counter("incidents", "Closed incidents by outcome", "unit", "outcome")
        self._last_incident = self._info(
            "last_incident",
            "1 for the unit's newest incident, which replaces the one before it; outcome is open until it is closed",
            "unit",
            told=("incident", "class", "outcome"),
        )
        self._newest: dict[str, Incident] = {}
        self.rollbacks = self._counter("rollbacks", "Rollbacks after which the server generated tokens", "unit")
        self.overridden = self._gauge(
            "overridden", "1 while a config of the watchdog's is in force in place of the operator's", "unit"
        )
        self.degraded = self._gauge(
            "degraded", "1 while the running launch has less than its config was proven with", "unit"
        )
        self.unresponsive = self._gauge(
            "unresponsive", "1 while the running launch makes no progress, though its main process lives", "unit"
        )
        self._running_steps = self._gauge(
            "running_speculative_num_steps",
            "Steps of the launch that serves, 0 without speculation; absent while none does",
            "unit",
        )
        self._known_good_steps = self._gauge(
            "known_good_speculative_num_steps",
            "Steps of the config that was proven last; absent until this daemon proved one",
            "unit",
        )
        self._config = self._info(
            "config",
            "Speculation configs in words; running is empty while nothing serves",
            "unit",
            told=("running", "known_good"),
        )
        self._configs: dict[str, dict[str, str]] = {unit: {"running": "", "known_good": ""} for unit in units}
        self.step_seconds = self._histogram(
            "recovery_step_seconds",
            "Time of each step of a recovery; verify is from the start to tokens, weights included",
            "unit",
            "step",
        )
        self.gpu_used = self._gauge(
            "incident_gpu_used_bytes",
            "Used memory of a card at the last reading; read only in an incident and while a launch starts, so never "
            "an idle or serving level",
            "gpu",
        )
        self.ended = self._counter("processes_ended", "Left-over processes that were sent a signal", "unit")
        self.spared = self._counter(
            "processes_spared", "Holders of GPU memory that were left alone while freeing", "unit"
        )
        self.hook_deliveries = self._counter(
            "hook_deliveries", "Incidents told to the operator's hooks; dropped where too many waited", "hook", "result"
        )
        self._sight = {sense: self._gauge(sense.value, text) for sense, text in _SENSES.items()}
        self._blind: set[Sense] = set()
        self._info("build", "Version of the watchdog", told=("version",)).info({"version": version})
        ProcessCollector(registry=self.registry)
        for sense in (Sense.NVML, Sense.JOURNAL, Sense.MODEL):
            self._sight[sense].set(1)  # nothing has failed yet
        self._preset()

    def serve(self, address: str, port: int, tls: "Tls | None" = None) -> int:
        """Starts the exporter's thread; returns the port (the system's choice for 0). Raises OSError where the port is
        taken or a file of `tls` is of no use."""
        if tls is None:
            server, _ = start_http_server(port, address, registry=self.registry)
        else:
            tls.check()
            server, _ = start_http_server(
                port,
                address,
                registry=self.registry,
                certfile=str(tls.certificate),
                keyfile=str(tls.key),
                client_cafile=str(tls.client_ca) if tls.client_ca else None,
                client_auth_required=tls.client_ca is not None,
            )
        return int(server.server_port)

    def runs(self, unit: str, config: SpeculationConfig | None) -> None:
        """What the serving launch runs; None where none serves, and then there is no sample of its steps."""
        if config is not None:
            self._running_steps.labels(unit).set(config.steps or 0)
        elif self._configs[unit]["running"]:
            self._running_steps.remove(unit)
        self._tell_config(unit, "running", config.describe() if config else "")

    def proven(self, unit: str, config: SpeculationConfig) -> None:
        self._known_good_steps.labels(unit).set(config.steps or 0)
        self._tell_config(unit, "known_good", config.describe())

    def _tell_config(self, unit: str, which: str, words: str) -> None:
        self._configs[unit][which] = words
        self._config.labels(unit).info(self._configs[unit])

    def saw_incident(self, incident: Incident) -> None:
        """Opened, closed, or known from before. One that is older than the newest is told no more."""
        newest = self._newest.get(incident.unit)
        if newest is not None and incident.opened < newest.opened:
            return
        self._newest[incident.unit] = incident
        told = {"incident": incident.id, "class": incident.failure.value, "outcome": incident.outcome.value}
        self._last_incident.labels(incident.unit).info(told)

    def closed(self, incident: Incident) -> None:
        self.incidents.labels(incident.unit, incident.outcome).inc()
        self.saw_incident(incident)

    def saw_state(self, unit: str, state: ActiveState | None) -> None:
        for known in ActiveState:
            self.unit_state.labels(unit, known).set(known is state)

    def sees(self, sense: Sense, *, well: bool) -> None:
        self._sight[sense].set(well)
        if well:
            self._blind.discard(sense)
        elif sense not in self._blind:
            self._blind.add(sense)
            self._on_blind(sense)

    @property
    def blind(self) -> tuple[Sense, ...]:
        """What cannot be seen now."""
        return tuple(sorted(self._blind))

    def saw_gpus(self, answer: GpuAnswer) -> None:
        self.sees(Sense.NVML, well=isinstance(answer, GpuReading))
        if isinstance(answer, GpuReading):
            for index in {gpu.index for gpu in answer.gpus}:
                self.gpu_used.labels(index).set(sum(gpu.used_bytes for gpu in answer.gpus if gpu.index == index))

    def _preset(self) -> None:
        for hook in HookKind:
            for result in Delivery:
                self.hook_deliveries.labels(hook, result)
        for unit in self._units:
            self.launches.labels(unit)
            self.rollbacks.labels(unit)
            self.ended.labels(unit)
            self.spared.labels(unit)
            self.overridden.labels(unit).set(0)
            self.degraded.labels(unit).set(0)
            self.unresponsive.labels(unit).set(0)
            for failure in FailureClass:
                self.failures.labels(unit, failure)
            for outcome in Outcome:
                if outcome is not Outcome.OPEN:
                    self.incidents.labels(unit, outcome)
            for step in Step:
                self.step_seconds.labels(unit, step)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._describe(name, "gauge", text, labels), text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._describe(f"{name}_total", "counter", text, labels), text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        described = self._describe(name, "histogram", text, labels)
        return Histogram(described, text, labels, registry=self.registry, buckets=_STEP_BUCKETS_S)

    def _info(self, name: str, text: str, *labels: str, told: tuple[str, ...]) -> Info:
        self._describe(f"{name}_info", "gauge", text, (*labels, *told))
        return Info(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _describe(self, name: str, kind: str, text: str, labels: tuple[str, ...]) -> str:
        full = f"{_PREFIX}_{name}"
        self.described.append(Described(full, kind, labels, text))
        return full


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. With `client_ca`, only clients that show a certificate of that authority are answered."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raises OSError where a file is of no use, which prometheus_client finds only once it holds the port."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca:
            context.load_verify_locations(self.client_ca)


_VALUES: dict[str, Iterable[str]] = {
    "state": ActiveState,
    "outcome": Outcome,
    "step": Step,
    "hook": HookKind,
    "result": Delivery,
}


def reference() -> str:
    """The reference page: every metric with its type, labels and meaning, in Markdown."""
    rows = [
        f"| `{one.name}` | {one.kind} | {' '.join(f'`{label}`' for label in one.labels) or 'none'} | {one.text} |"
        for one in Metrics((), "").described
    ]
    values = [f"| `{label}` | {', '.join(f'`{value}`' for value in known)} |" for label, known in _VALUES.items()]
    return "\n".join(
        (
            "# Metrics",
            "",
            "<!-- Written by `python -m sglang_watchdog.reporting.metrics`: edit the texts there. -->",
            "",
            "Where and how they are served: [alerts and metrics](alerts-and-metrics.md#metrics). Every class, outcome",
            "and step is there at 0 from the start, so `increase()` sees the first event. No label has an unbounded",
            "set of values: an incident's id stands in one series for each unit, which the next incident replaces.",
            "",
            "| metric | type | labels | meaning |",
            "|--|--|--|--|",
            *rows,
            "",
            "The daemon's own memory, processor time, files and start are there under the names that every exporter",
            "has (`process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`,",
            "`process_start_time_seconds`, …).",
            "",
            "| label | values |",
            "|--|--|",
            "| `unit` | the units of the settings |",
            "| `class` | the [classes](diagnosis.md) |",
            *values,
            "| `gpu` | index of a card |",
            "| `incident` | 12 hexadecimal digits, as in the journal's `SGLANG_WATCHDOG_INCIDENT=` and `history` |",
            "",
        )
    )


if __name__ == "__main__":
    print(reference(), end="")
