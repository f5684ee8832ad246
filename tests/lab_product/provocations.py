"""Each class of failure, brought about on a real systemd: what is done to a unit, and the class that this is.

A provocation gets a stage with a unit that is written and loaded, and returns once systemd says that the launch is
over, or, for a server that is up and should not be, once it serves. It knows nothing of the watchdog.

What a lab host cannot bring about is told in the words of a recorded case: REPLAYED says which and why.
"""

import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from lab.host import CHECKOUT, LabHost
from lab.kernel_log import KernelLog
from lab_product.client import Client
from lab_product.conftest import GIB
from lab_product.installed import InferenceHost
from sglang_watchdog.domain.failure import FailureClass as Class
from waiting import wait_until

CASES = CHECKOUT / "tests" / "corpus" / "cases"
REPLAYED = {
    Class.HOST_OOM_KILL: (
        "011-diffusion-host-oom-nccl-noise.json",
        "a host that runs out of memory is the whole machine; the kill is real, the kernel's line is the recorded one",
    ),
    Class.GPU_HARDWARE_FAULT: (
        "028-nvlink-xid-149-145-then-45.json",
        "a card breaks by itself only; its driver's line is the recorded one",
    ),
}
"""The recorded case whose kernel line is replayed, and why it is not the kernel's own."""
END_S = 40.0
BUSY_TOKENS = 200_000


@dataclass
class Stage:
    """One unit on a host. `control` steers its simulation while it runs."""

    inference: InferenceHost
    control: Path
    kernel: KernelLog

    @property
    def host(self) -> LabHost:
        return self.inference.host

    def serve(self, *faults: str) -> None:
        """Starts the unit, waits until it serves, then asks the simulation for the faults: not before, since the
        watchdog's own probe is a request as well and may come before ours."""
        self.inference.start()
        self.ask_for(*faults)

    def start(self) -> None:
        """Starts the unit and waits until it is over."""
        self.host.systemctl("start", self.inference.unit, check=False, timeout=90)  # its job is over, so it did begin
        self.wait_over()

    def wait_over(self) -> None:
        wait_until(lambda: self.inference.state().startswith(("failed", "inactive")), END_S, "the launch is over")

    def ask_for(self, *faults: str) -> None:
        self.host.write(self.control, "\n".join(faults))

    def request(self, tokens: int = 8) -> None:
        """Sends one and does not wait for its answer, which may never come."""
        Thread(target=_ask, args=(self.inference.client, tokens), daemon=True).start()

    def worker(self, title: str = "sglang::scheduler") -> int:
        """The host's own pid of a child with this title."""
        group = self.inference.show("ControlGroup")["ControlGroup"]
        script = 'for p in $(cat "/sys/fs/cgroup$1/cgroup.procs"); do echo $p $(tr "\\0" " " <"/proc/$p/cmdline"); done'
        lines = self.host.run("sh", "-c", script, "titles", group).stdout.splitlines()
        return next(int(line.split()[0]) for line in lines if line.split()[1:2] == [title])

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """What somebody in a shell does."""
        self.host.run("kill", f"-{int(number)}", str(pid))

    def kill_main(self) -> None:
        self.kill(int(self.inference.show("MainPID")["MainPID"]))

    def rewrite(self, *service: str) -> None:
        """Another command than a server's, and what goes with it."""
        self.host.unit(
            self.inference.unit, "\n".join(["[Unit]", "StartLimitIntervalSec=60", "[Service]", *service, ""])
        )


@dataclass(frozen=True)
class Provocation:
    """`definition` and `simulation` are what differs from a small server that serves. `runs`: it is up at the end."""

    expected: Class
    act: Callable[[Stage], None]
    definition: dict[str, Any]
    simulation: dict[str, Any]
    runs: bool

    @property
    def name(self) -> str:
        return self.act.__name__


PROVOCATIONS: list[Provocation] = []
BIG = {"profile": "hybrid122b", "release": "0.5.9"}


def provokes(
    expected: Class, *, simulation: dict[str, Any] | None = None, runs: bool = False, **definition: Any
) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    def register(act: Callable[[Stage], None]) -> Callable[[Stage], None]:
        PROVOCATIONS.append(Provocation(expected, act, definition, simulation or {}, runs))
        return act

    return register


def _ask(client: Client, tokens: int) -> None:
    try:
        client.generate(tokens)
    except (OSError, ValueError):  # what is provoked is that there is no answer
        return


def recorded_kernel_line(failure: Class, words: str) -> str:
    """The first line of the class's recorded case that the kernel said and that has these words."""
    log: list[str] = json.loads((CASES / REPLAYED[failure][0]).read_text())["log"]
    return next(line.removeprefix("kernel: ") for line in log if line.startswith("kernel: ") and words in line)


# --- GPU memory: the simulated cards are the published ones, and so are the figures


@provokes(Class.KV_CACHE_OOM, steps=10, tp=4, simulation=BIG)
def steps_that_do_not_fit(stage: Stage) -> None:
    stage.start()


@provokes(Class.WEIGHTS_OOM, simulation=BIG)
def one_card_for_the_weights_of_four(stage: Stage) -> None:
    stage.start()


@provokes(Class.CUDA_GRAPH_OOM, simulation={"faults": "graph_oom"})
def no_memory_in_a_capture(stage: Stage) -> None:
    stage.start()


@provokes(Class.CUDA_GRAPH_OOM, simulation={"faults": "graph_buffers_oom"})
def no_memory_for_the_buffers_of_graphs(stage: Stage) -> None:
    stage.start()


@provokes(Class.RUNTIME_CUDA_OOM)
def no_memory_in_a_prefill(stage: Stage) -> None:
    stage.serve("runtime_oom")
    stage.request()
    stage.wait_over()


@provokes(Class.GPU_MEMORY_HELD, steps=4, tp=4, simulation=BIG)
def a_stranger_on_a_card(stage: Stage) -> None:
    with stage.inference.bystander(0, 88 * GIB):
        stage.start()


# --- Host memory and files


@provokes(Class.HOST_OOM_KILL)
def a_kill_by_the_kernel(stage: Stage) -> None:
    stage.serve()
    pid = stage.worker()
    line = recorded_kernel_line(Class.HOST_OOM_KILL, "Out of memory: Killed process")
    stage.kernel.say(line.replace("90121 (sgl_diffusion::)", f"{pid} (sglang::schedul)"))
    stage.kill(pid)
    stage.wait_over()


@provokes(Class.HOST_MEMORY_SHORTAGE, flags=("--enable-hierarchical-cache", "--hicache-size", "100000"))
def a_host_cache_larger_than_the_host(stage: Stage) -> None:
    stage.start()


@provokes(Class.SHM_OR_DISK_FULL, tp=2, service=("TemporaryFileSystem=/dev/shm:size=1m,mode=1777",))
def a_small_dev_shm(stage: Stage) -> None:
    stage.start()


# --- Stops, starts, kills


@provokes(Class.REQUESTED_STOP)
def a_stop(stage: Stage) -> None:
    stage.serve()
    stage.inference.stop()


@provokes(Class.REQUESTED_STOP, kill_mode="control-group")
def a_stop_of_all_processes_at_once(stage: Stage) -> None:
    stage.serve()
    stage.inference.tokens(8)
    stage.inference.stop()


@provokes(Class.REQUESTED_STOP)
def a_stop_for_a_deploy(stage: Stage) -> None:
    """The definition is another one by now, and was not when the launch began."""
    stage.serve()
    stage.inference.change(steps=3)
    stage.inference.reload()
    stage.inference.stop()


@provokes(Class.STOP_TIMEOUT_SIGKILL, timeout_stop_s=1.0)
def a_stop_that_requests_outlive(stage: Stage) -> None:
    stage.serve()
    stage.inference.load(2, BUSY_TOKENS)
    stage.inference.stop()


@provokes(Class.START_TIMEOUT, service=("Type=notify", "TimeoutStartSec=3"))
def a_type_that_sglang_does_not_know(stage: Stage) -> None:
    stage.start()


@provokes(Class.STALE_UNIT_FILE, steps=3, runs=True)
def a_start_without_a_reload(stage: Stage) -> None:
    stage.inference.change(steps=5)
    stage.serve()


@provokes(Class.START_LIMIT_HIT)
def a_command_that_always_fails_without_a_word(stage: Stage) -> None:
    stage.rewrite("ExecStart=/bin/false", "Restart=always", "RestartSec=50ms")
    stage.host.systemctl("start", stage.inference.unit, check=False)
    told = "Start request repeated too quickly"
    wait_until(
        lambda: told in stage.host.run("journalctl", "--unit", stage.inference.unit, "--output=cat").stdout,
        *(END_S, "systemd gives up"),
    )
    stage.wait_over()


@provokes(Class.EXTERNAL_KILL)
def a_kill_of_main(stage: Stage) -> None:
    stage.serve()
    stage.kill_main()
    stage.wait_over()


@provokes(Class.EXTERNAL_KILL)
def a_kill_of_a_worker(stage: Stage) -> None:
    stage.serve()
    stage.kill(stage.worker())
    stage.wait_over()


@provokes(Class.EXTERNAL_KILL)
def a_kill_through_systemd(stage: Stage) -> None:
    stage.serve()
    stage.inference.kill()
    stage.wait_over()


@provokes(Class.EXTERNAL_KILL, service=("RuntimeMaxSec=6",))
def a_limit_of_the_run_time(stage: Stage) -> None:
    stage.serve()
    stage.wait_over()


# --- The card and the software


@provokes(Class.GPU_HARDWARE_FAULT)
def a_card_that_breaks(stage: Stage) -> None:
    stage.serve()
    stage.kernel.say(recorded_kernel_line(Class.GPU_HARDWARE_FAULT, "Xid"))
    stage.ask_for("cuda_fault")
    stage.request()
    stage.wait_over()


@provokes(Class.CUDA_ERROR)
def an_illegal_access(stage: Stage) -> None:
    stage.serve("cuda_fault")
    stage.request()
    stage.wait_over()


@provokes(Class.NCCL_ERROR)
def a_collective_that_fails(stage: Stage) -> None:
    stage.serve("nccl_fault")
    stage.request()
    stage.wait_over()


@provokes(Class.SEGFAULT)
def a_segmentation_fault(stage: Stage) -> None:
    stage.serve()
    stage.kill(stage.worker(), signal.SIGSEGV)
    stage.wait_over()


@provokes(Class.SEGFAULT, simulation={"faults": "init_signal 11"})
def a_segmentation_fault_at_the_start(stage: Stage) -> None:
    stage.start()


@provokes(Class.SOFTWARE_EXCEPTION)
def an_exception(stage: Stage) -> None:
    stage.serve("crash_after")
    stage.request()
    stage.wait_over()


@provokes(Class.INTERNAL_WATCHDOG_HANG, flags=("--watchdog-timeout", "20"))
def a_scheduler_that_stands_still(stage: Stage) -> None:
    stage.serve()
    stage.inference.load(1, BUSY_TOKENS)
    stage.ask_for("hang")
    stage.wait_over()


@provokes(Class.UNRESPONSIVE)
def a_prober_that_loses_patience(stage: Stage) -> None:
    stage.serve("hang")
    for _ in range(2):
        assert not stage.inference.client.healthy(timeout_s=30.0)
    stage.kill_main()
    stage.wait_over()


@provokes(Class.UNRESPONSIVE, simulation={"release": "0.5.9"}, runs=True)
def a_dead_scheduler_that_main_does_not_notice(stage: Stage) -> None:
    stage.serve()
    stage.kill(stage.worker())
    assert not stage.inference.client.healthy(timeout_s=30.0)


@provokes(Class.BAD_ARGUMENTS, flags=("--no-such-flag",))
def a_flag_that_is_none(stage: Stage) -> None:
    stage.start()


@provokes(Class.BAD_ARGUMENTS, flags=("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"))
def steps_without_topk(stage: Stage) -> None:
    stage.start()


@provokes(Class.MISSING_DEPENDENCY)
def an_interpreter_that_is_not_there(stage: Stage) -> None:
    stage.rewrite("ExecStart=/opt/no/such/python -m sglang.launch_server --model-path /models/m")
    stage.start()


@provokes(Class.MISSING_DEPENDENCY, service=("EnvironmentFile=/etc/no-such-file.env",))
def an_environment_file_that_is_not_there(stage: Stage) -> None:
    stage.start()


# The warm-up would talk to whoever listens, and wait for its answer.
@provokes(Class.PORT_IN_USE, flags=("--skip-server-warmup",))
def a_port_that_somebody_listens_on(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", stage.inference.sglang.port)):
        stage.start()


@provokes(Class.UNKNOWN)
def an_end_that_nobody_asked_for(stage: Stage) -> None:
    stage.rewrite("ExecStart=/bin/sleep 5")
    stage.start()
