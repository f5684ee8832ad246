"""`sglang-watchdog setup`: finds the SGLang units of this host and has them observed. `setting_up.py` does it."""

from pathlib import Path

import click

from sglang_watchdog.cli.parameters import config_option


@click.command()
@click.argument("unit", required=False, help="Only this unit; without it every unit that runs SGLang.")
@click.option("--dry-run", is_flag=True, help="Only say what was found: write nothing.")
@config_option
def setup(unit: str | None, dry_run: bool, config: Path) -> None:
    """Find the SGLang units of this host and have them observed.

    Also says what would serve them better."""
    from sglang_watchdog.cli.setting_up import set_up

    set_up(unit, config, dry_run=dry_run)
