"""The command line as a whole.

A module of a command holds what is typed and what it asks of others. It imports what does the work when the command
runs, because every command, each completion in a shell and the start gate of a unit wait for all imports that are made
here.
"""

import click

from sglang_watchdog.cli import check_config, diagnose, history, may_start, operate, run, setup, status

NAME = "sglang-watchdog"
COMPLETE_VARIABLE = "_SGLANG_WATCHDOG_COMPLETE"  # set by the completions that are installed for shells


@click.group(NAME, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=NAME, prog_name=NAME, message="%(prog)s %(version)s", help="Show name and version.")
def app() -> None:
    """Says why an SGLang launch under systemd ended, and brings the server back."""


for command in (
    *(run.run, status.status, diagnose.diagnose, history.history, status.gpus, status.free),
    *(operate.pause, operate.resume, operate.rollback, operate.mark_good, operate.forget),
    *(may_start.may_start, run.hand_back, setup.setup, check_config.check_config),
):
    app.add_command(command)
