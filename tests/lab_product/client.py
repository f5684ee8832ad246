"""A client of the simulated server: real requests for tokens, and a load in the background.

Runs outside the host, which shares this machine's loopback. Bounded in requests, tokens and time.
"""

import http.client
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ANSWER_S = 60.0


@dataclass(frozen=True)
class Client:
    """Of the server on one port of 127.0.0.1."""

    port: int
    api_key: str = ""

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """What `/health` says; False where nobody listens."""
        with suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/health", timeout_s=timeout_s)[0] == http.client.OK
        return False

    def generate(self, tokens: int, timeout_s: float = ANSWER_S) -> int:
        """How many tokens a request for that many brought. Raises OSError where the server went away."""
        body = {"text": "Tell me of the sea", "sampling_params": {"max_new_tokens": tokens}}
        status, answer = self.ask("POST", "/generate", body, timeout_s)
        if status != http.client.OK:
            raise ConnectionError(f"/generate answered {status}: {answer[:200]!r}")
        return int(json.loads(answer)["meta_info"]["completion_tokens"])

    def running(self) -> int:
        """Requests that the scheduler works on."""
        status, answer = self.ask("GET", "/get_load", timeout_s=5.0)
        loads: list[dict[str, Any]] = json.loads(answer) if status == http.client.OK else []
        return sum(int(one["num_reqs"]) for one in loads)

    def ask(self, method: str, path: str, body: object = None, timeout_s: float = ANSWER_S) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@dataclass
class Load:
    """Requests sent all at once, each on a connection of its own, for as long as they take."""

    client: Client
    requests: int
    tokens: int
    answered: int = 0
    broken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> "Load":
        for _ in range(self.requests):
            threading.Thread(target=self._one, daemon=True).start()
        return self

    @property
    def over(self) -> bool:
        return self.answered + self.broken == self.requests

    def _one(self) -> None:
        try:
            self.client.generate(self.tokens)
        except (OSError, http.client.HTTPException, ValueError):
            with self._lock:
                self.broken += 1
        else:
            with self._lock:
                self.answered += 1
