"""What leaves the watchdog under its shipped service: hooks, a whole incident in the journal, and never a secret."""

import json

import pytest

from lab_product.conftest import Inference, deploy, proven
from lab_product.installed import INSTALLED, SERVICE, STATE, InferenceHost
from lab_product.sglang_unit import Way
from waiting import wait_until

pytestmark = pytest.mark.lab
ACTING = {"act": True, "soak": 0.5}
HOOK = "/opt/hook.sh"
TOLD = f"{STATE}/told.jsonl"
# As a flag and its value, joined by "=", by its form alone, and in an address.
API_KEY = "q7-night-shift-5f1d0c7e"
ADMIN_KEY = "q7-admin-9c31b2"
TOKEN = "hf_" + "Q7" * 17
PASSWORD = "q7hunter2"
SECRETS = (API_KEY, ADMIN_KEY, TOKEN, PASSWORD)
DEADLINE_S = 60.0


def with_hook(host: InferenceHost, script: str) -> None:
    """Has every incident told to a command that runs `script`."""
    host.host.write(HOOK, f"#!/bin/sh\n{script}\n", mode=0o755)
    settings = f'[hooks]\ncommand = ["{HOOK}"]\nretries = 0\ntimeout = 10\n'
    host.host.write("/etc/sglang-watchdog/config.d/hooks.toml", settings)
    host.host.systemctl("restart", SERVICE)


def told(host: InferenceHost, event: str) -> list[dict[str, object]]:
    lines = host.host.run("cat", TOLD, check=False).stdout.splitlines()
    return [message for message in map(json.loads, lines) if message["event"] == event]


def test_an_incident_is_told_whole_and_no_secret_with_it(inference: Inference) -> None:
    secrets = {"HF_TOKEN": TOKEN, "PROXY": f"http://me:{PASSWORD}@127.0.0.1:9/"}
    flags = (f"--admin-api-key={ADMIN_KEY}",)
    way = Way.ENVIRONMENT_FILE
    with inference(settings=ACTING, way=way, api_key=API_KEY, flags=flags, environment=secrets) as host:
        with_hook(host, f"cat >>{TOLD}; echo >>{TOLD}")
        proven(host)
        deploy(host, 10)
        closed = host.wait_alert(OUTCOME="contained", deadline_s=DEADLINE_S)
        wait_until(lambda: told(host, "closed"), DEADLINE_S, "the hook was told")
        incident = closed.get("INCIDENT")
        [opened] = told(host, "opened")
        assert opened["incident"] == incident
        assert [one["outcome"] for one in told(host, "closed") if one["incident"] == incident] == ["contained"]

        entries = host.host.journal(f"SGLANG_WATCHDOG_INCIDENT={incident}")
        actions = [entry["SGLANG_WATCHDOG_ACTION"] for entry in entries if "SGLANG_WATCHDOG_ACTION" in entry]
        assert entries[0]["SGLANG_WATCHDOG_CLASS"] == "kv_cache_oom"
        assert actions[0] == "plan"
        assert {"hold", "override", "start"} <= set(actions)
        assert entries[-1]["SGLANG_WATCHDOG_OUTCOME"] == "contained"
        assert [int(entry["PRIORITY"]) for entry in entries] == [3, *[5] * (len(entries) - 1)]

        published = everything(host)
        assert [name for name, text in published.items() if not text] == []
        assert [(name, secret) for name, text in published.items() for secret in SECRETS if secret in text] == []


def everything(host: InferenceHost) -> dict[str, str]:
    """All that leaves the watchdog, by name; the state folder holds ledger and what the hook was told."""
    run = host.host.run
    return {
        "journal": str(host.host.journal(f"_SYSTEMD_UNIT={SERVICE}", "+", f"SGLANG_WATCHDOG_UNIT={host.unit}")),
        "state folder": run("sh", "-c", f"cd {STATE} && find . -type f -exec cat {{}} +").stdout,
        "hook": run("cat", TOLD).stdout,
        "metrics": host.metrics(),
        "history": run(INSTALLED, "history", "--json").stdout + run(INSTALLED, "history").stdout,
        "status": run(INSTALLED, "status", "--json").stdout + run(INSTALLED, "status").stdout,
        "gpus": run(INSTALLED, "gpus", "--json").stdout + run(INSTALLED, "gpus").stdout,
        "diagnose": run(INSTALLED, "diagnose", host.unit).stdout,
        "diagnose --json": run(INSTALLED, "diagnose", "--json", host.unit).stdout,
    }


def test_a_hook_that_hangs_costs_a_log_line_and_a_count_and_no_recovery(inference: Inference) -> None:
    with inference(settings=ACTING) as host:
        with_hook(host, "exec sleep 600")
        proven(host)
        deploy(host, 10)
        host.wait_alert(OUTCOME="contained", deadline_s=DEADLINE_S)
        failed = {"hook": "command", "result": "failed"}
        name = "sglang_watchdog_hook_deliveries_total"
        wait_until(lambda: (host.metric(name, **failed) or 0) >= 1, DEADLINE_S, "a delivery is given up")
        assert "hook failed" in host.log(200)
