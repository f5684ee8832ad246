"""The commands as people use them: what they print where all is well, and one line that helps where it is not."""

import json
from collections.abc import Iterator, Mapping
from subprocess import CompletedProcess
from typing import Any

import pytest

from lab.host import LabHost
from lab_product.conftest import GIB, proven
from lab_product.installed import (
    CARD_COUNT,
    INSTALLED,
    SERVICE,
    SETTINGS,
    STATE,
    Bystander,
    InferenceHost,
    inference_host,
)
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = pytest.mark.lab
GHOST = "ghost.service"  # watched, and not there
BAD_SETTINGS = 'log_level = "loud"\n\n[units."sglang.service"]\nact = "yes"\nsok = 3\n'
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
NO_BUS = {"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent"}
OF_THE_DAEMON = (("status",), ("gpus",), ("free", "sglang.service", "--dry-run"))
OF_THE_SETTINGS = (("history",), ("check-config",), ("run",))


@pytest.fixture(scope="module")
def observed(lab: LabHost) -> Iterator[InferenceHost]:
    """An observed unit that leaves a child with its memory behind when it is killed, and one that does not exist."""
    lab.write(f"{SETTINGS.removesuffix('config.toml')}config.d/ghost.toml", f'[units."{GHOST}"]\n')
    with inference_host(
        lab,
        settings={"act": False, "soak": 0.5},
        simulation=Simulation(driver_lag_s=0.0, faults="leak_child"),
        kill_mode="process",
        restart="no",
    ) as host:
        yield host
    lab.systemctl("stop", SERVICE, host.unit, check=False)
    lab.run("sh", "-c", f"rm -rf {STATE}/*; journalctl --rotate; journalctl --vacuum-time=1ms")


@pytest.fixture
def serving(observed: InferenceHost) -> InferenceHost:
    """The unit runs and its config is known-good."""
    if observed.state() != "active/running":
        proven(observed)
    return observed


@pytest.fixture
def bystander(observed: InferenceHost) -> Iterator[Bystander]:
    with observed.bystander(1, GIB) as bystander:
        yield bystander


@pytest.fixture
def no_daemon(serving: InferenceHost) -> Iterator[InferenceHost]:
    serving.host.systemctl("stop", SERVICE)
    yield serving
    serving.host.systemctl("start", SERVICE)


def run(
    host: InferenceHost, *words: str, by: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    return host.host.run(*by, INSTALLED, *words, check=False, env={"COLUMNS": "200", **(env or {})})


def printed(host: InferenceHost, *words: str) -> str:
    """What a command prints that succeeds."""
    done = run(host, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def asked(host: InferenceHost, *words: str) -> Any:
    return json.loads(printed(host, *words, "--json"))


def complaint(done: CompletedProcess[str], status: int) -> str:
    """The one line with which a command fails."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
    assert done.stderr.startswith("sglang-watchdog: ")
    return done.stderr


def test_status_says_what_runs_and_what_is_known_good(serving: InferenceHost) -> None:
    text = printed(serving, "status")
    assert all(word in text for word in (serving.unit, "active (running)", "serving", "steps 4"))
    rows = {row["unit"]: row for row in asked(serving, "status")["units"]}
    ours = rows[serving.unit]
    assert (ours["serving"], ours["running"], ours["known_good"], ours["act"]) == (True, "steps 4", "steps 4", False)
    assert ours["invocation"] == serving.invocation()


def test_status_says_that_a_unit_does_not_exist(serving: InferenceHost) -> None:
    rows = {row["unit"]: row for row in asked(serving, "status")["units"]}
    assert "not-found" in rows[GHOST]["state"]
    assert "not-found" in printed(serving, "status")


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_name_of_a_unit_is_never_cut(serving: InferenceHost, columns: str) -> None:
    assert serving.unit in run(serving, "status", env={"COLUMNS": columns}).stdout
    assert f"{serving.unit}: current_launch (" in run(serving, "gpus", env={"COLUMNS": columns}).stdout


def test_history_names_each_launch_and_what_it_ran(serving: InferenceHost) -> None:
    text = printed(serving, "history")
    assert f"{serving.unit}  steps 4, came to serving, runs" in text
    newest = asked(serving, "history", serving.unit)["launches"][0]
    assert (newest["invocation"], newest["config"], newest["ended"]) == (serving.invocation(), "steps 4", None)


def test_gpus_says_whose_each_holder_is(serving: InferenceHost, bystander: Bystander) -> None:
    text = printed(serving, "gpus")
    assert f"it lives in {bystander.unit}" in text
    gpus = asked(serving, "gpus")["gpus"]
    assert len(gpus) == CARD_COUNT
    assert [holder["whose"] for holder in gpus[1]["holders"] if holder["used_bytes"] == GIB] == ["stranger"]
    assert [holder["whose"] for holder in gpus[0]["holders"]] == [f"{serving.unit}: current_launch"]


def test_free_ends_the_left_over_of_its_unit_alone(serving: InferenceHost, bystander: Bystander) -> None:
    serving.kill()
    wait_until(lambda: serving.state() == "failed/failed", 10, "the unit ended")
    wait_until(lambda: asked(serving, "free", serving.unit, "--dry-run")["ended"], 20, "a left-over is seen")
    dry = printed(serving, "free", serving.unit, "--dry-run")
    assert "would end" in dry
    assert f"(it lives in {bystander.unit})" in dry
    assert serving.gpu_used()[CARD_COUNT - 1] > GIB
    assert "Left-over processes" in printed(serving, "free", serving.unit)
    assert serving.gpu_used()[CARD_COUNT - 1] < GIB
    assert bystander.alive()
    assert asked(serving, "free", serving.unit)["ended"] == []


def test_free_leaves_a_running_launch_alone(serving: InferenceHost) -> None:
    before = serving.invocation()
    would = asked(serving, "free", serving.unit, "--dry-run")
    # A host that tests share may still show a neighbour's process that the driver is about to let go.
    ranks = [spared for spared in would["spared"] if "runs now" in spared["why"]]
    assert (would["ended"], len(ranks)) == ([], CARD_COUNT)
    assert f"{serving.unit} is active (running): stop it" in complaint(run(serving, "free", serving.unit), 1)
    assert serving.tokens(8) == 8
    assert serving.invocation() == before


def test_free_of_a_unit_that_is_not_watched_names_those_that_are(serving: InferenceHost) -> None:
    line = complaint(run(serving, "free", "other.service"), 2)
    assert "other.service is not watched" in line
    assert serving.unit in line


def test_hand_back_leaves_a_daemon_that_runs_its_work(serving: InferenceHost) -> None:
    before = serving.invocation()
    assert "finishes what it began" in printed(serving, "hand-back")
    assert serving.invocation() == before


def test_check_config_says_what_the_settings_come_to(serving: InferenceHost) -> None:
    text = printed(serving, "check-config")
    assert "usable" in text
    assert f"{serving.unit}: observed only" in text


@pytest.mark.parametrize("words", OF_THE_DAEMON, ids=lambda words: words[0])
def test_without_a_daemon_a_command_says_how_to_start_it(no_daemon: InferenceHost, words: tuple[str, ...]) -> None:
    assert "systemctl start sglang-watchdog" in complaint(run(no_daemon, *words), 1)


def test_without_a_daemon_history_and_hand_back_work(no_daemon: InferenceHost) -> None:
    assert no_daemon.unit in printed(no_daemon, "history")
    assert "Nothing is held" in printed(no_daemon, "hand-back")


@pytest.mark.parametrize("words", [*OF_THE_DAEMON, ("history",), ("hand-back",)], ids=lambda words: words[0])
def test_who_is_not_root_is_told_so(serving: InferenceHost, words: tuple[str, ...]) -> None:
    assert "root" in complaint(run(serving, *words, by=NOBODY), 1)


def test_who_is_not_root_may_check_the_settings(serving: InferenceHost) -> None:
    assert run(serving, "check-config", by=NOBODY).returncode == 0


def test_without_a_bus_hand_back_says_so(no_daemon: InferenceHost) -> None:
    assert "bus" in complaint(run(no_daemon, "hand-back", env=NO_BUS), 1)


@pytest.mark.parametrize("words", OF_THE_SETTINGS, ids=lambda words: words[0])
def test_bad_settings_are_told_by_file_key_found_and_allowed(serving: InferenceHost, words: tuple[str, ...]) -> None:
    serving.host.write("/etc/bad.toml", BAD_SETTINGS)
    done = run(serving, *words, "--config=/etc/bad.toml")
    assert done.returncode == 2
    lines = done.stderr.removeprefix("sglang-watchdog: ").splitlines()
    assert lines[0] == '/etc/bad.toml: log_level: found "loud"; allowed is one of "debug", "info", "warning", "error".'
    assert lines[1] == '/etc/bad.toml: units."sglang.service".act: found "yes"; allowed is true or false.'
    assert "did you mean soak?" in lines[2]


@pytest.mark.parametrize("words", OF_THE_DAEMON, ids=lambda words: words[0])
def test_bad_settings_keep_nobody_from_asking_the_daemon(serving: InferenceHost, words: tuple[str, ...]) -> None:
    serving.host.write("/etc/bad.toml", BAD_SETTINGS)
    assert printed(serving, *words, "--config=/etc/bad.toml")


def test_bad_settings_do_not_keep_hand_back_from_its_work(no_daemon: InferenceHost) -> None:
    no_daemon.host.write("/etc/bad.toml", BAD_SETTINGS)
    done = run(no_daemon, "hand-back", "--config=/etc/bad.toml")
    assert (done.returncode, done.stdout) == (0, "Nothing is held.\n")
    assert done.stderr.count("\n") == 1
    assert STATE in done.stderr
    assert "/etc/bad.toml: log_level" in done.stderr


def test_settings_that_are_not_there_are_told_in_one_line(serving: InferenceHost) -> None:
    assert "/etc/none.toml: cannot be read" in complaint(run(serving, "status", "--config=/etc/none.toml"), 2)
