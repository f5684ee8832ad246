"""The simulated server held against recorded runs of the real one: same exit status, same lines in the same order.

What may differ is blanked: numbers, request ids, the frames of a traceback. The recorded runs polled /health at their
own pace and sent requests of their own; those lines are left out on both sides.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sim_sglang.load import Load
from sim_sglang.release import Release
from sim_sglang.simulation import Simulation
from sim_sglang.testing import Server
from waiting import wait_until

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
PACED = re.compile(r'"GET /health |#new-token: 1, |^Decode batch|^Prefill batch|"POST /generate|^KV cache pool is full')
# Of the machine that recorded, or about garbage collection and caches.
OTHERS = re.compile(
    r"^Ignore import error|^tilelang not|^\[transformers\]|^Cannot detect CUDA|^init_threads|^Freezing GC"
    r"|^Compiled-kernel caches|^Using the Python TreeCore"
)
PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*(?: TP\d+)?\] ")
# Values of `server_args` that are chosen at random or by the machine.
CHOSEN = {"port", "random_seed"}
CPU_FLAGS = (
    *("--model-path", "/models/tiny", "--load-format", "dummy", "--device", "cpu", "--skip-tokenizer-init"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--max-total-tokens", "4096", "--mem-fraction-static", "0.5"),
)


def shape(line: str) -> str | None:
    """A line without what differs from run to run; None for those that are not compared."""
    text = PREFIX.sub("", line.rstrip())
    if not text or text.startswith(("  ", "rc=")) or PACED.search(text) or OTHERS.search(text):
        return None
    if text.startswith("server_args="):
        return "server_args="
    text = re.sub(r"remaining_rids=\[.*\]", "remaining_rids=[…]", text)
    text = re.sub(r"timings \(s\): .*", "timings", text)
    text = re.sub(r"Components: \(.*?\)\.", "Components", text)
    return re.sub(r"-?\d+(?:\.\d+)?", "#", re.sub(r"requests \d+\.", "requests n.", text))


def shapes(lines: list[str]) -> list[str]:
    return [found for line in lines if (found := shape(line))]


@dataclass(frozen=True)
class Recorded:
    """One recorded run: its lines, how its main process ended, and what was started."""

    lines: list[str]
    status: int
    flags: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> Recorded:
        folder = CORPUS / "recorded" / name
        entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        first = next(one for one in entries if one["SYSLOG_IDENTIFIER"] == "python")
        invocation = first["_SYSTEMD_INVOCATION_ID"]
        lines = [message(one) for one in entries if one.get("_SYSTEMD_INVOCATION_ID") == invocation]
        ended = next(message(one) for one in entries if "Main process exited" in message(one))
        argv = re.search(r"argv\[\]=\S+ -W ignore -m sglang\.launch_server (.*?) ;", (folder / "show.txt").read_text())
        assert argv
        return cls(lines, _status(ended), tuple(re.sub(r"--port \d+ ?", "", argv[1]).split()))


def message(entry: dict[str, Any]) -> str:
    text = entry["MESSAGE"]
    return text if isinstance(text, str) else bytes(text).decode()


def _status(ended: str) -> int:
    found = re.search(r"code=(\w+), status=(\d+)", ended)
    assert found
    return -int(found[2]) if found[1] == "killed" else int(found[2])


def stop_main(server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)


def stop_group(server: Server) -> None:
    server.terminate_group()


def kill_scheduler(server: Server) -> None:
    os.kill(server.children()["sglang::scheduler"], signal.SIGKILL)


def kill_main(server: Server) -> None:
    os.kill(server.pid, signal.SIGKILL)


def stop_busy_and_time_out(server: Server) -> None:
    """Three long requests run; after four seconds systemd loses its patience with all that is left."""
    Load.to(f"http://127.0.0.1:{server.port}", 3, 100_000).start()
    server.wait_for("#running-req: 3")
    stop_main(server)
    server.wait_for("Remaining number of requests 3")
    for pid in (server.pid, *server.children().values()):
        os.kill(pid, signal.SIGKILL)


def nothing(_server: Server) -> None:
    """The run ends by itself."""


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("0.5.16-stop-control-group", stop_group),
        ("0.5.16-stop-mixed", stop_main),
        ("0.5.16-stop-timeout", stop_busy_and_time_out),
        ("0.5.16-scheduler-kill9", kill_scheduler),
        ("0.5.16-systemctl-kill", kill_main),
        ("0.5.16-kv-oom-loop", nothing),
        ("0.5.16-bad-args", nothing),
    ],
)
def test_a_run_ends_and_logs_as_the_recorded_one(name: str, act: Callable[[Server], None], tmp_path: Path) -> None:
    recorded = Recorded.of(name)
    simulation = Simulation("0.5.16", "tiny", time_scale=0.03)
    server = Server(simulation, recorded.flags, tmp_path, options=("-W", "ignore")).start()
    try:
        if act is not nothing:
            server.up()
            wait_until(server.healthy, 10, "/health answers 200")
            act(server)
        assert server.exit_status() == recorded.status
        assert shapes(server.log().splitlines()) == shapes(recorded.lines)
    finally:
        server.close()


@pytest.mark.parametrize("log", sorted((CORPUS / "startup").glob("*.log")), ids=lambda path: path.name)
def test_a_release_starts_with_the_lines_of_its_recorded_log(log: Path, tmp_path: Path) -> None:
    release = Release.parse(log.stem.removeprefix("sglang-"))
    simulation = Simulation(str(release), "tiny", time_scale=0.005)
    server = Server(simulation, CPU_FLAGS, tmp_path, options=("-W", "ignore"))
    server.start()
    try:
        server.up()
        recorded = log.read_text(errors="replace").splitlines()
        end = next(i for i, line in enumerate(recorded) if "fired up" in line)
        simulated = server.log().splitlines()
        assert shapes(simulated) == shapes(recorded[: end + 1])
        assert differing_args(simulated, recorded) <= CHOSEN
    finally:
        server.close()


def differing_args(one: list[str], other: list[str]) -> set[str]:
    first, second = (server_args(lines) for lines in (one, other))
    assert list(first) == list(second)
    return {name for name in first if first[name] != second[name]}


def server_args(lines: list[str]) -> dict[str, str]:
    """The fields of the `server_args=` line with their texts, in order."""
    line = next(PREFIX.sub("", line) for line in lines if "server_args=" in line).removeprefix("server_args=")
    node = ast.parse(line, mode="eval").body
    if isinstance(node, ast.Call):
        return {str(one.arg): ast.unparse(one.value) for one in node.keywords}
    assert isinstance(node, ast.Dict)
    return {ast.literal_eval(key): ast.unparse(value) for key, value in zip(node.keys, node.values, strict=True) if key}
