"""Child processes: started, waited for in bounded time, and given up."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_watchdog.domain.errors import DeadlineExceeded, WatchdogError

# A killed process that still has not ended is stuck in the kernel (a disk that does not answer).
REAP_S = 2.0
_LINE_LIMIT = 64 * 1024


class CannotBeRun(WatchdogError):
    """There is no such command, or the host has no memory or process left, which is what one in trouble answers."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command printed, what it complained of (stderr), and its exit status."""

    status: int
    printed: bytes
    complaint: str

    @property
    def last_words(self) -> str:
        return self.complaint.splitlines()[-1] if self.complaint else ""


async def start(argv: Sequence[str], *, limit: int = _LINE_LIMIT) -> asyncio.subprocess.Process:
    """Without input, and with both outputs to be read; `limit` is of a line, in bytes. Raises `CannotBeRun`."""
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, limit=limit
        )
    except OSError as error:
        raise CannotBeRun(f"{argv[0]} cannot be run: {error.strerror or error}") from error


async def run(argv: Sequence[str], deadline: float) -> Ended:
    """`deadline` in seconds. Raises `CannotBeRun` or `DeadlineExceeded`."""
    process = await start(argv)
    try:
        async with asyncio.timeout(deadline):
            printed, complaint = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{' '.join(argv[:2])} did not end within {deadline:g} s") from error
    finally:
        await give_up(process)
    return Ended(process.returncode or 0, printed, complaint.decode(errors="replace").strip())


async def give_up(process: asyncio.subprocess.Process) -> None:
    """Kills it, lets go of it, and waits in bounded time; nothing where it has ended. asyncio's own `wait` lasts until
    the pipes are closed too, which a grandchild may hold and nobody reads any more."""
    if process.returncode is not None:
        return
    process._transport.close()  # type: ignore[attr-defined]  # kills it; there is no public way to close the pipes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await process.wait()
