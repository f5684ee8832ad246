"""What more than one command takes."""

import re
from pathlib import Path

import click

from sglang_watchdog.settings_files import DEFAULT_PATH

FILE = click.Path(path_type=Path, readable=False)  # whether it can be read is told by who reads it, in words of its own
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LENGTH = re.compile(r"([0-9]{1,9}[smhd])+")


class Length(click.ParamType[int]):
    """A length of time as systemd and Prometheus write it, in seconds."""

    name = "length"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not _LENGTH.fullmatch(value):
            self.fail(f"{value} is no length of time; write 90s, 30m, 2h, 1d or 1h30m", param, ctx)
        return sum(int(number) * _SECONDS[of] for number, of in re.findall(r"(\d+)([smhd])", value))


config_option = click.option("--config", type=FILE, default=DEFAULT_PATH, show_default=True, help="The settings file.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
unit_argument = click.argument("unit", help="The watched unit, as in sglang.service.")
