"""Alerts and metrics: stable names, every class present from the start, and no secret in any of them."""

import dataclasses

from prometheus_client import generate_latest

from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.unit import ActiveState
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.metrics import Metrics

UNIT = "sglang.service"
DIAGNOSIS = Diagnosis(
    FailureClass.KV_CACHE_OOM,
    0.97,
    "The KV pool could not be sized.",
    Phase.ALLOCATING_KV,
    evidence=(Evidence(Source.SGLANG, "argv: --api-key abracadabra-42 --port 30000"),),
    advice=("Use fewer steps.",),
)


def test_an_ended_launch_carries_the_documented_fields() -> None:
    fields = alerts.launch_ended(UNIT, "a" * 32, DIAGNOSIS, "incident1").fields()
    assert fields["SGLANG_WATCHDOG_UNIT"] == UNIT
    assert fields["SGLANG_WATCHDOG_CLASS"] == "kv_cache_oom"
    assert fields["SGLANG_WATCHDOG_INCIDENT"] == "incident1"
    assert fields["OBJECT_SYSTEMD_UNIT"] == UNIT
    assert fields["PRIORITY"] == "3"
    assert "The KV pool could not be sized." in fields["MESSAGE"]


def test_no_secret_leaves_in_an_alert() -> None:
    fields = alerts.launch_ended(UNIT, "a" * 32, DIAGNOSIS).fields()
    assert "abracadabra-42" not in str(fields)
    assert "--port 30000" in fields["SGLANG_WATCHDOG_EVIDENCE"]


def test_a_requested_stop_is_a_notice_and_a_held_unit_is_critical() -> None:
    asked = Diagnosis(FailureClass.REQUESTED_STOP, 0.99, "Stopped.", Phase.STOPPING)
    assert alerts.launch_ended(UNIT, "a", asked).priority is alerts.Priority.NOTICE
    held = Incident("1", UNIT, "a", 0.0, FailureClass.KV_CACHE_OOM, "", Outcome.HELD, reason="Nothing proven is left.")
    assert alerts.closed(held).priority is alerts.Priority.CRITICAL
    assert alerts.closed(held).id is alerts.AlertId.HOLDING


def exported(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_every_class_and_outcome_is_there_at_zero_before_anything_happens() -> None:
    text = exported(Metrics((UNIT,), "0.1.0"))
    for failure in FailureClass:
        assert f'sglang_watchdog_failures_total{{class="{failure}",unit="{UNIT}"}} 0.0' in text
    assert f'sglang_watchdog_incidents_total{{outcome="contained",unit="{UNIT}"}} 0.0' in text
    assert f'sglang_watchdog_rollbacks_total{{unit="{UNIT}"}} 0.0' in text


def test_the_newest_incident_of_a_unit_stands_alone_whichever_is_closed_last() -> None:
    metrics = Metrics((UNIT,), "0.1.0")
    first = Incident("1" * 12, UNIT, "a", 1.0, FailureClass.KV_CACHE_OOM, "")
    second = Incident("2" * 12, UNIT, "b", 2.0, FailureClass.SEGFAULT, "")
    metrics.saw_incident(first)
    metrics.saw_incident(second)
    metrics.closed(dataclasses.replace(first, outcome=Outcome.FAILED))
    lines = [line for line in exported(metrics).splitlines() if line.startswith("sglang_watchdog_last_incident_info{")]
    told = f'class="segfault",incident="{second.id}",outcome="open",unit="{UNIT}"'
    assert lines == [f"sglang_watchdog_last_incident_info{{{told}}} 1.0"]
    assert f'sglang_watchdog_incidents_total{{outcome="failed",unit="{UNIT}"}} 1.0' in exported(metrics)


def test_exactly_one_state_of_a_unit_is_set() -> None:
    metrics = Metrics((UNIT,), "0.1.0")
    metrics.saw_state(UNIT, ActiveState.ACTIVE)
    metrics.saw_state(UNIT, ActiveState.FAILED)
    lines = [line for line in exported(metrics).splitlines() if line.startswith("sglang_watchdog_unit_state{")]
    assert [line for line in lines if line.endswith(" 1.0")] == [
        f'sglang_watchdog_unit_state{{state="failed",unit="{UNIT}"}} 1.0'
    ]
