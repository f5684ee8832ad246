"""`sglang-watchdog setup` on a real systemd: it finds the SGLang units, has them observed, and tells what it saw."""

import re
from collections.abc import Iterator

import pytest

from lab.host import LabHost
from lab_product.installed import COMMAND
from waiting import wait_until

pytestmark = pytest.mark.lab

FOLDER = "/etc/sglang-watchdog"
PLAIN = "t-setup-plain.service"
SCRIPTED = "t-setup-scripted.service"
BOXED = "t-setup-boxed.service"
QUADLET = "t-setup-quadlet.service"
EXAMPLE = "t-setup-example.service"
SECRET = "very-secret-7731"
UNITS = {
    PLAIN: f"""[Service]
Type=exec
ExecStart=/usr/bin/env sh -c 'trap "" TERM; while :; do sleep 0.2; done' -m sglang.launch_server --model-path /m \
--api-key {SECRET} --speculative-algorithm EAGLE --speculative-num-steps 4
TimeoutStopSec=1
""",
    SCRIPTED: "[Service]\nExecStart=/opt/serve-t-setup\nRestart=always\nKillMode=mixed\nTimeoutStopSec=300\n",
    BOXED: "[Service]\nExecStart=/usr/bin/docker run --name q lmsysorg/sglang:v0.5.16 /serve\n",
    QUADLET: """[Service]
Type=notify
ExecStart=/usr/bin/podman run --rm -d lmsysorg/sglang sglang serve --model-path /m --speculative-num-steps 4
""",
    EXAMPLE: """[Service]
EnvironmentFile=-/etc/default/t-setup
EnvironmentFile=-/var/lib/sglang-watchdog/overrides/%n.env
Environment=SPT_NOENV=1
ExecStart=/usr/bin/env sglang serve --model-path /m $SGLANG_SPECULATION_ARGS
KillMode=mixed
TimeoutStopSec=300
Restart=on-failure
""",
    "t-setup-other.service": "[Service]\nExecStart=/bin/sleep 600\n",
}


@pytest.fixture(scope="module")
def host(lab: LabHost) -> Iterator[LabHost]:
    for unit, text in UNITS.items():
        lab.write(f"/etc/systemd/system/{unit}", text)
    lab.write("/opt/serve-t-setup", "#!/bin/sh\nexec python -m sglang.launch_server --model-path /m\n", mode=0o755)
    args = '"--speculative-algorithm EAGLE --speculative-num-steps 3"'
    lab.write("/etc/default/t-setup", f"SGLANG_SPECULATION_ARGS={args}\n")
    lab.systemctl("daemon-reload")
    lab.systemctl("start", PLAIN)
    lab.systemctl("stop", PLAIN)  # deaf to SIGTERM: it times out
    wait_until(lambda: lab.journal(f"UNIT={PLAIN}", "UNIT_RESULT=timeout"), 20, "a stop that timed out")
    yield lab
    paths = [f"/etc/systemd/system/{unit}" for unit in UNITS]
    lab.run("rm", "-rf", FOLDER, "/opt/serve-t-setup", "/etc/default/t-setup", *paths)
    lab.systemctl("daemon-reload")


@pytest.fixture
def settings(host: LabHost) -> Iterator[str]:
    host.run("rm", "-rf", FOLDER)
    yield FOLDER
    host.run("rm", "-rf", FOLDER)


def setup(host: LabHost, *words: str) -> str:
    return host.run(COMMAND, "setup", *words, timeout=60).stdout


def about(said: str, unit: str) -> str:
    """What is said of one unit: its lines are indented, and the next unit's name is not."""
    return re.split(r"\n(?=\S)", said.split(f"{unit}  ", 1)[1])[0]


def test_every_sglang_unit_is_found_and_observed_and_nothing_else(host: LabHost, settings: str) -> None:
    said = setup(host)
    listed = host.run("ls", f"{settings}/config.d").stdout.split()
    assert {name for name in listed if name.startswith("t-setup")} == {
        f"{unit}.toml" for unit in (PLAIN, SCRIPTED, BOXED, QUADLET, EXAMPLE)
    }
    checked = host.run(COMMAND, "check-config").stdout
    assert f"{PLAIN}: observed only (act is not true)" in checked
    assert SECRET not in said


def test_a_second_run_changes_nothing_that_the_operator_wrote(host: LabHost, settings: str) -> None:
    setup(host, PLAIN)
    path = f"{settings}/config.d/{PLAIN}.toml"
    mine = f'[units."{PLAIN}"]\nact = true # mine\n'
    host.write(path, mine)
    assert "already, observed and acted on (act = true)" in setup(host, PLAIN)
    assert host.read(path) == mine


def test_a_dry_run_writes_nothing(host: LabHost, settings: str) -> None:
    assert "Nothing was written." in setup(host, "--dry-run")
    assert host.run("ls", settings, check=False).returncode != 0


def test_a_weak_unit_is_told_what_was_seen_and_gets_exact_lines(host: LabHost, settings: str) -> None:  # noqa: ARG001
    said = about(setup(host, "--dry-run"), PLAIN)
    assert "flags     steps 4, on the ExecStart= line" in said
    assert "rollback  by drop-in, with a daemon-reload" in said
    assert "KillMode=control-group, TimeoutStopSec=1 s\n" in said
    assert "drains    1 of 1 stops in the journal timed out\n" in said
    for line in ("KillMode=mixed", "TimeoutStopSec=90", "Restart=on-failure", "Environment=SPT_NOENV=1", "ExecStart="):
        assert f"\n        {line}\n" in said
    assert '"SGLANG_SPECULATION_ARGS=--speculative-algorithm EAGLE --speculative-num-steps 4"' in said


def test_what_is_recommended_is_taken_by_systemd_and_makes_the_unit_well(
    host: LabHost,
    settings: str,  # noqa: ARG001
) -> None:
    said = about(setup(host, "--dry-run"), PLAIN)
    lines = [line.strip() for line in said.split("    Recommended", 1)[1].splitlines()[1:]]
    drop_in = "\n".join(lines).replace("REDACTED", SECRET)
    path = f"/etc/systemd/system/{PLAIN}.d/50-recommended.conf"
    host.write(path, drop_in + "\n")
    host.systemctl("daemon-reload")
    try:
        assert host.run("systemd-analyze", "verify", "--man=no", PLAIN, check=False).stderr == ""
        after = about(setup(host, "--dry-run"), PLAIN)
    finally:
        host.run("rm", "-r", f"/etc/systemd/system/{PLAIN}.d")
        host.systemctl("daemon-reload")
    assert "Nothing to recommend." in after
    assert "flags     steps 4, by $SGLANG_SPECULATION_ARGS from Environment=" in after
    assert "rollback  by environment file, without a daemon-reload" in after


def test_a_well_made_unit_is_told_where_its_flags_come_from(host: LabHost, settings: str) -> None:  # noqa: ARG001
    said = about(setup(host, "--dry-run"), EXAMPLE)
    assert "flags     steps 3, by $SGLANG_SPECULATION_ARGS from /etc/default/t-setup" in said
    assert "Nothing to recommend." in said


@pytest.mark.parametrize(("unit", "why"), [(SCRIPTED, "are in a script"), (BOXED, "no SGLang command is to be seen")])
def test_a_hidden_command_is_observed_and_why_it_is_no_more_is_said(
    host: LabHost,
    settings: str,  # noqa: ARG001
    unit: str,
    why: str,
) -> None:
    said = about(setup(host, "--dry-run"), unit)
    assert f"{why}" in said.split("rollback", 1)[1].splitlines()[0]
    assert "\n        ExecStart=" not in said


def test_a_command_that_is_seen_in_a_container_can_be_given_other_flags(host: LabHost, settings: str) -> None:  # noqa: ARG001
    said = about(setup(host, "--dry-run"), QUADLET)
    assert "(the server runs in a container)" in said
    assert "flags     steps 4, on the ExecStart= line" in said
    assert "rollback  by drop-in" in said
    assert "--stop-timeout=90" in said
    assert "Type=" not in said


def test_a_unit_that_is_not_there_is_an_error_in_one_line(host: LabHost, settings: str) -> None:  # noqa: ARG001
    done = host.run(COMMAND, "setup", "t-setup-missing", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "t-setup-missing.service is not loaded (not-found)" in done.stderr
