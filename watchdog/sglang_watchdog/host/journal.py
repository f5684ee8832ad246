"""The journal, pulled: `journalctl -o json` after a cursor, when something else says that there is news.

Following wakes 400 to 500 ms late, because journald batches its change notices, while an entry can be read after
0.7 ms (measured on systemd 252). `--all`, since journalctl gives fields over 4096 bytes as null without it, and
SGLang's `server_args=` line is one.
"""

import asyncio
from collections.abc import Callable

from sglang_watchdog.domain.errors import DeadlineExceeded, WatchdogError
from sglang_watchdog.domain.journal import FIELDS, JournalEntry, MessageId
from sglang_watchdog.host.child import CannotBeRun, give_up, start

# A line of the journal is at most 48 KiB of message (LineMax=), six times that where it is not UTF-8; but an operator
# can raise LineMax=, and what logs by itself (sd_journal_send) has no such bound.
_LINE_LIMIT = 16 * 1024 * 1024
READING = ("--output=json", f"--output-fields={','.join(FIELDS)}", "--all", "--no-pager", "--quiet")
Feed = Callable[[JournalEntry], None]
Parse = Callable[[bytes], JournalEntry | None]


class JournalUnreadable(WatchdogError):
    """journalctl failed, or could not be run; the text has its own words or the kernel's."""


class _NothingAtCursor(JournalUnreadable):
    """journalctl failed before it gave an entry: the cursor is not in the journal any more."""


class Journal:
    """Reads one launch's entries. `parse` turns a line of `journalctl -o json` into an entry."""

    def __init__(self, parse: Parse, command: str = "journalctl") -> None:
        self._parse = parse
        self._command = command

    async def pull(self, invocation: str, feed: Feed, *, since: float, cursor: str = "", deadline: float = 30.0) -> str:
        """Feeds what the launch's processes, PID 1 and the kernel said, from `cursor` on (else from `since`, Unix
        seconds); returns the new cursor. A cursor that rotation took away falls back to `since`.

        Raises `DeadlineExceeded` or `JournalUnreadable`. What was fed by then stays fed: whoever goes on after that
        takes the cursor of the last entry that came."""
        matches = matches_of(invocation)
        if cursor:
            try:
                return await self._run(feed, cursor, [f"--after-cursor={cursor}", *matches], deadline)
            except _NothingAtCursor:
                pass  # rotated or vacuumed away: the time is all that is left
        return await self._run(feed, cursor, [f"--since=@{max(0.0, since):.6f}", *matches], deadline)

    async def _run(self, feed: Feed, cursor: str, arguments: list[str], deadline: float) -> str:
        try:
            process = await start([self._command, *READING, *arguments], limit=_LINE_LIMIT)
        except CannotBeRun as error:
            raise JournalUnreadable(str(error)) from error
        try:
            async with asyncio.timeout(deadline):
                reached = await self._feed_lines(process, feed, cursor)
                assert process.stderr is not None
                words = (await process.stderr.read(4096)).decode(errors="replace").strip()
                status = await process.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"journalctl did not end within {deadline:.0f} s") from error
        finally:
            await give_up(process)
        if status:
            failure = JournalUnreadable if reached != cursor else _NothingAtCursor
            raise failure(f"journalctl ended with status {status}: {words or 'no words'}")
        return reached

    async def _feed_lines(self, process: asyncio.subprocess.Process, feed: Feed, cursor: str) -> str:
        assert process.stdout is not None
        while line := await _next_line(process.stdout):
            entry = self._parse(line)
            if entry is not None:
                feed(entry)
                cursor = entry.cursor or cursor
        return cursor


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Empty at the end. Of a line over the limit only the last piece, which is no entry: to stop at it would mean to
    stop at it for ever, because nothing behind it has a cursor yet."""
    while True:
        try:
            return await stream.readline()
        except ValueError:  # it has thrown away what it had of the line
            continue


def matches_of(invocation: str) -> list[str]:
    """Alternatives, joined by `+`: the unit's own entries, PID 1's about it, the kernel's, and systemd-oomd's."""
    return [
        f"_SYSTEMD_INVOCATION_ID={invocation}",
        "+",
        f"INVOCATION_ID={invocation}",
        "+",
        "_TRANSPORT=kernel",
        "+",
        f"MESSAGE_ID={MessageId.OOMD_KILL}",
    ]
