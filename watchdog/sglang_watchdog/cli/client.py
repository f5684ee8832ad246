"""Asks the running daemon over its control socket, by the standard library alone: the start gate does so at each start
of a unit, and the daemon's own HTTP library takes longer to import than the daemon to answer."""

import errno
import json
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from sglang_watchdog.domain.errors import UnusableInput, WatchdogError
from sglang_watchdog.settings_files import SOCKET_NAME

Json = dict[str, object]
_TIMEOUT_S = 120
_DENIED = frozenset({errno.EACCES, errno.EPERM})


class NotRunning(WatchdogError):
    """No daemon answers on the control socket, or not to us."""


class _UnixConnection(HTTPConnection):
    """HTTP on a unix socket. The time limit is of each read: the daemon sends an answer in one piece."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("watchdog", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(runtime_dir: Path, method: str, path: str, timeout_s: float = _TIMEOUT_S) -> Json:
    """One request. Raises `WatchdogError` with the daemon's own words, or with what keeps it from being asked."""
    control = runtime_dir / SOCKET_NAME
    connection = _UnixConnection(control, timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        status, content = answer.status, answer.read()
    except (HTTPException, OSError) as error:
        raise NotRunning(_why_not(control, error, timeout_s)) from error
    finally:
        connection.close()
    try:
        body: Json = json.loads(content)
    except ValueError as error:
        raise WatchdogError("the daemon failed to answer; why: journalctl -u sglang-watchdog") from error
    if status == 400:
        raise UnusableInput(str(body.get("error")))
    if status != 200:
        raise WatchdogError(str(body.get("error", f"the daemon answered {status}")))
    return body


def _why_not(control: Path, error: Exception, timeout_s: float) -> str:
    if isinstance(error, OSError) and error.errno in _DENIED:
        return f"{control} is root's alone: run this as root"
    if isinstance(error, TimeoutError):
        return f"sglang-watchdog did not answer within {timeout_s:.0f} s; why: journalctl -u sglang-watchdog"
    return f"sglang-watchdog is not running ({control} does not answer): systemctl start sglang-watchdog"
