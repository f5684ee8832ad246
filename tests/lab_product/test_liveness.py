"""A server that runs and makes no progress, under the shipped service on a real systemd: seen by its tokens."""

import json
import re
import signal

import pytest

from lab_product.conftest import Inference, proven
from lab_product.installed import INSTALLED, PYTHON, InferenceHost
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.faults]
BUDGET_S = 5.0  # a request every 1.25 s
OBSERVING = {"act": False, "soak": 0.5, "serving_budget": BUDGET_S, "loading_budget": 4.0}

STRANGER = """
import http.server, json, sys
class Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps({"meta_info": {"completion_tokens": 4}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Stranger).serve_forever()
"""

PY_SPY = """#!/bin/sh
test "$1 $2 $3" = "dump --nonblocking --pid" || exit 2
printf 'Process %s: python --api-key hush-hush-4711\\nPython v3.11.2\\n\\n' "$4"
printf 'Thread %s (idle): "MainThread"\\n    recv (%s)\\n' "$4" "$(readlink "/proc/$4/exe" | xargs basename)"
"""


def schedulers(host: InferenceHost) -> list[int]:
    """Pids of the host's own."""
    script = 'grep -l "^sglang::schedul" $(sed "s,.*,/proc/&/comm," "/sys/fs/cgroup$1/cgroup.procs") | cut -d/ -f3'
    group = host.show("ControlGroup")["ControlGroup"]
    return sorted(int(pid) for pid in host.host.run("sh", "-c", script, "schedulers", group).stdout.split())


def signalled(host: InferenceHost, number: signal.Signals, *pids: int) -> None:
    host.host.run("kill", f"-{int(number)}", *map(str, pids))


def asked(host: InferenceHost) -> int:
    """How many requests were answered."""
    lines = host.host.run("journalctl", "--unit", host.unit, "--output=cat", "--grep=POST /generate").stdout
    return lines.count("200 OK")


def hangs(host: InferenceHost) -> float:
    return host.metric("sglang_watchdog_unresponsive", unit=host.unit) or 0.0


def test_a_server_that_answers_200_and_gives_no_tokens_is_unresponsive_and_left_alone_where_it_may_not_be_touched(
    inference: Inference,
) -> None:
    with inference(settings=OBSERVING) as host:
        host.host.write("/usr/local/bin/py-spy", PY_SPY, mode=0o755)
        proven(host)
        before = host.invocation()
        wait_until(lambda: asked(host) >= 4, 20, "an idle server is asked now and then")
        load = host.load(2, tokens=30_000)  # for longer than the budget
        wait_until(lambda: load.over, 60, "long requests come to their end")
        assert host.alerts(CLASS="unresponsive") == []
        host.load(2, tokens=100_000)
        time_of_load = asked(host)
        host.ask_for("hang_healthy")
        alert = host.wait_alert(CLASS="unresponsive")
        assert asked(host) == time_of_load
        assert host.client.healthy()
        assert "generated nothing" in alert.message
        evidence = alert.get("EVIDENCE")
        assert re.search(r"sglang::schedul \(\d+\): S \(sleeping\)", evidence)
        assert re.search(r"sglang::schedul \(\d+\) is in recv \(python", evidence)
        whole = host.host.read(re.findall(r"the whole stacks are in (\S+)", evidence)[0])
        assert whole.count("MainThread") >= 6  # main, four schedulers, the detokenizer
        assert "hush-hush" not in whole + evidence
        assert hangs(host) == 1
        assert host.status()["units"][0]["progress"]["life"] == "hung"
        assert host.history()["incidents"][0]["outcome"] == "reported"
        host.ask_for()
        wait_until(lambda: hangs(host) == 0, 20, "it makes progress again")
        assert host.invocation() == before
        assert len(host.alerts(CLASS="unresponsive")) == 1


def test_tokens_of_a_stranger_on_the_port_are_no_life_of_a_start_that_hangs(inference: Inference) -> None:
    with inference(settings=OBSERVING) as host:
        command = (PYTHON, "-c", STRANGER, str(host.sglang.port))
        host.host.run("systemd-run", "--unit=stranger", "--collect", *command)
        try:
            wait_until(lambda: host.client.healthy(), 30, "the stranger serves")
            host.ask_for("init_hang")
            host.start(wait=False)
            alert = host.wait_alert(CLASS="unresponsive")
            assert host.tokens(4) == 4
            assert "The launch loads and has said nothing" in alert.message
        finally:
            host.host.systemctl("stop", "stranger", check=False)


# What is done about it

RESTARTING = {"act": True, "soak": 0.5, "serving_budget": BUDGET_S, "restart_unresponsive": True}


def test_a_server_whose_scheduler_is_dead_is_ended_and_serves_again_with_the_same_config(inference: Inference) -> None:
    """Up to 0.5.9 main stays active for ever; nothing of SGLang's own is left that would have to be waited for."""
    with inference(settings=RESTARTING, simulation=Simulation(release="0.5.9"), restart="no") as host:
        proven(host)
        before = schedulers(host)
        signalled(host, signal.SIGKILL, before[0])
        alert = host.wait_alert(CLASS="unresponsive")
        assert "1 of 4 is gone" in alert.message
        held = host.wait_alert(since=alert.time, ACTION="hold")
        assert "the launch that hung was brought down" in held.message
        host.wait_alert(since=alert.time, OUTCOME="recovered")
        assert host.tokens(8) == 8
        assert not set(before) & set(schedulers(host))
        (incident,) = host.history()["incidents"]  # our own kill is no incident of its own
        assert (incident["class"], incident["outcome"]) == ("unresponsive", "recovered")
        assert hangs(host) == 0
        said = host.host.run(INSTALLED, "diagnose", host.unit, "--invocation", incident["invocation"], "--json").stdout
        assert json.loads(said)["class"] == "unresponsive"


def test_an_operator_who_stops_what_hangs_is_not_gainsaid(inference: Inference) -> None:
    """A frozen one, while SGLang's own watchdog would have its time."""
    with inference(settings=RESTARTING, flags=("--watchdog-timeout", "8"), timeout_stop_s=2.0) as host:
        proven(host)
        signalled(host, signal.SIGSTOP, *schedulers(host))
        alert = host.wait_alert(CLASS="unresponsive")
        assert "T (stopped)" in alert.get("EVIDENCE")
        host.stop()
        host.wait_alert(CLASS="requested_stop")
        wait_until(lambda: host.history()["incidents"][0]["outcome"] != "open", 20, "nothing is left open")
        assert host.alerts(ACTION="start") == host.alerts(ACTION="hold") == []
        assert host.state().startswith(("failed", "inactive"))
