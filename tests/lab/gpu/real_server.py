"""The same with a released SGLang 0.5.16 in the simulated one's place: real weights' sizes, pools, captures and exits.

Its packages lie in SITE on the machine (cut down to what a start with dummy weights and the triton backend needs) and
its model is a configuration of a hybrid model with random weights. What fits and what does not was measured before:
with FITS_STEPS_3 of the card steps 3 serve, and the states of steps 10 leave nothing for the KV cache.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lab.gpu.inference import GpuInference
from lab.gpu.scenarios import Scenario, Stage, freeze
from lab_product.client import Client
from lab_product.sglang_unit import MODEL
from sim_nvml import GIB
from waiting import wait_until

SITE = Path("/opt/sglang-site")
CACHES = Path("/opt/sglang-caches")
CONFIG = Path(__file__).with_name("models") / "hybrid.json"
FITS_STEPS_3 = "0.2603"
FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "triton"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--decode-log-interval", "10"),
    *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "8"),
)
# NVLink multicast must not be used where others share the host's cards.
PLAIN_NCCL = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Kernels are compiled at the first start, and found in CACHES afterwards.
FIRST_START_S, START_S = 280.0, 150.0
TOOLCHAIN = ("PATH", "CUDA_HOME", "CUDAHOSTCXX", "LIBRARY_PATH", "CPATH", "CC", "CXX", "TORCH_CUDA_ARCH_LIST")
GOOD, TOO_MANY = 3, 10


def _environment() -> dict[str, str]:
    toolchain = {name: os.environ[name] for name in TOOLCHAIN if name in os.environ}
    return toolchain | {
        "PYTHONPATH": f"{SITE}:/opt/sglang-watchdog/lib/python3.12/site-packages:/opt/server-site",
        "HOME": "/root",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "TVM_FFI_CACHE_DIR": str(CACHES / "jit"),
        "TRITON_CACHE_DIR": str(CACHES / "triton"),
    }


def _options(fraction: str) -> dict[str, Any]:
    return {
        "settings": {"act": True, "soak": 3.0, "start_deadline": 400.0},
        "steps": GOOD,
        "fraction": fraction,
        "environment": _environment(),
        "more_flags": FLAGS,
        "restart": "on-failure",
        "timeout_stop_s": 30.0,
    }


def _generated(inference: GpuInference, tokens: int = 16) -> int:
    """Tokens of a real request, by ids: there is no tokenizer."""
    body = {"input_ids": list(range(10, 74)), "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    status, answer = Client(inference.sglang.port).ask("POST", "/generate", body, 60.0)
    return len(json.loads(answer)["output_ids"]) if status == http.client.OK else 0


def _proven(inference: GpuInference, deadline_s: float) -> float:
    """Starts it and waits for its proof; returns how long it took to serve."""
    began = time.time()
    inference.start(wait=False)
    wait_until(lambda: inference.client.healthy() or _over(inference), deadline_s, "a healthy server, or its end")
    assert not _over(inference), inference.host.run("journalctl", "-n", "60", "-u", inference.unit, "-o", "cat").stdout
    took = time.time() - began
    inference.wait_known_good(60.0)
    return took


def _over(inference: GpuInference) -> bool:
    return inference.state().startswith(("failed", "activating/auto-restart"))


def story(stage: Stage) -> dict[str, Any]:
    """Beside a bystander: steps 3 are proven, steps 10 do not fit and are rolled back, steps 3 generate again."""
    found: dict[str, Any] = {}
    stage.host.write(f"{MODEL}/config.json", CONFIG.read_text())
    with stage.inference(**_options(FITS_STEPS_3)) as inference, inference.bystander(0, 2 * GIB) as bystander:
        found["start_s"] = _proven(inference, FIRST_START_S)
        found["tokens"] = _generated(inference)
        stage.record(inference, "proven")
        inference.change(steps=TOO_MANY)
        inference.reload()
        before = found["restarted"] = time.time()
        inference.restart(wait=False)
        alert = inference.wait_alert(START_S, since=before, CLASS="kv_cache_oom")
        found |= {"diagnosed": alert.time, "says": alert.message}
        closed = inference.wait_alert(START_S, since=alert.time, OUTCOME="contained")
        found |= {"contained": closed.time, "closed": closed.message, "tokens_again": _generated(inference)}
        stage.expect(found["tokens_again"] == 16, "tokens come")
        stage.expect(f"--speculative-num-steps {GOOD}" in " ".join(inference.argv()), "steps 3 run")
        stage.expect(bystander.alive(), "the bystander lives")
    return found


def crowded(stage: Stage) -> dict[str, Any]:
    """Proven alone, started again beside 100 GiB of a stranger: a degraded start. Then its scheduler is frozen, and the
    stop runs into its timeout."""
    found: dict[str, Any] = {}
    stage.host.write(f"{MODEL}/config.json", CONFIG.read_text())
    with stage.inference(**_options("0.85")) as inference:
        found["start_s"] = _proven(inference, START_S)
        inference.stop()
        with inference.bystander(0, 100 * GIB):
            began = time.time()
            inference.start(wait=False)
            alert = wait_until(
                lambda: [one for one in inference.alerts() if "degraded start" in one.message], START_S, "degraded"
            )[0]
            found |= {"began": began, "degraded": alert.time, "says": alert.message}
            stage.record(inference, "degraded")
            found["frozen"] = freeze(inference)
            before = time.time()
            with suppress(OSError):
                found["healthy"] = inference.client.healthy(timeout_s=25)
            found["health_took_s"] = time.time() - before
            before = time.time()
            inference.stop()
            ended = inference.wait_alert(60, since=before)
            found |= {"stop_took_s": ended.time - before, "class": ended.get("CLASS"), "ended": ended.message}
            stage.expect(ended.get("CLASS") == "stop_timeout_sigkill", f"a stop timeout, not {ended.get('CLASS')}")
    return found


def ranks(stage: Stage) -> dict[str, Any]:
    """On two cards: one rank dies of a segmentation fault, then one is frozen, so that the other waits for it in NCCL
    until SGLang's own watchdog ends the server, then one is killed. Each time systemd starts it again."""
    found: dict[str, Any] = {}
    stage.host.write(f"{MODEL}/config.json", CONFIG.read_text())
    options = _options("0.3") | {"tp": 2, "more_flags": (*FLAGS, *PLAIN_NCCL, "--watchdog-timeout", "20")}
    options["environment"] |= NO_MULTICAST
    with stage.inference(**options) as inference:
        found["start_s"] = _proven(inference, FIRST_START_S)
        found["tokens"] = _generated(inference)
        stage.record(inference, "proven")
        for rank, number, expected in (
            (0, signal.SIGSEGV, "segfault"),
            (1, signal.SIGSTOP, "internal_watchdog_hang"),
            (1, signal.SIGKILL, "unknown"),  # the other rank is faster than SGLang's look at its children
        ):
            before, was = time.time(), inference.invocation()
            found[f"{number.name} of rank {rank}"] = _signalled(inference, rank, number)
            asking = threading.Thread(target=_ask_in_vain, args=(inference,), daemon=True)
            asking.start()
            with suppress(AssertionError):
                alert = inference.wait_alert(150, since=before, CLASS=expected)
                found[expected] = {"after_s": alert.time - before, "says": alert.message}
            stage.record(inference, expected)
            stage.expect(expected in found, f"{number.name} of rank {rank} is told as {expected}")
            wait_until(partial(_serves_anew, inference, was), START_S, "a healthy server again")
            with suppress(TimeoutError):  # two ranks were seen to hang in the first long request after a restart
                found[f"tokens after {number.name}"] = _generated(inference)
    return found


def _signalled(inference: GpuInference, rank: int, number: signal.Signals) -> list[str]:
    script = (
        "for p in $(cat /sys/fs/cgroup/system.slice/$1/cgroup.procs); do"
        " grep -q scheduler_TP$2 /proc/$p/cmdline && kill -$3 $p && echo $p; done"
    )
    words = ("signal", inference.unit, str(rank), str(int(number)))
    return inference.host.run("sh", "-c", script, *words, check=False).stdout.split()  # processes come and go


def _ask_in_vain(inference: GpuInference) -> None:
    with suppress(OSError, http.client.HTTPException):
        _generated(inference)


def _serves_anew(inference: GpuInference, was: str) -> bool:
    return inference.invocation() != was and inference.client.healthy()


REAL_SCENARIOS: dict[str, Scenario] = {"real_story": story, "real_crowded": crowded, "real_ranks": ranks}
