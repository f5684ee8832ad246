"""What an SGLang server says over HTTP. Every call has a deadline, and no failure of the server is an exception.

It says what was proven and no more: a port that answers can be another server's, and HTTP 200 is no token. Some calls
wait for ever on a dead scheduler (`/server_info`, `/get_load`), and `/health` for 20 s before it gives up by itself.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.secrets import redact_mapping
from sglang_watchdog.domain.speculation import Command

# SGLang's own defaults.
_HOST, _PORT = "127.0.0.1", 30000
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": _HOST}
# The prompt of SGLang's own warm-up: token ids need no tokenizer, which a server may be started without.
_PROMPT = [10, 11, 12]
_PROBE_TOKENS = 4
# More is no answer of SGLang's; /server_info has some 100 KiB.
_LONGEST_ANSWER = 4 << 20


class HealthState(StrEnum):
    REFUSED = "refused"  # nothing listens: SGLang binds its port after all weights and graphs are in place
    STARTING = "starting"  # 503 before the first 200: it warms up
    UP = "up"
    UNHEALTHY = "unhealthy"  # 503 after that (draining, scheduler dead), or no HTTP of SGLang's
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that really came, in so many seconds. Without tokens `reason` says why there are none. `silent`: the
    request was taken, and there was no answer until the deadline."""

    tokens: int
    seconds: float
    reason: str = ""
    silent: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """`status` is 0 where there was no HTTP answer; `body` is None where it was no JSON object or list."""

    status: int
    reason: str
    body: Any = None
    state: HealthState = HealthState.UNHEALTHY


def address_of(argv: Sequence[str]) -> tuple[str, int]:
    """Where a server with this command listens, as host (brackets around IPv6) and port for a URL. A wildcard address
    is asked by loopback."""
    command = Command.parse(argv)
    host = command.value("--host") or _HOST
    host = _EVERY_ADDRESS.get(host, host)
    port = whole(command.value("--port") or "")
    return f"[{host}]" if ":" in host else host, _PORT if port is None else port


class Server:
    """One server. `deadline` is in seconds; nothing is kept open between calls."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._was_up = False

    async def health(self, deadline: float) -> HealthState:
        """A deadline under 20 s can take a server that is about to say 503 for one that hangs."""
        answer = await self._call("GET", "/health", deadline)
        if answer.status == 200:
            self._was_up = True
            return HealthState.UP
        if answer.status == 503 and not self._was_up:
            return HealthState.STARTING
        return answer.state

    async def generate(self, deadline: float) -> Generated:
        """Asks for a few tokens, and counts those that came."""
        begun = time.monotonic()
        sampling = {"max_new_tokens": _PROBE_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self._call("POST", "/generate", deadline, {"input_ids": _PROMPT, "sampling_params": sampling})
        tokens = _tokens(answer.body, "meta_info")
        if answer.status == 404:  # a router in front, or a server of another make
            body = {"model": "default", "prompt": _PROMPT, "max_tokens": _PROBE_TOKENS, "temperature": 0}
            left = deadline - (time.monotonic() - begun)
            answer = await self._call("POST", "/v1/completions", left, body)
            tokens = _tokens(answer.body, "usage")
        reason = "" if tokens else answer.reason or "the answer has no tokens"
        return Generated(tokens, time.monotonic() - begun, reason, answer.state is HealthState.TIMEOUT)

    async def model_info(self, deadline: float) -> Mapping[str, object] | None:
        """Answered by the main process alone: it says nothing about the scheduler."""
        return await self._first_object(("/model_info", "/get_model_info"), deadline)

    async def server_info(self, deadline: float) -> Mapping[str, object] | None:
        """The effective arguments and the scheduler's state, secrets removed."""
        info = await self._first_object(("/server_info", "/get_server_info"), deadline)
        return None if info is None else redact_mapping(info)

    async def requests_in_flight(self, deadline: float) -> int | None:
        """Running and waiting, over all data-parallel ranks; None where it cannot be told."""
        answer = await self._first(("/v1/loads", "/get_load"), deadline)
        return _requests(answer.body)

    async def _first_object(self, paths: Sequence[str], deadline: float) -> Mapping[str, object] | None:
        answer = await self._first(paths, deadline)
        return answer.body if answer.status == 200 and isinstance(answer.body, dict) else None

    async def _first(self, paths: Sequence[str], deadline: float) -> _Answer:
        """The first path that this release has; they were renamed over the releases."""
        end = time.monotonic() + deadline
        answer = _Answer(0, "nothing was asked")
        for path in paths:
            answer = await self._call("GET", path, end - time.monotonic())
            if answer.status != 404:
                break
        return answer

    async def _call(self, method: str, path: str, deadline: float, body: object = None) -> _Answer:
        try:
            async with asyncio.timeout(deadline), aiohttp.ClientSession(headers=self._headers) as session:
                url = self._url + path
                async with session.request(method, url, json=body, allow_redirects=False) as response:
                    content = _json(await _read(response))
                    return _Answer(
                        response.status, "" if response.status == 200 else f"HTTP {response.status}", content
                    )
        except TimeoutError:
            return _Answer(0, f"no answer within {deadline:.3g} s", state=HealthState.TIMEOUT)
        except aiohttp.ClientConnectorError as error:
            return _Answer(0, str(error), state=HealthState.REFUSED)
        except (aiohttp.ClientError, OSError) as error:
            return _Answer(0, str(error) or type(error).__name__)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LONGEST_ANSWER:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {_LONGEST_ANSWER} bytes")
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _tokens(body: object, where: str) -> int:
    """As the server counts them."""
    counts = body.get(where) if isinstance(body, dict) else None
    tokens = counts.get("completion_tokens") if isinstance(counts, dict) else None
    return tokens if isinstance(tokens, int) else 0


def _requests(body: object) -> int | None:
    names: tuple[str, ...]
    match body:
        case {"loads": [*ranks]}:  # /v1/loads, 0.5.9 and later
            names = ("num_running_reqs", "num_waiting_reqs")
        case [*ranks]:  # /get_load, up to 0.5.20: num_reqs counts the waiting ones too
            names = ("num_reqs",)
        case _:
            return None
    counts = [rank.get(name) for rank in ranks if isinstance(rank, dict) for name in names]
    whole = [count for count in counts if isinstance(count, int)]
    return sum(whole) if whole and len(whole) == len(counts) else None
