"""A released SGLang as a unit of a lab host: its unit file, and what a client sees of it.

The server is SGLang on the CPU with a model of two layers and random weights: real processes, signals, exit
statuses, health states and log lines, no GPU bytes. The host shares this machine's loopback, so clients run outside.
"""

import http.client
import json
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.host import LabHost
from sglang_real.following import Entry, wait_for_entry
from waiting import wait_until

HARNESS = Path(__file__).parent / "cpu_harness"
MODEL = HARNESS / "tiny_llama"
ON_THE_CPU = (
    *("--model-path", str(MODEL), "--load-format", "dummy", "--device", "cpu", "--skip-tokenizer-init"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-overlap-schedule",
)
FITS = ("--mem-fraction-static", "0.2", "--max-total-tokens", "4096")
# Memory cannot be the reason: on the CPU the pool comes from the machine's free memory, which other processes change
# meanwhile, so that the smallest fraction serves one time in two. A pool of no tokens fails every time, where the pool
# is sized, with SGLang's own "Not enough memory".
CANNOT_BE_SIZED = ("--mem-fraction-static", "0.1", "--max-total-tokens", "0")
ENVIRONMENT = {
    "PYTHONPATH": str(HARNESS),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "SPT_NOENV": "1",  # titled workers keep the environment by which they are proven the unit's
    "PYTHONDONTWRITEBYTECODE": "1",  # the environment is shared by hosts and runs
    "TORCHDYNAMO_DISABLE": "1",  # 0.5.9 compiles C++ at its first request otherwise, a minute of it
}
# 31 s of CPU time, most of it imports in three processes: half a minute on two idle cores, more on busy ones.
START_DEADLINE_S = 240.0
READY = "The server is fired up and ready to roll!"


@dataclass(frozen=True)
class RealServer:
    """One unit of `host`, and its port. `python` is that of the environment which packaging/sglang-env.sh makes."""

    host: LabHost
    unit: str
    port: int
    python: Path

    def argv(self, memory: Sequence[str]) -> tuple[str, ...]:
        server = (str(self.python), "-W", "ignore", "-m", "sglang.launch_server")
        return (*server, *ON_THE_CPU, "--port", str(self.port), *memory)

    def define(self, memory: Sequence[str], *, stop_s: float, restart: str = "no", kill_mode: str = "mixed") -> None:
        """Writes the unit file and has it loaded. SGLang looks every 5 s whether a drain is over."""
        environment = "".join(f"Environment={name}={value}\n" for name, value in ENVIRONMENT.items())
        self.host.unit(
            self.unit,
            f"[Service]\nExecStart={shlex.join(self.argv(memory))}\n{environment}"
            f"KillMode={kill_mode}\nTimeoutStopSec={stop_s:g}\nRestart={restart}\nRestartSec=1\n",
        )

    def start(self) -> str:
        """Starts the unit and returns once it serves: the launch's invocation id."""
        self.host.systemctl("start", self.unit)
        invocation = self.invocation()
        self.wait_ready(invocation)
        return invocation

    def wait_ready(self, invocation: str) -> None:
        """Returns once the launch says that it is ready; raises AssertionError where it ends before."""
        of_launch = (f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}")
        told = wait_for_entry(self.host, of_launch, _ready_or_over, START_DEADLINE_S, f"{self.unit} is ready")
        assert READY in told["MESSAGE"], self.log(invocation)[-4000:]
        wait_until(lambda: self.health() == 200, 10, f"{self.unit} is healthy")

    def invocation(self) -> str:
        return self.host.show(self.unit, "InvocationID")["InvocationID"]

    def has_ended(self) -> bool:
        return self.host.show(self.unit, "ActiveState")["ActiveState"] in ("failed", "inactive")

    def end(self) -> tuple[str, str, str]:
        """Result, ExecMainCode and ExecMainStatus."""
        shown = self.host.show(self.unit, "Result", "ExecMainCode", "ExecMainStatus")
        return shown["Result"], shown["ExecMainCode"], shown["ExecMainStatus"]

    def titles(self) -> list[str]:
        """The command lines of the unit's processes."""
        return list(self.processes())

    def processes(self) -> dict[str, int]:
        """The host's own pids by command line; of equal ones the last."""
        group = self.host.show(self.unit, "ControlGroup")["ControlGroup"]
        script = (
            'for p in $(cat "/sys/fs/cgroup$1/cgroup.procs"); do echo "$p $(tr "\\0" " " <"/proc/$p/cmdline")"; done'
        )
        lines = self.host.run("sh", "-c", script, "processes", group).stdout.splitlines()
        return {title.strip(): int(pid) for pid, _, title in (line.partition(" ") for line in lines)}

    def wait_over(self) -> None:
        wait_until(self.has_ended, START_DEADLINE_S, f"{self.unit} has ended")

    def log(self, invocation: str) -> str:
        """What the launch printed, prefixes included."""
        entries = self.host.journal(f"_SYSTEMD_INVOCATION_ID={invocation}")
        return "\n".join(entry["MESSAGE"] for entry in entries if isinstance(entry["MESSAGE"], str))

    def health(self) -> int | None:
        """The status of /health, None while nobody listens."""
        with suppress(OSError, http.client.HTTPException):
            return self._request("GET", "/health")[0]
        return None

    def generate(self, tokens: int) -> list[int]:
        """The ids of so many tokens, generated now. There is no tokenizer, so there is no text."""
        status, body = self._request("POST", "/generate", _prompt(tokens))
        assert status == 200, body
        return list(json.loads(body)["output_ids"])

    @contextmanager
    def requests_in_flight(self, count: int) -> Iterator[None]:
        """So many requests that run for a minute; their clients wait and read nothing."""
        body = json.dumps(_prompt(1000)).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with ExitStack() as clients:
            for _ in range(count):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=10))
                client.sendall(head.encode() + body)
            running = f"#running-req: {count},"
            wait_for_entry(
                self.host,
                (f"_SYSTEMD_INVOCATION_ID={self.invocation()}",),
                lambda entry: "Decode batch" in entry["MESSAGE"] and running in entry["MESSAGE"],
                *(30, f"{count} requests run"),
            )
            yield

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _ready_or_over(entry: Entry) -> bool:
    return READY in entry["MESSAGE"] or "UNIT_RESULT" in entry


def _prompt(tokens: int) -> dict[str, Any]:
    return {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
