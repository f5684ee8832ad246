"""`sglang-watchdog diagnose UNIT` on a live host: the same diagnosis, from systemd, the journal and the ledger as they
are now. Asks nobody but `systemctl` and `journalctl`, so it works while the daemon is down."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from sglang_watchdog.cli.answer import Answer
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.errors import LedgerError, UnusableInput, WatchdogError
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import override, unit_files
from sglang_watchdog.host.journal import matches_of
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.settings import Settings, load

_SHOW_S = 20
# A day of entries is read where nothing names the launch; a named one is found at any age.
_NAMELESS = ("--since=-1d",)


def diagnose_live(unit: str, invocation: str, config: Path) -> Answer:
    """The diagnosis of a unit of this host: its newest launch that ended, or the one that `invocation` names."""
    settings = load(config) if config.exists() else Settings()
    case = live_case(unit, invocation, settings.state_dir)
    return Answer(diagnose(case), unit, case.timeline.invocation)


def live_case(unit: str, invocation: str, state_dir: Path) -> Case:
    """What is known of the newest ended launch of the unit, or of the one that `invocation` names."""
    snapshot = _show(unit)
    if not snapshot.loaded and not invocation:
        raise UnusableInput(f"{unit} is not loaded ({snapshot.load_state or 'systemd does not know it'})")
    chosen = invocation or (snapshot.invocation if snapshot.ended else "")
    matches = matches_of(chosen) if chosen else [*_NAMELESS, f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}"]
    timeline = read_launch(read_journal(_journalctl(matches), "the journal"), chosen, unit)
    return Case(
        timeline=timeline,
        unit=snapshot,
        launch=_recorded(state_dir, timeline.invocation),
        disk_changed=unit_files.disk_changed(snapshot),
        intended=_intended(snapshot, state_dir),
    )


def _intended(snapshot: UnitSnapshot, state_dir: Path) -> SpeculationConfig | None:
    """What the unit's files ask for, as the daemon sees it; None where their command cannot be told from them."""
    obstacle = override.override_obstacle(snapshot, state_dir / override.FOLDER)
    return None if obstacle else unit_files.intended_config(snapshot)


def _show(unit: str) -> UnitSnapshot:
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--", unit], capture_output=True, text=True, timeout=_SHOW_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WatchdogError(f"systemctl cannot be asked: {error}") from error
    if shown.returncode:
        words = " ".join(shown.stderr.split())
        raise WatchdogError(f"systemctl show {unit}: {words}")
    snapshot = parse_show(shown.stdout, "systemctl show")
    if snapshot is None:
        raise UnusableInput(f"systemd tells nothing of {unit}")
    return snapshot


def _journalctl(matches: list[str]) -> Iterator[bytes]:
    command = ["journalctl", "--output=json", "--all", "--no-pager", "--quiet", *matches]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            yield from process.stdout
            words = process.stderr.read().decode(errors="replace").strip()
    except OSError as error:
        raise WatchdogError(f"journalctl cannot be run: {error}") from error
    if process.returncode:
        raise WatchdogError(f"journalctl ended with status {process.returncode}: {words}")


def _recorded(state_dir: Path, invocation: str) -> Launch | None:
    try:
        ledger = Ledger.open(state_dir / LEDGER_NAME, read_only=True)
    except LedgerError:
        return None  # no daemon ever ran here, or not for us to read: the journal alone has to do
    try:
        return ledger.launch(invocation)
    finally:
        ledger.close()
