"""Commands that the sandbox of our own service has no room for: systemd runs each in a transient unit of its own, so
that the sandbox stays as it is, and what hangs is systemd's to end.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_watchdog.domain.errors import DeadlineExceeded, WatchdogError
from sglang_watchdog.host.child import give_up


class CannotBeRun(WatchdogError):
    """systemd-run itself cannot be started."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command printed, and its exit status. `complaint` is the last line of its stderr."""

    status: int
    printed: bytes
    complaint: str


async def run(*words: str, deadline: float, description: str, properties: Sequence[str] = ()) -> Ended:
    """`deadline` in seconds. Raises `CannotBeRun` or `DeadlineExceeded`."""
    command = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"]
    command += [f"--description={description}", f"--property=RuntimeMaxSec={max(1, round(deadline))}"]
    command += [f"--property={one}" for one in properties]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, "--", *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise CannotBeRun(f"systemd-run cannot be started: {error}") from error
    try:
        async with asyncio.timeout(deadline):
            printed, complaint = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(f"{words[0]} does not answer within {deadline:.0f} s") from None
    finally:
        await give_up(process)
    lines = complaint.decode(errors="replace").strip().splitlines()
    return Ended(process.returncode or 0, printed, lines[-1] if lines else "")
