"""A failure under the installed service, seen by Debian's Prometheus and told by its Alertmanager, incident and all."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.host import LabHost
from lab_product.installed import InferenceHost, inference_host
from prometheus.dashboard import DASHBOARD, filled, label_queries, panels, queries
from prometheus.servers import Monitoring, Webhook, monitoring, webhook
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
TOO_MANY = 10
DEADLINE_S = 60.0
# Of what did not happen here: nothing serves and nothing is proven; no recovery came to its verification.
MAY_BE_EMPTY = {"Speculative steps", "Recovery steps, mean"}


@dataclass(frozen=True)
class Watched:
    inference: InferenceHost
    servers: Monitoring
    hook: Webhook


@pytest.fixture(scope="module")
def watched(lab: LabHost, programs: Path) -> Iterator[Watched]:
    """A first deploy that cannot fit, with nothing proven to go back to: the watchdog holds the unit."""
    with (
        inference_host(lab, settings={"act": True}, steps=TOO_MANY) as inference,
        webhook() as hook,
        monitoring(lab, programs, inference.metrics_port, hook.port) as servers,
    ):
        up = 'up{job="sglang-watchdog"} == 1'
        wait_until(lambda: servers.query(up), DEADLINE_S, "a scrape")
        inference.start(wait=False)
        inference.wait_alert(OUTCOME="held", deadline_s=DEADLINE_S)
        yield Watched(inference, servers, hook)


def test_the_alert_comes_to_the_webhook_with_the_incident(watched: Watched) -> None:
    held = wait_until(lambda: watched.hook.alerts("SGLangHeld"), DEADLINE_S, "SGLangHeld at the webhook")[0]
    [incident] = [one for one in watched.inference.history()["incidents"] if one["outcome"] == "held"]
    assert held["labels"]["incident"] == incident["id"]
    assert held["labels"]["unit"] == watched.inference.unit
    assert held["labels"]["class"] == "kv_cache_oom"
    assert held["labels"]["severity"] == "critical"
    assert f"SGLANG_WATCHDOG_INCIDENT={incident['id']}" in held["annotations"]["description"]
    # And the id leads from there to the journal.
    told = watched.inference.host.journal(f"SGLANG_WATCHDOG_INCIDENT={incident['id']}")
    assert {entry.get("SGLANG_WATCHDOG_OUTCOME") for entry in told} == {None, "held"}


def test_every_query_of_the_dashboard_is_answered(watched: Watched) -> None:
    wait_until(
        lambda: watched.servers.query('sglang_watchdog_last_incident_info{outcome="held"}'), DEADLINE_S, "a hold"
    )
    for panel in panels():
        for target in panel["targets"]:
            found = watched.servers.query(filled(target["expr"]))
            assert found or panel["title"] in MAY_BE_EMPTY, f"{panel['title']}: {target['expr']}"
    assert len(list(queries())) > len(panels()) > len(MAY_BE_EMPTY)
    [held] = [panel for panel in DASHBOARD["panels"] if panel["title"] == "Held for a human"]
    assert watched.servers.query(filled(held["targets"][0]["expr"]))[0]["value"][1] == "1"


def test_every_variable_of_the_dashboard_has_values(watched: Watched) -> None:
    asked = label_queries()
    assert {label for _, label in asked} == {"instance", "unit"}
    for metric, label in asked:
        values = watched.servers.ask(f"label/{label}/values", **{"match[]": metric})
        assert values, (metric, label)


def test_every_rule_is_evaluated_without_an_error(watched: Watched) -> None:
    groups = watched.servers.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    wait_until(
        lambda: all(
            rule["health"] == "ok" for group in watched.servers.ask("rules")["groups"] for rule in group["rules"]
        ),
        DEADLINE_S,
        "an evaluation of every rule",
    )
    assert len(rules) > 15


def test_the_alert_is_taken_back_when_the_unit_serves_again(watched: Watched) -> None:
    wait_until(lambda: watched.hook.alerts("SGLangHeld"), DEADLINE_S, "SGLangHeld at the webhook")
    watched.inference.change(steps=4)
    watched.inference.reload()
    watched.inference.host.systemctl("reset-failed", watched.inference.unit, check=False)
    watched.inference.start()
    wait_until(lambda: watched.hook.alerts("SGLangHeld", "resolved"), DEADLINE_S, "the end of SGLangHeld")
