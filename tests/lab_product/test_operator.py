"""The operator wins: whatever they do to the unit while the watchdog recovers it, that is what holds in the end.

A recovery is stopped in its tracks by a driver that keeps the memory of the launch that failed: the watchdog then waits
for the cards, for as long as a test needs to act as the operator, and goes on once the driver lets go.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from lab.host import CHECKOUT, LabHost
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import CARDS, PYTHON, InferenceHost
from lab_product.sglang_unit import OVERRIDES, Way
from sglang_watchdog.domain.incident import Step
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]
ACTING = {"act": True, "soak": 0.5}
# What was proven gives its memory back at once, what fails keeps it until the driver is made to let go.
AT_ONCE = Simulation(driver_lag_s=0.0)
KEPT_S = 300.0
STEP_DEADLINE_S = 30.0
UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"
NEWEST = "SELECT id FROM incidents WHERE unit=? ORDER BY opened DESC LIMIT 1"
LET_GO = """
from sim_nvml import SimNvml
nvml = SimNvml()
for card in nvml.cards():
    for allocation in nvml.lingering(card.index):
        nvml.release(allocation.id)
"""


@pytest.fixture(autouse=True)
def clean_cards(lab: LabHost) -> Iterator[None]:
    """What one test's driver keeps is not on the next one's cards."""
    yield
    let_go(lab)


def let_go(host: LabHost) -> None:
    """The driver gives back what ended processes held. Runs inside, where the pids are what they were there."""
    host.run(PYTHON, "-c", LET_GO, env={"PYTHONPATH": str(CHECKOUT / "tests"), "SIM_NVML_DIR": str(CARDS)})


def deploy_what_fails(host: InferenceHost, steps: int = 10) -> None:
    """Returns while the watchdog holds the unit and waits for the cards."""
    kept = dataclasses.replace(host.sglang.simulation, driver_lag_s=KEPT_S)
    host.change(simulation=kept)
    deploy(host, steps)
    wait_step(host, Step.FREE)


def wait_step(host: InferenceHost, step: Step, *, begun: int = 1) -> None:
    """Until the step of the newest incident is under way; `begun` is how often it was begun in all."""

    def under_way() -> bool:
        found = [intent for intent in intents(host) if intent.step == step]
        return len(found) >= begun and not found[-1].outcome

    try:
        wait_until(under_way, STEP_DEADLINE_S, f"the step {step} is under way")
    except AssertionError as in_vain:
        raise AssertionError(f"{in_vain}\n{host.log()}") from None


class SeenIntent(NamedTuple):
    """A step that was begun; without an outcome it is under way, or its daemon died in it."""

    step: str
    outcome: str


def intents(host: InferenceHost) -> list[SeenIntent]:
    """Of the unit's newest incident, in order."""
    rows = host.ledger.rows(f"SELECT step, outcome FROM intents WHERE incident=({NEWEST}) ORDER BY id", host.unit)
    return [SeenIntent(*row) for row in rows]


def starts(host: InferenceHost) -> int:
    """How often systemd has started the unit, by its own word."""
    return len(host.host.journal("_PID=1", f"UNIT={host.unit}", f"MESSAGE_ID={UNIT_STARTED}"))


def steps_of(host: InferenceHost) -> str:
    """--speculative-num-steps of what runs; the last one counts."""
    return " ".join(host.argv()).rpartition("--speculative-num-steps ")[2].partition(" ")[0]


def is_down(host: InferenceHost) -> bool:
    return host.state() in ("inactive/dead", "failed/failed")


def test_a_stop_while_the_cards_are_freed_is_obeyed(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.stop()
        let_go(host.host)
        host.wait_alert(OUTCOME="yielded")
        assert is_down(host)
        assert starts(host) == before
        assert [intent.step for intent in intents(host)] == [Step.HOLD, Step.FREE]
        assert override(host) == ""


def test_a_start_by_hand_while_the_cards_are_freed_is_the_only_one(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.change(steps=3)
        host.reload()
        host.start(wait=False)
        let_go(host.host)
        host.wait_alert(OUTCOME="yielded")
        by_hand = host.invocation()
        host.wait_ready()
        assert (steps_of(host), host.invocation()) == ("3", by_hand)
        assert starts(host) == before + 1
        assert override(host) == ""


def test_a_stop_while_the_rolled_back_launch_loads_is_obeyed(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, timeout_stop_s=5.0) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.ask_for("init_hang")
        let_go(host.host)
        wait_step(host, Step.VERIFY)
        host.stop()
        host.wait_alert(OUTCOME="yielded")
        assert is_down(host)
        assert starts(host) == before + 1


@pytest.mark.parametrize("way", Way)
def test_flags_that_the_operator_changes_after_a_rollback_replace_the_override(inference: Inference, way: Way) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, way=way) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"
        host.change(steps=3)
        host.reload()
        host.restart()
        assert steps_of(host) == "3"
        assert override(host) == ""
        assert host.alerts(ACTION="withdraw")


@pytest.mark.parametrize("way", Way)
def test_flags_that_are_edited_while_the_cards_are_freed_are_tried_and_not_covered(
    inference: Inference, way: Way
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, way=way) as host:
        proven(host)
        deploy_what_fails(host)
        host.change(steps=3)
        host.reload()
        let_go(host.host)
        said = host.wait_alert(OUTCOME="yielded")
        assert "flags were changed to steps 3" in said.message
        host.wait_ready()
        assert (steps_of(host), override(host)) == ("3", "")


def test_a_drop_in_of_the_operators_own_while_the_cards_are_freed_wins(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        command = dataclasses.replace(host.sglang, steps=2).command_line()
        host.host.write(f"{host.sglang.file_path}.d/50-own.conf", f"[Service]\nExecStart=\n{command}\n")
        host.reload()
        let_go(host.host)
        host.wait_alert(OUTCOME="yielded")
        host.wait_ready()
        assert (steps_of(host), override(host)) == ("2", "")


def test_a_unit_that_is_disabled_while_the_cards_are_freed_is_given_back_as_it_is(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, wanted_by="multi-user.target") as host:
        host.host.systemctl("enable", host.unit)
        proven(host)
        deploy_what_fails(host)
        host.host.systemctl("disable", host.unit)
        let_go(host.host)
        said = host.wait_alert(OUTCOME="yielded")
        assert "the unit was disabled" in said.message
        assert override(host) == ""


def test_an_edit_that_is_not_loaded_yet_takes_the_override_away_and_loads_nothing(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        host.change(steps=3)
        wait_until(lambda: override(host) == "", STEP_DEADLINE_S, "the override is gone before the operator's reload")
        assert "a daemon-reload puts them in force" in host.wait_alert(ACTION="withdraw").message
        assert host.show("NeedDaemonReload") == {"NeedDaemonReload": "yes"}
        host.reload()
        host.restart()
        assert steps_of(host) == "3"


@pytest.fixture
def packages(lab: LabHost) -> Iterator[str]:
    """Where packages put their units. systemctl masks those only: a file of the operator's own would be in its way."""
    folder = "/usr/local/lib/systemd/system"
    lab.run("mkdir", "--parents", folder)
    yield folder
    lab.run("rm", "--recursive", folder)


@pytest.mark.parametrize("way", Way)
def test_a_unit_that_is_masked_while_the_cards_are_freed_is_left_down(
    inference: Inference, packages: str, way: Way
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, way=way) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.host.run("mv", host.sglang.file_path, packages)
        host.host.systemctl("mask", host.unit)
        let_go(host.host)
        host.wait_alert(OUTCOME="yielded")
        assert is_down(host)
        assert starts(host) == before
        host.host.systemctl("unmask", host.unit)


def test_a_stop_during_the_automatic_restart_is_obeyed(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, restart_s=20.0) as host:
        proven(host)
        before = starts(host)
        host.kill()
        host.wait_alert(CLASS="external_kill")
        assert host.state() == "activating/auto-restart"
        host.stop()
        wait_until(lambda: is_down(host), 10, "the unit is down")
        status = wait_until(lambda: host.status()["units"][0]["state"].startswith(("failed", "inactive")), 20, "seen")
        assert status
        assert is_down(host)
        assert starts(host) == before
        assert host.alerts(ACTION="start") == []


@pytest.mark.parametrize("way", Way)
def test_an_override_taken_away_by_hand_stays_away_and_the_ceiling_that_it_covered_is_said(
    inference: Inference, way: Way
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, way=way) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained")
        ours = f"{host.sglang.file_path}.d/90-sglang-watchdog.conf", f"{OVERRIDES}/{host.unit}.env"
        host.host.run("rm", "--force", *ours)
        host.reload()
        asked = time.time()
        host.restart(wait=False)
        ceiling = "steps 10 was started, which did not fit"  # told once the base is known, perhaps after the end
        wait_until(
            lambda: [one for one in host.alerts() if one.time > asked and ceiling in one.message], 20, "it is said"
        )
        assert [alert.message for alert in host.alerts(ACTION="withdraw") if "taken away by hand" in alert.message]
        host.wait_alert(since=asked, OUTCOME="contained")
        assert steps_of(host) == "4"
