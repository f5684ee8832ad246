"""One alert of each id, as the product makes them: with all that they can carry, and with the least."""

from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import Diagnosis, FailureClass, RuledOut
from sglang_watchdog.domain.incident import Incident, Outcome
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.alerts import Alert, AlertId

UNIT = "sglang.service"
INVOCATION = "8825ef178f1a4a6787f4b997ec2b54a8"
INCIDENT = Incident("c8b047994eb7", UNIT, INVOCATION, 0.0, FailureClass.KV_CACHE_OOM, "No memory was left.")
CEILING = Ceiling(UNIT, "base", SpeculationConfig(), FailureClass.KV_CACHE_OOM, INVOCATION, 0.0)
LEAST = Diagnosis(FailureClass.UNKNOWN, 0.3, "Nothing here says why.", Phase.UNKNOWN)
MOST = Diagnosis(
    FailureClass.KV_CACHE_OOM,
    0.95,
    "No memory was left.",
    Phase.ALLOCATING_KV,
    evidence=(Evidence(Source.SGLANG, "Not enough memory."),),
    ruled_out=(RuledOut(FailureClass.CUDA_GRAPH_OOM, "it failed before any graph was captured"),),
    advice=("Use fewer speculative steps.",),
)


def with_most() -> dict[AlertId, Alert]:
    return _samples(MOST, INCIDENT.id)


def with_least() -> dict[AlertId, Alert]:
    """Such as of a launch that the ledger could not record."""
    return _samples(LEAST, "")


def _samples(diagnosis: Diagnosis, incident: str) -> dict[AlertId, Alert]:
    made = (
        alerts.launch_ended(UNIT, INVOCATION, diagnosis, incident),
        alerts.action(INCIDENT, "free", "NVML shows our bytes back."),
        alerts.closed(_closed(Outcome.CONTAINED)),
        alerts.closed(_closed(Outcome.HELD)),
        alerts.stale_definition(UNIT, INVOCATION, diagnosis, incident),
        alerts.degraded(UNIT, INVOCATION, "fewer tokens"),
        alerts.known_good(UNIT, INVOCATION, "steps 4 is known-good"),
        alerts.blind("the ledger"),
        alerts.yielded(UNIT, "the operator's flags are now steps 3"),
        alerts.known_ceiling(UNIT, INVOCATION, CEILING),
        alerts.unresponsive(UNIT, INVOCATION, diagnosis, incident),
        alerts.responsive_again(UNIT, INVOCATION, "it makes progress again"),
        alerts.pause(UNIT, "pause", "paused until 2026-11-29 18:00:00 UTC"),
    )
    return {alert.id: alert for alert in made}


def _closed(outcome: Outcome) -> Incident:
    return Incident(
        INCIDENT.id, UNIT, INVOCATION, 0.0, FailureClass.KV_CACHE_OOM, INCIDENT.summary, outcome, reason="steps 4"
    )
