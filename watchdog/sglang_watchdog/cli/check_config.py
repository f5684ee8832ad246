"""`sglang-watchdog check-config`: whether the settings can be used, and what they come to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.settings_files import DEFAULT_PATH

if TYPE_CHECKING:
    from sglang_watchdog.settings import Settings, UnitSettings


def check_config(config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH) -> None:
    """Read the settings and say what is wrong with them, one line for each error; exit status 2 if anything is."""
    from sglang_watchdog.settings import load

    try:
        settings = load(config)
    except UnusableInput as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    print("\n".join(summary(settings)))


def summary(settings: "Settings") -> list[str]:
    """What the settings come to, a line for each unit."""
    watched = [f"{name}: {_what(unit)}" for name, unit in sorted(settings.units.items())]
    return ["The settings are usable.", *(watched or ['No unit is watched: add [units."NAME.service"].'])]


def _what(unit: "UnitSettings") -> str:
    return "observed and acted on (act = true)" if unit.act else "observed only (act is not true)"
