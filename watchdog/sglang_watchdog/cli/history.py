"""`sglang-watchdog history`: past launches and incidents, from the ledger itself, so also while the daemon is down."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.settings import DEFAULT_PATH, load

Ended = tuple[Launch, FailureClass | None]


def history(
    unit: Annotated[str | None, typer.Argument(help="Only this unit; all of them without.")] = None,
    limit: Annotated[int, typer.Option(help="How many of each, newest first.", min=1, max=1000)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH,
) -> None:
    """Past launches and incidents, newest first."""
    settings = load(config)
    ledger = Ledger.open(Path(settings.state_dir) / LEDGER_NAME, read_only=True)
    units = [unit] if unit else sorted(settings.units)
    launches = [row for name in units for row in ledger.launches(name, limit)]
    incidents = [row for name in units for row in ledger.incidents(name, limit)]
    ledger.close()
    if as_json:
        print(json.dumps({"launches": [_launch(row) for row in launches], "incidents": [*map(_incident, incidents)]}))
        return
    console = Console()
    console.print(_launch_table(launches))
    console.print(_incident_table(incidents))


def _launch(row: Ended) -> dict[str, object]:
    launch, failure = row
    return {
        "unit": launch.unit,
        "invocation": launch.invocation,
        "started": launch.started,
        "ended": launch.ended,
        "phase": launch.phase,
        "class": failure,
        "config": SpeculationConfig.of(launch.argv).describe(),
        "argv": list(launch.argv),
        "server_args": dict(launch.server_args),
        "version": launch.version,
        "phases": [{"phase": mark.phase, "time": mark.time} for mark in launch.phases],
        "max_total_num_tokens": launch.memory.max_total_num_tokens,
        "max_running_requests": launch.memory.max_running_requests,
    }


def _incident(incident: Incident) -> dict[str, object]:
    return {
        "id": incident.id,
        "unit": incident.unit,
        "invocation": incident.invocation,
        "opened": incident.opened,
        "closed": incident.closed,
        "class": incident.failure,
        "summary": incident.summary,
        "outcome": incident.outcome,
        "reason": incident.reason,
        "steps": list(incident.steps),
        "target": incident.target.describe() if incident.target else None,
        "diagnosis": incident.diagnosis,
    }


def _launch_table(launches: list[Ended]) -> Table:
    table = Table("started", "unit", "ran", "came to", "ended", "class", title="Launches", title_justify="left")
    for launch, failure in launches:
        config = SpeculationConfig.of(launch.argv).describe()
        table.add_row(
            *(_when(launch.started), launch.unit, config, launch.phase, _when(launch.ended), failure or "running")
        )
    return table


def _incident_table(incidents: list[Incident]) -> Table:
    table = Table("opened", "unit", "class", "what happened", "outcome", title="Incidents", title_justify="left")
    for incident in incidents:
        outcome = f"{incident.outcome}: {incident.reason}" if incident.reason else incident.outcome
        table.add_row(_when(incident.opened), incident.unit, incident.failure, incident.summary, outcome)
    return table


def _when(time: float | None) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%m-%d %H:%M:%S") if time else ""
