"""A small load: `python -m sim_sglang.load --url http://127.0.0.1:30000 --requests 16 --tokens 400`.

Bounded in requests, tokens and time, and only for this machine's own loopback address. Prints one line: how many
requests were answered and the tokens a second, as the clients saw them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

MOST_REQUESTS, MOST_TOKENS = 256, 1_000_000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Load:
    """Requests sent all at once, each with its own connection."""

    host: str
    port: int
    requests: int
    tokens: int
    timeout_s: float = 60.0
    answered: int = 0
    generated: int = 0
    errors: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def to(cls, url: str, requests: int, tokens: int, timeout_s: float = 60.0) -> Load:
        """Raises ValueError for another machine's address or a load without bounds."""
        parts = urlsplit(url)
        if parts.hostname not in LOOPBACK or not parts.port:
            raise ValueError(f"only http://127.0.0.1:PORT can be loaded, not {url}")
        if not 0 < requests <= MOST_REQUESTS or not 0 < tokens <= MOST_TOKENS:
            raise ValueError(f"at most {MOST_REQUESTS} requests of {MOST_TOKENS} tokens")
        return cls(parts.hostname, parts.port, requests, tokens, timeout_s)

    def start(self) -> None:
        self.threads = [threading.Thread(target=self._one, daemon=True) for _ in range(self.requests)]
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        """Wait until every request was answered or failed."""
        for thread in self.threads:
            thread.join(self.timeout_s + 5)

    def _one(self) -> None:
        body = json.dumps({"text": "Tell me of the sea", "sampling_params": {"max_new_tokens": self.tokens}})
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            count = json.loads(answer.read())["meta_info"]["completion_tokens"]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with self._lock:
                self.errors.append(f"{type(error).__name__}: {error}")
            return
        finally:
            connection.close()
        with self._lock:
            self.answered += 1
            self.generated += count


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim_sglang.load")
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    wanted = parser.parse_args()
    try:
        load = Load.to(wanted.url, wanted.requests, wanted.tokens, wanted.timeout)
    except ValueError as error:
        parser.error(str(error))
    began = time.monotonic()
    load.start()
    load.join()
    seconds = time.monotonic() - began
    print(f"{load.answered} of {load.requests} requests answered, {load.generated / seconds:.0f} tokens/s")
    for text in sorted(set(load.errors)):
        print(f"  {load.errors.count(text)} x {text}")
    return 0 if load.answered == load.requests else 1


if __name__ == "__main__":
    sys.exit(main())
