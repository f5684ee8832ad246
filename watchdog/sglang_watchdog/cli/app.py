"""The command line as a whole: one command for each module beside this one."""

import os

import typer
from typer._completion_classes import completion_init

from sglang_watchdog.cli import check_config, diagnose, history, may_start, operate, run, setup, status

COMPLETE_VARIABLE = "_SGLANG_WATCHDOG_COMPLETE"  # set by the completions that are installed for shells

if COMPLETE_VARIABLE in os.environ:
    completion_init()  # Typer does so by itself only where it may write to the user's shell settings as well

app = typer.Typer(
    name="sglang-watchdog",
    help="Says why an SGLang launch under systemd ended, and brings the server back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
