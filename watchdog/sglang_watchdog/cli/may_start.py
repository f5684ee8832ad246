"""`sglang-watchdog may-start`: the start gate, as a unit's `ExecCondition=` runs it."""

import sys
import time
from typing import Annotated
from urllib.parse import quote

import typer

from sglang_watchdog.cli.operate import UnitArgument, seconds_of
from sglang_watchdog.cli.status import ConfigOption, ask
from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.settings_files import DEFAULT_PATH

REFUSED = 77  # no status that a shell, Python or timeout(1) ends with when something is broken
_AGAIN_S = 0.5
# NVML and the model's files are given 10 s at most each; a daemon that takes longer hangs.
_ANSWERS_WITHIN_S = 25.0


def may_start(
    unit: UnitArgument,
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for GPU memory of ended launches.")] = "30s",
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Say whether UNIT may start now: status 77 where it would run what is proven not to fit, else 0.

    For ExecCondition=. Waits a while for GPU memory that ended launches of UNIT still hold. Whatever is broken lets the
    start go on."""
    end = time.monotonic() + seconds_of(wait)
    while True:
        try:
            answer = ask(config, "GET", f"/v1/units/{quote(unit, safe='')}/may-start", timeout_s=_ANSWERS_WITHIN_S)
        except WatchdogError as error:
            print(f"sglang-watchdog: the start goes on unchecked: {error}", file=sys.stderr)
            return
        if answer["move"] == "refuse":
            print(f"{unit}: {answer['reason']}")
            raise typer.Exit(REFUSED)
        if answer["move"] != "wait" or time.monotonic() > end:
            return
        time.sleep(_AGAIN_S)
