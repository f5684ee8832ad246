"""`sglang-watchdog pause`, `resume`, `rollback`, `mark-good`, `forget`: what an operator asks of the daemon."""

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from sglang_watchdog.cli.status import ConfigOption, ask
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.settings_files import DEFAULT_PATH

UnitArgument = Annotated[str, typer.Argument(help="The watched unit, as in sglang.service.")]
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+[smhd])+")


def pause(
    unit: UnitArgument,
    length: Annotated[str, typer.Option("--for", help="30m, 2h, 1d or 1h30m; a week at most.")] = "2h",
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Keep the watchdog away from UNIT for a time: it reports as before and touches nothing."""
    _tell(unit, "pause", config, seconds=str(seconds_of(length)))


def resume(unit: UnitArgument, config: ConfigOption = DEFAULT_PATH) -> None:
    """End a pause, also that of a broken ledger. What failed meanwhile, and is still down, is taken up now."""
    _tell(unit, "resume", config)


def rollback(
    unit: UnitArgument,
    to: Annotated[str, typer.Option("--to", help="The id of a known-good config; the best one without.")] = "",
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Put a known-good config of UNIT in force and restart it. Requests in flight are drained as the unit says."""
    _tell(unit, "rollback", config, to=to)


def mark_good(unit: UnitArgument, config: ConfigOption = DEFAULT_PATH) -> None:
    """Call what UNIT runs now known-good, without waiting for its soak."""
    _tell(unit, "mark-good", config)


def forget(
    unit: UnitArgument,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a known-good or a ceiling; `status` lists them.")
    ],
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Forget that a config is known-good, or that it does not fit."""
    _tell(unit, "forget", config, id=name)


def seconds_of(length: str) -> int:
    """Raises `UnusableInput` where it is no length of time."""
    if not _DURATION.fullmatch(length):
        raise UnusableInput(f"--for {length}: is no length of time; write 90s, 30m, 2h, 1d or 1h30m")
    return sum(int(number) * _SECONDS[of] for number, of in re.findall(r"(\d+)([smhd])", length))


def _tell(unit: str, verb: str, config: Path, **query: str) -> None:
    print(ask(config, "POST", f"/v1/units/{quote(unit, safe='')}/{verb}?{urlencode(query)}")["summary"])
