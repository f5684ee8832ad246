"""What is played on the machine with a real card. Each takes a stage and returns what it found, as plain values.

Records (journal, `systemctl show`, history, metrics) are the stage's matter. A scenario says what must come of it by
`expect`: what is not so is a finding, and the next scenario is played all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import story
from lab.gpu.inference import Card, GpuInference, gpu_inference, start_holder
from lab.gpu.machine import ON_DISK
from lab.gpu.server import HOLD, Stray, stray_command
from lab.host import LabHost
from lab_product.client import Client
from lab_product.installed import INSTALLED, SERVICE
from lab_product.sglang_unit import Way
from sim_nvml import GIB
from waiting import wait_until

ACTING = {"act": True, "soak": 0.5}
OBSERVING = {"act": False, "soak": 0.5}
STRAYS = ",".join(f"{kind}:4096" for kind in Stray)
FAILURE_S = 60.0
START_S = 60.0


@dataclass
class Stage:
    """One scenario's host, and what is written down of it."""

    host: LabHost
    card: Card
    folder: Path
    findings: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.findings.append(what)
            print("    NOT:", what, flush=True)

    @contextmanager
    def inference(self, **options: Any) -> Iterator[GpuInference]:
        with gpu_inference(self.host, self.card, **options) as inference:
            try:
                yield inference
            finally:
                self.record(inference)

    def record(self, inference: GpuInference, mark: str = "end") -> None:
        """Everything that there is to see now."""
        folder = self.folder / mark
        folder.mkdir(parents=True, exist_ok=True)
        for name, command in {
            "journal.jsonl": ["journalctl", "--output=json", "--all", "--no-pager", "--quiet"],
            "show.txt": ["systemctl", "show", inference.unit],
            "history.json": [INSTALLED, "history", "--json"],
            "status.json": [INSTALLED, "status", "--json"],
            "watchdog-show.txt": ["systemctl", "show", SERVICE],
            "processes.txt": ["ps", "-eo", "pid,ppid,pidns,stat,lstart,cgroup,args"],
        }.items():
            done = self.host.run(*command, check=False, timeout=60)
            (folder / name).write_text(done.stdout + (done.stderr if done.returncode else ""))
        try:
            (folder / "metrics.txt").write_text(inference.metrics())
        except OSError as error:
            (folder / "metrics.txt").write_text(f"# {error}\n")


Scenario = Callable[[Stage], dict[str, Any]]


def hardening(stage: Stage) -> dict[str, Any]:
    """The shipped service as it is: does it reach NVML, and are its limits in force?"""
    found: dict[str, Any] = {}
    with stage.inference(settings=OBSERVING) as inference:
        with suppress(AssertionError):
            wait_until(lambda: inference.metric("sglang_watchdog_nvml_known") == 1, 20, "NVML answered")
        found["nvml_known"] = inference.metric("sglang_watchdog_nvml_known")
        found["metrics"] = [line for line in inference.metrics().splitlines() if "gpu" in line or "nvml" in line]
        found["service"] = inference.host.show(
            SERVICE, "ActiveState", "NRestarts", "MemoryCurrent", "MemoryPeak", "TasksCurrent", "DeviceAllow",
            "CapabilityBoundingSet", "MemoryDenyWriteExecute", "SystemCallFilter",
        )  # fmt: skip
        found["log"] = inference.log()
        stage.expect(found["nvml_known"] == 1, "the hardened watchdog reads NVML")
        found["limits"] = _device_limits(stage)
    return found


def _device_limits(stage: Stage) -> dict[str, str]:
    """NVML under properties of the unit, one at a time, each with what it says."""
    code = (
        "import ctypes; n = ctypes.CDLL('libnvidia-ml.so.1'); print('nvmlInit', n.nvmlInit_v2());"
        " c = ctypes.c_uint(); print('count', n.nvmlDeviceGetCount_v2(ctypes.byref(c)), c.value)"
    )
    tried = {
        "none": [],
        "DevicePolicy=closed alone": ["DevicePolicy=closed"],
        "closed, char-nvidia": ["DevicePolicy=closed", "DeviceAllow=char-nvidia rw"],
        "closed, char-nvidia-frontend": ["DevicePolicy=closed", "DeviceAllow=char-nvidia-frontend rw"],
        "closed, both": ["DevicePolicy=closed", "DeviceAllow=char-nvidia rw", "DeviceAllow=char-nvidia-frontend rw"],
        "MemoryDenyWriteExecute": ["MemoryDenyWriteExecute=yes"],
        "system calls": [
            "SystemCallFilter=@system-service", "SystemCallFilter=~@privileged @resources @keyring @memlock",
            "SystemCallErrorNumber=EPERM",
        ],
        "PrivateDevices": ["PrivateDevices=yes"],
        "no capability": ["CapabilityBoundingSet=CAP_KILL", "NoNewPrivileges=yes"],
    }  # fmt: skip
    found = {}
    for name, properties in tried.items():
        options = [f"--property={one}" for one in properties]
        options += [f"--setenv={key}={value}" for key, value in stage.card.environment().items()]
        done = stage.host.run(
            "systemd-run", "--wait", "--pipe", "--quiet", "--collect", *options, "/usr/bin/env", "python3", "-c", code,
            check=False, timeout=30,
        )  # fmt: skip
        found[name] = " ".join((done.stdout + done.stderr).split())
    found["/proc/devices"] = stage.host.run("sh", "-c", "grep nvidia /proc/devices", check=False).stdout
    return found


def night(stage: Stage) -> dict[str, Any]:
    """The story of one bad deploy, as the demo plays it."""
    said: list[tuple[float, str, str]] = []

    def say(line: story.Line, text: str) -> None:
        said.append((time.time(), line, text))
        print(f"    {line}: {text}", flush=True)

    with stage.inference(
        settings={"act": True, "soak": story.SOAK_S},
        steps=story.GOOD,
        api_key=story.SECRET,
        kill_mode="process",
        timeout_stop_s=story.TIMEOUT_STOP_S,
        restart_s=1.0,
    ) as inference:
        ending = story.play(inference, say)
        for problem in ending.problems():
            stage.expect(False, problem)
        return {"said": said, "classes": ending.classes, "exit_to_start_s": ending.exit_to_start_s}


def strays(stage: Stage) -> dict[str, Any]:
    """Left-overs that no stop reaches: own session, stopped, in a PID namespace, in another group; beside a stranger.

    The same config serves again once they are ended.
    """
    with stage.inference(settings=ACTING, kill_mode="process", environment={"GPU_LAB_STRAYS": STRAYS}) as inference:
        inference.ask_for("leak_child")
        with inference.bystander(0, 2 * GIB) as stranger:
            inference.start(wait=False)
            inference.wait_ready(START_S)
            inference.wait_known_good(START_S)
            wait_until(lambda: _holders(inference) >= len(Stray), START_S, "all strays hold their memory")
            stage.record(inference, "before")
            moved = _move_out(inference)
            inference.ask_for()
            _without_strays(inference)
            before = time.time()
            inference.kill()
            alert = inference.wait_alert(FAILURE_S, since=before, CLASS="gpu_memory_held")
            closed = inference.wait_alert(FAILURE_S, since=alert.time, OUTCOME="recovered")
            stage.expect(stranger.alive(), "the stranger lives")
            stage.expect("--speculative-num-steps 4" in " ".join(inference.argv()), "steps 4 run")
            stage.expect(inference.tokens(8) == 8, "tokens come")
            return {
                "moved": moved,
                "killed": before,
                "diagnosed": alert.time,
                "recovered": closed.time,
                "alerts": [(one.time, one.message) for one in inference.alerts()],
            }


def _without_strays(inference: GpuInference) -> None:
    """The next launch leaves nothing."""
    environment = {**inference.sglang.environment, "GPU_LAB_STRAYS": ""}
    inference.change(environment=environment)
    inference.reload()


def _holders(inference: GpuInference) -> int:
    held = inference.host.journal(f"_SYSTEMD_UNIT={inference.unit}", "_TRANSPORT=stdout")
    return sum(str(entry.get("MESSAGE", "")).startswith("holding") for entry in held)


def _move_out(inference: GpuInference) -> list[str]:
    """Puts the stray with a session of its own into a group outside of the unit's."""
    script = (
        "mkdir -p /sys/fs/cgroup/elsewhere.slice;"
        " for p in $(cat /sys/fs/cgroup/system.slice/$1/cgroup.procs); do"
        " if grep -q hold.py /proc/$p/cmdline && ! grep -qE 'stop|unshare' /proc/$p/cmdline"
        ' && [ "$(readlink /proc/$p/ns/pid)" = "$(readlink /proc/self/ns/pid)" ]; then'
        " echo $p > /sys/fs/cgroup/elsewhere.slice/cgroup.procs && echo $p; fi; done"
    )
    return inference.host.run("sh", "-c", script, "move", inference.unit, check=False).stdout.split()


def graphs(stage: Stage) -> dict[str, Any]:
    """A capture that runs out of memory inside torch.cuda.graph, rolled back."""
    return _rolled_back(stage, "cuda_graph_oom", fraction="0.95")


def states(stage: Stage) -> dict[str, Any]:
    """Pools that cannot be sized with more steps, rolled back by the environment file's way."""
    return _rolled_back(stage, "kv_cache_oom", way=Way.ENVIRONMENT_FILE)


def neighbour(stage: Stage) -> dict[str, Any]:
    """As `states`, beside a stranger with 4 GiB that was there when steps 4 were proven."""
    return _rolled_back(stage, "kv_cache_oom", beside=4 * GIB)


def newcomer(stage: Stage) -> dict[str, Any]:
    """As `states`, beside a stranger with 1.5 GiB that came after the proof, so that its bytes are looked at first."""
    return _rolled_back(stage, "gpu_memory_held", late=3 * GIB // 2)


def _rolled_back(stage: Stage, failure: str, beside: int = 0, late: int = 0, **options: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        inference = stack.enter_context(stage.inference(settings=ACTING, **options))
        stranger = stack.enter_context(inference.bystander(0, beside)) if beside else None
        inference.start(wait=False)
        inference.wait_ready(START_S)
        inference.wait_known_good(START_S)
        stranger = stack.enter_context(inference.bystander(1, late)) if late else stranger
        inference.change(steps=10)
        inference.reload()
        before = time.time()
        inference.restart(wait=False)
        alert = inference.wait_alert(FAILURE_S, since=before, CLASS=failure)
        closed = inference.wait_alert(FAILURE_S, since=before, OUTCOME="contained")
        stage.expect(inference.tokens(8) == 8, "tokens come")
        stage.expect("--speculative-num-steps 4" in " ".join(inference.argv()), "steps 4 run")
        stage.expect(stranger is None or stranger.alive(), "the bystander lives")
        return {"restarted": before, "diagnosed": alert.time, "contained": closed.time, "says": alert.message}


def degraded(stage: Stage) -> dict[str, Any]:
    """A bystander that leaves too little for what was proven: it serves, with less."""
    with stage.inference(settings=ACTING) as inference:
        inference.start(wait=False)
        inference.wait_ready(START_S)
        inference.wait_known_good(START_S)
        inference.stop()
        with inference.bystander(0, 12 * GIB):
            inference.start(wait=False)
            inference.wait_ready(START_S)
            alert = wait_until(
                lambda: [one for one in inference.alerts() if "degraded start" in one.message], 20, "degraded is said"
            )[0]
            return {"says": alert.message}


def frozen(stage: Stage) -> dict[str, Any]:
    """A scheduler that is stopped while it serves, then the stop of the unit."""
    with stage.inference(settings=ACTING, timeout_stop_s=6.0, restart="no") as inference:
        inference.start(wait=False)
        inference.wait_ready(START_S)
        inference.wait_known_good(START_S)
        freeze(inference)
        healthy = Client(inference.sglang.port).healthy(timeout_s=5)
        stage.expect(not healthy, "the health check fails")
        before = time.time()
        inference.stop()
        alert = inference.wait_alert(FAILURE_S, since=before)
        return {"stop_took_s": time.time() - before, "class": alert.get("CLASS"), "says": alert.message}


def freeze(inference: GpuInference) -> list[str]:
    """Stops the scheduler; its pid."""
    script = (
        "for p in $(cat /sys/fs/cgroup/system.slice/$1/cgroup.procs); do"
        " grep -q scheduler /proc/$p/cmdline && kill -STOP $p && echo $p; done"
    )
    return inference.host.run("sh", "-c", script, "freeze", inference.unit, check=False).stdout.split()


def plain(name: str, expected: str, **options: Any) -> Scenario:
    """One launch that ends by itself, observed only: what it leaves becomes a fixture."""

    def scenario(stage: Stage) -> dict[str, Any]:
        held = int(options.pop("held_gib", 0)) * GIB
        definition = {"restart": "no", **options}
        with stage.inference(settings=OBSERVING, **definition) as inference:
            if not held:
                return _one_launch(stage, inference, expected)
            with inference.bystander(0, held) as stranger:
                found = _one_launch(stage, inference, expected)
                stage.expect(stranger.alive(), "the stranger lives")
                return found

    scenario.__doc__ = f"One launch that ends as {expected}."
    scenario.__name__ = name
    return scenario


def _one_launch(stage: Stage, inference: GpuInference, expected: str) -> dict[str, Any]:
    before = time.time()
    inference.start(wait=False)
    alert = inference.wait_alert(FAILURE_S, since=before)
    stage.expect(alert.get("CLASS") == expected, f"{alert.get('CLASS')} is called {expected}: {alert.message}")
    return {"began": before, "diagnosed": alert.time, "class": alert.get("CLASS"), "says": alert.message}


def host_memory(stage: Stage) -> dict[str, Any]:
    """A scheduler that takes more host memory than the unit's MemoryMax=: the kernel kills it in its group."""
    environment = {"GPU_LAB_HOST_MIB": "8192"}
    with stage.inference(settings=OBSERVING, restart="no", environment=environment) as inference:
        limit = "[Service]\nMemoryMax=5G\nMemorySwapMax=0\nOOMPolicy=kill\n"
        inference.host.write(f"{inference.sglang.file_path}.d/20-limit.conf", limit)
        inference.reload()
        found = _one_launch(stage, inference, "cgroup_oom_kill")
        found["show"] = inference.show("Result", "ExecMainCode", "ExecMainStatus", "OOMPolicy", "MemoryMax")
        stage.expect(found["show"]["Result"] == "oom-kill", "systemd says oom-kill")
        return found


def pressure(stage: Stage) -> dict[str, Any]:
    """As `host_memory`, with systemd-oomd before the kernel: it kills a unit that stalls on its MemoryHigh=."""
    host = stage.host
    host.run("mkdir", "-p", "/etc/systemd/oomd.conf.d")
    host.write("/etc/systemd/oomd.conf.d/lab.conf", "[OOM]\nDefaultMemoryPressureDurationSec=2s\n")
    host.systemctl("start", "systemd-oomd.service", check=False, timeout=30)
    found: dict[str, Any] = {
        "oomd": host.show("systemd-oomd.service", "ActiveState", "ConditionResult", "Result"),
        "oomd says": _said(host, "systemd-oomd.service")[-2000:],
        "pressure": host.run("sh", "-c", "head /proc/pressure/*", check=False).stdout,
    }
    if found["oomd"]["ActiveState"] != "active":
        stage.expect(False, f"systemd-oomd runs: {found['oomd']} {found['oomd says']}")
        return found
    environment = {"GPU_LAB_HOST_MIB": "8192"}
    with stage.inference(settings=OBSERVING, restart="no", environment=environment) as inference:
        # The reader fills the group with pages of a file: without swap nothing else can be reclaimed, and oomd spares
        # a group in which nothing is.
        limit = (
            "[Service]\nMemoryHigh=5G\nManagedOOMMemoryPressure=kill\nManagedOOMMemoryPressureLimit=10%\n"
            f"ExecStartPost=/bin/sh -c '(dd if=/dev/zero of={ON_DISK}/pages bs=1M count=2048;"
            f" while cat {ON_DISK}/pages; do :; done) >/dev/null 2>&1 &'\n"
        )
        host.write(f"{inference.sglang.file_path}.d/20-limit.conf", limit)
        inference.reload()
        try:
            found |= _one_launch(stage, inference, "cgroup_oom_kill")
        finally:
            found["oomctl"] = host.run("oomctl", check=False).stdout[-3000:]
        found["show"] = inference.show("Result", "ExecMainCode", "ExecMainStatus", "OOMPolicy", "MemoryHigh")
        stage.expect(found["show"]["Result"] == "oom-kill", "systemd says oom-kill")
    return found


def pid_namespaces(stage: Stage) -> dict[str, Any]:
    """What NVML lists for a process in a PID namespace, a zombie and a stopped one, seen from where the watchdog is."""
    found: dict[str, Any] = {}
    host, card = stage.host, stage.card
    for kind in Stray:
        unit = f"stray-{kind}.service"
        start_holder(host, card, unit, stray_command(kind, 3 * GIB, simulated=card.simulated), {})
        wait_until(lambda: "holding" in _said(host, unit), 30, f"{unit} holds")  # noqa: B023
        found[kind] = {
            "cgroup.procs": host.run("cat", f"/sys/fs/cgroup/system.slice/{unit}/cgroup.procs", check=False).stdout,
            "said": _said(host, unit).split(),
            "listed inside": _listed_inside(stage),
            "listed outside": _listed_outside(stage),
        }
        host.systemctl("kill", "--signal=KILL", unit, check=False)
        host.systemctl("stop", unit, check=False)
    return found


def _said(host: LabHost, unit: str) -> str:
    return host.run("journalctl", "--unit", unit, "--output=cat").stdout


_LIST = (
    "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
    " print(n.nvmlDeviceGetMemoryInfo(h).used >> 20, [(p.pid, (p.usedGpuMemory or 0) >> 20)"
    " for p in n.nvmlDeviceGetComputeRunningProcesses(h)], [(p.pid, (p.usedGpuMemory or 0) >> 20)"
    " for p in n.nvmlDeviceGetMPSComputeRunningProcesses(h)])"
)


def _listed_inside(stage: Stage) -> str:
    return stage.host.run("python3", "-c", _LIST, env=_python_environment(stage), check=False).stdout.strip()


def _python_environment(stage: Stage) -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    return {**stage.card.environment(), "PATH": f"{bin_folder}:{os.environ['PATH']}"}


def _listed_outside(stage: Stage) -> str:
    if stage.card.simulated:
        return ""
    return subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, check=False).stdout.strip()


def zombie(stage: Stage) -> dict[str, Any]:
    """A holder whose parent does not reap it: when its bytes come back, and whether it stays listed."""
    host = stage.host
    script = (
        "import subprocess, sys, time, pathlib\n"
        "p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "print(p.stdout.readline(), end='', flush=True)\n"
        "p.kill(); t = time.time()\n"
        "while time.time() - t < 6:\n"
        "    s = pathlib.Path(f'/proc/{p.pid}/stat').read_text().rpartition(')')[2].split()[0]\n"
        "    print(f'{time.time() - t:.3f} {s}', flush=True); time.sleep(0.25)\n"
        "p.wait(); print('reaped', flush=True); time.sleep(1)\n"
    )
    command = [sys.executable, "-c", script, sys.executable, str(HOLD), str(8 * GIB)]
    start_holder(host, stage.card, "zombie.service", command, {})
    found: dict[str, Any] = {"listed": []}
    wait_until(lambda: "holding" in _said(host, "zombie.service"), 30, "the zombie to be holds")
    end = time.time() + 8
    while time.time() < end:
        found["listed"].append((time.time(), _listed_inside(stage)))
        time.sleep(0.2)
    found["said"] = _said(host, "zombie.service").splitlines()
    return found


def mps(stage: Stage) -> dict[str, Any]:
    """A client of the CUDA MPS server, if one can be started: what NVML lists."""
    host = stage.host
    script = (
        "command -v nvidia-cuda-mps-control || ls -l /usr/local/nvidia/bin;"
        " export PATH=$PATH:/usr/local/nvidia/bin CUDA_MPS_PIPE_DIRECTORY=/run/mps CUDA_MPS_LOG_DIRECTORY=/run/mps-log;"
        " mkdir -p /run/mps /run/mps-log; exec nvidia-cuda-mps-control -f"
    )
    start_holder(host, stage.card, "mps.service", ["sh", "-c", script], {})
    time.sleep(3)
    found: dict[str, Any] = {"control": _said(host, "mps.service")}
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    start_holder(host, stage.card, "mps-client.service", [sys.executable, str(HOLD), str(3 * GIB)], pipe)
    time.sleep(5)
    found["client"] = _said(host, "mps-client.service")
    found["listed inside"] = _listed_inside(stage)
    found["listed outside"] = _listed_outside(stage)
    found["log"] = host.run("sh", "-c", "tail -n 20 /run/mps-log/*", check=False).stdout
    found["processes"] = host.run("sh", "-c", "ps -eo pid,ppid,comm,args | grep -i mps", check=False).stdout
    for unit in ("mps-client.service", "mps.service"):
        host.systemctl("kill", "--signal=KILL", unit, check=False)
        host.systemctl("stop", unit, check=False)
    return found


# In the order of their worth: the last ones are dropped when time is up.
SCENARIOS: dict[str, Scenario] = {
    "hardening": hardening,
    "held_weights": plain("held_weights", "gpu_memory_held", held_gib=100),
    "night": night,
    "strays": strays,
    "graphs": graphs,
    "states": states,
    "pid_namespaces": pid_namespaces,
    "zombie": zombie,
    "held_states": plain("held_states", "gpu_memory_held", held_gib=50),
    "host_memory": host_memory,
    "pressure": pressure,
    "graph_oom": plain("graph_oom", "cuda_graph_oom", steps=10, fraction="0.95"),
    "pool_oom": plain("pool_oom", "kv_cache_oom", fraction="0.995"),
    "states_refused": plain("states_refused", "kv_cache_oom", steps=10),
    "degraded": degraded,
    "frozen": frozen,
    "neighbour": neighbour,
    "newcomer": newcomer,
    "mps": mps,
}
