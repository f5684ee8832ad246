"""`sglang-watchdog run`: the daemon in the foreground, as sglang-watchdog.service starts it; and `hand-back`, for when
that has died."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_watchdog.cli.parameters import config_option
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError

if TYPE_CHECKING:
    from sglang_watchdog.domain.incident import Incident
    from sglang_watchdog.settings import Settings


@click.command()
@config_option
def run(config: Path) -> None:
    """Watch the units that the settings name, until SIGTERM."""
    import asyncio

    from sglang_watchdog.daemon import Daemon
    from sglang_watchdog.reporting import logs
    from sglang_watchdog.settings import load

    settings = load(config)
    logs.configure(settings.log_level, to_journal="JOURNAL_STREAM" in os.environ)
    asyncio.run(Daemon(settings).run())


@click.command()
@config_option
def hand_back(config: Path) -> None:
    """Start what a daemon that died had stopped.

    Run by OnFailure= of its own service, and harmless at any other time."""
    from sglang_watchdog.hand_back import hand_back_units

    if os.geteuid() != 0:
        raise WatchdogError("hand-back starts units, which is root's alone: run this as root")
    settings = _settings(config)
    closed: list[Incident] = []
    try:
        for line in hand_back_units(settings, closed.append):
            print(line)
    finally:
        _tell_hooks(settings, closed)


def _tell_hooks(settings: "Settings", closed: list["Incident"]) -> None:
    """After every start that was owed: a receiver may take its time."""
    if not closed or not settings.hooks.model_fields_set:
        return
    import asyncio

    from sglang_watchdog.reporting import hooks, logs  # an HTTP client, which is slow to load

    logs.configure(settings.log_level, to_journal="JOURNAL_STREAM" in os.environ)
    asyncio.run(hooks.tell_closed(settings.hooks, closed))


def _settings(config: Path) -> "Settings":
    """Of settings that cannot be used the defaults: they may be what the daemon died of, and a unit that it had
    stopped is owed its start all the same."""
    from sglang_watchdog.settings import Settings, load

    try:
        return load(config)
    except UnusableInput as error:
        settings = Settings()
        first = str(error).splitlines()[0]
        print(f"sglang-watchdog: going by {settings.state_dir}, the default, because {first}", file=sys.stderr)
        return settings
