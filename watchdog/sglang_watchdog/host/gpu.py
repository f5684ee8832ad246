"""The cards and their holders, asked through a helper process that can be abandoned.

A call into the driver can hang for ever, and then no signal ends it. So every question has a deadline, after which
the helper is killed and never waited for, and the answer is "unknown": never an exception, never "free". There is no
helper before the first question nor after `close`, so that an idle daemon is no client of the driver.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sglang_watchdog.domain.gpu import Gpu, GpuAnswer, GpuHolder, GpuReading, GpuUnknown
from sglang_watchdog.domain.ownership import ProcessFacts
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.host import processes

# NVML stalls for up to 1.7 s while another process gives pinned memory back; less would call that a hang.
CALL_DEADLINE_S = 5.0
# Each holds what it took of the driver's locks: more of them would only add to the harm.
MOST_ABANDONED = 3
_GOODBYE_S = 0.5
_LOOK_S = 0.01
# A card lists some tens of holders, each with a few words.
_LONGEST_LINE = 4 << 20


@dataclass(frozen=True, slots=True)
class DeviceHolder:
    """A process that has the driver's memory device open, and the cards that it opened (`/dev/nvidia0`)."""

    pid: int
    devices: tuple[str, ...]


class NoAnswer(Exception):
    """Why there is none, in one sentence."""


class ProbeWorker:
    """Starts, asks and abandons helper processes. One question at a time; `deadline` is seconds, start included.
    `where` is what they can hang in, for a person."""

    def __init__(self, where: str = "in the driver") -> None:
        self._where = where
        self._worker: _Worker | None = None
        self._abandoned: list[_Worker] = []
        self._one_at_a_time = asyncio.Lock()
        self.abandoned_total = 0

    @property
    def abandoned_alive(self) -> int:
        """Helpers that were killed and have not ended: each is stuck."""
        self._abandoned = [worker for worker in self._abandoned if not worker.ended()]
        return len(self._abandoned)

    async def read_gpus(self, deadline: float = CALL_DEADLINE_S) -> GpuAnswer:
        """All cards and their holders; unknown where NVML is missing, hangs, or fails for one of the cards."""
        try:
            answer = await self.ask({"do": "gpus"}, deadline)
        except NoAnswer as why:
            return GpuUnknown(time.time(), str(why))
        return GpuReading(time.time(), answer["driver"], tuple(_gpu(gpu) for gpu in answer["gpus"]))

    async def describe(self, pids: Iterable[int], deadline: float = CALL_DEADLINE_S) -> dict[int, ProcessFacts]:
        """What is known of each process; one that is gone is left out.

        Only command line and environment come from the helper: where it hangs, the rest is known all the same.
        `deadline` is for all together.
        """
        end = time.monotonic() + deadline
        found: dict[int, ProcessFacts] = {}
        for pid in sorted(set(pids)):
            facts = processes.facts(pid)
            if facts is not None:
                facts = await self._with_words(facts, end - time.monotonic())
            # Read again: the words may be those of a later process with this pid.
            if facts is not None and processes.identify(pid) == facts.id:
                found[pid] = facts
        return found

    async def device_holders(self, deadline: float = CALL_DEADLINE_S) -> tuple[DeviceHolder, ...] | GpuUnknown:
        """Who has the driver's memory device open: the second source, where NVML names no pids."""
        try:
            answer = await self.ask({"do": "device_holders"}, deadline)
        except NoAnswer as why:
            return GpuUnknown(time.time(), str(why))
        return tuple(DeviceHolder(holder["pid"], tuple(holder["devices"])) for holder in answer)

    async def close(self) -> None:
        """No helper any more: called when no incident is on. Takes at most half a second."""
        async with self._one_at_a_time:
            if self._worker is not None:
                self._abandon(self._worker)
                self._worker = None
            end = time.monotonic() + _GOODBYE_S
            while self.abandoned_alive and time.monotonic() < end:
                await asyncio.sleep(_LOOK_S)

    async def _with_words(self, facts: ProcessFacts, deadline: float) -> ProcessFacts:
        try:
            words = await self.ask({"do": "process", "pid": facts.id.pid}, deadline)
        except NoAnswer:
            return facts
        argv = words["argv"]
        return replace(facts, argv=None if argv is None else redact_argv(argv), invocation=words["invocation"])

    async def ask(self, request: dict[str, object], deadline: float) -> Any:
        """The answer of a helper (see `host.probe_worker`). Raises `NoAnswer`."""
        try:
            async with asyncio.timeout(deadline), self._one_at_a_time:
                answer = await self._exchange(request)
        except TimeoutError:
            self.abandoned_total += 1
            raise NoAnswer(f"a read hangs {self._where}: no answer within {deadline:.3g} s") from None
        if "error" in answer:
            raise NoAnswer(answer["error"])
        return answer["answer"]

    async def _exchange(self, request: dict[str, object]) -> dict[str, Any]:
        """The helper that fails an exchange, whyever (cancelled too), is not asked again: its answer may still come,
        and a driver that was replaced is loaded by a new process only."""
        if self.abandoned_alive >= MOST_ABANDONED:
            raise NoAnswer(f"{MOST_ABANDONED} earlier calls still hang {self._where}")
        worker = self._worker or await _started()
        self._worker = None
        answer: dict[str, Any] = {"error": "the probe worker ended without an answer"}
        kept = False
        try:
            answer = await worker.exchange(request)
            kept = "error" not in answer
        except (OSError, EOFError, ValueError):
            pass
        finally:
            if kept:
                self._worker = worker
            else:
                self._abandon(worker)
        return answer

    def _abandon(self, worker: "_Worker") -> None:
        worker.kill()
        self._abandoned.append(worker)


class _Worker:
    """One helper process, and the socket that is its stdin and stdout.

    Not asyncio's own subprocess: that waits for the child in a thread or at the loop's end, and a child stuck in the
    driver never ends.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
            process = subprocess.Popen(
                # -P: what the daemon was started from is no place to import from.
                [sys.executable, "-P", "-m", "sglang_watchdog.host.probe_worker"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                process_group=0,  # a Ctrl-C is the daemon's to handle
            )
        return cls(process, reader, writer)

    async def exchange(self, request: dict[str, object]) -> dict[str, Any]:
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()
        line = await self._reader.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self._writer.transport.abort()
        self._process.kill()

    def ended(self) -> bool:
        """Looks, never waits; reaps it if it has."""
        return self._process.poll() is not None


async def _started() -> _Worker:
    try:
        return await _Worker.start()
    except OSError as error:
        raise NoAnswer(f"the probe worker cannot be started: {error}") from error


def _gpu(gpu: dict[str, Any]) -> Gpu:
    holders = tuple(GpuHolder(pid, bytes_) for pid, bytes_ in gpu["holders"])
    return Gpu(gpu["index"], gpu["uuid"], gpu["name"], gpu["total"], gpu["used"], holders)
