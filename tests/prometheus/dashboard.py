"""contrib/grafana/sglang-watchdog.json as a test reads it: panels, queries, and what Grafana puts in for variables."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((CHECKOUT / "contrib" / "grafana" / "sglang-watchdog.json").read_text())
_PUT_IN = {"$__rate_interval": "1m", "$__range": "1h", "$instance": ".*", "$unit": ".*"}


def panels() -> list[dict[str, Any]]:
    """Those that show something; rows only head others."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


def filled(query: str) -> str:
    """The query as Grafana sends it with every variable at All."""
    for name, value in _PUT_IN.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def label_queries() -> list[tuple[str, str]]:
    """Metric and label of each variable that Grafana asks Prometheus for."""
    asked = []
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["query"]["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            asked.append((filled(metric), label))
    return asked
