"""The cards through the helper process: real helpers on a simulated NVML, that hangs, fails, and lies about pids."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_watchdog.domain.gpu import GpuReading, GpuUnknown
from sglang_watchdog.host import probe_worker, processes
from sglang_watchdog.host.gpu import MOST_ABANDONED, ProbeWorker
from sglang_watchdog.host.probe_worker import device_holders
from sim_nvml import GIB, MIB, SimNvml, build
from waiting import wait_until

IDLE = 615 * MIB
SHORT_S = 0.3


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimNvml]:
    simulated = SimNvml(tmp_path / "nvml")
    simulated.gpus(2, 96 * GIB)
    monkeypatch.setenv("SIM_NVML_DIR", str(simulated.folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build.library()))
    yield simulated
    simulated.heal()


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    environment = {"INVOCATION_ID": "a" * 32, "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()", "--api-key", "hush"], env=environment
    )
    wait_until(lambda: "--api-key" in processes.command_line(process.pid), 10, "the holder runs")
    yield process
    process.kill()
    process.wait()


@asynccontextmanager
async def probing() -> AsyncIterator[ProbeWorker]:
    probe = ProbeWorker()
    try:
        yield probe
    finally:
        await probe.close()


def helpers() -> list[psutil.Process]:
    """Probe workers of this process, which may have other children as well (a lab host that other tests share)."""
    return [child for child in psutil.Process().children() if _is_worker(child)]


def _is_worker(child: psutil.Process) -> bool:
    try:
        return "sglang_watchdog.host.probe_worker" in child.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def test_all_cards_are_read_with_their_holders(nvml: SimNvml, holder: subprocess.Popen[bytes]) -> None:
    nvml.hold(1, holder.pid, 10 * GIB)
    nvml.hold(1, holder.pid, 5 * GIB)

    async def read() -> None:
        async with probing() as probe:
            reading = await probe.read_gpus()
            assert isinstance(reading, GpuReading)
            assert reading.driver == "580.159.04"
            assert [(gpu.index, gpu.uuid[:4], gpu.total_bytes) for gpu in reading.gpus] == [
                (0, "GPU-", 96 * GIB),
                (1, "GPU-", 96 * GIB),
            ]
            assert [gpu.used_bytes for gpu in reading.gpus] == [IDLE, IDLE + 15 * GIB]
            assert [[(h.pid, h.used_bytes) for h in gpu.holders] for gpu in reading.gpus] == [
                [],
                [(holder.pid, 15 * GIB)],
            ]

    asyncio.run(read())


def test_pid_0_is_nobodys_and_graphics_and_mps_clients_are_holders_too(
    nvml: SimNvml, holder: subprocess.Popen[bytes]
) -> None:
    nvml.hold(0, 0, 2 * GIB)
    nvml.hold(0, holder.pid, GIB, kind="graphics")
    nvml.hold(1, holder.pid, GIB, kind="mps")
    nvml.hold(1, holder.pid, GIB, show_pid=4_000_000)

    async def read() -> None:
        async with probing() as probe:
            reading = await probe.read_gpus()
            assert isinstance(reading, GpuReading)
            first, second = ({h.pid: h.used_bytes for h in gpu.holders} for gpu in reading.gpus)
            assert first == {None: 2 * GIB, holder.pid: GIB}
            assert second == {holder.pid: GIB, 4_000_000: GIB}

    asyncio.run(read())


class BusyCard:
    """NVML of one card, on which a process takes a GiB after each of the first `times` readings of used bytes."""

    NVMLError = RuntimeError

    def __init__(self, times: int) -> None:
        self.times = times
        self.held = self.readings = 0

    def nvmlDeviceGetMemoryInfo(self, _handle: object) -> SimpleNamespace:  # noqa: N802 (NVML's own name)
        found = SimpleNamespace(total=96 * GIB, used=self.held)
        self.readings += 1
        self.held += GIB if self.readings <= self.times else 0
        return found

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: object) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=7, usedGpuMemory=self.held)] if self.held else []

    def __getattr__(self, _name: str) -> Callable[[object], object]:
        return lambda _handle: ""


@pytest.mark.parametrize("times", [0, 1, 3])
def test_used_bytes_and_holders_are_of_one_moment(times: int) -> None:
    """What is allocated between two calls is neither memory without a holder nor a holder of memory that is free."""
    card = probe_worker._gpu(BusyCard(times), None, 0)
    assert card["used"] == times * GIB
    assert card["holders"] == ([(7, times * GIB)] if times else [])


def test_a_card_that_never_rests_is_read_all_the_same() -> None:
    busy = BusyCard(1000)
    assert probe_worker._gpu(busy, None, 0)["used"] > 0
    assert busy.readings <= 6


@pytest.mark.parametrize(
    ("code", "call", "words"),
    [
        (9, "nvmlInit_v2", "NVML error 9"),
        (15, "nvmlDeviceGetMemoryInfo", "GPU 0: GPU is lost (NVML error 15)"),
        (18, "nvmlInit_v2", "NVML error 18"),
        (999, "nvmlDeviceGetComputeRunningProcesses_v3", "NVML error 999"),
    ],
)
def test_an_nvml_error_is_unknown_and_the_next_call_initialises_anew(
    nvml: SimNvml, code: int, call: str, words: str
) -> None:
    async def read() -> None:
        async with probing() as probe:
            nvml.fail(code, call)
            answer = await probe.read_gpus()
            assert isinstance(answer, GpuUnknown)
            assert words.lower() in answer.reason.lower()
            nvml.heal()
            assert isinstance(await probe.read_gpus(), GpuReading)

    asyncio.run(read())


def test_a_card_without_process_lists_is_read_without_holders(nvml: SimNvml) -> None:
    nvml.fail(3, "nvmlDeviceGetMPSComputeRunningProcesses_v3")
    nvml.fail(3, "nvmlDeviceGetComputeRunningProcesses_v3")

    async def read() -> None:
        async with probing() as probe:
            reading = await probe.read_gpus()
            assert isinstance(reading, GpuReading)
            assert [gpu.holders for gpu in reading.gpus] == [(), ()]

    asyncio.run(read())


def test_a_host_without_nvml_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    async def read() -> None:
        async with probing() as probe:
            answer = await probe.read_gpus()
            assert isinstance(answer, GpuUnknown)
            assert "not found" in answer.reason.lower()

    asyncio.run(read())


def test_a_hang_is_unknown_in_time_and_the_next_call_gets_a_new_helper(nvml: SimNvml) -> None:
    async def read() -> None:
        async with probing() as probe:
            assert isinstance(await probe.read_gpus(), GpuReading)
            (first,) = helpers()
            nvml.hang()
            answer = await probe.read_gpus(SHORT_S)
            assert isinstance(answer, GpuUnknown)
            assert "0.3 s" in answer.reason
            assert probe.abandoned_total == 1
            nvml.heal()
            assert isinstance(await probe.read_gpus(), GpuReading)
            (second,) = helpers()
            assert second.pid != first.pid

    asyncio.run(read())


def test_a_slow_driver_is_waited_for(nvml: SimNvml) -> None:
    nvml.slow(0.1, "nvmlInit_v2")

    async def read() -> None:
        async with probing() as probe:
            assert isinstance(await probe.read_gpus(), GpuReading)

    asyncio.run(read())


def test_helpers_that_cannot_die_are_counted_and_soon_no_more_are_started(
    nvml: SimNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stuck in the driver outlives SIGKILL: simulated by a kill that does nothing."""
    stuck: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: stuck.append(process))
    nvml.hang()

    async def read() -> None:
        probe = ProbeWorker()
        for count in range(1, MOST_ABANDONED + 1):
            assert isinstance(await probe.read_gpus(SHORT_S), GpuUnknown)
            assert probe.abandoned_alive == count
        answer = await probe.read_gpus()
        assert isinstance(answer, GpuUnknown)
        assert "still hang" in answer.reason
        assert len(helpers()) == MOST_ABANDONED
        monkeypatch.undo()
        for process in stuck:
            process.kill()
        await probe.close()
        assert probe.abandoned_alive == 0
        assert helpers() == []

    asyncio.run(read())


def test_a_cancelled_question_leaves_no_answer_to_the_next_one(nvml: SimNvml) -> None:
    nvml.slow(1, "nvmlInit_v2")

    async def read() -> None:
        async with probing() as probe:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(probe.read_gpus(), SHORT_S)
            nvml.heal()
            assert await probe.describe([os.getpid()])

    asyncio.run(read())


@pytest.mark.usefixtures("nvml")
def test_an_idle_daemon_has_no_helper() -> None:
    async def read() -> None:
        probe = ProbeWorker()
        assert helpers() == []
        for _ in range(2):
            assert isinstance(await probe.read_gpus(), GpuReading)
            assert len(helpers()) == 1
            await probe.close()
            assert helpers() == []

    asyncio.run(read())


def test_a_helper_ends_with_its_parent() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, "-m", "sglang_watchdog.host.probe_worker"], stdin=theirs.fileno(), stdout=theirs.fileno()
        )
    ours.close()
    assert helper.wait(10) == 0


def test_a_helper_starts_without_the_large_libraries() -> None:
    """Its start is part of every deadline."""
    code = "import sys, sglang_watchdog.host.probe_worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert not {"pydantic", "aiohttp", "rich", "asyncio", "psutil", "pynvml"} & set(done.stdout.split())


# What is told of a process


def test_a_holder_is_described_without_its_secrets(holder: subprocess.Popen[bytes]) -> None:
    async def read() -> None:
        async with probing() as probe:
            facts = (await probe.describe([holder.pid]))[holder.pid]
            assert facts.id == processes.identify(holder.pid)
            assert facts.invocation == "a" * 32
            assert facts.argv is not None
            assert facts.argv[-2:] == ("--api-key", "REDACTED")
            assert "hush" not in repr(facts)
            assert facts.ancestors[0].id == processes.identify(os.getpid())
            assert facts.uid == os.getuid()

    asyncio.run(read())


def test_one_that_is_gone_is_left_out_and_a_zombie_is_not(holder: subprocess.Popen[bytes]) -> None:
    async def read() -> None:
        async with probing() as probe:
            holder.kill()
            wait_until(
                lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE, 10, "the holder is a zombie"
            )
            facts = (await probe.describe([holder.pid]))[holder.pid]
            assert facts.zombie
            assert (facts.argv, facts.invocation) == ((), None)
            holder.wait()
            assert await probe.describe([holder.pid]) == {}

    asyncio.run(read())


def test_where_the_helper_cannot_read_the_rest_is_known_all_the_same(holder: subprocess.Popen[bytes]) -> None:
    async def read() -> None:
        async with probing() as probe:
            facts = (await probe.describe([holder.pid], deadline=0))[holder.pid]
            assert facts.id == processes.identify(holder.pid)
            assert (facts.argv, facts.invocation) == (None, None)

    asyncio.run(read())


def test_open_device_files_name_holders_and_their_cards(tmp_path: Path) -> None:
    for name in ("nvidia-uvm", "nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    prefix = str(tmp_path / "nvidia")

    def opener(*names: str) -> subprocess.Popen[bytes]:
        code = (
            f"import signal; files = [open('{prefix}' + name) for name in {names!r}]; print(flush=True); signal.pause()"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    holder, monitor = opener("-uvm", "ctl", "1"), opener("ctl", "0")
    try:
        found = device_holders(prefix, f"{prefix}-uvm")
    finally:
        for process in (holder, monitor):
            process.kill()
            process.communicate()
    assert found == [{"pid": holder.pid, "devices": [f"{prefix}1"]}]


def test_device_holders_are_asked_through_the_helper() -> None:
    async def read() -> None:
        async with probing() as probe:
            assert isinstance(await probe.device_holders(), tuple)
            assert isinstance(await probe.device_holders(0), GpuUnknown)

    asyncio.run(read())


def test_a_card_in_mig_mode_is_read_as_its_instances(nvml: SimNvml, holder: subprocess.Popen[bytes]) -> None:
    nvml.gpus(2, 96 * GIB, instances=2)
    nvml.hold(1, holder.pid, 10 * GIB, instance=1)

    async def read() -> None:
        async with probing() as probe:
            reading = await probe.read_gpus()
            assert isinstance(reading, GpuReading)
            assert [gpu.index for gpu in reading.gpus] == [0, 0, 1, 1]
            assert all(gpu.uuid.startswith("MIG-") and gpu.total_bytes == 48 * GIB for gpu in reading.gpus)
            assert len({gpu.uuid for gpu in reading.gpus}) == 4
            held = [[(one.pid, one.used_bytes) for one in gpu.holders] for gpu in reading.gpus]
            assert held == [[], [], [], [(holder.pid, 10 * GIB)]]
            assert reading.gpus[3].used_bytes - reading.gpus[2].used_bytes == 10 * GIB

    asyncio.run(read())


def test_instances_that_may_not_be_seen_are_read_as_the_whole_card(
    nvml: SimNvml, holder: subprocess.Popen[bytes]
) -> None:
    nvml.gpus(1, 96 * GIB, instances=2)
    nvml.hold(0, holder.pid, 10 * GIB, instance=1)
    nvml.fail(4, "nvmlDeviceGetMigDeviceHandleByIndex")

    async def read() -> None:
        async with probing() as probe:
            reading = await probe.read_gpus()
            assert isinstance(reading, GpuReading)
            assert [(gpu.uuid[:4], gpu.total_bytes, len(gpu.holders)) for gpu in reading.gpus] == [
                ("GPU-", 96 * GIB, 1)
            ]

    asyncio.run(read())
