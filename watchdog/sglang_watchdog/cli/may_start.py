"""`sglang-watchdog may-start`: the start gate, as a unit's `ExecCondition=` runs it."""

import sys
import time
from pathlib import Path
from urllib.parse import quote

import click

from sglang_watchdog.cli.parameters import Length, config_option, unit_argument
from sglang_watchdog.cli.status import ask
from sglang_watchdog.domain.errors import WatchdogError

REFUSED = 77  # no status that a shell, Python or timeout(1) ends with when something is broken
_AGAIN_S = 0.5
# NVML and the model's files are given 10 s at most each; a daemon that takes longer hangs.
_ANSWERS_WITHIN_S = 25.0


@click.command()
@unit_argument
@click.option(
    *("--wait", "wait_s"),
    type=Length(),
    default="30s",
    show_default=True,
    help="How long to wait for GPU memory that ended launches of UNIT still hold.",
)
@config_option
def may_start(unit: str, wait_s: int, config: Path) -> None:
    """Say whether UNIT may start now, for ExecCondition=.

    Exit status 77 where it would run what is proven not to fit, else 0. Waits a while for GPU memory that ended
    launches of UNIT still hold. Whatever is broken lets the start go on."""
    end = time.monotonic() + wait_s
    while True:
        try:
            answer = ask(config, "GET", f"/v1/units/{quote(unit, safe='')}/may-start", timeout_s=_ANSWERS_WITHIN_S)
        except WatchdogError as error:
            print(f"sglang-watchdog: the start goes on unchecked: {error}", file=sys.stderr)
            return
        if answer["move"] == "refuse":
            print(f"{unit}: {answer['reason']}")
            sys.exit(REFUSED)
        if answer["move"] != "wait" or time.monotonic() > end:
            return
        time.sleep(_AGAIN_S)
