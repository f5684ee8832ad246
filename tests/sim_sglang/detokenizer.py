"""The detokenizer process: hands what scheduler 0 made on to the main process, and dies with its parent."""

from __future__ import annotations

from multiprocessing.connection import Connection

from sim_sglang.bond import enter
from sim_sglang.settings import Settings


def run_detokenizer(source: Connection, target: Connection, settings: Settings) -> None:
    """Entry point of the process."""
    enter("sglang::detokenizer", settings)
    try:
        while True:
            target.send(source.recv())
    except EOFError:
        # The scheduler is gone; the real detokenizer waits on its socket all the same.
        while True:
            settings.rest(3600)
