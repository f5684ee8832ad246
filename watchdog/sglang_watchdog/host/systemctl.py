"""What is asked of systemd through `systemctl`: calls that may outlast the bound of a call over the bus."""

import asyncio

from sglang_watchdog.domain.errors import BusError, DeadlineExceeded
from sglang_watchdog.host.child import give_up

RELOAD_DEADLINE_S = 90.0
_LIST_DEADLINE_S = 10.0


async def daemon_reload() -> None:
    """Raises `BusError` with systemctl's words, or `DeadlineExceeded`."""
    await _systemctl("daemon-reload", deadline=RELOAD_DEADLINE_S)


async def awaiting_reload() -> tuple[str, ...]:
    """Loaded services whose files changed since they were loaded: a daemon-reload would load all of them."""
    shown = await _systemctl(
        *("show", "--property=Id,NeedDaemonReload", "--type=service", "*"), deadline=_LIST_DEADLINE_S
    )
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.split("\n\n")]
    return tuple(block["Id"] for block in blocks if block.get("NeedDaemonReload") == "yes")


async def _systemctl(*arguments: str, deadline: float) -> str:
    process = await _started(arguments)
    try:
        async with asyncio.timeout(deadline):
            output, words = await process.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(f"systemctl {arguments[0]} did not end within {deadline:.0f} s") from error
    finally:
        await give_up(process)
    if process.returncode:
        raise BusError(f"systemctl {arguments[0]}: {words.decode(errors='replace').strip()}")
    return output.decode(errors="replace")


async def _started(arguments: tuple[str, ...]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            "systemctl",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:  # no memory or no process left (EAGAIN) is what a host in trouble answers
        raise BusError(f"systemctl cannot be run: {error.strerror or error}") from error
