"""The shipped unit files: systemd takes them as they are, they are as tight as they claim, and fit the product."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import unit_files
from sglang_watchdog.host.override import OverrideKind, override_kind
from sglang_watchdog.host.unit_files import environment_file_of, on_disk
from sglang_watchdog.host.unit_syntax import assignments
from sglang_watchdog.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[2]
SHIPPED = CHECKOUT / "contrib" / "systemd"
SERVICE = "sglang-watchdog.service"
# Exposure in tenths, as `systemd-analyze security` counts it.
EXPOSURE = {SERVICE: 25, "sglang-watchdog-hand-back.service": 16}
needs_systemd_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def with_commands(tmp_path: Path) -> Path:
    """The shipped units with commands that are installed here, whose absence would be all that is to be said."""
    for unit in SHIPPED.glob("*.service"):
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    return tmp_path


@needs_systemd_analyze
def test_systemd_has_nothing_to_say_against_the_units(with_commands: Path) -> None:
    done = analyze("verify", "--man=no", *map(str, sorted(with_commands.glob("*.service"))))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd_analyze
@pytest.mark.parametrize("unit", sorted(EXPOSURE))
def test_the_units_are_as_tight_as_they_claim(unit: str) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE[unit]}", str(SHIPPED / unit))
    assert done.returncode == 0, done.stdout


def systemd_version() -> int:
    return int(analyze("--version").stdout.split()[1])


@needs_systemd_analyze
def test_the_backoff_is_taken_by_a_systemd_that_knows_it_and_warned_of_by_another(with_commands: Path) -> None:
    """Why it is a file of its own, which is linked on 254 and later alone."""
    folder = with_commands / f"{SERVICE}.d"
    folder.mkdir()
    shutil.copy(SHIPPED / "sglang-watchdog-backoff.conf", folder)
    done = analyze("verify", "--man=no", str(with_commands / SERVICE))
    assert done.returncode == 0
    assert done.stderr.count("Unknown key 'Restart") == (0 if systemd_version() >= 254 else 2)


def settings_of(unit: str) -> dict[str, str]:
    """The last value of each setting of [Unit] and [Service]."""
    text = (SHIPPED / unit).read_text()
    return {**dict(assignments(text, "Unit")), **dict(assignments(text, "Service"))}


def test_each_line_of_the_sandbox_is_explained_in_place() -> None:
    """One comment may be of three lines that do one thing together, and stands right above them."""
    sandbox = (SHIPPED / SERVICE).read_text().split("# --- What it may do.")[1].split("[Install]")[0]
    unexplained, since_comment = [], 99
    for line in sandbox.splitlines()[1:]:
        if line.startswith("#"):
            since_comment = 0
        else:
            since_comment = since_comment + 1 if line else 99
        if line and since_comment > 3:
            unexplained.append(line)
    assert unexplained == []


def test_the_folders_of_the_service_are_those_of_the_settings() -> None:
    defaults, service = Settings(), settings_of(SERVICE)
    assert str(defaults.state_dir) == f"/var/lib/{service['StateDirectory']}"
    assert str(defaults.runtime_dir) == f"/run/{service['RuntimeDirectory']}"
    assert service["ReadWritePaths"] == str(unit_files.drop_in_of("a.service").parents[1])


def test_a_watchdog_that_is_given_up_hands_its_units_back() -> None:
    hand_back = settings_of(SERVICE)["OnFailure"]
    assert settings_of(hand_back)["ExecStart"] == "/usr/bin/sglang-watchdog hand-back"
    for same in ("StateDirectory", "ReadWritePaths", "IPAddressAllow"):
        assert settings_of(hand_back)[same] == settings_of(SERVICE)[same]


def test_the_example_unit_takes_an_override_without_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(SHIPPED / "sglang.service", tmp_path)
    monkeypatch.setattr(unit_files, "UNIT_PATHS", (tmp_path,))
    unit = UnitSnapshot("sglang.service", fragment=str(tmp_path / "sglang.service"), exec_start_count=1)
    command = on_disk(unit).command
    assert command is not None
    listed = [
        value for key, value in assignments((tmp_path / unit.name).read_text(), "Service") if key == "EnvironmentFile"
    ]
    paths = tuple(unit_files.resolve_specifiers(value.removeprefix("-"), unit.name) for value in listed)
    assert paths[-1] == str(environment_file_of(unit.name))
    assert all(value.startswith("-") for value in listed), "a missing file would keep the server from starting"
    loaded = replace(unit, exec_start=command.argv, environment_files=paths)
    assert override_kind(loaded) is OverrideKind.ENVIRONMENT_FILE
