"""`sglang-watchdog check-config`: whether the settings can be used, and what they come to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_watchdog.cli.parameters import config_option
from sglang_watchdog.domain.errors import UnusableInput

if TYPE_CHECKING:
    from sglang_watchdog.settings import Settings, UnitSettings


@click.command()
@config_option
def check_config(config: Path) -> None:
    """Say what is wrong with the settings.

    One line for each error, and exit status 2 if there is any."""
    from sglang_watchdog.settings import load

    try:
        settings = load(config)
    except UnusableInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("\n".join(summary(settings)))


def summary(settings: "Settings") -> list[str]:
    """What the settings come to, a line for each unit."""
    watched = [f"{name}: {_what(unit)}" for name, unit in sorted(settings.units.items())]
    return ["The settings are usable.", *(watched or ['No unit is watched: add [units."NAME.service"].'])]


def _what(unit: "UnitSettings") -> str:
    return "observed and acted on (act = true)" if unit.act else "observed only (act is not true)"
