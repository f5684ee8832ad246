"""What the world does to a watchdog in the middle of its work: a full disk, a host that goes down, a flood of lines, an
override that is reverted. In the end a server runs or a human is told, and no incident is left open."""

import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from conftest import LabFactory
from lab.host import LabHost
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import CARDS, PYTHON, SERVICE, STATE, InferenceHost, inference_host
from lab_product.test_operator import ACTING, AT_ONCE, deploy_what_fails, is_down, let_go, starts, steps_of
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]
FILLER = "filler"
THIN = "/run/thin"
SOON_S = 20.0
Disk = Callable[[LabHost], AbstractContextManager[str]]


@pytest.fixture(autouse=True)
def clean_cards(lab: LabHost) -> Iterator[None]:
    yield
    let_go(lab)


@contextmanager
def small_disk(lab: LabHost) -> Iterator[str]:
    """The state directory is a disk of its own, of 2 MiB. Yields the folder that is to be filled."""
    lab.run("mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "small", STATE)
    try:
        yield STATE
    finally:
        lab.run("umount", "--lazy", STATE)


@contextmanager
def thin_disk(lab: LabHost) -> Iterator[str]:
    """The state directory lies on a device that has less room than it says: where it cannot take what is written, the
    kernel reports an I/O error (EIO at fsync), as of a disk that fails. Yields the folder that is to be filled."""
    image = f"{THIN}/image"
    lab.run("mkdir", "--parents", THIN)
    lab.run("mount", "-t", "tmpfs", "-o", "size=6m", "thin", THIN)
    try:
        lab.run("sh", "-c", f"truncate --size=32M {image}; mkfs.ext4 -q -O ^has_journal {image}")
        # Only this machine has loop devices. A detached one is free as soon as nothing is mounted on it.
        attach = ["losetup", "--find", "--show", f"/proc/{lab.leader}/root{image}"]
        attached = subprocess.run(attach, capture_output=True, text=True, check=False)
        if attached.returncode:
            pytest.skip(f"no loop device: {attached.stderr.strip()}")
        device = attached.stdout.strip()
        try:
            lab.run("mknod", "/dev/thin", "b", "7", device.removeprefix("/dev/loop"))
            lab.run("mount", "/dev/thin", STATE)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
        try:
            yield THIN
        finally:
            lab.run("umount", "--lazy", STATE)
    finally:
        lab.run("sh", "-c", f"rm -f /dev/thin; umount --lazy {THIN}")


@contextmanager
def state_on(disk: Disk, host: InferenceHost) -> Iterator[str]:
    lab = host.host
    lab.systemctl("stop", SERVICE)
    with disk(lab) as folder:
        lab.systemctl("start", SERVICE)
        try:
            yield folder
        finally:
            lab.systemctl("stop", SERVICE, check=False)


def fill(lab: LabHost, folder: str) -> None:
    lab.run("sh", "-c", f"cat /dev/zero >{folder}/{FILLER}", check=False)


def outcomes(host: InferenceHost) -> list[str]:
    """Of all incidents, newest first."""
    return [incident["outcome"] for incident in host.history()["incidents"]]


@pytest.mark.parametrize("disk", [small_disk, thin_disk], ids=["full", "failing"])
def test_a_disk_that_gives_out_in_the_middle_gives_the_unit_back_and_leaves_nothing_owed(
    inference: Inference, disk: Disk
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host, state_on(disk, host) as folder:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        fill(host.host, folder)
        let_go(host.host)
        assert "the unit was held, and is started" in host.wait_alert(OUTCOME="failed").message
        wait_until(lambda: starts(host) > before, SOON_S, "the unit is started")
        wait_until(lambda: host.metric("sglang_watchdog_ledger_writable") == 0, SOON_S, "it says that it is blind")
        host.stop()
        host.host.systemctl("restart", SERVICE)  # what is owed is handed back on the way out
        assert is_down(host)
        let_go(host.host)
        host.host.run("rm", f"{folder}/{FILLER}")
        host.host.systemctl("restart", SERVICE)
        host.change(steps=4, simulation=AT_ONCE)
        host.reload()
        proven(host)
        assert host.metric("sglang_watchdog_ledger_writable") == 1
        assert "open" not in outcomes(host)
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"


def test_a_state_directory_that_cannot_be_written_leaves_a_watchdog_that_observes(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, restart="no") as host, state_on(small_disk, host):
        proven(host)
        host.host.systemctl("stop", SERVICE)
        host.host.run("mount", "-o", "remount,ro", STATE)
        host.host.systemctl("start", SERVICE)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom")
        assert host.metric("sglang_watchdog_ledger_writable") == 0
        assert host.alerts(ACTION="hold") == []
        assert override(host) == ""


@pytest.mark.parametrize("at_boot", ["enabled", "not enabled"])
def test_a_power_cut_in_the_middle_leaves_what_systemd_starts_at_boot_and_no_open_incident(
    lab_factory: LabFactory, at_boot: str
) -> None:
    with lab_factory("rebooted") as lab:
        lab.write("/etc/tmpfiles.d/cards.conf", f"C {CARDS} - - - - /var/cards\n")
        with inference_host(lab, settings=ACTING, simulation=AT_ONCE, wanted_by="multi-user.target") as host:
            lab.systemctl("enable", SERVICE, *([host.unit] if at_boot == "enabled" else []))
            lab.run("cp", "--archive", CARDS, "/var/cards")
            proven(host)
            deploy_what_fails(host)
            host.change(simulation=AT_ONCE)
            lab.power_cut()
            wait_until(lambda: outcomes_after_boot(host) and "open" not in outcomes(host), SOON_S, "all are closed")
            if at_boot == "enabled":
                wait_until(lambda: host.alerts(OUTCOME="contained"), SOON_S, "the proven config serves")
                assert steps_of(host) == "4"
                assert host.tokens(4) == 4
            else:
                assert is_down(host)
                assert host.history()["incidents"][0]["outcome"] == "yielded"


def outcomes_after_boot(host: InferenceHost) -> bool:
    """The watchdog has taken up what it found."""
    return (
        host.host.show(SERVICE, "SubState") == {"SubState": "running"}
        and host.metric("sglang_watchdog_bus_connected") == 1
    )


def test_a_unit_that_is_reverted_while_an_override_is_in_force_runs_what_its_package_says(
    inference: Inference, lab: LabHost
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        # Out of the reach of `systemctl revert`, which takes away what an admin has added to a package's unit.
        packaged = f"/usr/local/lib/systemd/system/{host.unit}"
        lab.run("mkdir", "--parents", Path(packaged).parent)
        lab.run("mv", host.sglang.file_path, packaged)
        lab.run("mv", f"{host.sglang.file_path}.d", f"{packaged}.d")
        host.reload()
        ten = dataclasses.replace(host.sglang, steps=10).text()
        host.host.write(packaged, ten)
        host.reload()
        host.restart(wait=False)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"
        running = host.invocation()
        lab.systemctl("revert", host.unit)
        assert "taken away by hand" in host.wait_alert(ACTION="withdraw").message
        assert (host.invocation(), override(host)) == (running, "")
        asked = time.time()
        host.restart(wait=False)
        host.wait_alert(since=asked, OUTCOME="contained")
        assert steps_of(host) == "4"
        lab.run("rm", "--recursive", packaged, f"{packaged}.d")


def test_what_fails_in_a_pause_is_recovered_when_its_time_is_over(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, restart="no") as host:
        proven(host)
        lab = host.host
        lab.run("/usr/bin/sglang-watchdog", "pause", host.unit, "--for=8s")
        paused = time.time()
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom")
        assert override(host) == ""
        contained = host.wait_alert(OUTCOME="contained")
        assert contained.time > paused + 7.5
        assert "the pause is over" in host.wait_alert(ACTION="resume").message
        assert steps_of(host) == "4"


STORM = "for number in range({lines}): print(f'[2026-01-01 00:00:00] Decode batch, #running-req: 1, line {{number}}')"


def test_a_storm_of_lines_and_a_vacuum_cost_neither_memory_nor_a_failure_that_comes_after(
    inference: Inference,
) -> None:
    lines = int(os.environ.get("STORM_LINES", "100000"))
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        lab = host.host
        proven(host)
        before = lab.show(SERVICE, "MainPID")
        group = f"/sys/fs/cgroup/{host.show('ControlGroup')['ControlGroup']}/cgroup.procs"
        # As a process of the unit, whose words are the launch's own.
        into = f'echo $$ >{group}; exec systemd-cat --identifier=sglang {PYTHON} -c "$1"'
        lab.run("sh", "-c", into, "storm", STORM.format(lines=lines), timeout=600)
        last = (f"_SYSTEMD_INVOCATION_ID={host.invocation()}", f"--grep=line {lines - 1}$")
        assert lab.journal(*last)
        lab.run("sh", "-c", "journalctl --rotate; journalctl --vacuum-time=1ms")  # with the daemon's place in it
        assert "line 0\n" not in lab.run("journalctl", "--output=cat", "--grep=line 0$", check=False).stdout
        deploy(host, 10)
        host.wait_alert(deadline_s=60, OUTCOME="contained")
        assert steps_of(host) == "4"
        assert lab.show(SERVICE, "MainPID", "NRestarts") == {**before, "NRestarts": "0"}
        status = lab.read(f"/proc/{before['MainPID']}/status")
        peak_kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
        assert peak_kib < 150 * 1024
