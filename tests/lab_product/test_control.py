"""What an operator tells the daemon of a unit: pause, resume, rollback, mark-good, forget."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lab.host import LabHost
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import INSTALLED, SERVICE, STATE, InferenceHost
from lab_product.test_operator import ACTING, AT_ONCE, deploy_what_fails, is_down, let_go, starts, steps_of
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]


@pytest.fixture(autouse=True)
def clean_cards(lab: LabHost) -> Iterator[None]:
    yield
    let_go(lab)


def told(host: InferenceHost, *words: str) -> str:
    done = host.host.run(INSTALLED, *words, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def refused(host: InferenceHost, *words: str) -> str:
    """The one line with which a command is refused."""
    done = host.host.run(INSTALLED, *words, check=False)
    assert (done.returncode != 0, done.stdout, done.stderr.count("\n")) == (True, "", 1), done
    return done.stderr


def row(host: InferenceHost) -> dict[str, Any]:
    found: dict[str, Any] = host.status()["units"][0]
    return found


def test_a_pause_gives_up_a_recovery_at_once_and_starts_what_was_held(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        assert "paused until" in told(host, "pause", host.unit, "--for", "1h")
        closed = host.wait_alert(OUTCOME="yielded")
        assert "it was held, and is started before it is left alone" in closed.message
        let_go(host.host)
        wait_until(lambda: starts(host) > before, 30, "systemd has its unit back")
        assert override(host) == ""


def test_a_failure_in_a_pause_is_reported_and_taken_up_when_it_is_over(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, restart="no") as host:
        proven(host)
        told(host, "pause", host.unit)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom", PHASE="allocating_kv")
        wait_until(lambda: row(host)["last_incident"]["outcome"] == "reported", 20, "it is only reported")
        host.host.systemctl("restart", SERVICE)
        wait_until(lambda: host.status()["units"][:1], 30, "the daemon is back")
        assert row(host)["paused_until"] is not None
        assert (is_down(host), override(host)) == (True, "")
        before = starts(host)
        assert told(host, "resume", host.unit) == f"{host.unit} is no longer paused.\n"
        host.wait_alert(OUTCOME="contained")
        assert (steps_of(host), starts(host)) == ("4", before + 1)
        assert told(host, "resume", host.unit) == f"{host.unit} was not paused.\n"


def test_a_rollback_by_hand_restarts_the_unit_with_what_was_named(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        assert "no other known-good" in refused(host, "rollback", host.unit)
        host.change(steps=3)
        host.reload()
        host.restart()
        assert "known-good" in told(host, "mark-good", host.unit)
        ids = {good["config"]: good["id"] for good in row(host)["proven"]}
        assert "g00000000 is no known-good" in refused(host, "rollback", host.unit, "--to", "g00000000")
        told(host, "pause", host.unit)
        assert "`resume` it first" in refused(host, "rollback", host.unit)
        told(host, "resume", host.unit)
        assert "steps 4" in told(host, "rollback", host.unit, "--to", ids["steps 4"])
        said = host.wait_alert(OUTCOME="recovered")
        assert "as was asked for" in said.message
        assert (steps_of(host), host.tokens(8)) == ("4", 8)
        told(host, "forget", host.unit, ids["steps 3"])
        assert ids["steps 3"] not in json.dumps(host.status())
        assert "names no known-good and no ceiling" in refused(host, "forget", host.unit, ids["steps 3"])


def test_a_second_watchdog_is_refused(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        assert "another sglang-watchdog works with" in refused(host, "run")
        assert host.status()["units"]
        host.host.systemctl("stop", SERVICE)
        holder = f"flock {STATE} {INSTALLED} hand-back"
        assert "another sglang-watchdog works with" in host.host.run("sh", "-c", holder, check=False).stderr
        assert "Nothing is held" in told(host, "hand-back")
