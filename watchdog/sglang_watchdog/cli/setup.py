"""`sglang-watchdog setup`: finds the SGLang units of this host and has them observed. `setting_up.py` does it."""

from pathlib import Path
from typing import Annotated

import typer

from sglang_watchdog.settings_files import DEFAULT_PATH


def setup(
    unit: Annotated[str | None, typer.Argument(help="Only this unit; without it every unit that runs SGLang.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what was found: write nothing.")] = False,
    config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH,
) -> None:
    """Find the SGLang units of this host, have them observed, and say what would serve them better."""
    from sglang_watchdog.cli.setting_up import set_up

    set_up(unit, config, dry_run=dry_run)
