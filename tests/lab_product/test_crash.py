"""The watchdog ends in the middle of its work, or loses systemd: what it began is finished, by it or for it.

Its service is the shipped one; where a test shortens a time of it, a drop-in does so.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.host import LabHost, free_port
from lab_product.conftest import Inference, deploy, proven
from lab_product.installed import CARDS, COMMAND, SERVICE, SETTINGS, Followed, InferenceHost
from lab_product.sglang_unit import SglangUnit
from lab_product.test_operator import (
    ACTING,
    AT_ONCE,
    deploy_what_fails,
    let_go,
    starts,
    steps_of,
    wait_step,
)
from lab_product.test_reports import TOLD, told, with_hook
from sglang_watchdog.domain.incident import Step
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]
DROP_IN = f"/etc/systemd/system/{SERVICE}.d/test.conf"
HAND_BACK = "sglang-watchdog-hand-back.service"
BACK_S = 20.0
# Another death after the first one and systemd gives up, at once.
GIVES_UP = "[Unit]\nStartLimitBurst=2\n[Service]\nRestartSec=100ms\n"
DOES_NOT_START = f"[Service]\nExecStart=\nExecStart={COMMAND} no-such-command\n"


@pytest.fixture(autouse=True)
def as_shipped(lab: LabHost) -> Iterator[None]:
    """What one test's driver keeps, and how it set up the service, is not the next one's."""
    yield
    let_go(lab)
    lab.run("rm", "--force", DROP_IN)


def set_up(host: InferenceHost, drop_in: str) -> None:
    """Another definition of the watchdog's service, in force from its next start on."""
    host.host.write(DROP_IN, drop_in)
    host.reload()


def signal_watchdog(host: InferenceHost, signal: str) -> None:
    host.host.systemctl("kill", f"--signal={signal}", "--kill-whom=main", SERVICE)


def restarts(host: InferenceHost) -> int:
    """How often systemd has restarted the watchdog."""
    return int(host.host.show(SERVICE, "NRestarts")["NRestarts"])


def wait_back(host: InferenceHost) -> None:
    """Until systemd has restarted the watchdog and it watches."""
    wait_until(lambda: restarts(host) == 1, BACK_S, "the watchdog is restarted")
    wait_until(lambda: host.host.show(SERVICE, "SubState") == {"SubState": "running"}, BACK_S, "it watches")


def tried_again(host: InferenceHost) -> list[str]:
    """Invocations of launches that repeated the flags that failed, after the diagnosis that they do."""
    history = host.history()
    diagnosed = min(incident["opened"] for incident in history["incidents"] if incident["class"] == "kv_cache_oom")
    later = (launch for launch in history["launches"] if launch["started"] > diagnosed)
    return [launch["invocation"] for launch in later if "--speculative-num-steps 10" in " ".join(launch["argv"])]


def test_a_watchdog_killed_while_it_frees_the_cards_comes_back_and_finishes(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        signal_watchdog(host, "KILL")
        wait_back(host)
        wait_step(host, Step.FREE, begun=2)
        let_go(host.host)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"
        assert host.tokens(8) == 8
        assert starts(host) == before + 1
        assert tried_again(host) == []


def test_a_watchdog_killed_while_the_rolled_back_launch_loads_closes_the_incident(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.ask_for("init_hang")
        let_go(host.host)
        wait_step(host, Step.VERIFY)
        signal_watchdog(host, "KILL")
        wait_back(host)
        host.ask_for()
        host.wait_alert(OUTCOME="contained")
        assert host.tokens(8) == 8
        assert starts(host) == before + 1


def test_a_watchdog_that_is_stopped_while_it_holds_the_unit_hands_it_back(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.host.systemctl("stop", SERVICE)
        closed = host.wait_alert(OUTCOME="yielded")
        assert "anded back" in closed.message
        wait_until(lambda: starts(host) > before, 10, "the unit is started")
        assert host.host.show(SERVICE, "Result") == {"Result": "success"}, host.log(60)
        assert host.history()["incidents"][0]["outcome"] == "yielded"


def test_a_stop_of_what_is_held_is_obeyed_also_where_no_watchdog_lives_to_hear_of_it(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        signal_watchdog(host, "KILL")
        host.stop()
        wait_back(host)
        let_go(host.host)
        assert "the operator acted on it meanwhile" in host.wait_alert(OUTCOME="yielded").message
        assert (starts(host), host.state()) == (before, "inactive/dead")


@pytest.mark.parametrize("broken", ["settings", "service"])
def test_a_watchdog_that_cannot_come_back_has_the_unit_handed_back(inference: Inference, broken: str) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        with_hook(host, f"cat >>{TOLD}; echo >>{TOLD}")
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        if broken == "settings":
            host.host.write(SETTINGS, "units = nonsense [\n")
        set_up(host, GIVES_UP + (DOES_NOT_START if broken == "service" else ""))
        signal_watchdog(host, "KILL")
        wait_until(lambda: host.host.show(SERVICE, "SubState") == {"SubState": "failed"}, BACK_S, "systemd gives up")
        with hand_back_told(host):
            wait_until(lambda: starts(host) > before, 10, "the unit is started")
            assert "anded back" in host.wait_alert(OUTCOME="yielded").message
        if broken == "service":  # who the hooks are stands in the settings

            def outcomes() -> set[object]:
                return {message["outcome"] for message in told(host, "closed")}

            wait_until(lambda: "yielded" in outcomes(), BACK_S, "hand-back tells the hook")


@contextmanager
def hand_back_told(host: InferenceHost) -> Iterator[None]:
    """A failure in the block says what hand-back said."""
    try:
        yield
    except AssertionError as failed:
        log = host.host.run("journalctl", f"--unit={HAND_BACK}", "--output=cat").stdout
        raise AssertionError(f"{failed}\n{log}") from None


def test_a_bus_that_is_restarted_costs_no_failure_that_comes_after(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        host.host.systemctl("restart", "dbus.service")
        wait_until(lambda: re.search("the bus was lost|cannot be reached", host.log()), BACK_S, "the loss is noticed")
        wait_until(lambda: host.metric("sglang_watchdog_bus_connected") == 1, BACK_S, "it has a bus again")
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"
        assert restarts(host) == 0


def test_a_bus_that_is_restarted_while_the_cards_are_freed_costs_no_second_start(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.host.systemctl("restart", "dbus.service")
        wait_step(host, Step.FREE, begun=2)
        let_go(host.host)
        host.wait_alert(OUTCOME="contained")
        assert starts(host) == before + 1
        assert restarts(host) == 0


def test_a_watchdog_that_stands_still_is_ended_by_systemd_and_comes_back(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        set_up(host, "[Service]\nWatchdogSec=3\n")
        host.host.systemctl("restart", SERVICE)
        proven(host)
        signal_watchdog(host, "STOP")
        wait_back(host)
        assert "watchdog timeout" in host.host.run("journalctl", "_PID=1", "--unit", SERVICE).stdout.lower()
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"


def test_of_two_units_the_one_that_fails_is_recovered_and_the_other_left_in_peace(inference: Inference) -> None:
    # Steps 2 leave room on the cards for a small server beside them.
    with inference(settings=ACTING, simulation=AT_ONCE, steps=2) as host:
        small = dataclasses.replace(AT_ONCE, profile="tiny", nvml=CARDS)
        flags = ("--base-gpu-id", "3", "--max-total-tokens", "1024")
        unit = SglangUnit("small.service", free_port(), small, steps=None, tp=1, flags=flags)
        other = InferenceHost(host.host, unit, host.metrics_port, Followed(unit.name))
        other.write_unit(unit)
        host.host.write("/etc/sglang-watchdog/config.d/small.toml", f'[units."{unit.name}"]\nact = true\nsoak = 0.5\n')
        host.reload()
        host.host.systemctl("restart", SERVICE)
        other.start()
        proven(host)
        untouched = other.invocation()
        deploy_what_fails(host)
        let_go(host.host)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "2"
        assert (other.invocation(), other.state()) == (untouched, "active/running")
        assert other.tokens(8) == 8
        assert {row["unit"]: row["last_incident"] is not None for row in host.status()["units"]} == {
            host.unit: True,
            other.unit: False,
        }
        host.host.systemctl("stop", other.unit)
        host.host.run("rm", "-r", unit.file_path, f"{unit.file_path}.d")
