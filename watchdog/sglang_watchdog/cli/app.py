"""The command line as a whole.

A module of a command holds what is typed and what it asks of others. It imports what does the work when the command
runs, because every command, each completion in a shell and the start gate of a unit wait for all imports that are made
here.
"""

import os
from typing import Annotated

import typer
from typer._completion_classes import completion_init

from sglang_watchdog.cli import check_config, diagnose, history, may_start, operate, run, setup, status

COMPLETE_VARIABLE = "_SGLANG_WATCHDOG_COMPLETE"  # set by the completions that are installed for shells

if COMPLETE_VARIABLE in os.environ:
    completion_init()  # Typer does so by itself only where it may write to the user's shell settings as well

NAME = "sglang-watchdog"
app = typer.Typer(name=NAME, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"{NAME} {version(NAME)}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show name and version and exit.")
    ] = False,
) -> None:
    """Says why an SGLang launch under systemd ended, and brings the server back."""


app.command("run")(run.run)
app.command("status")(status.status)
app.command("diagnose")(diagnose.command)
app.command("history")(history.history)
app.command("gpus")(status.gpus)
app.command("free")(status.free)
app.command("pause")(operate.pause)
app.command("resume")(operate.resume)
app.command("rollback")(operate.rollback)
app.command("mark-good")(operate.mark_good)
app.command("forget")(operate.forget)
app.command("may-start")(may_start.may_start)
app.command("hand-back")(run.hand_back)
app.command("setup")(setup.setup)
app.command("check-config")(check_config.check_config)
