"""`sglang-watchdog pause`, `resume`, `rollback`, `mark-good`, `forget`: what an operator asks of the daemon."""

from pathlib import Path
from urllib.parse import quote, urlencode

import click

from sglang_watchdog.cli.parameters import Length, config_option, unit_argument
from sglang_watchdog.cli.status import ask


@click.command()
@unit_argument
@click.option(
    *("--for", "length_s"), type=Length(), default="2h", show_default=True, help="30m, 2h, 1d or 1h30m; a week at most."
)
@config_option
def pause(unit: str, length_s: int, config: Path) -> None:
    """Keep the watchdog away from UNIT for a time.

    It reports as before and touches nothing."""
    _tell(unit, "pause", config, seconds=str(length_s))


@click.command()
@unit_argument
@config_option
def resume(unit: str, config: Path) -> None:
    """End a pause, also that of a broken ledger.

    What failed meanwhile, and is still down, is taken up now."""
    _tell(unit, "resume", config)


@click.command()
@unit_argument
@click.option("--to", default="", help="The id of a known-good config; the best one without.")
@config_option
def rollback(unit: str, to: str, config: Path) -> None:
    """Put a known-good config of UNIT in force and restart it.

    Requests in flight are drained as the unit says."""
    _tell(unit, "rollback", config, to=to)


@click.command()
@unit_argument
@config_option
def mark_good(unit: str, config: Path) -> None:
    """Call what UNIT runs now known-good, without its soak."""
    _tell(unit, "mark-good", config)


@click.command()
@unit_argument
@click.argument("name", metavar="ID", help="The id of a known-good or a ceiling; `status` lists them.")
@config_option
def forget(unit: str, name: str, config: Path) -> None:
    """Forget that a config is known-good, or does not fit."""
    _tell(unit, "forget", config, id=name)


def _tell(unit: str, verb: str, config: Path, **query: str) -> None:
    print(ask(config, "POST", f"/v1/units/{quote(unit, safe='')}/{verb}?{urlencode(query)}")["summary"])
