"""`sglang-watchdog diagnose`: why a launch ended, of a unit of this host or from files that anybody can hand over."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_watchdog.cli.parameters import FILE, config_option, json_option
from sglang_watchdog.domain.errors import UnusableInput

if TYPE_CHECKING:
    from sglang_watchdog.cli.answer import Answer


@click.command()
@click.argument("unit", required=False, help="A unit of this host; or give files by the options.")
@click.option("--journal", type=FILE, help="What `journalctl -o json --all` or `-o export` printed; - for a pipe.")
@click.option("--show", type=FILE, help="What `systemctl show UNIT` printed.")
@click.option("--text", type=FILE, help="A log of any other kind (plain, docker, JSON); - for a pipe.")
@click.option("--invocation", default="", help="Which launch, by its invocation id.")
@click.option("--all", "every", is_flag=True, help="Every launch that is to be found, newest first.")
@click.option("--explain", is_flag=True, help="Also what matched where, and why every other class lost.")
@json_option
@config_option
def diagnose(
    *,
    unit: str | None,
    journal: Path | None,
    show: Path | None,
    text: Path | None,
    invocation: str,
    every: bool,
    explain: bool,
    as_json: bool,
    config: Path,
) -> None:
    """Say why a launch ended.

    Of a unit of this host, or from files that somebody handed over."""
    if unit and (journal or text or show):
        raise UnusableInput(
            f"{unit} and files exclude each other: give the unit on its own host, or the files anywhere"
        )
    if every and invocation:
        raise UnusableInput("--all and --invocation exclude each other: give the one that you want")
    if every:
        _list(_all_live(unit, config, explain) if unit else _all_offline(journal, text, show, explain), as_json)
        return
    answer = _live(unit, invocation, config, explain) if unit else _offline(journal, text, show, invocation, explain)
    if as_json:
        click.echo(json.dumps(answer.to_json(), ensure_ascii=False))
    else:
        from sglang_watchdog.cli.terminal import print_diagnosis

        print_diagnosis(answer)


def _list(answers: list["Answer"], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([answer.listed() for answer in answers], ensure_ascii=False))
        return
    from sglang_watchdog.cli.terminal import print_list

    print_list(answers)


def _live(unit: str, invocation: str, config: Path, explain: bool) -> "Answer":
    from sglang_watchdog.cli.live import diagnose_live

    return diagnose_live(unit, invocation, config, explain=explain)


def _all_live(unit: str, config: Path, explain: bool) -> list["Answer"]:
    from sglang_watchdog.cli.live import list_live

    return list_live(unit, config, explain=explain)


def _offline(journal: Path | None, text: Path | None, show: Path | None, invocation: str, explain: bool) -> "Answer":
    from sglang_watchdog.cli.files import diagnose_offline

    return diagnose_offline(journal=journal, text=text, show=show, invocation=invocation, explain=explain)


def _all_offline(journal: Path | None, text: Path | None, show: Path | None, explain: bool) -> list["Answer"]:
    from sglang_watchdog.cli.files import list_offline

    return list_offline(journal=journal, text=text, show=show, explain=explain)
