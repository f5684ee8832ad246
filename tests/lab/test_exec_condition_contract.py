"""The start gate's contract with systemd: what a condition that says no, or cannot be run, makes of a unit."""

from pathlib import Path

import pytest

from lab.service import IDLE, READY, Service

pytestmark = pytest.mark.lab

NOTIFY = ("Type=notify", "NotifyAccess=all", "Restart=always", "RestartSec=100ms")
GATE = Path(__file__).parents[2] / "contrib" / "systemd" / "sglang-start-gate.conf"
COMMAND = "/usr/bin/sglang-watchdog"


def tried(service: Service, condition: str) -> str:
    """The state after a start."""
    service.define(READY + IDLE, *NOTIFY, condition)
    service.start(check=False)
    return service.wait_for("active/running", "inactive/dead", "failed/failed")


@pytest.mark.parametrize("status", [1, 77, 254])
def test_a_refusal_leaves_the_unit_inactive_and_not_restarted(service: Service, status: int) -> None:
    with service.reference():
        assert tried(service, f"ExecCondition=/bin/sh -c 'exit {status}'") == "inactive/dead"
        result, restarts, invocation = service.show("Result", "NRestarts", "InvocationID")
        assert (result, restarts) == ("exec-condition", "0")
        service.start()
        assert service.show("InvocationID") != (invocation,)


def test_what_is_killed_in_its_condition_is_a_failure(service: Service) -> None:
    service.define(READY + IDLE, *NOTIFY[:2], "ExecCondition=/bin/sh -c 'kill -9 $$$$'")
    service.start(check=False)
    assert service.wait_for_end() == "failed/failed"


def test_a_command_that_is_not_there_refuses_so_that_it_takes_a_shell_to_fail_open(service: Service) -> None:
    with service.reference():
        assert tried(service, "ExecCondition=/no/such/command") == "inactive/dead"


def test_a_refusal_is_lost_where_failures_are_ignored(service: Service) -> None:
    assert tried(service, "ExecCondition=-/bin/sh -c 'exit 77'") == "active/running"


@pytest.mark.parametrize(
    ("broken", "state"),
    [
        ("exit 0", "active/running"),
        ("exit 77", "inactive/dead"),
        ("exit 1", "active/running"),  # Python's own
        ("exit 2", "active/running"),  # of an older sglang-watchdog that knows no such command
        ("kill -9 $$", "active/running"),
        ('test "$1 $2" != "may-start $UNIT" || exit 77', "inactive/dead"),
    ],
)
def test_the_gate_as_it_is_shipped_refuses_by_77_alone(service: Service, broken: str, state: str) -> None:
    program = f"/opt/{service.name}.gate"
    service.host.write(program, f"#!/bin/sh\nUNIT={service.name}\n{broken}\n", mode=0o755)
    service.host.write(f"{service.file_path}.d/50-start-gate.conf", GATE.read_text().replace(COMMAND, program))
    with service.reference():
        assert tried(service, "User=nobody") == state
