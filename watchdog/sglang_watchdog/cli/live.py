"""`sglang-watchdog diagnose UNIT` on a live host: the same diagnosis, from systemd, the journal and the ledger as they
are now. Asks nobody but `systemctl` and `journalctl`, so it works while the daemon is down."""

import contextlib
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sglang_watchdog.cli.answer import MOST_LAUNCHES, Answer, answer, newest_first
from sglang_watchdog.compared import Compared, compared_with
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.formats import lines_of
from sglang_watchdog.diagnosis.launches import read_launch, read_launches
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.domain.errors import LedgerError, UnusableInput, WatchdogError
from sglang_watchdog.domain.journal import MessageId
from sglang_watchdog.domain.known_good import base_of
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.domain.visible import seen_before
from sglang_watchdog.host import override, surroundings, unit_files
from sglang_watchdog.host.journal import READING, matches_of
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.settings import Settings, UnitSettings, load

_SHOW_S = 20
_SYNC_S = 5  # a journald that takes longer is told nothing new by waiting
_WORDS = 4096  # bytes of what journalctl complains
_OOMD = f"MESSAGE_ID={MessageId.OOMD_KILL}"
# A day of entries is read where nothing names the launch; a named one is found at any age.
_NAMELESS = ("--since=-1d",)


def diagnose_live(unit: str, invocation: str, config: Path, *, explain: bool = False) -> Answer:
    """The diagnosis of a unit of this host: its newest launch that ended, or the one that `invocation` names."""
    return answer(live_case(unit, invocation, _settings(config)), unit, explain=explain)


def list_live(unit: str, config: Path, *, explain: bool = False) -> list[Answer]:
    """The diagnoses of every launch of the unit that the journal still holds, newest first; of very many the newest."""
    snapshot, settings = _show(unit), _settings(config)
    name = snapshot.name or unit
    matches = [f"_SYSTEMD_UNIT={name}", "+", f"UNIT={name}", "+", "_TRANSPORT=kernel", "+", _OOMD]
    answers: deque[Answer] = deque(maxlen=MOST_LAUNCHES)
    case_of = _cases(snapshot, settings)
    for timeline in read_launches(read_journal(_journalctl(matches), "the journal"), name):
        answers.append(answer(case_of(timeline), name, explain=explain))
    return newest_first(list(answers), name)


def _settings(config: Path) -> Settings:
    return load(config) if config.exists() else Settings()


def live_case(unit: str, invocation: str, settings: Settings) -> Case:
    """What is known of the newest ended launch of the unit, or of the one that `invocation` names."""
    snapshot = _show(unit)
    if not snapshot.loaded and not invocation:
        raise UnusableInput(f"{unit} is not loaded ({snapshot.load_state or 'systemd does not know it'})")
    name = snapshot.name or unit
    chosen = invocation or (snapshot.invocation if snapshot.ended else "")
    matches = matches_of(chosen) if chosen else [*_NAMELESS, f"_SYSTEMD_UNIT={name}", "+", f"UNIT={name}"]
    timeline = read_launch(read_journal(_journalctl(matches), "the journal"), chosen, name)
    return _cases(snapshot, settings)(timeline)


def _cases(snapshot: UnitSnapshot, settings: Settings) -> Callable[[Timeline], Case]:
    """Makes a case of a launch of the unit, with all that the daemon would know of it, as far as the ledger remembers.
    What is the same for every launch is read once."""
    managed = settings.units.get(snapshot.name, UnitSettings()).managed_flags
    of_unit = partial(
        Case,
        unit=snapshot,
        on_disk=unit_files.definition_on_disk(snapshot),
        disk_changed=unit_files.disk_changed(snapshot),
        shadowed=unit_files.shadowed_config(snapshot, managed),
        intended=_intended(snapshot, settings.state_dir, managed),
        inside=surroundings.container(),
        managed=managed,
    )

    def case_of(timeline: Timeline) -> Case:
        launch, compared, ended_for = _remembered(timeline.invocation, settings.state_dir, managed)
        return of_unit(
            timeline=timeline,
            launch=launch,
            gpu_before=seen_before(launch) if launch else None,
            held_before=launch.held_before if launch else (),
            held_when_proven=compared.held,
            memory_when_proven=compared.memory,
            loaded=launch.definition if launch else None,
            known_good=compared.config,
            ended_for=ended_for,
            has_ledger=launch is not None,
        )

    return case_of


def _intended(snapshot: UnitSnapshot, state_dir: Path, managed: frozenset[str]) -> SpeculationConfig | None:
    """What the unit's files ask for, as the daemon sees it; None where their command cannot be told from them."""
    obstacle = override.override_obstacle(snapshot, state_dir / override.FOLDER)
    return None if obstacle else unit_files.intended_config(snapshot, managed)


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


def _settle() -> None:
    """Has journald write down what it was sent so far: the last words of a launch that has just ended may still lie in
    its socket. Takes root; without it, and where it fails, the journal is read as it is."""
    if os.geteuid():
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["journalctl", "--sync"], capture_output=True, timeout=_SYNC_S, check=False)


def _journalctl(matches: list[str]) -> Iterator[bytes]:
    """Lines of the journal. What was read before journalctl failed is used: a file that rotation or a vacuum takes
    away while it is read ends the reading early, and no more."""
    _settle()
    command = ["journalctl", *READING, *matches]
    given = False
    try:
        with (
            tempfile.TemporaryFile() as errors,  # a pipe that nobody reads would fill and stop it
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
        ):
            assert process.stdout is not None
            for line in lines_of(process.stdout):
                given = True
                yield line
            status = process.wait()
            errors.seek(0)
            words = " ".join(errors.read(_WORDS).decode(errors="replace").split())
    except OSError as error:
        raise WatchdogError(f"journalctl cannot be run: {error}") from error
    if status and not given:
        raise WatchdogError(f"journalctl ended with status {status}: {words}")


def _remembered(invocation: str, state_dir: Path, managed: frozenset[str]) -> tuple[Launch | None, Compared, str]:
    """What the ledger has of a launch, of the proof that it is compared with, and why the watchdog itself ended it."""
    try:
        ledger = Ledger.open(state_dir / LEDGER_NAME, read_only=True)
    except LedgerError:
        return None, Compared(), ""  # no daemon ever ran here, or not for us to read: the journal alone has to do
    try:
        launch = ledger.launch(invocation)
        base = _base_of(launch, managed) if launch else ""
        compared = compared_with(ledger, launch.unit, base) if launch and base else Compared()
        return launch, compared, ledger.ended_for(invocation)
    finally:
        ledger.close()


def _base_of(launch: Launch, managed: frozenset[str]) -> str:
    """As the daemon had it; empty where the cards, the command or the model's files could not be read then."""
    before = launch.gpu_before
    if before is None or not launch.argv or launch.model_digest is None:
        return ""
    uuids = [gpu.uuid for gpu in before.gpus]
    return base_of(
        launch.argv,
        managed,
        version=launch.version,
        driver=before.driver,
        gpus=uuids,
        model_digest=launch.model_digest,
    )
