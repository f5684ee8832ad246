"""Asks the running daemon over its control socket."""

import asyncio
from pathlib import Path

import aiohttp

from sglang_watchdog.control import SOCKET_NAME
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError

Json = dict[str, object]
_TIMEOUT = aiohttp.ClientTimeout(total=120, connect=5)


class NotRunning(WatchdogError):
    """No daemon answers on the control socket."""


def ask(runtime_dir: Path, method: str, path: str) -> Json:
    """One request. Raises `WatchdogError` with the daemon's own words, or with what keeps it from being asked."""
    return asyncio.run(_ask(runtime_dir / SOCKET_NAME, method, path))


async def _ask(socket: Path, method: str, path: str) -> Json:
    connector = aiohttp.UnixConnector(path=str(socket))
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
        try:
            async with session.request(method, f"http://watchdog{path}") as answer:
                body: Json = await answer.json()
                status = answer.status
        except PermissionError as error:
            raise NotRunning(f"{socket} is root's alone: run this as root") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NotRunning(
                f"sglang-watchdog is not running ({socket} does not answer): systemctl start sglang-watchdog"
            ) from error
    if status == 400:
        raise UnusableInput(str(body.get("error")))
    if status != 200:
        raise WatchdogError(str(body.get("error", f"the daemon answered {status}")))
    return body
