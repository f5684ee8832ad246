"""The HTTP side of the main process: the endpoints of the real server, its access log, and its key.

Each request has a thread. What an endpoint answers while the server starts, drains, hangs or has lost its scheduler is
the engine's state; what exists at all is the release's.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sim_sglang import replies
from sim_sglang.engine import Engine, Status, Stream
from sim_sglang.logs import Log
from sim_sglang.messages import Kind

WARMUP_HEADER = "X-Sim-Warmup"
OPEN_PATHS = ("/health", "/metrics", "/ready")
CLIENT_LOOK_S = 0.1


class Web(ThreadingHTTPServer):
    """Listens; bound only once the engine is loaded. Raises OSError where the address is in use."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, log: Log) -> None:
        self.engine, self.log = engine, log
        super().__init__((engine.args.get("host"), engine.args.get("port")), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error worth a traceback."""


class Gone(Exception):
    """The client closed its connection before the answer was complete."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Web
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """The access line is written by `_head`, in uvicorn's format."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        path = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        key = self.server.engine.args.api_key
        if key and not path.startswith(OPEN_PATHS) and self.headers.get("Authorization") != f"Bearer {key}":
            self._json(HTTPStatus.UNAUTHORIZED, {"error": "Unauthorized"})
        elif not self.server.engine.args.release.has_path(path):
            self._json(HTTPStatus.NOT_FOUND, {"detail": "Not Found"})
        elif method == "GET":
            self._get(path)
        else:
            self._post(path, body)

    def _get(self, path: str) -> None:
        engine = self.server.engine
        match path:
            case "/health" | "/health_generate" | "/ready":
                self._health()
            case "/ping":
                self._send(HTTPStatus.OK, b"", "text/plain")
            case "/model_info" | "/get_model_info":
                self._json(HTTPStatus.OK, replies.model_info(engine))
            case "/v1/models":
                self._json(HTTPStatus.OK, replies.models(engine))
            case "/server_info" | "/get_server_info":
                self._json(HTTPStatus.OK, replies.server_info(engine, engine.internal_state()))
            case "/get_load" | "/v1/loads":
                engine.internal_state()  # asks the scheduler, and so hangs with it
                self._json(HTTPStatus.OK, replies.load(engine, path))
            case "/metrics" if engine.args.get("enable_metrics"):
                self._send(HTTPStatus.OK, replies.metrics(engine).encode(), "text/plain; version=0.0.4")
            case _:
                self._json(HTTPStatus.NOT_FOUND, {"detail": "Not Found"})

    def _health(self) -> None:
        engine, log = self.server.engine, self.server.log
        if engine.draining:
            log.say("Health check request received during shutdown. Returning 503.")
            healthy = False
        else:
            healthy = engine.status is not Status.STARTING and engine.healthy(log)
        self._send(HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain")

    def _post(self, path: str, body: bytes) -> None:
        if path == "/freeze_gc":
            self._send(HTTPStatus.OK, b"Garbage collection frozen.\n", "text/plain")
            return
        if path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
            self._json(HTTPStatus.NOT_FOUND, {"detail": "Not Found"})
            return
        try:
            asked = replies.Asked.of(path, json.loads(body or b"{}"))
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            self._json(HTTPStatus.BAD_REQUEST, {"error": {"message": str(wrong), "code": 400}})
            return
        kind = Kind.WARMUP if WARMUP_HEADER in self.headers else Kind.CLIENT
        engine = self.server.engine
        stream = engine.submit(kind, asked.prompt_tokens, asked.max_tokens)
        engine.answering.add(stream.rid)
        try:
            self._stream(asked, stream) if asked.stream else self._whole(asked, stream)
        except (Gone, OSError):
            self.close_connection = True
            engine.abandon(stream)
        finally:
            engine.answering.discard(stream.rid)

    # -- answers that take their time

    def _whole(self, asked: replies.Asked, stream: Stream) -> None:
        began, count = time.monotonic(), 0
        for new, _ in self._tokens(stream):
            count += new
        self._json(HTTPStatus.OK, replies.whole(self.server.engine, asked, stream.rid, count, time.monotonic() - began))

    def _stream(self, asked: replies.Asked, stream: Stream) -> None:
        self._head(HTTPStatus.OK, "text/event-stream; charset=utf-8", None)
        count = 0
        for new, done in self._tokens(stream):
            count += new
            self._event(json.dumps(replies.part(self.server.engine, asked, stream.rid, new, count, done)))
        self._event("[DONE]")
        self._chunk(b"")

    def _tokens(self, stream: Stream) -> Iterator[tuple[int, bool]]:
        """What comes for this request, to its end; raises Gone once the client hung up."""
        looked = time.monotonic()
        while True:
            got = stream.next(CLIENT_LOOK_S)
            if got:
                yield got
                if got[1]:
                    return
            if time.monotonic() - looked > CLIENT_LOOK_S:
                looked = time.monotonic()
                if self._client_left():
                    raise Gone

    def _client_left(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def _event(self, text: str) -> None:
        self._chunk(f"data: {text}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    # -- whole answers

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        host, port = self.client_address[:2]
        self.server.log.access(f'{host}:{port} - "{self.command} {self.path} HTTP/1.1" {status.value} {status.phrase}')
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()
