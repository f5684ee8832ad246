"""The simulated NVML, seen as the product sees it: through pynvml, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim_nvml import GIB, MIB, GpuFull, SimNvml, build
from waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]
IDLE = 615 * MIB

PREAMBLE = """
import json, pynvml as n
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(0)
def answer(value): print(json.dumps(value))
"""


@pytest.fixture
def nvml(tmp_path: Path) -> SimNvml:
    simulated = SimNvml(tmp_path / "nvml")
    simulated.gpus(2, 96 * GIB)
    return simulated


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def environment(nvml: SimNvml) -> dict[str, str]:
    return os.environ | {
        "SIM_NVML_DIR": str(nvml.folder),
        "LD_LIBRARY_PATH": str(build.library()),
        "PYTHONPATH": str(TESTS),
    }


def ask(nvml: SimNvml, code: str, timeout_s: float = 20) -> Any:
    """What `code` answers through pynvml."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=environment(nvml),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def used(nvml: SimNvml) -> int:
    value = ask(nvml, "answer(n.nvmlDeviceGetMemoryInfo(handle).used)")
    assert isinstance(value, int)
    return value


def test_an_idle_card_shows_what_the_driver_reserves(nvml: SimNvml) -> None:
    first, second, count = ask(
        nvml,
        """
        old, new = n.nvmlDeviceGetMemoryInfo(handle), n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
        answer([[old.total, old.free, old.used], [new.total, new.reserved, new.free, new.used], n.nvmlDeviceGetCount()])
        """,
    )
    assert first == [96 * GIB, 96 * GIB - IDLE, IDLE]
    assert second == [96 * GIB, IDLE, 96 * GIB - IDLE, 0]
    assert count == 2


def test_everything_the_product_asks_of_a_card_is_answered(nvml: SimNvml) -> None:
    facts = ask(
        nvml,
        """
        second = n.nvmlDeviceGetHandleByIndex(1)
        answer({
            "driver": n.nvmlSystemGetDriverVersion(), "nvml": n.nvmlSystemGetNVMLVersion(),
            "same": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(second))),
            "name": n.nvmlDeviceGetName(second), "minor": n.nvmlDeviceGetMinorNumber(second),
            "mig": n.nvmlDeviceGetMigMode(second), "bus": n.nvmlDeviceGetPciInfo(second).busId,
            "persistence": n.nvmlDeviceGetPersistenceMode(second), "mode": n.nvmlDeviceGetComputeMode(second),
            "ecc": n.nvmlDeviceGetTotalEccErrors(second, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
        })
        n.nvmlShutdown()
        """,
    )
    assert facts == {
        "driver": "580.159.04",
        "nvml": "13.580.159.04",
        "same": 1,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "minor": 1,
        "mig": [0, 0],
        "bus": "00000000:2A:00.0",
        "persistence": 1,
        "mode": 0,
        "ecc": 0,
    }


def test_a_holder_is_listed_with_all_its_bytes_on_its_own_card_only(
    nvml: SimNvml, holder: subprocess.Popen[bytes]
) -> None:
    nvml.hold(0, holder.pid, 30 * GIB)
    nvml.hold(0, holder.pid, 10 * GIB)
    lists = ask(
        nvml,
        """
        cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        answer([[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(c)] for c in cards])
        """,
    )
    assert lists == [[[holder.pid, 40 * GIB]], []]
    assert used(nvml) == nvml.used(0) == IDLE + 40 * GIB
    assert nvml.used(1) == IDLE


def test_a_dead_holders_bytes_linger_for_the_drivers_lag_even_as_a_zombie(
    nvml: SimNvml, holder: subprocess.Popen[bytes]
) -> None:
    nvml.hold(0, holder.pid, 30 * GIB, lag_s=0.6)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped: a zombie
    assert used(nvml) == nvml.used(0) == IDLE + 30 * GIB
    wait_until(lambda: used(nvml) == IDLE, 5, "the bytes are back")
    assert nvml.used(0) == IDLE
    assert nvml.processes(0) == {}


def test_a_number_used_again_by_another_process_does_not_keep_the_bytes(
    nvml: SimNvml, holder: subprocess.Popen[bytes]
) -> None:
    nvml.hold(0, holder.pid, GIB, lag_s=0)
    (file,) = (nvml.folder / "alloc").iterdir()
    file.write_text(file.read_text().replace("start=", "start=1"))
    assert used(nvml) == nvml.used(0) == IDLE


def test_wedged_bytes_stay_and_belong_to_no_process(nvml: SimNvml, holder: subprocess.Popen[bytes]) -> None:
    nvml.hold(0, holder.pid, 30 * GIB, wedged=True)
    holder.kill()
    holder.wait()
    assert used(nvml) == nvml.used(0) == IDLE + 30 * GIB
    assert ask(nvml, "answer(len(n.nvmlDeviceGetComputeRunningProcesses(handle)))") == 0
    nvml.release_all()
    assert used(nvml) == IDLE


@pytest.mark.parametrize("shown", [0, 4_000_000])
def test_a_container_may_show_no_pid_or_one_that_is_not_here(nvml: SimNvml, shown: int) -> None:
    name = nvml.hold(0, 0, 5 * GIB, show_pid=shown)
    listed = ask(nvml, "answer([[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(handle)])")
    assert listed == [[shown, 5 * GIB]]
    nvml.release(name)
    assert used(nvml) == IDLE


@pytest.mark.parametrize(("code", "error"), [(15, "NVMLError_GpuIsLost"), (999, "NVMLError_Unknown")])
def test_a_call_fails_with_the_code_it_was_told_and_heals(nvml: SimNvml, code: int, error: str) -> None:
    ask_error = """
        try: n.nvmlDeviceGetMemoryInfo(handle); answer("fine")
        except n.NVMLError as e: answer(type(e).__name__)
        """
    nvml.fail(code, "nvmlDeviceGetMemoryInfo")
    assert ask(nvml, ask_error) == error
    nvml.heal()
    assert ask(nvml, ask_error) == "fine"


def test_a_call_that_hangs_goes_on_when_the_driver_heals(nvml: SimNvml) -> None:
    nvml.hang("nvmlInit_v2")
    with pytest.raises(subprocess.TimeoutExpired):
        ask(nvml, "answer(1)", timeout_s=1)
    waiting = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + "answer(2)"], env=environment(nvml), stdout=subprocess.PIPE
    )
    nvml.heal()
    out, _ = waiting.communicate(timeout=20)
    assert json.loads(out) == 2


def test_a_slow_call_takes_the_time_it_was_told(nvml: SimNvml) -> None:
    nvml.slow(0.3, "nvmlDeviceGetMemoryInfo")
    code = "import time; at = time.monotonic(); n.nvmlDeviceGetMemoryInfo(handle); answer(time.monotonic() - at)"
    assert ask(nvml, code) >= 0.3


def test_a_host_without_cards_has_no_driver(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
        env=environment(SimNvml(tmp_path)),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert "NVMLError_DriverNotLoaded" in done.stderr


def test_no_more_can_be_taken_than_is_free(nvml: SimNvml, holder: subprocess.Popen[bytes]) -> None:
    nvml.take(0, holder.pid, 60 * GIB)
    with pytest.raises(GpuFull) as full:
        nvml.take(0, holder.pid, 60 * GIB)
    assert full.value.free == 36 * GIB - IDLE
    nvml.take(1, holder.pid, 60 * GIB)


def test_readers_never_see_half_a_file_while_state_is_replaced(nvml: SimNvml, holder: subprocess.Popen[bytes]) -> None:
    code = """
        seen = set()
        for _ in range(3000):
            seen.add((n.nvmlDeviceGetMemoryInfo(handle).total, n.nvmlDeviceGetMemoryInfo(handle).used))
        answer(sorted(seen))
        """
    reader = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)], env=environment(nvml), stdout=subprocess.PIPE
    )
    while reader.poll() is None:
        nvml.gpus(2, 96 * GIB)
        nvml.release(nvml.hold(0, holder.pid, GIB))
    assert reader.stdout is not None
    with reader.stdout as out:
        seen = {tuple(one) for one in json.load(out)}
    assert seen <= {(96 * GIB, IDLE), (96 * GIB, IDLE + GIB)}


def test_a_bystander_of_the_command_line_holds_until_it_is_killed(nvml: SimNvml) -> None:
    command = [sys.executable, "-m", "sim_nvml", "hold", "--gpu", "1", "--bytes", "40GiB", "--lag", "0"]
    with subprocess.Popen(command, env=environment(nvml), stdout=subprocess.PIPE) as bystander:
        wait_until(lambda: nvml.processes(1) == {bystander.pid: 40 * GIB}, 10, "the bystander holds its bytes")
        bystander.terminate()
        bystander.wait(timeout=10)
    assert nvml.used(1) == IDLE
