"""The real server by itself under the lab's systemd: what the simulated one and the product rely on."""

from pathlib import Path

import pytest

from lab.host import LabHost, free_port
from sglang_real.server import FITS, RealServer
from waiting import wait_until

pytestmark = pytest.mark.lab


def test_the_real_server_starts_serves_and_ends_a_plain_stop_with_9_kill(
    host: LabHost, sglang_env: Path, unit_name: str
) -> None:
    server = RealServer(host, unit_name, free_port(), sglang_env / "bin/python")
    server.define(FITS, stop_s=60)
    invocation = server.start()

    assert len(server.generate(tokens=8)) == 8
    assert {"sglang::scheduler", "sglang::detokenizer"} <= set(server.titles())

    host.systemctl("stop", server.unit, timeout=90)
    wait_until(server.has_ended, 5, "the stop is over")
    assert server.end() == ("signal", "2", "9")
    assert "SIGTERM received." in server.log(invocation)
