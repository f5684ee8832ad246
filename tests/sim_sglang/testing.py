"""A simulated server under a test's control, outside systemd: its log, its children, its end.

Every process that was started is ended by `close`, by its recorded number, orphans too.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ports import free_port
from sim_sglang.simulation import Simulation, command
from waiting import wait_until

FIRED_UP = "The server is fired up and ready to roll!"


@dataclass
class Server:
    """One server process with its log in a file."""

    simulation: Simulation
    flags: tuple[str, ...]
    folder: Path
    port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    seen: dict[int, float] = field(default_factory=dict)

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = self.folder / f"server-{self.port}.log"
        argv = command(*self.flags, "--port", str(self.port), options=self.options)
        environment = os.environ | self.simulation.environment() | self.environment
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace").replace("\r", "\n")

    def wait_for(self, text: str, deadline_s: float = 20) -> None:
        """Until the log holds this text."""
        wait_until(lambda: text in self.log(), deadline_s, f"{text!r} in the log:\n" + self.log()[-1500:])

    def up(self) -> Server:
        self.wait_for(FIRED_UP)
        self.children()
        return self

    def titles(self) -> dict[int, str]:
        """Command lines of the children that run; remembered by number, so that orphans are found again."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.seen[child.pid] = child.create_time()
        return {pid: title(pid) for pid in self.seen if alive(pid)}

    def children(self) -> dict[str, int]:
        """Children that run by their titles (those without one yet look all the same)."""
        return {name: pid for pid, name in self.titles().items()}

    def wait_for_children(self, count: int) -> dict[str, int]:
        wait_until(lambda: len(self.children()) >= count, 20, f"{count} children")
        return self.children()

    def exit_status(self, deadline_s: float = 20) -> int:
        """As subprocess tells it: negative for a signal."""
        wait_until(lambda: self.process.poll() is not None, deadline_s, "the server's end:\n" + self.log()[-1500:])
        return int(self.process.returncode)

    def terminate_group(self) -> None:
        """What systemd does with KillMode=control-group."""
        self.children()
        os.killpg(self.pid, signal.SIGTERM)

    def close(self) -> None:
        self.children()
        for pid, created in [(self.pid, None), *self.seen.items()]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if created is None or process.create_time() == created:
                    process.kill()
        self.process.wait(timeout=10)

    # -- HTTP

    def ask(
        self, method: str, path: str, body: Any = None, timeout_s: float = 10, key: str | None = None
    ) -> tuple[int, bytes]:
        """Status and body; raises OSError where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def status(self, path: str, timeout_s: float = 10) -> int:
        return self.ask("GET", path, timeout_s=timeout_s)[0]

    def healthy(self) -> bool:
        try:
            return self.status("/health") == http.client.OK
        except OSError:
            return False

    def generate(self, tokens: int, timeout_s: float = 20) -> dict[str, Any]:
        body = {"text": "tell me of the sea", "sampling_params": {"max_new_tokens": tokens}}
        status, answer = self.ask("POST", "/generate", body, timeout_s)
        assert status == http.client.OK, (status, answer)
        found: dict[str, Any] = json.loads(answer)
        return found


def alive(pid: int) -> bool:
    """Does this process run (a zombie does not)?"""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(alive(pid) for pid in pids)


def title(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
