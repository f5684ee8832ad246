"""Prometheus metrics. Names and units by Prometheus' conventions; every label value is from a closed set or is a unit
that the settings name, and every counter is there at 0 before anything happens."""

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    start_http_server,
)

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.gpu import GpuAnswer, GpuReading
from sglang_watchdog.domain.incident import Outcome, Step
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


_SENSES = {
    Sense.BUS: "1 while systemd's bus can be reached",
    Sense.NVML: "1 where the last question to NVML was answered",
    Sense.LEDGER: "1 while the ledger can be written; 0: observing only",
    Sense.JOURNAL: "1 where the last journal pull worked",
}


class Metrics:
    """All metrics of one daemon, in a registry of its own."""

    def __init__(
        self, units: tuple[str, ...], version: str, on_blind: Callable[[Sense], None] = lambda _: None
    ) -> None:
        """`on_blind` is called when a sense is lost, once until it is back."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample beside every counter, which nobody reads
        self._on_blind = on_blind
        self.registry = CollectorRegistry()
        self._units = units
        self.unit_state = self._gauge("unit_state", "1 for the unit's current ActiveState", ("unit", "state"))
        self.launches = self._counter("launches", "Launches seen", ("unit",))
        self.failures = self._counter("failures", "Ended launches by diagnosed class", ("unit", "class"))
        self.incidents = self._counter("incidents", "Closed incidents by outcome", ("unit", "outcome"))
        self.rollbacks = self._counter("rollbacks", "Speculation configs put back", ("unit",))
        self.degraded = self._gauge("degraded", "1 while the server runs with less than its proven capacity", ("unit",))
        self._running_steps = self._gauge(
            "running_speculative_num_steps", "--speculative-num-steps of the running launch, 0 without", ("unit",)
        )
        self._known_good_steps = self._gauge(
            "known_good_speculative_num_steps", "--speculative-num-steps of the newest known-good config", ("unit",)
        )
        self._config = self._info("config", "Speculation configs in words: running and known_good", ("unit",))
        self._configs: dict[str, dict[str, str]] = {unit: {"running": "", "known_good": ""} for unit in units}
        self.step_seconds = Histogram(
            f"{_PREFIX}_recovery_step_seconds",
            "Time that each step of a recovery took",
            ("unit", "step"),
            registry=self.registry,
            buckets=_STEP_BUCKETS_S,
        )
        self.gpu_used = self._gauge(
            "incident_gpu_used_bytes", "Used memory of a card when it was last read, in an incident", ("gpu",)
        )
        self.ended = self._counter("processes_ended", "Left-over processes that were ended", ("unit",))
        self.spared = self._counter("processes_spared", "Holders of GPU memory left alone: not proven ours", ("unit",))
        self._sight = {sense: self._gauge(sense.value, text) for sense, text in _SENSES.items()}
        self._blind: set[Sense] = set()
        self._info("build", "Version of the watchdog").info({"version": version})
        for sense in (Sense.NVML, Sense.JOURNAL):
            self._sight[sense].set(1)  # nothing has failed yet
        self._preset()

    def serve(self, address: str, port: int) -> int:
        """Starts the exporter's thread; returns the port (the system's choice for 0)."""
        server, _ = start_http_server(port, address, registry=self.registry)
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
            for gpu in answer.gpus:
                self.gpu_used.labels(gpu.index).set(gpu.used_bytes)

    def _preset(self) -> None:
        for unit in self._units:
            self.launches.labels(unit)
            self.rollbacks.labels(unit)
            self.ended.labels(unit)
            self.spared.labels(unit)
            self.degraded.labels(unit).set(0)
            for failure in FailureClass:
                self.failures.labels(unit, failure)
            for outcome in Outcome:
                if outcome is not Outcome.OPEN:
                    self.incidents.labels(unit, outcome)
            for step in Step:
                self.step_seconds.labels(unit, step)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _info(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Info:
        return Info(f"{_PREFIX}_{name}", text, labels, registry=self.registry)
