"""`sglang-watchdog status`, `gpus`, `free`: what the daemon sees, and the one thing it may be asked to do by hand.

Lines, no tables: a table cuts names where the terminal is narrow, and in a pipe.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from sglang_watchdog.cli.parameters import config_option, json_option
from sglang_watchdog.settings_files import runtime_dir

Json = dict[str, Any]
_GIB = 2**30


@click.command()
@json_option
@config_option
def status(as_json: bool, config: Path) -> None:
    """What the daemon sees of each unit, and what it cannot see."""
    answer = ask(config, "GET", "/v1/status")
    _print([json.dumps(answer)] if as_json else _status_lines(answer))


@click.command()
@json_option
@config_option
def gpus(as_json: bool, config: Path) -> None:
    """Every card, who holds its memory, and whose process that is."""
    answer = ask(config, "GET", "/v1/gpus")
    _print([json.dumps(answer)] if as_json else _gpu_lines(answer))


@click.command()
@click.argument("unit", help="The unit whose left-over processes are to be ended.")
@click.option("--dry-run", is_flag=True, help="Only say what would be ended, and what not.")
@json_option
@config_option
def free(unit: str, dry_run: bool, as_json: bool, config: Path) -> None:
    """End what ended launches of UNIT left on the GPUs.

    Only processes that still hold GPU memory and are proven to be the unit's own."""
    answer = ask(config, "POST", f"/v1/units/{quote(unit, safe='')}/free?dry_run={str(dry_run).lower()}")
    _print([json.dumps(answer)] if as_json else _free_lines(answer, dry_run=dry_run))


def ask(config: Path, method: str, path: str, **limits: float) -> Json:
    from sglang_watchdog.cli import client  # HTTP, which `--help` and completions should not wait for

    return client.ask(runtime_dir(config), method, path, **limits)


def _print(lines: Iterator[str] | list[str]) -> None:
    for line in lines:
        print(line)


def _status_lines(answer: Json) -> Iterator[str]:
    for row in answer["units"]:
        yield from _unit_lines(row)
    if not answer["units"]:
        yield "No unit is watched."
    yield from (f"cannot see: {problem}" for problem in answer["blind"])


def _unit_lines(row: Json) -> Iterator[str]:
    yield f"{row['unit']}  {row['state']}{', ' + row['phase'] if row['phase'] else ''}"
    yield f"    runs {row['running'] or 'nothing'}, known-good: {row['known_good'] or 'nothing yet'}"
    if (progress := row.get("progress")) and progress["life"] == "hung":
        yield f"    hangs: {progress['why']}"
    for good in row["proven"]:
        how = "" if good["traffic"] else ", by probes alone"
        yield f"    {good['id']}  {good['config']}, proven {_when(good['proven'])}{how}"
    for ceiling in row["ceilings"]:
        yield f"    {ceiling['id']}  {ceiling['config']} does not fit: {ceiling['class']}, {_when(ceiling['seen'])}"
    paused = f", paused until {_when(row['paused_until'])}" if row["paused_until"] else _after_a_comma(row["paused"])
    yield f"    may act: {'yes' if row['act'] else 'no'}{paused}"
    if row["last_incident"]:
        yield "    last incident: {class} ({outcome})  {id}".format_map(row["last_incident"])


def _gpu_lines(answer: Json) -> Iterator[str]:
    if "unknown" in answer:
        yield f"unknown: {answer['unknown']}"
        return
    for gpu in answer["gpus"]:
        yield f"{gpu['index']} {gpu['name']}  {_size(gpu['used_bytes'])} of {_size(gpu['total_bytes'])} used"
        for holder in gpu["holders"]:
            who = f"process {holder['pid']}" if holder["pid"] else "a process that is not visible here"
            yield f"    {who} holds {_size(holder['used_bytes'])}  {holder['whose']} ({holder['why']})"


def _free_lines(answer: Json, *, dry_run: bool) -> Iterator[str]:
    for row in answer["ended"]:
        yield f"{'would end' if dry_run else 'ended'} {row['pid']} ({row['why']})"
    for row in answer["spared"]:
        who = row["pid"] or "a process that is not visible here"
        yield f"left alone: {who} ({row['why']})" + (f"; `{row['by_hand']}` ends it" if row["by_hand"] else "")
    yield answer["summary"]


def _after_a_comma(words: str) -> str:
    return f", {words}" if words else ""


def _when(time: float) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%m-%d %H:%M")


def _size(amount: int) -> str:
    return f"{amount / _GIB:.1f} GiB"
