"""`sglang-watchdog run`: the daemon in the foreground, as sglang-watchdog.service starts it."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from sglang_watchdog.settings import DEFAULT_PATH, load


def run(config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH) -> None:
    """Watch the units that the settings name, until SIGTERM."""
    from sglang_watchdog.daemon import Daemon  # NVML, D-Bus and the exporter are the daemon's alone
    from sglang_watchdog.reporting import logs

    settings = load(config)
    logs.configure(settings.log_level, to_journal="JOURNAL_STREAM" in os.environ)
    asyncio.run(Daemon(settings).run())


def hand_back(config: Annotated[Path, typer.Option(help="The settings file.")] = DEFAULT_PATH) -> None:
    """Start what a daemon that died had stopped: run by OnFailure= of its own service, harmless at any other time."""
    from sglang_watchdog.hand_back import hand_back_units

    for line in hand_back_units(load(config)):
        print(line)
