"""The pull of the journal where journalctl does not do as it should: real processes in its place."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_watchdog.diagnosis.entries import entry_or_none
from sglang_watchdog.domain.errors import DeadlineExceeded
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.host.journal import Journal, JournalUnreadable

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def written(body: str) -> Path:
        path = tmp_path / "journalctl"
        path.write_text(f"#!/bin/sh\n{body}")
        path.chmod(0o755)
        return path

    return written


def entry(number: int) -> str:
    return f"""echo '{{"MESSAGE": "line {number}", "__CURSOR": "c{number}", "__REALTIME_TIMESTAMP": "1"}}'\n"""


def pull(command: Path, fed: list[JournalEntry], cursor: str = "", deadline: float = 20.0) -> str:
    journal = Journal(entry_or_none, str(command))
    return asyncio.run(journal.pull("a" * 32, fed.append, since=1.0, cursor=cursor, deadline=deadline))


def test_what_came_before_the_deadline_was_fed_with_its_cursor(script: Script) -> None:
    fed: list[JournalEntry] = []
    with pytest.raises(DeadlineExceeded):
        pull(script(entry(1) + entry(2) + "exec sleep 60"), fed, deadline=0.5)
    assert [e.cursor for e in fed] == ["c1", "c2"]


def test_the_deadline_holds_whoever_keeps_the_pipe_open(script: Script, tmp_path: Path) -> None:
    fed: list[JournalEntry] = []
    with pytest.raises(DeadlineExceeded):
        pull(script(f"sleep 60 &\necho $! >{tmp_path}/pid\n{entry(1)}wait"), fed, deadline=0.5)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert [e.cursor for e in fed] == ["c1"]


def test_a_line_of_any_length_loses_nothing_but_itself(script: Script) -> None:
    huge = "head -c 20000000 /dev/zero | tr '\\0' x; echo\n"
    fed: list[JournalEntry] = []
    assert pull(script(entry(1) + huge + entry(2)), fed) == "c2"
    assert [e.cursor for e in fed] == ["c1", "c2"]


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_journalctl_that_cannot_be_run_makes_the_journal_unreadable(script: Script, mode: int | None) -> None:
    path = script("")
    path.unlink() if mode is None else path.chmod(mode)
    with pytest.raises(JournalUnreadable, match=f"{path} cannot be run"):
        pull(path, [], cursor="c1")


def test_a_cursor_that_is_gone_falls_back_to_the_time(script: Script) -> None:
    gone = 'case "$*" in *--after-cursor*) echo "Failed to seek to cursor" >&2; exit 1;; esac\n'
    fed: list[JournalEntry] = []
    assert pull(script(gone + entry(7)), fed, cursor="c1") == "c7"
    assert len(fed) == 1


def test_a_journalctl_that_fails_in_the_middle_does_not_make_anything_be_fed_twice(script: Script) -> None:
    fed: list[JournalEntry] = []
    with pytest.raises(JournalUnreadable, match="status 3: input/output error"):
        pull(script(entry(1) + entry(2) + "echo input/output error >&2; exit 3"), fed, cursor="c0")
    assert [e.cursor for e in fed] == ["c1", "c2"]
