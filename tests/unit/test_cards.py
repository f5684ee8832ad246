"""The freeing of cards with real processes and a real helper on simulated NVML: who is ended, and who never is."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_watchdog.cards import Cards
from sglang_watchdog.domain.gpu import GpuUnknown
from sglang_watchdog.domain.launch import Launch, Phase, RecordedProcess
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.host import processes
from sglang_watchdog.host.clock import SystemClock
from sglang_watchdog.host.gpu import DeviceHolder, ProbeWorker
from sglang_watchdog.host.journal import Journal
from sglang_watchdog.host.server_files import ServerFilesReader
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.freeing import Patience
from sglang_watchdog.reporting.hooks import Hooks
from sglang_watchdog.reporting.metrics import Metrics
from sglang_watchdog.settings import HookSettings, UnitSettings
from sim_nvml import GIB, SimNvml, build
from waiting import wait_until

UNIT = "sglang.service"
DOWN = UnitSnapshot(
    UNIT,
    load_state="loaded",
    active_state=ActiveState.FAILED,
    invocation="a" * 32,
    control_group=f"/system.slice/{UNIT}",
    kill_mode="mixed",
)
UP = UnitSnapshot(
    UNIT,
    load_state="loaded",
    active_state=ActiveState.ACTIVATING,
    invocation="b" * 32,
    control_group=f"/system.slice/{UNIT}",
)
PATIENT = Patience(terminate=20, kill=20, release=20)
HURRIED = Patience(terminate=0.2, kill=20, release=0.5)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


class Manager:
    """systemd, as far as freeing asks it. `then` gives the unit's state from the `after`th reading on."""

    def __init__(self) -> None:
        self.readings = 0
        self.after = 1 << 30
        self.then = UP

    def snapshot(self, _unit: str) -> UnitSnapshot:
        self.readings += 1
        return DOWN if self.readings <= self.after else self.then

    def kill(self, _unit: str, _signal: int) -> None:
        raise AssertionError("nobody is in the unit's cgroup")


class Probe(ProbeWorker):
    """The real helper; `devices` are those who have the driver's memory device open."""

    devices: tuple[int, ...] = ()

    async def device_holders(self, deadline: float = 5.0) -> tuple[DeviceHolder, ...] | GpuUnknown:  # noqa: ARG002
        return tuple(DeviceHolder(pid, ()) for pid in self.devices)


class Host:
    """Cards, an ended launch and its left-overs, all of which end with the test."""

    def __init__(self, nvml: SimNvml) -> None:
        self.nvml = nvml
        self.manager = Manager()
        self.probe = Probe()
        self.ledger = Ledger.in_memory()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str, code: str = "") -> subprocess.Popen[bytes]:
        """A command, or Python code that says with a line when it is ready."""
        process = subprocess.Popen(argv or (sys.executable, "-c", code), stdout=subprocess.PIPE if code else None)
        self._started.append(process)
        if process.stdout is not None:
            process.stdout.readline()
        wait_until(lambda: code or processes.name(process.pid) == argv[0], 30, "it is executed")
        return process

    def recorded(self, *of_launch: subprocess.Popen[bytes], **facts: Any) -> None:
        """What the ledger says of the launch that ended: these were in the unit's cgroup. `facts`: more of it."""
        found = [processes.identify(process.pid) for process in of_launch]
        seen = tuple(RecordedProcess(one, "", Phase.SERVING) for one in found if one)
        now = SystemClock().now()
        boot = processes.boot_id()
        self.ledger.save_launch(
            Launch(UNIT, DOWN.invocation, now - 60, boot_id=boot, processes=seen, ended=now, **facts)
        )

    def free(self, patience: Patience = PATIENT) -> str:
        metrics = Metrics((UNIT,), "0")
        parts = Parts(
            self.manager,  # type: ignore[arg-type]
            Journal(lambda _line: None),
            self.probe,
            ServerFilesReader(),
            SystemClock(),
            self.ledger,
            metrics,
            Hooks(HookSettings(), metrics),
            Path("/nonexistent"),
        )
        cards = Cards(UNIT, UnitSettings(), parts, lambda: None)

        async def freed() -> str:
            try:
                return await cards.free(None, patience=patience)
            finally:
                await self.probe.close()

        return asyncio.run(freed())

    def end(self) -> None:
        for process in self._started:
            with process:
                process.kill()
        self.nvml.heal()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    simulated = SimNvml(tmp_path / "nvml")
    simulated.gpus(1, 96 * GIB)
    monkeypatch.setenv("SIM_NVML_DIR", str(simulated.folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build.library()))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    made = Host(simulated)
    yield made
    made.end()


def test_a_left_over_is_ended_and_a_tenant_with_the_same_command_lives(host: Host) -> None:
    ours, tenant = host.start("sleep", "600"), host.start("sleep", "600")
    for process in (ours, tenant):
        host.nvml.hold(0, process.pid, GIB)
    host.recorded(ours)
    said = host.free()
    assert ours.wait(1) != 0
    assert tenant.poll() is None
    assert f"Left-over processes {ours.pid} were ended (1.0 GiB)" in said
    assert f"process {tenant.pid} with 1.0 GiB" in said
    assert "NVML shows our bytes back" in said


@pytest.mark.parametrize("then", [UP, replace(DOWN, job=7, job_type="restart")])
def test_an_automatic_restart_between_the_look_and_the_signal_spares_everybody(host: Host, then: UnitSnapshot) -> None:
    ours = host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, GIB)
    host.recorded(ours)
    host.manager.after, host.manager.then = 1, then
    said = host.free()
    assert ours.poll() is None
    assert "started meanwhile" in said


def test_an_automatic_restart_after_sigterm_keeps_sigkill_back(host: Host) -> None:
    ours = host.start(code=STUBBORN)
    host.nvml.hold(0, ours.pid, GIB)
    host.recorded(ours)
    host.manager.after = 6
    assert "started meanwhile" in host.free(Patience(terminate=1, kill=20, release=20))
    assert ours.poll() is None


def test_what_ignores_sigterm_is_killed(host: Host) -> None:
    ours = host.start(code=STUBBORN)
    host.nvml.hold(0, ours.pid, GIB)
    host.recorded(ours)
    assert "NVML shows our bytes back" in host.free(Patience(terminate=0.2, kill=20, release=20))
    assert ours.wait(1) == -9


def test_a_holder_that_its_supervisor_starts_again_is_ended_with_it(host: Host) -> None:
    hold = [sys.executable, "-m", "sim_nvml", "hold", "--bytes", "1GiB"]
    supervisor = host.start(code=f"import subprocess; print(flush=True)\nwhile True: subprocess.run({hold!r})")
    wait_until(lambda: host.nvml.processes(0), 30, "it holds memory")
    host.recorded(supervisor)
    said = host.free()
    assert "NVML shows our bytes back" in said
    assert supervisor.poll() is not None
    assert host.nvml.processes(0) == {}


@pytest.mark.parametrize("show", [0, 4_194_299])
def test_one_that_nvml_cannot_name_is_found_by_its_open_device(host: Host, show: int) -> None:
    ours = host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, 8 * GIB, show_pid=show)
    host.recorded(ours)
    host.probe.devices = (ours.pid, os.getpid())
    said = host.free()
    assert ours.poll() is not None
    assert f"process {os.getpid()} with an unknown amount" in said  # has it open too, and is nobody's of the unit


@pytest.mark.parametrize("fault", ["hang", "missing"])
def test_without_nvml_the_left_overs_are_ended_and_nothing_is_called_free(host: Host, fault: str) -> None:
    ours, stranger = host.start("sleep", "600"), host.start("sleep", "600")
    host.recorded(ours)
    host.probe.devices = (ours.pid, stranger.pid)
    if fault == "missing":
        host.nvml.fail(9, "nvmlInit_v2")
    else:
        host.nvml.hang()
    said = host.free()
    assert ours.poll() is not None
    assert stranger.poll() is None
    assert "cannot be told" in said
    assert "bytes back" not in said


def test_memory_without_a_process_is_told_with_what_helps(host: Host) -> None:
    host.nvml.hold(0, 0, 8 * GIB, wedged=True)
    said = host.free(HURRIED)
    assert "No visible process holds 7." in said
    assert "GPU-5119a000" in said
    assert "nvidia-smi --gpu-reset" in said


def test_a_process_that_outlives_sigkill_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in the driver does (state D); no signal reaches this one."""
    ours = host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, GIB)
    host.recorded(ours)
    monkeypatch.setattr(processes, "signal_process", lambda *_args: processes.SignalOutcome.SENT)
    said = host.free(Patience(terminate=0.1, kill=0.3, release=20))
    assert f"Outlived SIGKILL: {ours.pid}" in said


def test_a_zombie_that_nobody_reaps_has_ended_and_its_bytes_are_waited_for(host: Host) -> None:
    ours = host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, GIB, lag_s=1.0)
    host.recorded(ours)
    ours.kill()
    assert "NVML shows our bytes back" in host.free()
    assert host.nvml.processes(0) == {}


def test_a_stranger_that_takes_memory_meanwhile_keeps_nobody_waiting(host: Host) -> None:
    ours, stranger = host.start("sleep", "600"), host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, GIB, lag_s=0.5)
    host.recorded(ours)
    signal_process: Callable[..., processes.SignalOutcome] = processes.signal_process

    def then_the_stranger_comes(*args: object) -> processes.SignalOutcome:
        host.nvml.hold(0, stranger.pid, 8 * GIB)
        return signal_process(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processes, "signal_process", then_the_stranger_comes)
        assert "NVML shows our bytes back" in host.free()
    assert stranger.poll() is None


def test_bytes_on_a_card_that_cuda_does_not_show_to_the_unit_keep_nobody_waiting(host: Host) -> None:
    host.nvml.gpus(2, 96 * GIB)
    ours = host.start("sleep", "600")
    host.nvml.hold(0, ours.pid, GIB)
    host.nvml.hold(1, 0, 8 * GIB, wedged=True)  # a neighbour's, which nobody is named for
    host.recorded(ours, argv=("python3", "-m", "sglang.launch_server"), cuda={"CUDA_VISIBLE_DEVICES": "0"})
    said = host.free()
    assert "NVML shows our bytes back" in said
    assert "No visible process" not in said
