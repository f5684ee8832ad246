"""The warm-up thread of the main process: asks the server over HTTP until it answers, generates, and says `fired up`.

It talks to whoever listens on the address, which is the real one's weakness where the port belongs to another server.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

from sim_sglang.flags import ServerArgs
from sim_sglang.logs import Log
from sim_sglang.settings import Settings
from sim_sglang.web import WARMUP_HEADER

TRIES, PAUSE_S, TIMEOUT_S = 120, 1.0, 30
FIRED_UP = "The server is fired up and ready to roll!"


class Warmup:
    """One warm-up."""

    def __init__(self, args: ServerArgs, settings: Settings, log: Log, failed: Callable[[str], None]) -> None:
        self.args, self.settings, self.log, self.failed = args, settings, log, failed

    def start(self, up: Callable[[], None]) -> threading.Thread:
        """Warm up in a thread; `up` is called once the server has generated."""
        thread = threading.Thread(target=self._run, args=(up,), daemon=True)
        thread.start()
        return thread

    def _run(self, up: Callable[[], None]) -> None:
        if self.args.get("skip_server_warmup"):
            up()
            self.log.say(FIRED_UP)
            return
        try:
            self._until_it_answers()
            body = json.dumps({"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}})
            self._ask("POST", "/generate", body)
            up()
            if self.args.release.freezes_gc:
                self._ask("POST", "/freeze_gc", "")
        except (OSError, http.client.HTTPException) as error:
            self.failed(f"Traceback (most recent call last):\n{type(error).__name__}: {error}\n")
            return
        self.log.say(FIRED_UP)

    def _until_it_answers(self) -> None:
        path = "/model_info" if self.args.release.at_least("0.5.9") else "/get_model_info"
        for left in reversed(range(TRIES)):
            self.settings.rest(PAUSE_S)
            try:
                self._ask("GET", path, None)
            except (OSError, http.client.HTTPException):
                if not left:
                    raise
            else:
                return

    def _ask(self, method: str, path: str, body: str | None) -> None:
        connection = http.client.HTTPConnection(self.args.get("host"), self.args.get("port"), timeout=TIMEOUT_S)
        headers = {WARMUP_HEADER: "1", "Connection": "close"}
        if self.args.api_key:
            headers["Authorization"] = f"Bearer {self.args.api_key}"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"{path} answered {answer.status}")
        finally:
            connection.close()
