"""`sglang-watchdog history`: past launches and incidents. `past.py` reads and prints them."""

from pathlib import Path

import click

from sglang_watchdog.cli.parameters import config_option, json_option


@click.command()
@click.argument("unit", required=False, help="Only this unit; all of them without.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many of each.")
@json_option
@config_option
def history(unit: str | None, limit: int, as_json: bool, config: Path) -> None:
    """Past launches and incidents, newest first."""
    from sglang_watchdog.cli.past import print_past

    print_past(unit, limit, config, as_json=as_json)
