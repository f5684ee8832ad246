"""Hands units back: a watchdog that stopped a unit owes it a start, also when it died in between.

`OnFailure=` of the daemon's own service runs this in a process of its own. It starts only what an open incident had
begun to hold and had not started again, with whatever config is in force by then. systemd 257 runs it before each
automatic restart of the daemon, 252 only once there is none any more: a daemon that comes back finishes its own work,
so then nothing is handed back.
"""

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from sglang_watchdog import witness
from sglang_watchdog.domain.errors import JobRefused, LedgerError, UnusableInput, WatchdogError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident, Intent, Outcome, Step
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.host import override, processes
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.lock import only_one
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.overriding import undo_unloaded
from sglang_watchdog.reporting import alerts
from sglang_watchdog.settings import Settings

SERVICE = "sglang-watchdog.service"
REBOOTED = "The host was rebooted in the middle"
# systemd hears of a death at once; what held a card takes some seconds to end.
_NOTICED_S, _FALLS_S, _LOOK_S = 2.0, 10.0, 0.05
Tell = Callable[[Incident], None]
log = structlog.get_logger()


def _nobody(_: Incident) -> None:
    """The journal is told of every incident; beside it nobody has to be."""


def owes_a_start(intents: list[Intent]) -> bool:
    """A hold was begun, and no start after it came to its end."""
    held = any(intent.step is Step.HOLD for intent in intents)
    started = any(intent.step is Step.START and intent.outcome == "done" for intent in intents)
    return held and not started


def hand_back_units(settings: Settings, tell: Tell = _nobody) -> list[str]:
    """Returns one sentence for each open incident, and tells of each that it closed. Raises `WatchdogError` where
    ledger or bus cannot be reached, or where a unit that is owed a start could not be given it."""
    path = settings.state_dir / LEDGER_NAME
    systemd = Systemd()
    systemd.open()
    try:
        if _comes_back(systemd):
            return ["The daemon runs or comes back by itself, and finishes what it began."]
        with only_one(settings.state_dir):
            said = _hand_back_all(path, systemd, tell)
    finally:
        systemd.close()
    return said or ["Nothing is held."]


def _hand_back_all(path: Path, systemd: Systemd, tell: Tell) -> list[str]:
    ledger = Ledger.open(path)
    try:
        said = [hand_back(incident, ledger, systemd, tell=tell) for incident in ledger.open_incidents()]
        for unit in ledger.witnessed():
            witness.dismiss(systemd, ledger, unit)
        return said
    finally:
        ledger.close()


def _comes_back(systemd: Systemd) -> bool:
    daemon = systemd.snapshot(SERVICE)
    return not daemon.ended or daemon.in_auto_restart or daemon.sub_state == "failed-before-auto-restart"


def hand_back(
    incident: Incident, ledger: Ledger, systemd: Systemd, *, theirs: bool = False, tell: Tell = _nobody
) -> str:
    """Gives one unit its start, if it is owed one, and closes the incident where we stopped in the middle of it.
    `theirs`: the operator has queued a job meanwhile, so that nothing is owed any more; neither is it after a stop."""
    intents = ledger.intents(incident.id)
    if not owes_a_start(intents):
        return f"{incident.unit}: nothing is owed for incident {incident.id}."
    theirs = theirs or was_started_since(incident, intents, systemd.snapshot(incident.unit), ledger)
    if of_earlier_boot(incident, ledger):
        closed = ledger.close_incident(incident, Outcome.YIELDED, f"{REBOOTED}, so that nothing is owed any more.")
    else:
        reason = _started(incident.unit, ledger, systemd, theirs=theirs, killed=killed_in(incident))
        closed = ledger.close_incident(incident, Outcome.YIELDED, f"Handed back: {reason}.")
    alerts.send(alerts.closed(closed))
    tell(closed)
    ledger.told(closed)
    return f"{incident.unit}: {closed.reason}"


def was_started_since(incident: Incident, intents: list[Intent], snapshot: UnitSnapshot, ledger: Ledger) -> bool:
    """Whether a start that no intent tells of has followed the launch that was held: ours, of which a ledger that could
    not be written knows nothing, or somebody's.

    Once a hold is done, the witness stands for the newest launch that it brought down. Until then an automatic restart
    may have been brought down by us; a start by hand sets systemd's count of those to 0."""
    if any(intent.step is Step.START for intent in intents):
        return False
    held = any(intent.step is Step.HOLD and intent.finished for intent in intents)
    if held and (last := ledger.witness(incident.unit)):
        return snapshot.invocation not in ("", last)
    return snapshot.invocation not in ("", incident.invocation) and snapshot.restarts == 0


def of_earlier_boot(incident: Incident, ledger: Ledger) -> bool:
    """What runs after a reboot is what systemd starts at boot: nothing that was held before it is held any more."""
    launch = ledger.launch(incident.invocation)
    return launch is not None and launch.boot_id not in ("", processes.boot_id())


def _started(unit: str, ledger: Ledger, systemd: Systemd, *, theirs: bool, killed: str) -> str:
    """Starts it where it is down, and says so. A file of ours that cannot be taken away costs no start."""
    try:
        undo_unloaded(systemd, ledger, unit, ledger.path.parent / override.FOLDER)
    except (LedgerError, UnusableInput) as error:
        log.error("what was not loaded could not be taken away", unit=unit, error=str(error))
    if theirs or witness.saw_a_stop(systemd, ledger, systemd.snapshot(unit)):
        return "the operator acted on it meanwhile"
    started = start_if_down(systemd, unit, killed)
    now = systemd.snapshot(unit)
    if not started and killed == now.invocation and now.active_state is ActiveState.DEACTIVATING and not now.job:
        raise WatchdogError(f"{unit} was brought down and does not end: it is owed a start once it has")
    return "started, because the watchdog ended in the middle" if started else "it runs already"


def killed_in(incident: Incident) -> str:
    """The launch that a recovery of it ends while it runs; empty where none is."""
    return incident.invocation if incident.failure is FailureClass.UNRESPONSIVE else ""


def start_if_down(systemd: Systemd, unit: str, killed: str = "") -> bool:
    """Starts a unit that is down with no job queued. A queued job is the operator's, and is left alone; so is a host
    that shuts down, which refuses every start. `killed`: a launch of it that we may just have killed."""
    systemd.ref(unit)  # one that is not enabled is forgotten between two calls otherwise
    snapshot = settled(systemd, unit, killed)
    if not snapshot.ended or snapshot.job:
        return False
    try:
        systemd.reset_failed(unit)
        systemd.start(unit)
    except JobRefused as error:
        log.info("no start", unit=unit, error=str(error))
        return False
    return True


def settled(systemd: Systemd, unit: str, killed: str) -> UnitSnapshot:
    """The unit, once that launch is down, if it was killed, or when that takes too long."""
    begun = time.monotonic()
    while True:
        snapshot, waited = systemd.snapshot(unit), time.monotonic() - begun
        if not killed or snapshot.invocation != killed or snapshot.ended or snapshot.job:
            return snapshot
        if waited >= (_FALLS_S if snapshot.active_state is ActiveState.DEACTIVATING else _NOTICED_S):
            return snapshot
        time.sleep(_LOOK_S)
