"""The end of a child process that is given up: killed, let go of, and waited for in bounded time."""

import asyncio
import contextlib

# A killed process that still has not ended is stuck in the kernel (a disk that does not answer).
REAP_S = 2.0


async def give_up(process: asyncio.subprocess.Process) -> None:
    """Nothing where it has ended. asyncio's own `wait` lasts until the pipes are closed too, which a grandchild may
    hold and nobody reads any more."""
    if process.returncode is not None:
        return
    process._transport.close()  # type: ignore[attr-defined]  # kills it; there is no public way to close the pipes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await process.wait()
