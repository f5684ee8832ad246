"""A server that takes the host's memory: the kernel ends the server, and the watchdog lives to tell."""

import pytest

from conftest import LabFactory
from lab.host import MIB
from lab_product.installed import SERVICE, inference_host

pytestmark = pytest.mark.lab
# The host's own systemd and journal, the watchdog with its helpers, and little to spare.
HOST_BYTES = 512 * MIB
DEADLINE_S = 60.0


def test_the_watchdog_outlives_the_memory_kill_that_ends_the_server(lab_factory: LabFactory) -> None:
    with (
        lab_factory("memory", memory_bytes=HOST_BYTES, kmsg=True) as machine,
        inference_host(machine, settings={"act": True}, restart="no") as host,
    ):
        before = machine.show(SERVICE, "MainPID", "NRestarts", "ActiveState")
        machine.unit(host.unit, "[Service]\nExecStart=tail /dev/zero\n")
        machine.systemctl("start", host.unit)
        ended = host.wait_alert(UNIT=host.unit, deadline_s=DEADLINE_S)
        assert ended.get("CLASS") != "requested_stop"
        assert machine.show(SERVICE, "MainPID", "NRestarts", "ActiveState") == before
        assert (before["ActiveState"], before["NRestarts"]) == ("active", "0")
        assert host.metric("sglang_watchdog_launches_total", unit=host.unit) == 1
