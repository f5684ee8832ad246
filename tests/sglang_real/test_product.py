"""The watchdog and a real server through one evening: served, stopped, misconfigured, rolled back, stopped while busy.

The story is played once, since every launch costs half a minute; the tests look at what it left behind.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.host import LabHost, free_port
from sglang_real.product import History, Watchdog
from sglang_real.server import CANNOT_BE_SIZED, FITS, MODEL, START_DEADLINE_S, RealServer
from sglang_watchdog.reporting.alerts import AlertId
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

UNIT = "sglang.service"
SOAK_S = 3
REQUESTS = 3
SETTINGS = {"act": True, "soak": SOAK_S, "managed_flags": ["--mem-fraction-static", "--max-total-tokens"]}

GOOD = "no speculation, --max-total-tokens 4096, --mem-fraction-static 0.2"


@dataclass(frozen=True)
class Story:
    """What is left when it is over. The launches are named by how they ended, as invocation ids."""

    stopped: str
    unsizable: str
    rolled_back: str
    tokens_after_rollback: list[int]
    alerts: list[dict[str, Any]]
    history: History
    metrics: dict[str, float]

    def classes(self, invocation: str) -> list[str]:
        """The classes that alerts gave the launch's end."""
        ended = (a for a in self.alerts if a.get("SGLANG_WATCHDOG_INVOCATION") == invocation)
        return [alert["SGLANG_WATCHDOG_CLASS"] for alert in ended if "SGLANG_WATCHDOG_CLASS" in alert]

    def failures(self, failure: str) -> float:
        return self.metrics[f'sglang_watchdog_failures_total{{class="{failure}",unit="{UNIT}"}}']


@pytest.fixture(scope="module")
def story(host: LabHost, sglang_env: Path) -> Story:
    server = RealServer(host, UNIT, free_port(), sglang_env / "bin/python")
    watchdog = Watchdog(host, free_port())
    watchdog.install(UNIT, SETTINGS)

    stopped = _serve_until_known_good(server, watchdog)
    _stop_when_idle(server, watchdog, stopped)
    unsizable, rolled_back = _roll_back(server, watchdog)
    tokens = server.generate(tokens=8)
    _stop_when_busy(server, watchdog, rolled_back)

    return Story(
        *(stopped, unsizable, rolled_back, tokens),
        *(watchdog.alerts(UNIT), watchdog.history(UNIT), watchdog.metrics()),
    )


def _serve_until_known_good(server: RealServer, watchdog: Watchdog) -> str:
    server.define(FITS, stop_s=60, restart="on-failure")
    invocation = server.start()
    watchdog.wait_for(AlertId.KNOWN_GOOD, SOAK_S + 30, INVOCATION=invocation)
    return invocation


def _stop_when_idle(server: RealServer, watchdog: Watchdog, invocation: str) -> None:
    server.host.systemctl("stop", UNIT, timeout=90)
    watchdog.wait_for(AlertId.LAUNCH_ENDED, 20, INVOCATION=invocation)


def _roll_back(server: RealServer, watchdog: Watchdog) -> tuple[str, str]:
    server.define(CANNOT_BE_SIZED, stop_s=4, restart="on-failure")
    server.host.systemctl("start", UNIT)
    failed = server.invocation()
    ended = watchdog.wait_for(AlertId.LAUNCH_ENDED, START_DEADLINE_S, INVOCATION=failed)
    watchdog.wait_for(AlertId.INCIDENT_CLOSED, START_DEADLINE_S, INCIDENT=ended["SGLANG_WATCHDOG_INCIDENT"])
    return failed, server.invocation()


def _stop_when_busy(server: RealServer, watchdog: Watchdog, invocation: str) -> None:
    with server.requests_in_flight(REQUESTS):
        server.host.systemctl("stop", UNIT, timeout=60)
    watchdog.wait_for(AlertId.LAUNCH_ENDED, 20, INVOCATION=invocation)
    wait_until(lambda: watchdog.history(UNIT).incident(invocation).get("closed"), 20, "the last incident is closed")


def test_a_launch_is_recorded_with_what_really_ran_and_becomes_known_good(story: Story) -> None:
    launch = story.history.launch(story.stopped)
    assert launch["version"] == "0.5.16"
    assert tuple(launch["argv"])[-4:] == FITS
    effective = launch["server_args"]
    assert effective["model_path"] == str(MODEL)
    assert effective["mem_fraction_static"] == 0.2
    assert effective["max_total_tokens"] == 4096
    # Not on the command line: SGLang's own choice, which only server_args tells.
    assert effective["chunked_prefill_size"] == 2048
    assert launch["max_total_num_tokens"] == 4096
    phases = [phase["phase"] for phase in launch["phases"]]
    assert phases[:3] == ["starting", "loading_weights", "allocating_kv"]
    assert phases[-3:] == ["ready", "serving", "stopping"]
    assert any(f"{GOOD} is known-good" in a["MESSAGE"] for a in story.alerts)


def test_a_plain_stop_which_sglang_ends_with_9_kill_is_a_requested_stop(story: Story) -> None:
    assert story.classes(story.stopped) == ["requested_stop"]
    assert story.history.launch(story.stopped)["class"] == "requested_stop"
    assert story.history.incident(story.stopped)["steps"] == []


def test_a_pool_that_cannot_be_sized_is_diagnosed_and_rolled_back_until_tokens_flow(story: Story) -> None:
    assert story.classes(story.unsizable) == ["kv_cache_oom"]
    incident = story.history.incident(story.unsizable)
    assert incident["outcome"] == "contained"
    assert incident["target"] == GOOD
    assert story.rolled_back != story.unsizable
    assert len(story.tokens_after_rollback) == 8
    assert story.history.launch(story.rolled_back)["server_args"]["mem_fraction_static"] == 0.2


def test_after_the_diagnosis_nothing_is_launched_with_the_config_that_failed(story: Story) -> None:
    failed = story.history.launch(story.unsizable)
    later = [launch for launch in story.history.launches if launch["started"] > failed["started"]]
    assert [sorted(launch["argv"][-4:]) for launch in later] == [sorted(FITS)]


def test_a_stop_that_requests_outlive_is_a_stop_timeout_and_rolls_nothing_back(story: Story) -> None:
    assert story.classes(story.rolled_back) == ["stop_timeout_sigkill"]
    incident = story.history.incident(story.rolled_back)
    assert incident["target"] is None
    told = next(a for a in story.alerts if a.get("SGLANG_WATCHDOG_CLASS") == "stop_timeout_sigkill")
    assert f"{REQUESTS} requests" in told["MESSAGE"]
    assert "TimeoutStopSec=" in told["SGLANG_WATCHDOG_ADVICE"]


def test_the_metrics_count_each_end_by_its_class(story: Story) -> None:
    counted = {
        failure: story.failures(failure) for failure in ("requested_stop", "kv_cache_oom", "stop_timeout_sigkill")
    }
    assert counted == {"requested_stop": 1, "kv_cache_oom": 1, "stop_timeout_sigkill": 1}
    assert story.failures("unknown") == 0
    assert story.metrics[f'sglang_watchdog_rollbacks_total{{unit="{UNIT}"}}'] == 1
