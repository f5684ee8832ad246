"""/proc and cgroups as real processes show them, and signals that reach the process meant or none."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.host import processes
from sglang_watchdog.host.processes import SignalOutcome, signal_process
from waiting import wait_until

NO_PID = 4_194_305  # above the kernel's largest


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    found = processes.identify(process.pid)
    assert found is not None
    return found


def zombify(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 10, "the child is a zombie")


# One process


def test_a_process_is_identified_by_its_start(child: subprocess.Popen[bytes]) -> None:
    started = processes.unix_time(identity(child).start_ticks)
    assert abs(started - time.time()) < 5
    assert abs(started - psutil.Process(child.pid).create_time()) < 1.1  # psutil's boot time has whole seconds
    assert processes.identify(NO_PID) is None


def test_a_name_with_blanks_and_brackets_is_no_field_of_its_own() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert processes.name(process.pid) == "a) R 1 (b"
            facts = processes.facts(process.pid)
            assert facts is not None
            assert facts.ancestors[0].id.pid == os.getpid()
            assert abs(facts.started - time.time()) < 5
        finally:
            process.kill()


def test_facts_of_a_child_name_its_ancestors_and_group(child: subprocess.Popen[bytes]) -> None:
    facts = processes.facts(child.pid)
    assert facts is not None
    assert facts.id == identity(child)
    assert (facts.name, facts.uid) == ("sleep", os.getuid())
    assert facts.ancestors[0].id == processes.identify(os.getpid())
    assert facts.ancestors[-1].id.pid in (0, 1)
    assert facts.cgroup == processes.cgroup(os.getpid())
    assert (facts.argv, facts.invocation) == (None, None)


def test_a_process_with_a_terminal_is_told_from_one_without() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as without:
        try:
            assert processes.facts(without.pid).terminal is False  # type: ignore[union-attr]
        finally:
            without.kill()
    master, slave = os.openpty()
    code = "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); print(flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, start_new_session=True
    ) as person:
        try:
            assert person.stdout is not None
            person.stdout.readline()
            assert processes.facts(person.pid).terminal is True  # type: ignore[union-attr]
        finally:
            person.kill()
            os.close(master)
            os.close(slave)


def test_of_a_process_that_is_gone_nothing_is_told() -> None:
    assert processes.facts(NO_PID) is None
    assert processes.command_line(NO_PID) == ()
    assert processes.name(NO_PID) == ""
    assert processes.cgroup(NO_PID) is None
    assert processes.ancestors(NO_PID) == ()


def test_a_zombie_is_still_a_process(child: subprocess.Popen[bytes]) -> None:
    zombify(child)
    facts = processes.facts(child.pid)
    assert facts is not None
    assert facts.zombie
    assert processes.command_line(child.pid) == ()


def test_a_command_line_keeps_empty_words(child: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: processes.command_line(child.pid) == ("sleep", "60"), 10, "the command is executed")
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "", "x"]) as process:
        try:
            wait_until(lambda: processes.command_line(process.pid)[3:] == ("", "x"), 10, "empty words are kept")
        finally:
            process.kill()


def test_the_boot_id_is_as_the_journal_writes_it() -> None:
    assert len(processes.boot_id()) == 32
    int(processes.boot_id(), 16)


# The unit's cgroup


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "_CGROUP_ROOTS", (tmp_path / "absent", tmp_path / "systemd"))
    return tmp_path / "systemd"


def fill(groups: Path, group: str, *pids: int) -> None:
    folder = groups / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))


def test_a_unit_has_the_processes_of_its_group_and_all_below_oldest_first(
    groups: Path, child: subprocess.Popen[bytes]
) -> None:
    fill(groups, "system.slice/x.service", child.pid, NO_PID)
    fill(groups, "system.slice/x.service/below/deeper", os.getpid(), 0)
    fill(groups, "system.slice/other.service", os.getppid())
    me = processes.identify(os.getpid())
    assert processes.cgroup_processes("/system.slice/x.service") == (me, identity(child))


def test_a_unit_without_a_group_has_no_processes(groups: Path) -> None:
    fill(groups, "", os.getpid())
    fill(groups, "system.slice", os.getpid())
    for nothing in ("", "/", "/system.slice/gone.service"):
        assert processes.cgroup_processes(nothing) == ()


@pytest.mark.parametrize(
    ("text", "unified", "path"),
    [
        ("0::/system.slice/x.service\n", True, "/system.slice/x.service"),
        ("9:name=systemd:/\n4:memory:/outer\n0::/system.slice/x.service\n", True, "/system.slice/x.service"),
        (
            "9:name=systemd:/system.slice/x.service\n4:memory:/\n0::/system.slice/x.service\n",
            False,
            "/system.slice/x.service",
        ),
        ("9:name=systemd:/docker/0123\n4:memory:/docker/0123\n0::/\n", False, "/docker/0123"),
        ("2:cpu,cpuacct:/\n1:name=systemd:/a:b\n", False, "/a:b"),
        ("0::/only\n", False, "/only"),
        ("", True, None),
    ],
)
def test_the_group_is_the_one_in_the_hierarchy_that_this_systemd_uses(
    text: str, unified: bool, path: str | None
) -> None:
    assert processes.systemd_path(text, unified=unified) == path


def test_the_group_of_a_real_process_has_it() -> None:
    group = processes.cgroup(os.getpid())
    if not group or group == "/":
        pytest.skip("this process is in the root group, which is no unit's")
    assert os.getpid() in {process.pid for process in processes.cgroup_processes(group)}


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_only_a_listening_socket_of_the_units_own_counts(
    groups: Path, child: subprocess.Popen[bytes], family: socket.AddressFamily, address: str
) -> None:
    fill(groups, "system.slice/mine.service", child.pid, os.getpid())
    fill(groups, "system.slice/other.service", child.pid)
    try:
        listener = socket.socket(family)
        listener.bind((address, 0))
    except OSError:
        pytest.skip(f"no {family.name} here")
    with listener:
        port = listener.getsockname()[1]
        assert not processes.cgroup_listens("/system.slice/mine.service", port)
        listener.listen()
        assert processes.cgroup_listens("/system.slice/mine.service", port)
        assert not processes.cgroup_listens("/system.slice/other.service", port)
        assert not processes.cgroup_listens("", port)


def test_a_connection_from_the_port_is_no_listener(groups: Path) -> None:
    fill(groups, "system.slice/mine.service", os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert not processes.cgroup_listens("/system.slice/mine.service", client.getsockname()[1])


def test_a_port_that_others_have_as_well_is_not_the_units_alone(groups: Path, child: subprocess.Popen[bytes]) -> None:
    """On another address, say: theirs may be the one that answers."""
    mine = "/system.slice/mine.service"
    fill(groups, "system.slice/mine.service", os.getpid())
    fill(groups, "system.slice/other.service", child.pid)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert processes.has_to_itself((mine,), port)
        assert not processes.has_to_itself(("/system.slice/other.service",), port)
        server = f"import socket; s = socket.create_server(('127.0.0.2', {port})); print(flush=True); s.accept()"
        with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None
            stranger.stdout.readline()
            assert not processes.has_to_itself((mine,), port)
            fill(groups, "system.slice/container.scope", stranger.pid)
            assert processes.has_to_itself((mine, "/system.slice/container.scope"), port)
            stranger.kill()
    assert not processes.has_to_itself((mine,), port)


def test_what_a_group_reads_and_writes_is_counted(groups: Path) -> None:
    fill(groups, "system.slice/mine.service", os.getpid())
    before = processes.bytes_moved(("/system.slice/mine.service",))
    assert before > 0
    with open("/dev/zero", "rb") as zeros:
        zeros.read(1 << 20)
    assert processes.bytes_moved(("/system.slice/mine.service",)) >= before + (1 << 20)


def test_what_a_process_does_is_told_by_the_kernel(child: subprocess.Popen[bytes]) -> None:
    assert re.fullmatch(rf".+ \({child.pid}\): [A-Z] \(.+\)(, waits in \w+)?, 1 threads", processes.doing(child.pid))
    child.kill()
    child.wait(10)
    assert processes.doing(child.pid) == ""


# Signals


def test_a_proven_process_gets_the_signal(child: subprocess.Popen[bytes]) -> None:
    assert signal_process(identity(child), signal.SIGTERM, lambda: True) is SignalOutcome.SENT
    assert child.wait(10) == -signal.SIGTERM


def test_without_a_proof_nothing_is_sent(child: subprocess.Popen[bytes]) -> None:
    assert signal_process(identity(child), signal.SIGKILL, lambda: False) is SignalOutcome.NOT_PROVEN
    assert child.poll() is None


def test_a_recycled_pid_is_never_signalled(child: subprocess.Popen[bytes]) -> None:
    recycled = ProcessId(child.pid, identity(child).start_ticks - 1)
    assert signal_process(recycled, signal.SIGKILL, lambda: True) is SignalOutcome.GONE
    assert child.poll() is None


def test_one_that_ends_and_is_reaped_during_the_proof_is_gone(child: subprocess.Popen[bytes]) -> None:
    """Its pid could be somebody else's now: the pidfd still means the old process."""

    def proof() -> bool:
        child.kill()
        child.wait()
        return True

    assert signal_process(identity(child), signal.SIGKILL, proof) is SignalOutcome.GONE
    assert signal_process(ProcessId(NO_PID, 1), signal.SIGKILL, lambda: True) is SignalOutcome.GONE


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_a_signal_that_is_not_allowed_is_denied(child: subprocess.Popen[bytes]) -> None:
    nobody = 65534
    os.setresuid(nobody, nobody, 0)
    try:
        outcome = signal_process(identity(child), signal.SIGTERM, lambda: True)
    finally:
        os.setresuid(0, 0, 0)
    assert outcome is SignalOutcome.DENIED
    assert child.poll() is None


def test_a_process_lives_until_it_has_ended_reaped_or_not(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert processes.lives(process)
    assert not processes.lives(replace(process, start_ticks=process.start_ticks - 1))
    zombify(child)
    wait_until(lambda: not processes.lives(process), 10, "a zombie does not live")
    child.wait()
    assert not processes.lives(process)


def test_a_process_lives_on_in_its_threads_when_its_main_thread_is_a_zombie() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            wait_until(
                lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 10, "the leader is a zombie"
            )
            assert processes.lives(identity(process))
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_pid_that_a_thread_has_by_now_is_no_process() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert not processes.lives(ProcessId(thread.native_id, processes.start_ticks(thread.native_id) or 0))
    finally:
        done.set()
        thread.join()


def test_the_group_that_a_leader_leaves_behind_is_no_process() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; exec sleep 60"], process_group=0, stdout=subprocess.PIPE
    ) as leader:
        assert leader.stdout is not None
        member, process = int(leader.stdout.readline()), identity(leader)
        try:
            leader.kill()
            leader.wait()
            assert not processes.lives(process)
            assert signal_process(process, signal.SIGTERM, lambda: True) is SignalOutcome.GONE
        finally:
            os.kill(member, signal.SIGKILL)


@pytest.mark.parametrize("said", [errno.ESRCH, errno.EINVAL, errno.ENOENT])
def test_no_process_is_told_in_three_ways_by_one_kernel_or_another(monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    def refused(_pid: int) -> int:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert not processes.lives(ProcessId(os.getpid(), 1))
