"""`sglang-watchdog diagnose`: why a launch ended, of a unit of this host or from files that anybody can hand over.

What does the work is imported when it is wanted: half a second for `--help` is long.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_watchdog.cli.answer import Answer
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.settings import DEFAULT_PATH


def command(
    unit: Annotated[str | None, typer.Argument(help="A unit of this host; or give files by the options.")] = None,
    journal: Annotated[Path | None, typer.Option(help="What `journalctl -o json --all -u UNIT` printed.")] = None,
    show: Annotated[Path | None, typer.Option(help="What `systemctl show UNIT` printed.")] = None,
    text: Annotated[Path | None, typer.Option(help="A plain log instead of a journal.")] = None,
    invocation: Annotated[str, typer.Option(help="Which launch, by its invocation id.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: Annotated[Path, typer.Option(help="The settings file, for a unit of this host.")] = DEFAULT_PATH,
) -> None:
    """Say why a launch ended: of a unit of this host, or from files that somebody handed over."""
    if unit and (journal or text or show):
        raise UnusableInput(
            f"{unit} and files exclude each other: give the unit on its own host, or the files anywhere"
        )
    answer = _live(unit, invocation, config) if unit else _offline(journal, text, show, invocation)
    if as_json:
        typer.echo(json.dumps(answer.diagnosis.to_json(), ensure_ascii=False))
    else:
        from sglang_watchdog.cli.terminal import print_diagnosis

        print_diagnosis(answer.diagnosis, answer.unit, answer.invocation)


def _live(unit: str, invocation: str, config: Path) -> Answer:
    from sglang_watchdog.cli.live import diagnose_live

    return diagnose_live(unit, invocation, config)


def _offline(journal: Path | None, text: Path | None, show: Path | None, invocation: str) -> Answer:
    from sglang_watchdog.cli.files import diagnose_offline

    return diagnose_offline(journal=journal, text=text, show=show, invocation=invocation)
