"""Settings: what is taken, which file wins, and what an error says."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from sglang_watchdog.cli.check_config import check_config, summary
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.settings import HookSettings, Metrics, Settings, UnitSettings, load, reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
UNIT = '[units."sglang.service"]\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(UNIT + "act = true\n")
    (tmp_path / "config.d").mkdir()
    return path


def drop_in(config: Path, name: str, text: str) -> Path:
    path = config.parent / "config.d" / name
    path.write_text(text)
    return path


def errors_of(config: Path) -> list[str]:
    with pytest.raises(UnusableInput) as raised:
        load(config)
    return str(raised.value).splitlines()


def test_a_unit_that_is_only_named_is_observed(config: Path) -> None:
    config.write_text(UNIT)
    settings = load(config)
    assert list(settings.units) == ["sglang.service"]
    assert not settings.units["sglang.service"].act
    assert settings.metrics.address == "127.0.0.1"


def test_every_setting_can_be_given(config: Path) -> None:
    config.write_text(
        """
        state_dir = "/srv/state"
        runtime_dir = "/srv/run"
        log_level = "debug"
        metrics = { address = "::1", port = 0, certificate = "/c.pem", key = "/k.pem", client_ca = "/ca.pem" }
        [hooks]
        command = ["/opt/hook", "--quiet"]
        webhook = "https://hooks.example/alerts?key=1"
        webhook_token_file = "/etc/sglang-watchdog/token"
        timeout = 5
        retries = 0
        [units."sglang@qwen.service"]
        act = true
        several_nodes = true
        url = "http://127.0.0.1:30000/"
        api_key_file = "/etc/sglang/key"
        soak = 30
        managed_flags = ["--mem-fraction-static", "--max-total-tokens"]
        allow_no_speculation = true
        start_deadline = 10.5
        free_deadline = 5
        verify_deadline = 6
        rollbacks = 1
        rollback_window = 60
        rollbacks_per_day = 2
        cool_down = 0
        loading_budget = 0
        capturing_budget = 7
        warming_budget = 8
        serving_budget = 9
        restart_unresponsive = true
        """
    )
    settings = load(config)
    unit = settings.units["sglang@qwen.service"]
    assert (settings.state_dir, settings.runtime_dir) == (Path("/srv/state"), Path("/srv/run"))
    tls = {"certificate": Path("/c.pem"), "key": Path("/k.pem"), "client_ca": Path("/ca.pem")}
    assert settings.metrics == Metrics(address="::1", port=0, **tls)
    assert {*settings.metrics.model_fields_set} == set(Metrics.model_fields)
    assert unit.url == "http://127.0.0.1:30000"
    assert unit.managed_flags == {"--mem-fraction-static", "--max-total-tokens"}
    assert (unit.soak, unit.start_deadline) == (30.0, 10.5)
    assert (unit.rollbacks, unit.rollback_window, unit.rollbacks_per_day, unit.cool_down) == (1, 60.0, 2, 0.0)
    assert unit.restart_unresponsive
    assert (unit.loading_budget, unit.capturing_budget, unit.warming_budget, unit.serving_budget) == (0, 7, 8, 9)
    assert settings.hooks.command == ("/opt/hook", "--quiet")
    assert {*settings.hooks.model_fields_set} == set(HookSettings.model_fields)
    given = {"state_dir", "runtime_dir", "log_level", "metrics", "hooks", "units"}
    assert given == set(Settings.model_fields), "a new setting is to be tried here too"
    assert {*unit.model_fields_set} == set(UnitSettings.model_fields)


def test_a_later_file_wins_key_by_key(config: Path) -> None:
    config.write_text(UNIT + "act = true\nsoak = 5\nrollbacks = 1\n")
    drop_in(config, "20-late.toml", UNIT + "soak = 7\n")
    drop_in(config, "10-early.toml", UNIT + 'soak = 6\n[units."b.service"]')
    drop_in(config, "30-ignored.conf", "soak = 8")
    settings = load(config)
    unit = settings.units["sglang.service"]
    assert (unit.act, unit.soak, unit.rollbacks) == (True, 7.0, 1)
    assert sorted(settings.units) == ["b.service", "sglang.service"]


def test_settings_cannot_be_changed(config: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(config).log_level = "debug"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (UNIT + 'soak = "long"', 'units."sglang.service".soak: found "long"; allowed is a number of seconds'),
        (UNIT + "soak = -1", 'units."sglang.service".soak: found -1; allowed is a number of seconds, 0 or more'),
        (UNIT + "soak = nan", 'units."sglang.service".soak: found NaN; allowed is a number of seconds'),
        (UNIT + 'act = "yes"', 'units."sglang.service".act: found "yes"; allowed is true or false.'),
        (UNIT + "act = 1", 'units."sglang.service".act: found 1; allowed is true or false.'),
        (UNIT + "sok = 1", 'units."sglang.service".sok: is no setting; did you mean soak? Allowed here are act,'),
        (UNIT + 'url = "me:pw@host"', 'units."sglang.service".url: found "me:pw@host"; allowed is http://HOST:PORT'),
        (UNIT + 'managed_flags = ["--tp"]', 'managed_flags: found "--tp"; allowed is a list of --mem-fraction-static'),
        ("metrics = 3", "metrics: found 3; allowed is a table."),
        (UNIT + "rollbacks = 1.5", 'rollbacks: found 1.5; allowed is a whole number'),
        ("[units.sglang]", 'units.sglang: found the name "sglang"; allowed is the full name of one service'),
        ('[units."a/b.service"]', 'found the name "a/b.service"; allowed is the full name of one service'),
        ('[units."sglang@.service"]', 'found the name "sglang@.service"; allowed is the full name of one service'),
        ("units = 1", "units: found 1; allowed is a table."),
        ("metrics = { port = 70000 }", "metrics.port: found 70000; allowed is a whole number from 0 to 65535."),
        ('metrics = { address = "host" }', 'metrics.address: found "host"; allowed is an IP address in quotes.'),
        ('hooks = { command = ["hook"] }', "hooks.command: found"),
        ('hooks = { webhook = "https://me:q7pw@h/" }', "webhook: found a value that is not shown; allowed"),
        ('metrics = { key = "/k" }', "metrics: certificate and key belong together."),
        ('metrics = { client_ca = "/c" }', "metrics: client_ca needs certificate and key."),
        ('log_level = "loud"', 'log_level: found "loud"; allowed is one of "debug"'),
        ('state_dir = "state"', 'state_dir: found "state"; allowed is an absolute path in quotes.'),
        ("metric = {}", "metric: is no setting; did you mean metrics? Allowed here are state_dir,"),
        ("a = 1\nb = ]", "is not TOML: Invalid value (at line 2, column 5)."),
    ],
)  # fmt: skip
def test_an_error_names_file_key_what_was_found_and_what_is_allowed(config: Path, text: str, complaint: str) -> None:
    config.write_text(text)
    (line,) = errors_of(config)
    assert line.startswith(f"{config}: ")
    assert complaint in line


def test_all_errors_of_all_files_are_told_at_once(config: Path) -> None:
    config.write_text(UNIT + "soak = true\n")
    late = drop_in(config, "10.toml", UNIT + "acct = true\nstart_deadline = 0\n")
    broken = drop_in(config, "20.toml", "= 3\n")
    lines = errors_of(config)
    assert [line.split(": ")[0] for line in sorted(lines)] == [str(late), str(late), str(broken), str(config)]


def test_the_file_that_had_the_last_word_is_blamed(config: Path) -> None:
    late = drop_in(config, "10.toml", UNIT + "act = 5\n")
    (line,) = errors_of(config)
    assert line.startswith(f"{late}: ")


def test_a_key_that_was_pasted_in_place_of_its_file_is_not_shown(config: Path) -> None:
    config.write_text(UNIT + 'api_key_file = "q7secret"\napi_key = "q7secret"\n')
    lines = errors_of(config)
    assert len(lines) == 2
    assert "q7secret" not in "".join(lines)


def test_a_file_that_cannot_be_read_is_named(config: Path) -> None:
    config.unlink()
    assert errors_of(config) == [f"{config}: cannot be read: No such file or directory."]
    config.write_bytes(b"a = '\xff'")
    assert errors_of(config) == [f"{config}: is not UTF-8 text (byte 5), so it is no TOML."]


@pytest.mark.parametrize("model", [Settings, Metrics, HookSettings, UnitSettings], ids=lambda model: model.__name__)
def test_every_setting_says_what_is_allowed_and_why(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        if name not in ("units", "metrics", "hooks"):
            assert field.description, name
            assert isinstance(field.json_schema_extra, dict), name
            assert field.json_schema_extra["allowed"], name


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m sglang_watchdog.settings > docs/settings.md"


def test_check_config_exits_with_2_and_the_errors(config: Path) -> None:
    assert CliRunner().invoke(check_config, ["--config", str(config)]).exit_code == 0
    config.write_text("a = 1")
    result = CliRunner().invoke(check_config, ["--config", str(config)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{config}: a: is no setting")


def test_check_config_says_what_the_settings_come_to(config: Path) -> None:
    drop_in(config, "b.toml", '[units."b.service"]')
    assert summary(load(config)) == [
        "The settings are usable.",
        "b.service: observed only (act is not true)",
        "sglang.service: observed and acted on (act = true)",
    ]
    config.write_text("")
    drop_in(config, "b.toml", "")
    assert "No unit is watched" in summary(load(config))[1]
