"""What `setup` recognises as an SGLang unit, what it learns from past stops, and what it recommends."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_watchdog.cli.setting_up import report, settings_for
from sglang_watchdog.domain.journal import JournalEntry, MessageId
from sglang_watchdog.settings import Settings, load, template
from sglang_watchdog.survey import Drains, Found, Launcher, advice, drains_of, launcher_of, needed_stop_timeout

WELL = Found(
    unit="sglang.service",
    state="active (running), enabled",
    launcher=Launcher.DIRECT,
    command="/opt/sglang/bin/python -m sglang.launch_server --api-key REDACTED",
    config="steps 4",
    given="by $SGLANG_SPECULATION_ARGS from /etc/default/sglang",
    rollback="by environment file, without a daemon-reload",
    service_type="exec",
    restart="on-failure",
    restart_delay=10.0,
    kill_mode="mixed",
    stop_timeout=300.0,
    keeps_environ=True,
    drains=Drains(7, 0, 84.0),
)
DIRECT, SCRIPT, CONTAINER = Launcher.DIRECT, Launcher.SCRIPT, Launcher.CONTAINER


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/opt/sglang/bin/python -m sglang.launch_server --model-path /m", DIRECT),
        ("/usr/bin/numactl -N 0 /opt/python -m sglang.launch_server", DIRECT),
        ("/opt/python /opt/sglang/python/sglang/launch_server.py", DIRECT),
        ("/opt/sglang/bin/sglang serve --model-path /m", DIRECT),
        ("/bin/bash -c exec python -m sglang.launch_server", SCRIPT),
        ("/bin/sh -lc cd /srv && sglang serve --model-path /m", SCRIPT),
        ("/usr/bin/docker run --gpus all lmsysorg/sglang:v0.5.16 python3 -m sglang.launch_server", CONTAINER),
        ("/usr/bin/podman start --attach sglang-qwen", CONTAINER),
        ("/usr/bin/docker run --rm nginx", None),
        ("/opt/venv/bin/python -m sglang_router.launch_router", None),
        ("/opt/venv/bin/python -m sglang_router.launch_server", None),
        ("/usr/bin/sglang-watchdog run", None),
        ("/opt/sglang/bin/sglang generate", None),
        ("/usr/bin/vllm serve /m", None),
        ("", None),
    ],
)
def test_a_unit_is_known_by_the_command_that_it_starts(command: str, expected: Launcher | None) -> None:
    assert launcher_of(command.split()) is expected


def test_a_script_is_known_by_its_text() -> None:
    text = "\ncd /srv/models\nexec /opt/sglang/bin/python -m sglang.launch_server \\\n  --model-path qwen\n"
    assert launcher_of(["/opt/serve.sh"], [text]) is Launcher.SCRIPT
    assert launcher_of(["/opt/serve.sh"], ["exec vllm serve"]) is None


# Past stops


def entry(at: float, message: MessageId, launch: str = "a", result: str = "") -> JournalEntry:
    return JournalEntry(at, "", invocation=launch, message_id=message, unit_result=result)


def test_a_drain_lasts_from_the_stop_to_the_end_of_the_main_process() -> None:
    stopped = [
        entry(100, MessageId.UNIT_STOPPING),
        entry(130, MessageId.PROCESS_EXIT),
        entry(131, MessageId.UNIT_FAILED, result="signal"),
        entry(132, MessageId.UNIT_STOPPED),
    ]
    assert drains_of(stopped) == Drains(1, 0, 30.0)


def test_a_stop_that_timed_out_tells_no_length() -> None:
    entries = [
        entry(100, MessageId.UNIT_STOPPING),
        entry(160, MessageId.PROCESS_EXIT),
        entry(160, MessageId.UNIT_FAILED, result="timeout"),
        entry(200, MessageId.UNIT_STOPPING, "b"),
        entry(212, MessageId.UNIT_SUCCESS, "b"),
    ]
    assert drains_of(entries) == Drains(2, 1, 12.0, 60.0)


def test_a_crash_is_no_stop() -> None:
    assert drains_of([entry(5, MessageId.PROCESS_EXIT), entry(5, MessageId.UNIT_FAILED, result="signal")]) == Drains()


@pytest.mark.parametrize(
    ("drains", "wanted"),
    [
        (Drains(), 90),
        (Drains(3, 0, 84.0), 120),
        (Drains(2, 2, 0.0, 60.0), 120),
        (Drains(2, 1, 30.0, 200.0), 420),
        (Drains(1, 0, 500.0), 540),
    ],
)
def test_a_stop_is_given_more_than_the_longest_drain_needed(drains: Drains, wanted: int) -> None:
    assert needed_stop_timeout(drains) == wanted


def test_who_followed_the_advice_is_not_told_to_go_further_because_of_stops_before_it() -> None:
    drains = Drains(1, 1, 0.0, 60.0)
    assert lines(replace(WELL, drains=drains, stop_timeout=60.0)) == ["TimeoutStopSec=120"]
    assert lines(replace(WELL, drains=drains, stop_timeout=120.0)) == []


# Advice


def lines(found: Found) -> list[str]:
    return [line for one in advice(found) for line in one.lines]


def test_a_unit_that_is_well_made_gets_no_advice() -> None:
    assert lines(WELL) == []
    assert "    Nothing to recommend." in list(report(WELL, "observed only"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"service_type": "notify"}, ["Type=exec"]),
        ({"kill_mode": "control-group"}, ["KillMode=mixed"]),
        ({"kill_mode": "process"}, ["KillMode=mixed"]),
        ({"kill_mode": "none", "launcher": Launcher.CONTAINER}, []),
        ({"stop_timeout": 60.0}, ["TimeoutStopSec=120"]),
        ({"stop_timeout": None}, []),
        ({"restart": "no"}, ["Restart=on-failure", "RestartSec=10"]),
        ({"restart": "always"}, []),
        ({"keeps_environ": False}, ["Environment=SPT_NOENV=1"]),
        ({"keeps_environ": False, "launcher": Launcher.SCRIPT}, []),
        ({"by_variable": ("ExecStart=",)}, ["ExecStart="]),
    ],
)
def test_each_weakness_gets_its_lines(changes: dict[str, object], expected: list[str]) -> None:
    assert lines(replace(WELL, **changes)) == expected  # type: ignore[arg-type]


def test_a_report_of_a_unit_fits_a_terminal_but_for_commands() -> None:
    found = replace(WELL, kill_mode="none", stop_timeout=5.0, drains=Drains(3, 2, 4.0), keeps_environ=False)
    said = list(report(found, "observed only"))
    assert [line for line in said if len(line) > 110] == []
    assert "2 of 3 stops in the journal timed out; the longest drain took 4 s" in "\n".join(said)


# Settings


@pytest.mark.parametrize("unit", ["sglang.service", "sglang@qwen.service", r"sglang\x2dqwen.service"])
def test_what_is_written_observes_and_no_more(tmp_path: Path, unit: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(template())
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / f"{unit}.toml").write_text(settings_for(unit))
    settings = load(config)
    assert set(settings.units) == {unit}
    assert settings.units[unit].act is False


def test_an_act_of_config_toml_is_not_taken_back_by_a_later_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[units."sglang.service"]\nact = true\n')
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "sglang.service.toml").write_text(settings_for("sglang.service"))
    assert load(config).units["sglang.service"].act is True


def test_the_installed_settings_watch_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(template())
    assert load(tmp_path / "config.toml") == Settings()


def test_each_commented_setting_is_one_and_holds_its_default() -> None:
    bare = "\n".join(
        line.removeprefix("# ") for line in template().splitlines() if line.startswith(("# [", "# ")) and "=" in line
    )
    assert tomllib.loads(bare)["soak"] == 600
