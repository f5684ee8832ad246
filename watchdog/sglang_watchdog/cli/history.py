"""`sglang-watchdog history`: past launches and incidents. `past.py` reads and prints them."""

from pathlib import Path
from typing import Annotated

import typer

from sglang_watchdog.settings_files import DEFAULT_PATH


def history(
    unit: Annotated[str | None, typer.Argument(help="Only this unit; all of them without.")] = None,
    limit: Annotated[int, typer.Option(help="How many of each, newest first.", min=1, max=1000)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH,
) -> None:
    """Past launches and incidents, newest first."""
    from sglang_watchdog.cli.past import print_past

    print_past(unit, limit, config, as_json=as_json)
