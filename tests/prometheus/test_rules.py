"""Prometheus' own tools on what is shipped for it: rules, configuration, and the names of the metrics."""

import re
import subprocess
from pathlib import Path

from prometheus_client import generate_latest

from prometheus.conftest import CONTRIB, RULES
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState
from sglang_watchdog.reporting.metrics import Metrics

UNIT = "sglang.service"
RULE_TESTS = Path(__file__).with_name("rules_test.yml")


def run(program: Path, *words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *words], check=False, input=text, capture_output=True, text=True, timeout=60, cwd=CONTRIB
    )


def complaints(done: subprocess.CompletedProcess[str]) -> str:
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_rules_fire_where_they_have_to_and_nowhere_else(programs: Path) -> None:
    assert complaints(run(programs / "promtool", "test", "rules", RULE_TESTS)) == ""


def test_every_rule_is_tested() -> None:
    named = set(re.findall(r"^\s*- (?:alert|record): (\S+)$", RULES.read_text(), flags=re.MULTILINE))
    assert len(named) > 10
    assert {name for name in named if name not in RULE_TESTS.read_text()} == set()


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    for alert in RULES.read_text().split("- alert: ")[1:]:
        assert re.search(r"severity: (critical|warning|info)\n", alert), alert
        page = re.search(r'runbook: "(docs/[\w/.-]+)', alert)
        assert page, alert
        assert (CONTRIB.parents[1] / page.group(1)).exists(), page.group(1)


def test_the_example_configurations_are_valid(programs: Path) -> None:
    assert complaints(run(programs / "promtool", "check", "config", "prometheus.yml")) == ""
    assert complaints(run(programs / "amtool", "check-config", "alertmanager.yml")) == ""


def test_names_units_and_types_follow_the_conventions(programs: Path) -> None:
    """`promtool check metrics` says nothing of a daemon that has seen a bit of everything."""
    metrics = Metrics((UNIT,), "0.1.0")
    metrics.saw_state(UNIT, ActiveState.ACTIVE)
    metrics.runs(UNIT, SpeculationConfig())
    metrics.proven(UNIT, SpeculationConfig())
    metrics.gpu_used.labels("0").set(1)
    metrics.saw_incident(Incident("c8b047994eb7", UNIT, "a" * 32, 0.0, FailureClass.UNKNOWN, ""))
    exported = generate_latest(metrics.registry).decode()
    assert [one.name for one in metrics.described if f"\n{one.name}" not in exported] == []
    checked = run(programs / "promtool", "check", "metrics", text=exported)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_rules_ask_for_metrics_that_exist() -> None:
    asked = set(re.findall(r"\bsglang_watchdog_\w+", RULES.read_text()))
    recorded = set(re.findall(r":(sglang_watchdog_\w+):", RULES.read_text()))
    exist = {one.name for one in Metrics((UNIT,), "0.1.0").described}
    assert {re.sub(r"_bucket$", "", name) for name in asked - recorded} <= exist
