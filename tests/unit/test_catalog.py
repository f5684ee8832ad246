"""The message catalog: every alert is explained, nothing else is, and journald takes the file."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import alert_samples
from sglang_watchdog.reporting.alerts import AlertId

CATALOG = Path(__file__).resolve().parents[2] / "contrib" / "systemd" / "sglang-watchdog.catalog"
needs_journalctl = pytest.mark.skipif(not shutil.which("journalctl"), reason="journalctl is missing")


def entries() -> dict[str, str]:
    """Text by message id."""
    pieces = re.split(r"^-- (\S+)$", CATALOG.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def test_every_alert_is_explained_and_nothing_else_is() -> None:
    assert sorted(entries()) == sorted(AlertId)


@pytest.mark.parametrize("alert", AlertId, ids=lambda alert: alert.name)
def test_an_explanation_names_only_fields_that_its_alert_always_carries(alert: AlertId) -> None:
    carried = alert_samples.with_least()[alert].fields()
    assert set(re.findall(r"@(\w+)@", entries()[alert])) <= set(carried)


@pytest.mark.parametrize("alert", AlertId, ids=lambda alert: alert.name)
def test_an_explanation_has_a_subject_an_author_and_a_text(alert: AlertId) -> None:
    assert re.fullmatch(r"\nSubject: \S.*\nDefined-By: sglang-watchdog\n\n\S[\s\S]+\n", entries()[alert])


@needs_journalctl
def test_journald_takes_the_file_and_gives_every_entry_back(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/systemd/catalog").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    shutil.copy(CATALOG, tmp_path / "usr/lib/systemd/catalog")
    assert journalctl(tmp_path, "--update-catalog") == ""
    listed = journalctl(tmp_path, "--list-catalog").splitlines()
    assert sorted(line.split()[0] for line in listed) == sorted(AlertId)


def journalctl(root: Path, *words: str) -> str:
    """What it says, complaints included."""
    done = subprocess.run(
        ["journalctl", f"--root={root}", *words], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
