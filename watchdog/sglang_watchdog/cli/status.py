"""`sglang-watchdog status`, `gpus`, `free`: what the daemon sees, and the one thing it may be asked to do by hand."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_watchdog.cli.client import ask
from sglang_watchdog.settings import DEFAULT_PATH, load

ConfigOption = Annotated[Path, typer.Option(help="The settings file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
_GIB = 2**30


def status(as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """What the daemon sees of each unit, and what it cannot see."""
    answer: dict[str, Any] = ask(Path(load(config).runtime_dir), "GET", "/v1/status")
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("unit", "state", "phase", "runs", "known-good", "may act", "last incident")
    for row in answer["units"]:
        table.add_row(*(str(row[key]) for key in ("unit", "state", "phase", "running", "known_good")), *_rest(row))
    console = Console()
    console.print(table)
    for problem in answer["blind"]:
        console.print(f"cannot see: {problem}", style="yellow")


def gpus(as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """Every card, who holds its memory, and whose process that is."""
    answer: dict[str, Any] = ask(Path(load(config).runtime_dir), "GET", "/v1/gpus")
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    if "unknown" in answer:
        console.print(f"unknown: {answer['unknown']}", style="yellow")
        return
    table = Table("card", "used", "of", "process", "holds", "whose", "why")
    for gpu in answer["gpus"]:
        table.add_row(
            f"{gpu['index']} {gpu['name']}", _size(gpu["used_bytes"]), _size(gpu["total_bytes"]), "", "", "", ""
        )
        for holder in gpu["holders"]:
            pid = holder["pid"] or "not visible"
            table.add_row("", "", "", str(pid), _size(holder["used_bytes"]), holder["whose"], holder["why"])
    console.print(table)


def free(
    unit: Annotated[str, typer.Argument(help="The unit whose left-over processes are to be ended.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be ended, and what not.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """End processes of ended launches of UNIT that still hold GPU memory: only those proven to be its own."""
    path = f"/v1/units/{unit}/free?dry_run={str(dry_run).lower()}"
    answer: dict[str, Any] = ask(Path(load(config).runtime_dir), "POST", path)
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    verb = "would end" if dry_run else "ended"
    for row in answer["ended"]:
        console.print(f"{verb} {row['pid']} ({row['why']})")
    for row in answer["spared"]:
        console.print(f"left alone: {row['pid'] or 'a process that is not visible here'} ({row['why']})")
    console.print(answer["summary"])


def _rest(row: dict[str, Any]) -> tuple[str, str]:
    last = row["last_incident"]
    return "yes" if row["act"] else "no", f"{last['class']} ({last['outcome']})" if last else ""


def _size(amount: int) -> str:
    return f"{amount / _GIB:.1f} GiB"
