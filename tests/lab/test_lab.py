"""The lab itself: that a host is a real one, is bounded, and leaves nothing behind however its test ends."""

import pytest

from lab.host import LabHost

pytestmark = pytest.mark.lab


def test_a_host_runs_a_real_systemd(lab: LabHost) -> None:
    assert lab.systemctl("is-system-running").stdout == "running\n"
    assert lab.run("cat", "/proc/1/comm").stdout == "systemd\n"
