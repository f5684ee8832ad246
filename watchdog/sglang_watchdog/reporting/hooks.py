"""Hooks: a command and a webhook of the operator's, told of each incident, with timeout and retry.

`tell` never waits and never raises. Each hook has a queue of its own that is bounded; what does not fit is dropped and
counted. What goes out is one JSON object, secrets removed, of a bounded size.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import structlog

from sglang_watchdog.domain.incident import Incident
from sglang_watchdog.domain.secrets import redact_mapping
from sglang_watchdog.reporting.metrics import Delivery, HookKind, Metrics
from sglang_watchdog.settings import HookSettings

# Incidents come at most every few seconds; this many waiting means that the receiver has been away for long.
_WAITING = 64
_LONGEST_BYTES = 64 * 1024
# Between two tries: 1 s, 2 s, 4 s, … and at most this.
_LONGEST_PAUSE_S = 60.0
# What the daemon's own end gives to what is still under way.
_LAST_S = 5.0
# What `hand-back` gives: its service has 60 s in all, and what is handed back is started by then.
_ALONE_S = 45.0
_REAP_S = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
log = structlog.get_logger()


class Event(StrEnum):
    OPENED = "opened"  # a recovery begins
    CLOSED = "closed"  # of every incident, the ones without a recovery included


class DeliveryFailed(Exception):
    """One try did not reach its receiver. The text holds no secret."""


@dataclass(frozen=True, slots=True)
class Message:
    """`body` is JSON; `variables` say the same in short, for a command that reads no JSON."""

    body: bytes
    variables: Mapping[str, str]

    @classmethod
    def of(cls, event: Event, incident: Incident) -> "Message":
        short = {
            "event": event.value,
            "unit": incident.unit,
            "incident": incident.id,
            "class": incident.failure.value,
            "outcome": incident.outcome.value,
        }
        told = {
            "version": 1,
            "host": socket.gethostname(),
            **short,
            "invocation": incident.invocation,
            "opened": incident.opened,
            "closed": incident.closed,
            "summary": incident.summary,
            "reason": incident.reason,
            "steps": [step.value for step in incident.steps],
        }
        whole = json.dumps(redact_mapping({**told, "diagnosis": incident.diagnosis})).encode()
        if len(whole) > _LONGEST_BYTES:  # a log's worst lines as evidence; the ledger has them
            whole = json.dumps(redact_mapping(told)).encode()[:_LONGEST_BYTES]
        variables = {f"SGLANG_WATCHDOG_{name.upper()}": str(value) for name, value in redact_mapping(short).items()}
        return cls(whole, variables)


class Hook(Protocol):
    """One receiver."""

    @property
    def kind(self) -> HookKind: ...

    async def deliver(self, message: Message) -> None:
        """One try. Raises `DeliveryFailed`; may be cancelled."""


class Hooks:
    """All hooks of one daemon."""

    def __init__(self, settings: HookSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._queues: dict[HookKind, asyncio.Queue[Message]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """In the running event loop. Without settings there is nothing to do."""
        for hook in _configured(self._settings):
            queue = self._queues[hook.kind] = asyncio.Queue(_WAITING)
            self._tasks.append(asyncio.create_task(self._work(hook, queue)))

    def tell(self, event: Event, incident: Incident) -> None:
        for kind, queue in self._queues.items():
            try:
                queue.put_nowait(Message.of(event, incident))
            except asyncio.QueueFull:
                log.warning("hook dropped", hook=kind.value, incident=incident.id, why=f"{_WAITING} are waiting")
                self._metrics.hook_deliveries.labels(kind, Delivery.DROPPED).inc()

    async def close(self, last_s: float = _LAST_S) -> None:
        """Gives what is under way a moment, then gives it up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last_s):
                await asyncio.gather(*(queue.join() for queue in self._queues.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, hook: Hook, queue: "asyncio.Queue[Message]") -> None:
        while True:
            message = await queue.get()
            try:
                result = await self._try_until_done(hook, message)
                self._metrics.hook_deliveries.labels(hook.kind, result).inc()
            finally:
                queue.task_done()

    async def _try_until_done(self, hook: Hook, message: Message) -> Delivery:
        incident = message.variables["SGLANG_WATCHDOG_INCIDENT"]
        for tried in range(self._settings.retries + 1):
            if tried:
                await asyncio.sleep(min(2.0 ** (tried - 1), _LONGEST_PAUSE_S))
            try:
                async with asyncio.timeout(self._settings.timeout):
                    await hook.deliver(message)
            except TimeoutError:
                why = f"no end within {self._settings.timeout:g} s"
            except DeliveryFailed as error:
                why = str(error)
            else:
                return Delivery.DELIVERED
            log.warning("hook failed", hook=hook.kind.value, incident=incident, attempt=tried + 1, why=why)
        return Delivery.FAILED


async def tell_closed(settings: HookSettings, incidents: Sequence[Incident]) -> None:
    """Where there is no daemon to do it: returns once each incident is delivered or given up."""
    hooks = Hooks(settings, Metrics((), ""))
    hooks.start()
    for incident in incidents:
        hooks.tell(Event.CLOSED, incident)
    await hooks.close(_ALONE_S)


def _configured(settings: HookSettings) -> list[Hook]:
    hooks: list[Hook] = []
    if settings.command:
        hooks.append(CommandHook(settings.command))
    if settings.webhook is not None:
        hooks.append(WebHook(settings.webhook, settings.webhook_token_file))
    return hooks


@dataclass(frozen=True, slots=True)
class CommandHook:
    """Gets the JSON on its standard input and the short form in its environment; nothing that it prints is kept."""

    command: tuple[str, ...]
    kind: HookKind = HookKind.COMMAND

    async def deliver(self, message: Message) -> None:
        environment = {"PATH": _PATH, "LANG": "C.UTF-8", **message.variables}
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise DeliveryFailed(f"cannot be run: {error.strerror}") from error
        try:
            _first_to_go(process.pid)
            await process.communicate(message.body)
        finally:
            await _end(process)
        if process.returncode:
            raise DeliveryFailed(f"ended with status {process.returncode}")


def _first_to_go(pid: int) -> None:
    """Where memory runs out it is the hook that is ended, not the daemon that it belongs to."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


async def _end(process: asyncio.subprocess.Process) -> None:
    """The command and what it left in its session's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REAP_S):
            await process.wait()


@dataclass(frozen=True, slots=True)
class WebHook:
    """POSTs the JSON. No redirect is followed, so that the token goes nowhere else; an answer of 2xx is a delivery."""

    url: str
    token_file: Path | None = None
    kind: HookKind = HookKind.WEBHOOK

    async def deliver(self, message: Message) -> None:
        headers = {"Content-Type": "application/json", **self._authorization()}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(self.url, data=message.body, headers=headers, allow_redirects=False) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Its text may hold the whole address, and that a token.
            raise DeliveryFailed(f"{self._receiver()}: {type(error).__name__}") from error
        if not 200 <= status < 300:
            raise DeliveryFailed(f"{self._receiver()} answered {status}")

    def _authorization(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        except (OSError, UnicodeDecodeError) as error:
            raise DeliveryFailed(f"{self.token_file} cannot be read: {type(error).__name__}") from error

    def _receiver(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"
