"""The control socket: HTTP and JSON on a unix socket, so that commands ask the daemon and only the daemon acts.

The socket is root's alone (mode 0600), and the peer's credentials are checked as well: a file mode can be changed by
accident.
"""

import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from aiohttp import web

from sglang_watchdog.domain.errors import UnusableInput, WatchdogError
from sglang_watchdog.settings_files import SOCKET_NAME

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
Json = dict[str, object]


class Controlled(Protocol):
    """What the daemon lets a command ask for. Each answer is JSON; errors are `WatchdogError`."""

    async def status(self) -> Json: ...

    async def gpus(self) -> Json: ...

    async def may_start(self, unit: str) -> Json: ...

    async def free(self, unit: str, *, dry_run: bool) -> Json: ...

    async def pause(self, unit: str, seconds: float) -> Json: ...

    async def resume(self, unit: str) -> Json: ...

    async def roll_back(self, unit: str, to: str) -> Json: ...

    async def mark_good(self, unit: str) -> Json: ...

    async def forget(self, unit: str, name: str) -> Json: ...


class ControlServer:
    """Serves one `Controlled` on `folder`/control.sock."""

    def __init__(self, controlled: Controlled, folder: Path) -> None:
        self._path = folder / SOCKET_NAME
        self._controlled = controlled
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[_root_only, _errors_as_json])
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/gpus", self._gpus)
        app.router.add_get("/v1/units/{unit}/may-start", self._may_start)
        app.router.add_post("/v1/units/{unit}/free", self._free)
        app.router.add_post("/v1/units/{unit}/pause", self._pause)
        app.router.add_post("/v1/units/{unit}/resume", self._resume)
        app.router.add_post("/v1/units/{unit}/rollback", self._roll_back)
        app.router.add_post("/v1/units/{unit}/mark-good", self._mark_good)
        app.router.add_post("/v1/units/{unit}/forget", self._forget)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        self._path.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self._path)).start()
        self._path.chmod(0o600)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.status())

    async def _gpus(self, _request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.gpus())

    async def _may_start(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.may_start(request.match_info["unit"]))

    async def _free(self, request: web.Request) -> web.Response:
        dry_run = request.query.get("dry_run", "false") == "true"
        return web.json_response(await self._controlled.free(request.match_info["unit"], dry_run=dry_run))

    async def _pause(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.pause(request.match_info["unit"], _seconds(request)))

    async def _resume(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.resume(request.match_info["unit"]))

    async def _roll_back(self, request: web.Request) -> web.Response:
        to = request.query.get("to", "")
        return web.json_response(await self._controlled.roll_back(request.match_info["unit"], to))

    async def _mark_good(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controlled.mark_good(request.match_info["unit"]))

    async def _forget(self, request: web.Request) -> web.Response:
        name = request.query.get("id", "")
        return web.json_response(await self._controlled.forget(request.match_info["unit"], name))


def _seconds(request: web.Request) -> float:
    try:
        return float(request.query.get("seconds", ""))
    except ValueError as error:
        raise UnusableInput("a pause needs its length: seconds=NUMBER") from error


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _root_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None or _uid(peer) != 0:
        return web.json_response({"error": "only root may use the control socket"}, status=403)
    return await handler(request)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnusableInput as error:
        return web.json_response({"error": str(error)}, status=400)
    except WatchdogError as error:
        return web.json_response({"error": str(error)}, status=503)


def _uid(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
