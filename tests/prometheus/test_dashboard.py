"""The Grafana dashboard, without a server: its shape, its layout, and that it asks for what exists.

That its queries are right is shown by test_end_to_end.py, which runs each of them.
"""

import itertools
import json
import re
from pathlib import Path

import fastjsonschema
import pytest

from prometheus.dashboard import DASHBOARD, queries
from sglang_watchdog.reporting.metrics import Metrics

SCHEMA = json.loads(Path(__file__).with_name("dashboard.schema.json").read_text())
EXPORTED = {one.name for one in Metrics(("sglang.service",), "0.1.0").described}


def test_the_dashboard_is_valid_by_its_schema() -> None:
    fastjsonschema.compile(SCHEMA)(DASHBOARD)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("panels", 1, "targets", 0, "exprs"), "up"),
        (("panels", 1, "type"), "graph"),
        (("panels", 1, "gridPos", "w"), 25),
        (("panels", 1, "targets"), []),
        (("schemaVersion",), 1),
        (("uid",), "short"),
    ],
)
def test_the_schema_refuses_what_grafana_would_not_show(path: tuple[str | int, ...], value: object) -> None:
    broken = json.loads(json.dumps(DASHBOARD))
    inner = broken
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(fastjsonschema.JsonSchemaException):
        fastjsonschema.compile(SCHEMA)(broken)


def test_every_panel_has_an_id_of_its_own_and_none_covers_another() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [cell for panel in DASHBOARD["panels"] for cell in covered(panel["gridPos"])]
    assert len(cells) == len(set(cells))


def covered(grid: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
    return list(itertools.product(columns, rows))


def test_it_asks_for_metrics_that_exist_and_leaves_no_sense_out() -> None:
    asked = {name for query in queries() for name in re.findall(r"\bsglang_watchdog_\w+", query)}
    assert {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in asked} <= EXPORTED
    assert {name for name in EXPORTED if name.endswith(("_connected", "_known", "_writable", "_readable"))} <= asked


def test_variables_of_a_query_are_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = {name for query in queries() for name in re.findall(r"\$(\w+)", query) if not name.startswith("__")}
    assert used <= defined
