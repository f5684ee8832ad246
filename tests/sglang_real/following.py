"""Waiting for a journal entry without looking again and again: a launch takes half a minute of both cores as it is."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from lab.host import LabHost

Entry = dict[str, Any]


def wait_for_entry(
    host: LabHost, matches: tuple[str, ...], wanted: Callable[[Entry], bool], deadline_s: float, what: str
) -> Entry:
    """The first entry, past ones included, that `wanted` accepts of those which journalctl's `matches` let through.

    Raises AssertionError, which names `what` and the last entry seen, after `deadline_s` seconds.
    """
    last: Entry = {}
    with _followed(host, matches, deadline_s) as entries:
        for last in entries:
            if wanted(last):
                return last
    raise AssertionError(f"waited {deadline_s:g} s in vain: {what} (last entry: {last.get('MESSAGE')!r})")


@contextmanager
def _followed(host: LabHost, matches: tuple[str, ...], deadline_s: float) -> Iterator[Iterator[Entry]]:
    command = ("journalctl", "--follow", "--no-tail", "--output=json", "--all", "--quiet", *matches)
    with host.popen(*command, stdout=subprocess.PIPE) as journalctl:
        assert journalctl.stdout is not None
        timer = Timer(deadline_s, journalctl.kill)
        timer.start()
        try:
            yield (json.loads(line) for line in journalctl.stdout)
        finally:
            timer.cancel()
            journalctl.kill()
