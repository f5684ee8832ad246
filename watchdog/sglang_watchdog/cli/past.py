"""What `sglang-watchdog history` prints: past launches and incidents, from the ledger itself, so also while the daemon
is down."""

import json
from datetime import datetime
from pathlib import Path

from sglang_watchdog.cli.terminal import console
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.settings import load

Ended = tuple[Launch, FailureClass | None]


def print_past(unit: str | None, limit: int, config: Path, *, as_json: bool) -> None:
    """So many launches and incidents of each unit, newest first. `unit`: only of this one."""
    settings = load(config)
    ledger = Ledger.open(Path(settings.state_dir) / LEDGER_NAME, read_only=True)
    units = [unit] if unit else sorted(settings.units)
    launches = [row for name in units for row in ledger.launches(name, limit)]
    incidents = [row for name in units for row in ledger.incidents(name, limit)]
    ledger.close()
    if as_json:
        print(json.dumps({"launches": [_launch(row) for row in launches], "incidents": [*map(_incident, incidents)]}))
        return
    out = console()
    out.print("Launches", style="bold")
    for launch, failure in launches:
        out.print(_launch_line(launch, failure))
    out.print("\nIncidents", style="bold")
    for incident in incidents:
        out.print(_incident_lines(incident))


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


def _launch_line(launch: Launch, failure: FailureClass | None) -> str:
    config = SpeculationConfig.of(launch.argv).describe()
    end = f"ended {_when(launch.ended)}, {failure or 'by the watchdog'}" if launch.ended else "runs"
    return f"  {_when(launch.started)}  {launch.unit}  {config}, came to {launch.phase}, {end}"


def _incident_lines(incident: Incident) -> str:
    head = f"  {_when(incident.opened)}  {incident.unit}  {incident.failure}  {incident.id}"
    return f"{head}\n      {incident.summary}\n      {incident.outcome}: {incident.reason}"


def _when(time: float | None) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%m-%d %H:%M:%S") if time else ""
