"""The simulated SGLang as a process tree: how it starts, serves, stops and dies, release by release.

Run outside systemd: what systemd would do to it is done by signals here.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sim_nvml import GIB, MIB, SimNvml
from sim_sglang.load import Load
from sim_sglang.simulation import SWEEP_FLAGS, Simulation, sweep_flags
from sim_sglang.testing import FIRED_UP, Server, alive, gone
from waiting import wait_until

IDLE = 615 * MIB
TINY = ("--model-path", "/models/tiny")
SCALE = 0.02
SCHEDULER, DETOKENIZER = "sglang::scheduler", "sglang::detokenizer"

Serve = Callable[..., Server]


@pytest.fixture
def nvml(tmp_path: Path) -> SimNvml:
    simulated = SimNvml(tmp_path / "nvml")
    simulated.gpus(4)
    return simulated


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "faults"


@pytest.fixture
def serve(nvml: SimNvml, control: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server of a release; all that was started is ended behind the test."""
    started: list[Server] = []

    def start(release: str, *flags: str, profile: str = "tiny", faults: str = "", **more: float) -> Server:
        simulation = Simulation(
            release, profile, nvml=nvml.folder, control=control, faults=faults, driver_lag_s=0.1, time_scale=SCALE
        )
        server = Server(replace(simulation, **more), flags or TINY, tmp_path)  # type: ignore[arg-type]
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.close()


def load(server: Server, requests: int, tokens: int) -> Load:
    found = Load.to(f"http://127.0.0.1:{server.port}", requests, tokens, timeout_s=15)
    found.start()
    return found


@contextmanager
def loaded(server: Server, control: Path, requests: int, tokens: int) -> Iterator[Load]:
    """Every request is with the scheduler, however slowly they came, and none makes a token until the block ends."""
    control.write_text("hang_healthy\n")
    found = load(server, requests, tokens)
    wait_until(lambda: in_flight(server) == requests, 20, f"{requests} requests are with the scheduler")
    yield found
    control.unlink()


def in_flight(server: Server) -> int:
    if server.simulation.release == "0.5.23":
        ranks = json.loads(server.ask("GET", "/v1/loads")[1])["loads"]
        return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)
    return sum(rank["num_reqs"] for rank in json.loads(server.ask("GET", "/get_load")[1]))


# -- a good server


def test_the_sweeps_server_looks_and_serves_like_the_real_one(serve: Serve, nvml: SimNvml) -> None:
    server = serve("0.5.9", *SWEEP_FLAGS, profile="hybrid122b").up()
    children = server.children()
    ranks = [children[f"{SCHEDULER}_TP{rank}"] for rank in range(4)]
    assert DETOKENIZER in children
    assert [list(nvml.processes(gpu)) for gpu in range(4)] == [[pid] for pid in ranks]
    assert nvml.used(0) > 70 * GIB

    answer = server.generate(400)
    assert answer["meta_info"]["completion_tokens"] == 400
    info = json.loads(server.ask("GET", "/get_server_info")[1])
    assert (info["speculative_num_steps"], info["max_total_num_tokens"]) == (4, 220_907)
    log = server.log()
    assert "max_total_num_tokens=220907" in log
    assert "accept len: 4.61, accept rate: 0.92, cuda graph: True, gen throughput (token/s): 277.00" in log
    order = ["server_args=", "Load weight begin", "Mamba Cache is allocated", "Memory pool end", "Capture cuda graph"]
    order += ["Capture draft cuda graph", "Capture draft extend cuda graph", "max_total_num_tokens=", FIRED_UP]
    places = [log.index(words) for words in order]
    assert places == sorted(places)
    environment = Path(f"/proc/{ranks[0]}/environ").read_bytes()
    assert b"SPT_NOENV=1" in environment


def test_sixteen_requests_share_a_server_of_twelve_slots(serve: Serve, control: Path) -> None:
    server = serve("0.5.9", *SWEEP_FLAGS, "--enable-metrics", profile="hybrid122b").up()
    with loaded(server, control, 16, 600) as sixteen:
        pass
    sixteen.join()
    assert (sixteen.answered, sixteen.errors) == (16, [])
    log = server.log()
    assert max(int(number) for number in re.findall(r"#running-req: (\d+)", log)) == 12
    assert max(int(number) for number in re.findall(r"#queue-req: (\d+)", log)) == 4
    metrics = server.ask("GET", "/metrics")[1].decode()
    assert re.search(r"^sglang:generation_tokens_total\{.*\} 9\d{3}$", metrics, re.MULTILINE)


def test_endpoints_speak_the_three_dialects_and_stream(serve: Serve) -> None:
    server = serve("0.5.16", *TINY, "--api-key", "s3cret").up()
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
    assert server.ask("POST", "/v1/chat/completions", chat)[0] == http.client.UNAUTHORIZED
    assert server.status("/health") == http.client.OK
    status, body = server.ask("POST", "/v1/chat/completions", chat, key="s3cret")
    answer = json.loads(body)
    assert (status, answer["usage"]["completion_tokens"]) == (http.client.OK, 8)
    completion = {"prompt": "hello", "max_tokens": 30, "stream": True}
    stream = server.ask("POST", "/v1/completions", completion, key="s3cret")[1].decode()
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1]).count(" ") == 30
    names = [one["id"] for one in json.loads(server.ask("GET", "/v1/models", key="s3cret")[1])["data"]]
    assert names == ["/models/tiny"]
    assert server.ask("GET", "/metrics")[0] == server.ask("GET", "/ready")[0] == http.client.NOT_FOUND


def test_health_is_refused_then_503_then_200(serve: Serve, control: Path) -> None:
    control.write_text("init_hang\n")
    server = serve("0.5.16")
    server.wait_for("Load weight end")
    with pytest.raises(ConnectionRefusedError):
        server.status("/health")
    control.write_text("hang\n")
    server.wait_for("Uvicorn running on")
    assert server.status("/health") == http.client.SERVICE_UNAVAILABLE
    control.unlink()
    server.up()
    assert server.status("/health") == http.client.OK


# -- starts that fail


def test_steps_10_die_at_pool_sizing_and_give_the_memory_back_a_little_later(serve: Serve, nvml: SimNvml) -> None:
    server = serve("0.5.9", *sweep_flags(10), profile="hybrid122b", driver_lag_s=0.3)
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    assert "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: " in log
    assert "Capture cuda graph" not in log
    assert nvml.used(0) > 60 * GIB
    wait_until(lambda: all(nvml.used(gpu) == IDLE for gpu in range(4)), 5, "the memory is back")


def test_a_dense_model_runs_out_in_graph_capture_instead(serve: Serve) -> None:
    serve("0.5.9", *sweep_flags(5), profile="dense").up().close()
    server = serve("0.5.9", *sweep_flags(10), profile="dense")
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    assert log.index("Memory pool end") < log.index("Exception: Capture cuda graph failed: CUDA out of memory.")


def test_an_occupied_card_is_told_by_the_clean_ranks(serve: Serve, nvml: SimNvml) -> None:
    nvml.hold(2, os.getpid(), 40 * GIB)
    server = serve("0.5.9", *SWEEP_FLAGS, profile="hybrid122b")
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    told = set(re.findall(r" (TP\d)\] Scheduler hit an exception", log))
    assert told
    assert "TP2" not in told
    assert "The memory capacity is unbalanced. Some GPUs may be occupied by other processes." in log


@pytest.mark.parametrize(
    ("fault", "last", "never"),
    [
        ("weights_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "Load weight end"),
        ("kv_oom", "ValueError: Loaded weights leave no GPU memory for the KV cache", "KV Cache is allocated"),
        ("graph_buffers_oom", "torch.OutOfMemoryError: CUDA out of memory.", "Capture target"),
        ("graph_oom", "Exception: Capture cuda graph failed: CUDA out of memory.", "max_total_num_tokens="),
    ],
)
def test_each_memory_fault_of_a_start_can_be_asked_for(serve: Serve, fault: str, last: str, never: str) -> None:
    server = serve("0.5.16", faults=fault)
    assert server.exit_status() == -signal.SIGKILL
    assert last in server.log()
    assert never not in server.log()


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.5.9", "Rank 0 scheduler is dead. Please check if there are relevant logs."),
        ("0.5.16", "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)."),
    ],
)
def test_a_scheduler_killed_while_it_starts_ends_main_with_status_1(serve: Serve, release: str, words: str) -> None:
    server = serve(release, faults="init_signal 9")
    assert server.exit_status() == 1
    assert words in server.log()


@pytest.mark.parametrize(("release", "status", "claims"), [("0.5.16", 1, True), ("0.5.23", 3, False)])
def test_a_port_in_use_ends_the_server_after_its_whole_start(
    serve: Serve, release: str, status: int, claims: bool
) -> None:
    first = serve(release).up()
    second = serve(release)
    second.close()
    second.port = first.port
    second.start()
    assert second.exit_status() == status
    log = second.log()
    assert f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {first.port})" in log
    assert (FIRED_UP in log) is claims


# -- ends of a server that serves


@pytest.mark.parametrize(("release", "status"), [("0.5.9", -9), ("0.5.23", 0)])
def test_a_drain_lets_running_requests_end(
    serve: Serve, nvml: SimNvml, control: Path, release: str, status: int
) -> None:
    server = serve(release).up()
    with loaded(server, control, 3, 3_000) as three:
        os.kill(server.pid, signal.SIGTERM)
        server.wait_for("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        assert server.status("/health") == http.client.SERVICE_UNAVAILABLE
    assert server.exit_status() == status
    three.join()
    assert three.answered == 3
    assert "Remaining number of requests 0." in server.log()
    wait_until(lambda: nvml.used(0) == IDLE, 5, "the memory is back")


def test_a_stop_that_does_not_drain_goes_on_for_ever(serve: Serve, control: Path) -> None:
    server = serve("0.5.9").up()
    control.write_text("no_drain\n")
    load(server, 2, 100)
    server.wait_for("#running-req: 2")
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: server.log().count("Remaining number of requests 2.") >= 3, 10, "three looks in vain")
    assert server.process.poll() is None


def test_a_sigterm_to_the_whole_group_looks_like_a_crash_from_0_5_10_on(serve: Serve) -> None:
    server = serve("0.5.16", *TINY, "--tp", "2").up()
    server.terminate_group()
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    assert log.index("SIGTERM received.") < log.index("crashed with exit code -15. Triggering SIGQUIT for cleanup...")
    assert "No live scheduler processes found; skipping py-spy and CUDA coredump." in log


def test_up_to_0_5_9_nobody_notices_a_dead_scheduler(serve: Serve) -> None:
    server = serve("0.5.9").up()
    os.kill(server.children()[SCHEDULER], signal.SIGKILL)
    assert server.status("/health") == http.client.SERVICE_UNAVAILABLE
    assert "Server couldn't get a response from detokenizer for last 20 seconds." in server.log()
    assert server.status("/model_info") == http.client.OK
    with pytest.raises(TimeoutError):
        server.status("/server_info", timeout_s=0.5)
    assert server.process.poll() is None


def test_from_0_5_10_on_a_dead_scheduler_brings_the_server_down_unless_told_otherwise(serve: Serve) -> None:
    watched, blind = serve("0.5.16").up(), serve("0.5.16", faults="dead_scheduler")
    os.kill(watched.children()[SCHEDULER], signal.SIGKILL)
    assert watched.exit_status() == -signal.SIGKILL
    assert "crashed with exit code -9. Triggering SIGQUIT for cleanup..." in watched.log()
    blind.wait_for("Uvicorn running on")
    wait_until(lambda: SCHEDULER not in blind.children(), 10, "the scheduler is dead")
    assert blind.status("/v1/models") == http.client.OK


@pytest.mark.parametrize(("signal_", "status"), [(signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_main_alone_dies_of_a_signal_while_it_loads_and_takes_its_children_with_it(
    serve: Serve, signal_: signal.Signals, status: int
) -> None:
    server = serve("0.5.9", time_scale=0.05)
    server.wait_for("Load weight begin")
    children = server.wait_for_children(3)
    os.kill(server.pid, signal_)
    assert server.exit_status() == status
    workers = [pid for name, pid in children.items() if name.startswith("sglang::")]
    wait_until(gone(*workers), 5, "no titled child is left")


def test_who_kills_main_before_its_children_are_bound_leaves_an_orphan_with_gpu_memory(
    serve: Serve, nvml: SimNvml
) -> None:
    server = serve("0.5.9", time_scale=0.15)
    spawned = "multiprocessing.spawn import spawn_main"
    wait_until(
        lambda: sum(spawned in name for name in server.titles().values()) == 2, 10, "two children without a title"
    )
    os.kill(server.pid, signal.SIGKILL)
    server.exit_status()
    wait_until(lambda: nvml.used(0) > IDLE + 600 * MIB, 10, "the orphan takes memory")
    (orphan,) = nvml.processes(0)
    assert alive(orphan)


def test_a_leaked_child_keeps_its_memory_after_everything_else_is_gone(serve: Serve, nvml: SimNvml) -> None:
    server = serve("0.5.16", *TINY, "--tp", "2", faults="leak_child").up()
    leaked = server.children()[f"{SCHEDULER}_TP1"]
    os.kill(server.pid, signal.SIGTERM)
    assert server.exit_status() == -signal.SIGKILL
    wait_until(lambda: nvml.used(0) == IDLE, 5, "rank 0's memory is back")
    assert alive(leaked)
    assert list(nvml.processes(1)) == [leaked]
    os.kill(leaked, signal.SIGKILL)
    wait_until(lambda: nvml.used(1) == IDLE, 5, "the orphan's memory is back")


def test_a_sigint_ends_a_serving_server_as_uvicorn_does(serve: Serve) -> None:
    old, new = serve("0.5.16").up(), serve("0.5.23").up()
    for server in (old, new):
        os.kill(server.pid, signal.SIGINT)
    assert (old.exit_status(), new.exit_status()) == (0, -signal.SIGINT)


def test_a_sigterm_before_the_first_request_is_uvicorns_and_ends_by_the_signal_itself(serve: Serve) -> None:
    server = serve("0.5.16", *TINY, "--skip-server-warmup").up()
    os.kill(server.pid, signal.SIGTERM)
    assert server.exit_status() == -signal.SIGTERM
    assert "INFO:     Shutting down" in server.log()


def test_a_stop_of_an_unhealthy_server_is_forced(serve: Serve) -> None:
    server = serve("0.5.9").up()
    os.kill(server.children()[SCHEDULER], signal.SIGKILL)
    assert server.status("/health") == http.client.SERVICE_UNAVAILABLE
    os.kill(server.pid, signal.SIGTERM)
    assert server.exit_status() == -signal.SIGKILL
    assert "Signal SIGTERM received while health check failed. Force exiting." in server.log()


# -- faults while serving


def test_a_full_pool_sends_requests_back_to_wait_and_loses_none(serve: Serve, control: Path) -> None:
    server = serve("0.5.16", *TINY, "--max-total-tokens", "4096").up()
    with loaded(server, control, 3, 3_500) as three:
        pass
    three.join()
    assert (three.answered, three.generated) == (3, 10_500)
    assert "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: " in server.log()


def test_a_hang_is_seen_by_health_and_ended_by_sglangs_own_watchdog(serve: Serve, control: Path) -> None:
    server = serve("0.5.9", *TINY, "--watchdog-timeout", "40").up()
    load(server, 1, 100_000)
    server.wait_for("#running-req: 1, #token")
    control.write_text("hang\n")
    # The first answer may still count a token of just before.
    wait_until(lambda: server.status("/health") == http.client.SERVICE_UNAVAILABLE, 10, "the health check fails")
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    assert "Scheduler watchdog timeout (self.watchdog_timeout=40, self.soft=False)" in log
    assert "SIGQUIT received. signum=None, frame=None. It usually means one child failed." in log


def test_a_hang_with_200_answers_every_probe_but_makes_no_token(serve: Serve) -> None:
    server = serve("0.5.16", faults="hang_healthy").up()
    with pytest.raises(TimeoutError):
        server.generate(4, timeout_s=0.5)
    assert server.healthy()


@pytest.mark.parametrize(
    ("fault", "served", "words"),
    [("crash_after 2", 2, "RuntimeError: The expanded size"), ("runtime_oom 3", 2, "torch.OutOfMemoryError: CUDA out")],
)
def test_a_server_can_be_told_to_die_after_so_many_requests(serve: Serve, fault: str, served: int, words: str) -> None:
    server = serve("0.5.16", faults=fault).up()
    for _ in range(served):
        server.generate(4)
    if fault.startswith("runtime"):
        load(server, 1, 4)
    assert server.exit_status() == -signal.SIGKILL
    log = server.log()
    assert log.index(FIRED_UP) < log.index(words) < log.index("SIGQUIT received.")


def test_the_load_is_bounded_and_loopback_only() -> None:
    for url, requests in (("http://192.0.2.1:30000", 1), ("http://127.0.0.1:30000", 100_000)):
        command = [sys.executable, "-m", "sim_sglang.load", "--url", url, "--requests", str(requests)]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            capture_output=True,
            timeout=20,
        )
        assert done.returncode == 2


def test_a_client_that_hangs_up_is_forgotten(serve: Serve) -> None:
    server = serve("0.5.9").up()
    body = json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 100_000}})
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        server.wait_for("#running-req: 1, #token")
    os.kill(server.pid, signal.SIGTERM)
    assert server.exit_status() == -signal.SIGKILL
