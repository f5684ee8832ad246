"""`sglang-watchdog diagnose`: why a launch ended, of a unit of this host or from files that anybody can hand over. With
files it needs no root, bus or GPU."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sglang_watchdog.cli.live import live_case
from sglang_watchdog.cli.terminal import print_diagnosis
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal, read_text
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.settings import DEFAULT_PATH, Settings, load

# Longer than any entry that journald writes; a file without line ends must not be read into memory whole.
_LONGEST_LINE = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A diagnosis, and of what."""

    diagnosis: Diagnosis
    unit: str
    invocation: str


def diagnose_offline(
    *, journal: Path | None = None, text: Path | None = None, show: Path | None = None, invocation: str = ""
) -> Answer:
    """The diagnosis of one launch in files. Of several launches the newest that ended, unless `invocation` names one.

    Raises UnusableInput, which names the file and the line.
    """
    source = journal or text
    if source is None:
        raise UnusableInput(
            "Nothing to diagnose: give --journal FILE (from `journalctl -o json --all -u UNIT`) or --text FILE"
        )
    if journal and text:
        raise UnusableInput("--journal and --text exclude each other: give the one that you have")
    unit = _read_show(show) if show else None
    read = read_journal if journal else read_text
    timeline = read_launch(read(_lines(source), str(source)), invocation, unit.name if unit else "")
    answer = diagnose(Case(timeline=timeline, unit=unit))
    return Answer(answer, timeline.unit or (unit.name if unit else ""), timeline.invocation)


def _read_show(path: Path) -> UnitSnapshot | None:
    try:
        return parse_show(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file; of one that is too long the beginning."""
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                yield line
                while not line.endswith(b"\n") and (line := file.readline(_LONGEST_LINE)):
                    pass
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UnusableInput:
    return UnusableInput(f"{path} cannot be read: {error.strerror or error}")


def diagnose_live(unit: str, invocation: str, config: Path) -> Answer:
    """The diagnosis of a unit of this host: its newest launch that ended, or the one that `invocation` names."""
    settings = load(config) if config.exists() else Settings()
    case = live_case(unit, invocation, settings.state_dir)
    return Answer(diagnose(case), unit, case.timeline.invocation)


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
    if unit:
        answer = diagnose_live(unit, invocation, config)
    else:
        answer = diagnose_offline(journal=journal, text=text, show=show, invocation=invocation)
    if as_json:
        typer.echo(json.dumps(answer.diagnosis.to_json(), ensure_ascii=False))
    else:
        print_diagnosis(answer.diagnosis, answer.unit, answer.invocation)
