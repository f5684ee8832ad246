"""The lab itself: that a host is a real one, is bounded, and leaves nothing behind however its test ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from conftest import LabFactory
from lab import cgroups
from lab.cgroups import HostGroups, NoCgroup
from lab.host import CHECKOUT, MIB, CommandFailed, LabHost, free_port
from lab.keeper import WORK
from waiting import wait_until

pytestmark = pytest.mark.lab

# A test process of its own: boots a host, leaves work running in it, says what is where, and waits to be killed.
VICTIM = """\
import json, sys
from lab.host import LabHost
with LabHost.boot("victim") as host:
    visitor = host.popen("sleep", "600")
    host.unit("work.service", "[Service]\\nExecStart=/bin/sleep 600\\n")
    host.systemctl("start", "work.service")
    print(host.name, host.leader, host._keeper.pid, flush=True)
    sys.stdin.read()
"""


def test_a_host_runs_a_real_systemd(systemd_host: LabHost) -> None:
    assert systemd_host.systemctl("is-system-running").stdout == "running\n"
    assert systemd_host.run("cat", "/proc/1/comm").stdout == "systemd\n"


@pytest.mark.lab13
def test_the_two_versions_differ(lab: LabHost, lab13: LabHost) -> None:
    assert lab13.systemd_version == 257
    assert lab.systemd_version == int(subprocess.check_output(["systemctl", "--version"], text=True).split()[1])


@pytest.mark.lab13
def test_a_host_stands_many_reloads(lab13: LabHost) -> None:
    lab13.run("sh", "-ec", "for i in $(seq 30); do systemctl daemon-reload; done")
    assert lab13.systemctl("is-system-running").stdout == "running\n"


def test_what_a_unit_prints_is_in_the_journal(systemd_host: LabHost, unit_name: str) -> None:
    systemd_host.unit(unit_name, "[Service]\nType=oneshot\nExecStart=/bin/echo hello from a unit\n")
    systemd_host.systemctl("start", unit_name)
    messages = [entry["MESSAGE"] for entry in systemd_host.journal(f"_SYSTEMD_UNIT={unit_name}")]
    assert messages == ["hello from a unit"]


def test_checkout_and_environment_are_at_the_same_paths_and_read_only(lab: LabHost) -> None:
    out = lab.run(sys.executable, "-c", "import psutil; print(psutil.__file__)").stdout.strip()
    assert out == psutil.__file__
    assert lab.run("touch", CHECKOUT / "written-from-inside", check=False).returncode != 0


def test_a_bound_folder_is_shared_though_it_lies_in_tmp(lab_factory: LabFactory, tmp_path: Path) -> None:
    (tmp_path / "from-outside").write_text("a")
    with lab_factory("binds", binds=[tmp_path]) as host:
        assert host.read(tmp_path / "from-outside") == "a"
        host.write(tmp_path / "from-inside", "b")
    assert (tmp_path / "from-inside").read_text() == "b"


def test_files_are_written_copied_and_read_but_not_on_the_machine(lab: LabHost, tmp_path: Path) -> None:
    (tmp_path / "folder/deep").mkdir(parents=True)
    (tmp_path / "folder/deep/file").write_text("content")
    lab.copy_in(tmp_path / "folder", "/opt/of-the-lab/copied")
    lab.write("/opt/of-the-lab/script", "#!/bin/sh\necho $1\n", mode=0o755)
    assert lab.read("/opt/of-the-lab/copied/deep/file") == "content"
    assert lab.run("/opt/of-the-lab/script", "said").stdout == "said\n"
    assert not Path("/opt/of-the-lab").exists()


def test_a_failed_command_shows_itself_its_status_and_what_it_said(lab: LabHost) -> None:
    with pytest.raises(CommandFailed, match=r"(?s)sh -c .*exit status 3.*stdout: out.*stderr: err"):
        lab.run("sh", "-c", "echo out; echo err >&2; exit 3")


def test_a_command_that_takes_too_long_is_ended_inside_the_host(lab: LabHost) -> None:
    with pytest.raises(CommandFailed, match=r"still running after 0\.2 s"):
        lab.run("sleep", "654.321", timeout=0.2)
    running = [lab.run("cat", path, check=False).stdout for path in _command_lines(lab)]
    assert not any("654.321" in line for line in running)


def test_signals_reach_a_command_inside(lab: LabHost) -> None:
    command = "trap 'echo got it; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    with lab.popen("sh", "-c", command, stdout=subprocess.PIPE) as visitor:
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == "ready\n"
        visitor.terminate()
        assert visitor.stdout.readline() == "got it\n"
        assert visitor.wait(10) == 7


def test_the_machine_and_the_host_share_ports(lab: LabHost) -> None:
    port = free_port()
    listen = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); s.accept()"
    with lab.popen(sys.executable, "-c", listen, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        assert subprocess.run(["bash", "-c", f": >/dev/tcp/127.0.0.1/{port}"], check=False).returncode == 0


def test_memory_is_bounded_and_the_kill_stays_in_the_host(lab_factory: LabFactory, unit_name: str) -> None:
    with lab_factory("small", memory_bytes=160 * MIB, kmsg=True) as host:
        host.unit(unit_name, "[Service]\nType=oneshot\nExecStart=/bin/tail /dev/zero\n")
        host.systemctl("start", unit_name, check=False)
        end = host.show(unit_name, "Result", "ExecMainStatus")
        kernel = [entry["MESSAGE"] for entry in host.journal("_TRANSPORT=kernel", "--since=-60s")]
        groups = HostGroups(host.name)
    # systemd says oom-kill where it sees memory.events, which it does not where the memory controller is on cgroup v1.
    assert end == {"Result": "oom-kill" if cgroups.is_v2() else "signal", "ExecMainStatus": "9"}
    assert any("Memory cgroup out of memory: Killed process" in line and "(tail)" in line for line in kernel)
    assert not any(folder.exists() for folder in groups.folders)


def test_files_are_bounded(lab_factory: LabFactory) -> None:
    with (
        lab_factory("full", disk_bytes=32 * MIB) as host,
        pytest.raises(CommandFailed, match="No space left on device"),
    ):
        host.run("dd", "if=/dev/zero", "of=/var/lib/filler", "bs=1M", "count=64")


def test_two_hosts_side_by_side_do_not_see_each_other(lab_factory: LabFactory, unit_name: str) -> None:
    with lab_factory("one") as one, lab_factory("two") as two:
        one.unit(unit_name, "[Service]\nExecStart=/bin/sleep 600\n")
        one.systemctl("start", unit_name)
        assert one.show(unit_name, "ActiveState")["ActiveState"] == "active"
        assert two.show(unit_name, "LoadState")["LoadState"] == "not-found"
        two.power_off()
        assert one.systemctl("is-system-running").stdout == "running\n"


def test_a_host_powers_off_in_order_and_leaves_nothing(lab_factory: LabFactory) -> None:
    with lab_factory("off") as host:
        keeper_pid = host._keeper.pid
        assert host.power_off()
        assert _left_of(host.name, host.leader, keeper_pid) == []


def test_a_failing_test_leaves_nothing(lab_factory: LabFactory) -> None:
    with pytest.raises(ZeroDivisionError), lab_factory("failing") as host:
        1 / 0  # noqa: B018 - as a failing test would
    assert _left_of(host.name, host.leader, host._keeper.pid) == []


def test_a_test_process_killed_half_way_leaves_nothing() -> None:
    with _victim() as (process, name, leader, keeper_pid):
        assert _left_of(name, leader, keeper_pid), "the host is up, so there is something to leave"
        process.kill()
        wait_until(lambda: not _left_of(name, leader, keeper_pid), 30, f"nothing left of {name}")


def test_a_killed_keeper_takes_its_host_with_it_and_a_sweep_removes_the_rest() -> None:
    with _victim() as (_, name, leader, keeper_pid):
        (keeper,) = psutil.Process(keeper_pid).children()  # behind the unshare that made its namespaces
        keeper.kill()
        wait_until(lambda: not _alive(leader), 30, "the host ends with its keeper")
        LabHost.sweep()  # another test's boot may have done it already
        wait_until(lambda: not _left_of(name, leader, keeper_pid), 10, f"nothing left of {name}")


def test_a_test_run_killed_half_way_leaves_nothing(tmp_path: Path) -> None:
    test = "def test_hangs(lab):\n    print(lab.name, lab.leader, lab._keeper.pid, flush=True)\n    input()\n"
    (tmp_path / "test_victim.py").write_text(test)
    with _pytest(tmp_path, "--capture=no") as run:
        assert run.stdout is not None
        line = next(line for line in run.stdout if "lab-shared-" in line)
        name, leader, keeper_pid = line[line.index("lab-shared-") :].split()
        run.kill()
        wait_until(lambda: not _left_of(name, int(leader), int(keeper_pid)), 30, f"nothing left of {name}")


def test_a_sweep_leaves_running_hosts_alone(lab: LabHost) -> None:
    assert lab.name not in LabHost.sweep()
    assert lab.systemctl("is-system-running").stdout == "running\n"


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        (["env", "PATH=/nowhere"], "not installed: systemd-nspawn, nsenter, unshare, setpriv, mount, umount"),
        (
            ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"],
            "cannot make namespaces and mount an overlay in them: ",
        ),
    ],
    ids=["commands", "capability"],
)
def test_what_is_missing_is_said_in_one_line(wrapper: list[str], reason: str) -> None:
    ask = [*wrapper, sys.executable, "-c", "from lab.host import lab_problem; print(lab_problem())"]
    said = subprocess.run(ask, check=True, capture_output=True, text=True, cwd=CHECKOUT / "tests", timeout=60).stdout
    assert said.startswith(reason)
    assert said.count("\n") == 1


def test_a_machine_without_a_memory_controller_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    with pytest.raises(NoCgroup, match="cannot bound memory"):
        HostGroups("lab-never").create(64 * MIB)


def test_a_debian_13_root_that_cannot_be_fetched_is_said_in_one_line(tmp_path: Path) -> None:
    ask = "from lab import debian13, errors\ntry: debian13.root()\nexcept errors.LabUnavailable as error: print(error)"
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    said = subprocess.run(
        [sys.executable, "-c", ask],
        check=True,
        capture_output=True,
        text=True,
        cwd=CHECKOUT / "tests",
        env={**os.environ, **nowhere, "SGLANG_WATCHDOG_LAB_CACHE": str(tmp_path)},
        timeout=120,
    ).stdout
    assert said.startswith("cannot make a root of trixie: ")
    assert said.count("\n") == 1
    assert [path.suffix for path in tmp_path.glob("trixie*")] in ([], [".lock"])


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_without_a_lab_tests_are_skipped_but_fail_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_needs.py").write_text("def test_needs_a_host(lab):\n    pass\n")
    with _pytest(tmp_path, PATH="/nowhere", CI=ci) as run:
        out, _ = run.communicate(timeout=60)
    assert outcome in out
    assert "no lab: not installed: systemd-nspawn" in out


def _command_lines(host: LabHost) -> list[str]:
    return host.run("sh", "-c", "ls -d /proc/[0-9]*/cmdline").stdout.split()


@contextmanager
def _victim() -> Iterator[tuple[subprocess.Popen[str], str, int, int]]:
    """The process, and its host's name, leader and keeper."""
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM],
        cwd=CHECKOUT / "tests",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        name, leader, keeper_pid = process.stdout.readline().split()
        yield process, name, int(leader), int(keeper_pid)
        process.kill()


def _pytest(folder: Path, *args: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rsE", *args, str(folder)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "tests"), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _left_of(name: str, *pids: int) -> list[str]:
    """What is still there of a host: processes, groups, its folder, and mounts in any namespace."""
    running = [f"pid {pid}" for pid in pids if _alive(pid)]
    there = [str(path) for path in (WORK / name, *HostGroups(name).folders) if path.exists()]
    return running + there + [f"mount in {table}" for table in _mount_tables() if name in _text(table)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # the machine's init may take its time to reap
    except psutil.NoSuchProcess:
        return False


def _mount_tables() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*/mountinfo"))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process went away meanwhile
        return ""
