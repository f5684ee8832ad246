"""Journal alerts: one entry for each thing that a person may have to know, with a stable MESSAGE_ID and fields.

The ids are explained by contrib/systemd/sglang-watchdog.catalog (`journalctl -x`). Every alert carries the fields
SGLANG_WATCHDOG_UNIT=, _CLASS=, _INCIDENT= and _ACTION= where they apply, so that `journalctl
SGLANG_WATCHDOG_INCIDENT=ID` shows a whole incident. All text passes the secrets filter on its way out.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum

import pystemd.journal

from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.incident import Incident, Outcome
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.secrets import redact_text


class AlertId(StrEnum):
    """MESSAGE_ID= values. They are an interface: never reuse or change one."""

    LAUNCH_ENDED = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c01"
    ACTION = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c02"
    INCIDENT_CLOSED = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c03"
    HOLDING = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c04"
    STALE_DEFINITION = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c05"
    DEGRADED_START = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c06"
    KNOWN_GOOD = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c07"
    BLIND = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c08"
    YIELDED = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c09"
    KNOWN_CEILING = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c0a"
    PAUSE = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c0b"
    UNRESPONSIVE = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c0c"
    RESPONSIVE_AGAIN = "7c1f0d6f2e0b4c5d9a3f0b1e6a5d4c0d"


class Priority(IntEnum):
    """syslog priorities, used so that `journalctl -p warning` shows what needs a look."""

    CRITICAL = 2  # a server is down and the watchdog will not bring it back
    ERROR = 3  # a launch failed
    WARNING = 4  # serving, but not as asked for; or the watchdog cannot see
    NOTICE = 5  # something was done, or ended as asked
    INFO = 6


@dataclass(frozen=True, slots=True)
class Alert:
    """One entry. `incident`, `failure` and `action` may be empty."""

    id: AlertId
    priority: Priority
    unit: str
    message: str
    incident: str = ""
    failure: str = ""
    action: str = ""
    details: tuple[tuple[str, str], ...] = ()

    def fields(self) -> dict[str, str]:
        """The journal fields, secrets removed. OBJECT_SYSTEMD_UNIT= makes `journalctl -u UNIT` show the alert."""
        named = {
            "MESSAGE": self.message,
            "MESSAGE_ID": self.id,
            "PRIORITY": str(int(self.priority)),
            "SYSLOG_IDENTIFIER": "sglang-watchdog",
            "OBJECT_SYSTEMD_UNIT": self.unit,
            "SGLANG_WATCHDOG_UNIT": self.unit,
            "SGLANG_WATCHDOG_INCIDENT": self.incident,
            "SGLANG_WATCHDOG_CLASS": self.failure,
            "SGLANG_WATCHDOG_ACTION": self.action,
        } | {f"SGLANG_WATCHDOG_{name}": value for name, value in self.details}
        return {name: redact_text(value) for name, value in named.items() if value}


def send(alert: Alert) -> None:
    """Writes the alert to the journal. journald being away loses it, as it loses everybody's entries."""
    pystemd.journal.sendv(*(f"{name}={value}" for name, value in alert.fields().items()))


def launch_ended(unit: str, invocation: str, diagnosis: Diagnosis, incident: str = "") -> Alert:
    """What a diagnosis says of an ended launch."""
    priority = Priority.NOTICE if diagnosis.failure == "requested_stop" else Priority.ERROR
    return _diagnosed(AlertId.LAUNCH_ENDED, priority, unit, invocation, diagnosis, incident)


def _diagnosed(
    alert: AlertId, priority: Priority, unit: str, invocation: str, diagnosis: Diagnosis, incident: str
) -> Alert:
    return Alert(
        alert,
        priority,
        unit,
        f"{unit}: {diagnosis.failure}: {diagnosis.summary}",
        incident=incident,
        failure=diagnosis.failure,
        details=(("INVOCATION", invocation), *_of_diagnosis(diagnosis)),
    )


def stale_definition(unit: str, invocation: str, diagnosis: Diagnosis, incident: str) -> Alert:
    """A running server that runs something else than its definition says."""
    return _diagnosed(AlertId.STALE_DEFINITION, Priority.WARNING, unit, invocation, diagnosis, incident)


def unresponsive(unit: str, invocation: str, diagnosis: Diagnosis, incident: str) -> Alert:
    """A launch that runs and makes no progress."""
    return _diagnosed(AlertId.UNRESPONSIVE, Priority.ERROR, unit, invocation, diagnosis, incident)


def responsive_again(unit: str, invocation: str, message: str) -> Alert:
    """It makes progress after all."""
    return Alert(
        AlertId.RESPONSIVE_AGAIN, Priority.NOTICE, unit, f"{unit}: {message}", details=(("INVOCATION", invocation),)
    )


def degraded(unit: str, invocation: str, message: str) -> Alert:
    """A server that came up with less than its config had when it was proven."""
    return Alert(
        AlertId.DEGRADED_START,
        Priority.WARNING,
        unit,
        f"{unit}: degraded start: {message}",
        details=(("INVOCATION", invocation),),
    )


def known_good(unit: str, invocation: str, message: str) -> Alert:
    return Alert(AlertId.KNOWN_GOOD, Priority.INFO, unit, f"{unit}: {message}", details=(("INVOCATION", invocation),))


def known_ceiling(unit: str, invocation: str, ceiling: Ceiling) -> Alert:
    """Somebody started a config that is proven not to fit."""
    when = datetime.fromtimestamp(ceiling.seen, UTC)
    return Alert(
        AlertId.KNOWN_CEILING,
        Priority.WARNING,
        unit,
        f"{unit}: {ceiling.config.describe()} was started, which did not fit on {when:%Y-%m-%d %H:%M} UTC "
        f"({ceiling.failure} in launch {ceiling.invocation}); it is left alone",
        failure=ceiling.failure,
        details=(("INVOCATION", invocation),),
    )


def pause(unit: str, verb: str, message: str) -> Alert:
    """A person told the watchdog to keep away from the unit, or no longer to."""
    return Alert(AlertId.PAUSE, Priority.NOTICE, unit, f"{unit}: {message}", action=verb)


def yielded(unit: str, message: str) -> Alert:
    """The operator changed something that the watchdog had put in force, and wins."""
    return Alert(AlertId.YIELDED, Priority.NOTICE, unit, f"{unit}: {message}", action="withdraw")


def blind(what: str) -> Alert:
    """The watchdog itself cannot see something it needs."""
    return Alert(AlertId.BLIND, Priority.WARNING, "", f"sglang-watchdog cannot see: {what}")


def action(incident: Incident, verb: str, message: str) -> Alert:
    return Alert(
        AlertId.ACTION,
        Priority.NOTICE,
        incident.unit,
        f"{incident.unit}: {message}",
        incident=incident.id,
        failure=incident.failure,
        action=verb,
    )


def closed(incident: Incident) -> Alert:
    """How an incident ended. A hold is the one outcome that leaves the server down until a human acts."""
    held = incident.outcome is Outcome.HELD
    failed = Priority.ERROR if incident.outcome is Outcome.FAILED else Priority.NOTICE
    return Alert(
        AlertId.HOLDING if held else AlertId.INCIDENT_CLOSED,
        Priority.CRITICAL if held else failed,
        incident.unit,
        f"{incident.unit}: {incident.outcome}: {incident.reason}",
        incident=incident.id,
        failure=incident.failure,
        details=(("OUTCOME", incident.outcome),),
    )


def _of_diagnosis(diagnosis: Diagnosis) -> tuple[tuple[str, str], ...]:
    return (
        ("CONFIDENCE", f"{diagnosis.confidence:.2f}"),
        ("PHASE", diagnosis.phase),
        ("EVIDENCE", "\n".join(f"{e.source}: {e.text}" for e in diagnosis.evidence)),
        ("RULED_OUT", "\n".join(f"{r.failure}: {r.because}" for r in diagnosis.ruled_out)),
        ("ADVICE", "\n".join(diagnosis.advice)),
    )
