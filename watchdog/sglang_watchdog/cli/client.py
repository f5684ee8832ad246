"""Asks the running daemon over its control socket."""

import asyncio
import errno
from pathlib import Path

import aiohttp

from sglang_watchdog.control import SOCKET_NAME
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError

Json = dict[str, object]
_TIMEOUT_S = 120
_DENIED = frozenset({errno.EACCES, errno.EPERM})


class NotRunning(WatchdogError):
    """No daemon answers on the control socket, or not to us."""


def ask(runtime_dir: Path, method: str, path: str, timeout_s: float = _TIMEOUT_S) -> Json:
    """One request. Raises `WatchdogError` with the daemon's own words, or with what keeps it from being asked."""
    return asyncio.run(_ask(runtime_dir / SOCKET_NAME, method, path, timeout_s))


async def _ask(socket: Path, method: str, path: str, timeout_s: float) -> Json:
    connector = aiohttp.UnixConnector(path=str(socket))
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s, connect=5)
    ) as session:
        try:
            async with session.request(method, f"http://watchdog{path}") as answer:
                body: Json = await answer.json()
                status = answer.status
        except aiohttp.ContentTypeError as error:
            raise WatchdogError("the daemon failed to answer; why: journalctl -u sglang-watchdog") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NotRunning(_why_not(socket, error, timeout_s)) from error
    if status == 400:
        raise UnusableInput(str(body.get("error")))
    if status != 200:
        raise WatchdogError(str(body.get("error", f"the daemon answered {status}")))
    return body


def _why_not(socket: Path, error: Exception, timeout_s: float) -> str:
    """aiohttp wraps what connect(2) said in an error of its own, which keeps the number only."""
    if isinstance(error, OSError) and error.errno in _DENIED:
        return f"{socket} is root's alone: run this as root"
    if isinstance(error, TimeoutError):
        return f"sglang-watchdog did not answer within {timeout_s:.0f} s; why: journalctl -u sglang-watchdog"
    return f"sglang-watchdog is not running ({socket} does not answer): systemctl start sglang-watchdog"
