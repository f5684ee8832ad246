"""`sglang-watchdog diagnose --journal FILE`: from files that anybody can hand over. Needs no root, bus or GPU."""

from collections.abc import Iterator
from pathlib import Path

from sglang_watchdog.cli.answer import Answer
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal, read_text
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.unit import UnitSnapshot

# Longer than any entry that journald writes; a file without line ends must not be read into memory whole.
_LONGEST_LINE = 8 * 1024 * 1024


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
