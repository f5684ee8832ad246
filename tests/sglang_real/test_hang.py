"""A real server whose scheduler is frozen: HTTP of main goes on, no token comes. Seen, ended, and served again."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.host import LabHost, free_port
from lab_product.installed import SERVICE
from sglang_real.product import Watchdog
from sglang_real.server import FITS, START_DEADLINE_S, RealServer
from sglang_watchdog.reporting.alerts import AlertId

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

UNIT = "sglang-hangs.service"
# So that SGLang's own watchdog, which is frozen with its scheduler, is not waited for.
OWN_WATCHDOG = ("--watchdog-timeout", "5")
SETTINGS = {"act": True, "soak": 3, "serving_budget": 12, "restart_unresponsive": True}


@pytest.fixture
def server(host: LabHost, sglang_env: Path) -> Iterator[RealServer]:
    server = RealServer(host, UNIT, free_port(), sglang_env / "bin/python")
    yield server
    host.systemctl("stop", SERVICE, UNIT, check=False, timeout=90)


def test_a_frozen_scheduler_is_seen_by_its_tokens_and_the_same_config_serves_again(
    host: LabHost, server: RealServer
) -> None:
    watchdog = Watchdog(host, free_port())
    watchdog.install(UNIT, SETTINGS)
    server.define((*FITS, *OWN_WATCHDOG), stop_s=60)
    hung = server.start()
    watchdog.wait_for(AlertId.KNOWN_GOOD, START_DEADLINE_S, INVOCATION=hung)
    scheduler = server.processes()["sglang::scheduler"]
    host.run("kill", f"-{int(signal.SIGSTOP)}", str(scheduler))

    told = watchdog.wait_for(AlertId.UNRESPONSIVE, 60, INVOCATION=hung)
    assert f"sglang::schedul ({scheduler}): T (stopped)" in told["SGLANG_WATCHDOG_EVIDENCE"]
    assert "2 small requests" in told["MESSAGE"]
    watchdog.wait_for(AlertId.INCIDENT_CLOSED, START_DEADLINE_S, OUTCOME="recovered")
    assert server.invocation() != hung
    assert len(server.generate(tokens=8)) == 8
    assert [one["class"] for one in watchdog.history(UNIT).incidents] == ["unresponsive"]
