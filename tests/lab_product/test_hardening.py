"""The shipped service's sandbox on a real systemd: what the watchdog needs is possible in it, and little else."""

import json
import sys
from collections.abc import Iterator

import pytest

from lab.host import CHECKOUT, LabHost

pytestmark = pytest.mark.lab

SERVICE = "sglang-watchdog.service"
# What the daemon does on a host, each thing by the means by which it does it. Prints what came of each.
PROBE = """
import asyncio, ctypes, json, os, signal, socket, sqlite3, subprocess, sys, time
from pathlib import Path
import pystemd.daemon, pystemd.journal
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.host import containers, override, unit_files
from sglang_watchdog.host.bus import SignalFeed, Systemd

UNIT = "watched.service"
systemd = Systemd()
systemd.open()
snapshot = systemd.snapshot(UNIT)

def reads_environ():
    return b"SECRET_OF_THE_UNIT=1" in Path(f"/proc/{snapshot.main_pid}/environ").read_bytes().split(b"\\0")

def reads_fds():
    return bool(os.listdir(f"/proc/{snapshot.main_pid}/fd")) and os.readlink(f"/proc/{snapshot.main_pid}/fd/0")

def reads_cgroup():
    groups = [path for path in Path("/sys/fs/cgroup").rglob("cgroup.procs") if path.parent.name == UNIT]
    return any(str(snapshot.main_pid) in path.read_text().split() for path in groups)

def reads_journal():
    words = ["journalctl", "--output=json", "--all", "--unit", UNIT, "--no-pager", "--quiet"]
    return bool(subprocess.run(words, capture_output=True, check=True, timeout=20).stdout)

def writes_journal():
    pystemd.journal.sendv(MESSAGE="probe", SGLANG_WATCHDOG_UNIT=UNIT)
    return True

def drop_in():
    override.put_in_force(override.render(snapshot, SpeculationConfig.of(["--speculative-num-steps", "4"])))
    problems = asyncio.run(override.verify(UNIT))
    subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=60)
    return problems or str(unit_files.drop_in_of(UNIT)) in systemd.snapshot(UNIT).drop_ins

def environment_file():
    path = unit_files.environment_file_of(UNIT)
    made = override.Override(UNIT, override.OverrideKind.ENVIRONMENT_FILE, path, "A=1\\n", 0o644, False)
    override._write_once(made)
    return path.read_text() == "A=1\\n"

def ledger():
    with sqlite3.connect("/var/lib/sglang-watchdog/probe.db") as ledger:
        ledger.execute("pragma journal_mode=wal")
        ledger.execute("create table if not exists t (a)")
        ledger.execute("insert into t values (1)")
    return True

def control_socket():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("/run/sglang-watchdog/probe.sock")
    return True

def loopback():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
        return True

def signals_by_pidfd():
    pidfd = os.pidfd_open(snapshot.main_pid)
    signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
    return True

def listens_on_the_bus():
    feed = SignalFeed((UNIT,))
    feed.open()
    return feed.fileno() > 0

def jobs():
    systemd.ref(UNIT)
    systemd.stop(UNIT)
    end = time.monotonic() + 20
    while not systemd.snapshot(UNIT).ended and time.monotonic() < end:
        time.sleep(0.05)
    systemd.reset_failed(UNIT)
    return systemd.start(UNIT) > 0

def asks_an_engine():
    return asyncio.run(containers._ask("echo", "answer")) == "answer\\n"

def ctypes_library():
    return ctypes.CDLL("libc.so.6").getpid() == os.getpid()

def refused(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "possible"

names = [reads_environ, reads_fds, reads_cgroup, reads_journal, writes_journal, drop_in, environment_file, ledger,
    control_socket, loopback, signals_by_pidfd, listens_on_the_bus, jobs, asks_an_engine, ctypes_library]
answers = {}
for needed in names:
    try:
        answers[needed.__name__] = needed()
    except Exception as error:
        answers[needed.__name__] = repr(error)
answers["refused"] = {
    "write /usr": refused(lambda: Path("/usr/probe").write_text("")),
    "write /root": refused(lambda: Path("/root/probe").write_text("")),
    "write /etc": refused(lambda: Path("/etc/probe").write_text("")),
    "write another's file": refused(lambda: Path("/etc/systemd/system/others").write_text("")),
    "chown": refused(lambda: os.chown("/run/sglang-watchdog", 1, 1)),
    "raw socket": refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
}
Path("/run/sglang-watchdog/answers.json").write_text(json.dumps(answers))
pystemd.daemon.notify(False, ready=1)
time.sleep(600)
"""
# Of another user, deaf to the probe's signal, and with a command line that names a server.
WATCHED = """[Service]
User=nobody
Environment=SECRET_OF_THE_UNIT=1
ExecStart=/usr/bin/env sh -c 'trap "" USR1; echo up; while :; do sleep 1; done' sglang serve --model-path /m
"""


@pytest.fixture
def answers(lab: LabHost) -> Iterator[dict[str, object]]:
    """What the probe found in place of the daemon, under the shipped unit."""
    lab.write("/opt/probe.py", PROBE)
    lab.write("/etc/systemd/system/others", "theirs")
    lab.run("chown", "nobody", "/etc/systemd/system/others")
    lab.write(f"/etc/systemd/system/{SERVICE}", (CHECKOUT / "contrib" / "systemd" / SERVICE).read_text())
    lab.write(
        f"/etc/systemd/system/{SERVICE}.d/probe.conf",
        f"[Service]\nExecStart=\nExecStart={sys.executable} /opt/probe.py\nBindReadOnlyPaths={CHECKOUT}\n",
    )
    lab.unit("watched.service", WATCHED)
    lab.systemctl("start", "watched.service")
    started = lab.systemctl("start", SERVICE, check=False, timeout=60)
    assert started.returncode == 0, lab.run("journalctl", "--unit", SERVICE, "--no-pager").stdout
    yield json.loads(lab.read("/run/sglang-watchdog/answers.json"))
    lab.systemctl("stop", SERVICE, "watched.service")
    lab.run(
        "rm", "-r", f"/etc/systemd/system/{SERVICE}.d", f"/etc/systemd/system/{SERVICE}", "/etc/systemd/system/others"
    )
    lab.run("rm", "-r", "/etc/systemd/system/watched.service", "/etc/systemd/system/watched.service.d")
    lab.run("rm", "-r", "/var/lib/sglang-watchdog")
    lab.systemctl("daemon-reload")


def test_the_sandbox_lets_the_watchdog_do_its_work_and_little_else(answers: dict[str, object]) -> None:
    refused = answers.pop("refused")
    assert {name: answer for name, answer in answers.items() if not answer or "Error" in str(answer)} == {}
    assert answers["drop_in"] is True
    assert refused == {
        "write /usr": "Read-only file system",
        "write /root": "Read-only file system",
        "write /etc": "Read-only file system",
        "write another's file": "Permission denied",
        "chown": "Operation not permitted",
        "raw socket": "Address family not supported by protocol",
    }
