"""The command line as a whole: one command for each module beside this one."""

import typer

from sglang_watchdog.cli import diagnose

app = typer.Typer(
    name="sglang-watchdog",
    help="Says why an SGLang launch under systemd ended, and brings the server back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("diagnose")(diagnose.command)


@app.callback()
def _group() -> None:
    """Without this a single command would lose its name."""
