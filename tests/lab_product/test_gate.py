"""The start gate, as it is shipped: refuses what is proven not to fit, waits for the unit's own bytes, and for nobody
else; and whatever is broken about it costs no start."""

import dataclasses
from collections.abc import Iterator

import pytest

from lab.host import LabHost
from lab_product.conftest import GIB, Inference, deploy, override, proven
from lab_product.installed import INSTALLED, SERVICE, SETTINGS, SHIPPED, InferenceHost, SeenAlert
from lab_product.test_operator import ACTING, AT_ONCE, KEPT_S, is_down, let_go, steps_of
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]
GATE = (SHIPPED / "sglang-start-gate.conf").read_text()
SOON_S = 20.0


@pytest.fixture(autouse=True)
def clean_cards(lab: LabHost) -> Iterator[None]:
    yield
    let_go(lab)


def install_gate(host: InferenceHost, text: str = GATE) -> None:
    host.host.write(f"{host.sglang.file_path}.d/50-start-gate.conf", text)
    host.reload()


def learn_that_ten_does_not_fit(host: InferenceHost) -> None:
    """Steps 4 serve in the end, by an override."""
    proven(host)
    deploy(host, 10)
    host.wait_alert(OUTCOME="contained")


def ask_for_ten_again(host: InferenceHost) -> None:
    host.host.run("rm", f"{host.sglang.file_path}.d/90-sglang-watchdog.conf")
    host.reload()
    host.restart(wait=False)


def ran(host: InferenceHost, invocation: str) -> bool:
    """Whether a server came to speak in that launch."""
    said = host.host.journal(f"_SYSTEMD_INVOCATION_ID={invocation}")
    return any("server_args=" in entry["MESSAGE"] for entry in said)


def refused_and_put_back(host: InferenceHost) -> SeenAlert:
    """Learns that ten do not fit, and asks for them again with the gate in place. Returns the refusal."""
    learn_that_ten_does_not_fit(host)
    install_gate(host)
    began = host.alerts()[-1].time
    ask_for_ten_again(host)
    told = host.wait_alert(since=began, CLASS="kv_cache_oom")
    assert "The start was refused: steps 10 is proven not to fit" in told.message
    host.wait_alert(since=told.time, OUTCOME="contained")
    return told


def of(host: InferenceHost, kind: str) -> list[str]:
    """Ids of what is `proven`, or of `ceilings`."""
    return [one["id"] for one in host.status()["units"][0][kind]]


def test_what_is_proven_not_to_fit_is_refused_and_the_proven_config_serves(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        told = refused_and_put_back(host)
        assert steps_of(host) == "4"
        assert host.tokens(4) == 4
        assert not ran(host, told.get("INVOCATION"))


def test_with_nothing_to_go_back_to_it_stays_down_until_the_ceiling_is_forgotten(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        learn_that_ten_does_not_fit(host)
        install_gate(host)
        began = host.alerts()[-1].time
        for good in of(host, "proven"):
            host.host.run(INSTALLED, "forget", host.unit, good)
        ask_for_ten_again(host)
        host.wait_alert(since=began, OUTCOME="held")
        assert host.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "exec-condition"}
        assert not ran(host, host.invocation())
        by_hand = host.host.run(INSTALLED, "may-start", host.unit, check=False)
        assert (by_hand.returncode, "proven not to fit" in by_hand.stdout) == (77, True)
        host.host.run(INSTALLED, "forget", host.unit, *of(host, "ceilings"))
        host.start(wait=False)
        wait_until(lambda: ran(host, host.invocation()), SOON_S, "it is tried again")


def test_gpu_memory_of_the_units_own_ended_launch_is_waited_for_and_a_strangers_is_not(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=dataclasses.replace(AT_ONCE, driver_lag_s=KEPT_S)) as host:
        install_gate(host)
        with host.bystander(1, GIB):
            proven(host)
            host.stop()
            host.host.systemctl("start", "--no-block", host.unit)
            wait_until(lambda: "still holds" in host.log(), SOON_S, "the gate waits")
            assert host.state() == "activating/condition"
            let_go(host.host)
            host.wait_ready()


@pytest.mark.parametrize("broken", ["daemon stopped", "daemon hangs", "settings", "no command"])
def test_what_is_broken_about_the_gate_costs_no_start(inference: Inference, broken: str) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        lab = host.host
        proven(host)
        host.stop()
        install_gate(host, GATE.replace(INSTALLED, "/usr/bin/no-such-command") if broken == "no command" else GATE)
        match broken:
            case "daemon stopped":
                lab.systemctl("stop", SERVICE)
            case "daemon hangs":
                lab.systemctl("kill", "--signal=STOP", "--kill-whom=main", SERVICE)
            case "settings":
                lab.write(SETTINGS, "units = nonsense [")
        assert is_down(host)
        host.host.systemctl("start", "--no-block", host.unit)
        host.wait_ready()
        assert steps_of(host) == "4"
        lab.systemctl("kill", "--signal=CONT", "--kill-whom=main", SERVICE, check=False)


def test_a_unit_that_is_only_observed_is_never_refused(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        learn_that_ten_does_not_fit(host)
        install_gate(host)
        host.host.run("sh", "-c", f"sed -i 's/act = true/act = false/' {SETTINGS}")
        host.host.systemctl("restart", SERVICE)
        host.host.run("rm", "--force", f"{host.sglang.file_path}.d/90-sglang-watchdog.conf")
        host.reload()
        host.restart(wait=False)
        wait_until(lambda: ran(host, host.invocation()), SOON_S, "it is started")
        assert override(host) == ""
