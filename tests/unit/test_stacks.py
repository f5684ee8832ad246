"""Stacks of a hanging launch: by a py-spy that only root can change, without secrets, bounded."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_watchdog.host import processes, stacks

PRINTS = """cat <<END
Process $4: python -m sglang.launch_server
--api-key hush-hush-4711
Python v3.11.2 (/usr/bin/python3.11)

Thread $4 (idle): "MainThread"
    recv (zmq/sugar/socket.py:100)
    event_loop_overlap (scheduler.py:999)
    <module> (launch_server.py:1)
Thread 99 (active): "token=abcdef0123456789abcdef"
    wait (threading.py:1)
END"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]) -> Callable[[str], str]:
    """`py_spy(code)`: what it does; returns the Python that it lies beside. The launch is one process."""
    folder = tmp_path / "bin"
    folder.mkdir()
    run = folder / "systemd-run"
    run.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    run.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "_writable_by_others", lambda _: "")
    identity = processes.identify(child.pid)
    monkeypatch.setattr(processes, "cgroup_processes", lambda _: (identity,))

    def made(code: str) -> str:
        command = folder / "py-spy"
        command.write_text(f"#!/bin/sh\n{code}\n")
        command.chmod(0o755)
        return str(folder / "python3")

    return made


def saved(python: str, folder: Path) -> list[str]:
    return [fact.text for fact in asyncio.run(stacks.save(("/x",), python, folder / "hangs", "one.txt", 7.0))]


def test_the_innermost_frames_are_told_and_the_whole_is_written_without_secrets(
    py_spy: Callable[[str], str], tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    short, where = saved(py_spy(PRINTS), tmp_path)
    frames = "recv (zmq/sugar/socket.py:100) < event_loop_overlap (scheduler.py:999) < <module> (launch_server.py:1)"
    assert short == f"sleep ({child.pid}) is in {frames}"
    file = tmp_path / "hangs" / "one.txt"
    assert str(file) in where
    assert "wait (threading.py:1)" in file.read_text()
    assert "hush-hush-4711" not in file.read_text()
    assert "abcdef0123456789" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_stuck_in_the_kernel_is_not_read(
    py_spy: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "stuck_in_the_kernel", lambda _: True)
    assert "stuck in the kernel" in saved(py_spy("touch /proc/self/never"), tmp_path)[0]


def test_a_py_spy_that_hangs_or_fails_is_said_and_given_up(
    py_spy: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_DUMP_DEADLINE_S", 0.2)
    assert "does not answer" in saved(py_spy(f"exec {sys.executable} -c 'import signal; signal.pause()'"), tmp_path)[0]
    monkeypatch.setattr(stacks, "_DUMP_DEADLINE_S", 10.0)
    assert "Permission denied" in saved(py_spy("echo Error: Permission denied >&2; exit 1"), tmp_path)[0]


def test_what_takes_too_long_in_all_is_left_out(
    py_spy: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_ALL_DEADLINE_S", 0.2)
    told = saved(py_spy(f"exec {sys.executable} -c 'import signal; signal.pause()'"), tmp_path)
    assert len(told) == 1
    assert "the whole stacks are in" in told[0]


def test_a_host_without_py_spy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_PATH", str(tmp_path))
    assert "neither beside the server's Python nor in PATH" in saved("/opt/no/such/python", tmp_path)[0]
    assert not (tmp_path / "hangs").exists()


def test_what_others_than_root_could_change_is_not_run(tmp_path: Path) -> None:
    mine = tmp_path / "py-spy"
    mine.write_text("#!/bin/sh\nexit 0\n")
    mine.chmod(0o755)
    assert stacks._writable_by_others(str(mine))  # below /tmp
    assert "not root's alone" in saved(str(tmp_path / "python"), tmp_path)[0]
    if Path("/bin").stat().st_uid == 0:
        assert not stacks._writable_by_others("/bin/cat")


def test_only_the_newest_are_kept(py_spy: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / "hangs"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text("")
        os.utime(folder / f"{number}.txt", (number, number))
    saved(py_spy(PRINTS), tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == sorted([*(f"{n}.txt" for n in range(11, 30)), "one.txt"])


def test_a_full_disk_costs_the_file_and_not_the_report(py_spy: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("no folder")
    short, where = saved(py_spy(PRINTS), tmp_path)
    assert "is in recv" in short
    assert "could not be written" in where


def test_stacks_are_those_of_processes_that_still_run(child: subprocess.Popen[bytes]) -> None:
    assert not processes.stuck_in_the_kernel(child.pid)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    assert not processes.stuck_in_the_kernel(child.pid)
