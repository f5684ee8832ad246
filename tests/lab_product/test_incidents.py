"""One failure after another under the shipped service on a real systemd: the right class, and the right thing done."""

import json

import pytest

from lab_product.conftest import GIB, Inference, deploy, leaves_a_child_that_is_freed, override, proven
from lab_product.installed import CARDS, INSTALLED, PYTHON, SERVICE, STATE
from lab_product.sglang_unit import Way
from sim_nvml import SimNvml
from waiting import wait_until

pytestmark = pytest.mark.lab
ACTING = {"act": True, "soak": 0.5}
OBSERVING = {"act": False, "soak": 0.5}


@pytest.mark.parametrize("way", Way)
def test_a_config_that_does_not_fit_is_rolled_back_and_tokens_flow_again(inference: Inference, way: Way) -> None:
    with inference(settings=ACTING, way=way) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom")
        closed = host.wait_alert(OUTCOME="contained")
        assert "steps 4" in closed.message
        assert host.tokens(8) == 8
        assert "--speculative-num-steps 4" in " ".join(host.argv())
        assert host.metric("sglang_watchdog_rollbacks_total", unit=host.unit) == 1


def test_observing_only_reports_the_same_and_touches_nothing(inference: Inference) -> None:
    with inference(settings=OBSERVING) as host:
        proven(host)
        deploy(host, 10)
        first = host.wait_alert(CLASS="kv_cache_oom")
        host.wait_alert(since=first.time + 1, CLASS="kv_cache_oom")  # systemd's own restarts go on
        assert override(host) == ""
        assert host.alerts(ACTION="hold") == []
        assert all(incident["outcome"] == "reported" for incident in host.history()["incidents"])


def test_one_of_several_nodes_is_diagnosed_and_reported_and_never_acted_on_alone(inference: Inference) -> None:
    with inference(settings={**ACTING, "several_nodes": True}) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom")
        wait_until(lambda: host.history()["incidents"][0]["outcome"] == "reported", 20, "it is reported")
        assert override(host) == ""
        assert host.alerts(ACTION="hold") == []


def test_a_requested_stop_is_no_failure_and_stays(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        proven(host)
        host.stop()
        host.wait_alert(CLASS="requested_stop")
        assert host.alerts(ACTION="start") == []
        assert host.state().startswith(("inactive", "failed"))
        assert host.metric("sglang_watchdog_failures_total", unit=host.unit, **{"class": "requested_stop"}) == 1


def test_a_stop_that_outlives_its_timeout_says_what_the_drain_needed_and_rolls_nothing_back(
    inference: Inference,
) -> None:
    with inference(settings=ACTING, timeout_stop_s=1.0) as host:
        proven(host)
        host.load(4, tokens=200_000)
        host.stop()
        alert = host.wait_alert(CLASS="stop_timeout_sigkill")
        assert "4 requests" in alert.message
        assert override(host) == ""
        assert host.alerts(ACTION="start") == []
        assert host.state() == "failed/failed"


def test_a_kill_of_the_main_process_is_not_called_out_of_memory(inference: Inference) -> None:
    with inference(settings=ACTING, restart_s=0.2) as host:
        proven(host)
        host.kill()
        alert = host.wait_alert(CLASS="external_kill")
        assert "oom" not in alert.message.lower()
        host.wait_ready()  # systemd's own restart
        assert override(host) == ""


def test_memory_that_a_stranger_holds_is_named_and_the_stranger_lives(inference: Inference) -> None:
    with inference(settings=ACTING) as host, host.bystander(0, 88 * GIB) as stranger:
        host.start(wait=False)
        alert = host.wait_alert(CLASS="gpu_memory_held")
        assert "held" in alert.message
        assert stranger.alive()
        assert host.alerts(ACTION="free") == []
        host.host.systemctl("stop", host.unit, check=False)


def test_diagnose_says_of_every_launch_what_the_daemon_said(inference: Inference) -> None:
    """Also where NVML alone proves it: the ledger remembers what was on the cards."""
    with inference(settings=OBSERVING, restart="no") as host:
        proven(host)
        with host.bystander(0, 40 * GIB):
            deploy(host, 10)
            host.wait_alert(CLASS="gpu_memory_held")
        host.restart(wait=False)
        host.wait_alert(CLASS="kv_cache_oom")
        host.host.systemctl("stop", SERVICE)
        listed = json.loads(host.host.run(INSTALLED, "diagnose", host.unit, "--all", "--json").stdout)
        by_daemon = {incident["invocation"]: incident["class"] for incident in host.history()["incidents"]}
        assert {one["invocation"]: one["class"] for one in listed if one["invocation"] in by_daemon} == by_daemon
        assert [one["class"] for one in listed[:3]] == ["kv_cache_oom", "gpu_memory_held", "requested_stop"]
        assert [one["rollback_helps"] for one in listed[:3]] == [True, None, False]


def test_a_left_over_of_the_unit_is_ended_and_the_same_config_serves(inference: Inference) -> None:
    # KillMode=process is what leaves children behind; a start beside them is systemd's ordinary way.
    with inference(settings=ACTING, kill_mode="process") as host, host.bystander(3, 2 * GIB) as stranger:
        leaves_a_child_that_is_freed(host, "leak_child")
        assert "--speculative-num-steps 4" in " ".join(host.argv())
        assert stranger.alive()
        assert host.metric("sglang_watchdog_processes_ended_total", unit=host.unit) not in (None, 0)


def test_a_start_with_less_than_was_proven_is_reported_as_degraded(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        proven(host)
        host.stop()
        with host.bystander(1, GIB):
            host.start()
            alert = wait_until(
                lambda: [a for a in host.alerts() if "degraded start" in a.message], 15, "a degraded start is reported"
            )[0]
            assert "were proven" in alert.message
            assert "1.0 GiB of card 1" in alert.message
            assert host.metric("sglang_watchdog_degraded", unit=host.unit) == 1


def test_a_server_that_runs_an_old_definition_is_named_and_left_in_peace(inference: Inference) -> None:
    with inference(settings=ACTING, steps=5) as host:
        proven(host)
        host.stop()
        host.change(steps=10)  # no reload
        host.start()
        alert = host.wait_alert(CLASS="stale_unit_file")
        assert "steps 5" in alert.message
        assert "steps 10" in alert.message
        before = host.invocation()
        assert host.tokens(8) == 8
        assert host.invocation() == before
        assert host.alerts(ACTION="hold") == []


def test_a_command_in_a_shell_is_diagnosed_but_never_rewritten(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        proven(host)
        text = host.host.read(host.sglang.file_path)
        command = next(line for line in text.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
        script = command.replace("--speculative-num-steps 4", "--speculative-num-steps 10").replace(
            "--speculative-num-draft-tokens 5", "--speculative-num-draft-tokens 11"
        )
        host.host.write("/opt/serve.sh", f"#!/bin/sh\n{script}\n", mode=0o755)
        host.host.write(host.sglang.file_path, text.replace(command, "/bin/sh /opt/serve.sh"))
        host.reload()
        host.restart(wait=False)
        alert = host.wait_alert(CLASS="kv_cache_oom")
        host.wait_alert(since=alert.time, OUTCOME="held")
        assert override(host) == ""


def test_a_driver_that_hangs_is_said_and_costs_the_daemon_nothing(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        proven(host)
        cards = SimNvml(host.host.root / CARDS.relative_to("/"))
        cards.hang()
        host.kill()
        host.wait_alert(CLASS="external_kill")
        wait_until(lambda: host.metric("sglang_watchdog_nvml_known") == 0, 20, "NVML is said not to answer")
        assert host.host.show("sglang-watchdog.service", "NRestarts") == {"NRestarts": "0"}
        cards.heal()


def test_every_launch_is_recorded_with_what_really_ran(inference: Inference) -> None:
    with inference(settings=OBSERVING, api_key="hush-hush-4711") as host:
        proven(host)
        launch = wait_until(
            lambda: [one for one in host.history()["launches"] if one["phase"] in ("ready", "serving")], 10, "recorded"
        )[0]
        assert launch["server_args"]["speculative_num_steps"] == 4
        assert "REDACTED" in launch["argv"]
        assert [mark["phase"] for mark in launch["phases"]][:2] == ["starting", "loading_weights"]
        assert launch["max_total_num_tokens"] > 0
        ledger = host.host.root / STATE.lstrip("/") / "ledger.db"
        files = list(ledger.parent.glob("ledger.db*"))
        assert files
        assert b"hush-hush-4711" not in b"".join(path.read_bytes() for path in files)
        assert "hush-hush-4711" not in host.metrics()


def test_a_ledger_of_a_newer_version_leaves_the_daemon_observing(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        host.host.systemctl("stop", "sglang-watchdog.service")
        newer = f"import sqlite3; sqlite3.connect('{STATE}/ledger.db').execute('PRAGMA user_version=99')"
        host.host.run(PYTHON, "-c", newer)
        host.host.systemctl("start", "sglang-watchdog.service")
        assert host.metric("sglang_watchdog_ledger_writable") == 0
        assert "newer sglang-watchdog" in host.log()
        status = host.status()
        assert status["units"][0]["act"] is False
        assert status["blind"]
