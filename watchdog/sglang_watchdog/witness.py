"""The witness of one unit: a unit of systemd's own that remembers that a stop was asked for.

Of a stop of what is down already systemd keeps no trace but a signal on the bus, which nobody hears while the daemon is
away. The witness is a transient slice, without a process, that is `PartOf=` the unit: every stop of the unit ends it,
and no failure, no automatic restart and no start does. It also keeps what systemd knows of a unit that is down. It is
called when a launch begins, sent away before a stop of our own, and called again after that.
"""

import structlog

from sglang_watchdog.domain.errors import BusError, BusLost, WatchdogError
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.ledger import Ledger

log = structlog.get_logger()


def saw_a_stop(systemd: Systemd, ledger: Ledger, snapshot: UnitSnapshot) -> bool:
    """Whether somebody but us asked for a stop of the unit since its newest launch. A unit that is down is forgotten by
    systemd, with its invocation, only once its witness is gone."""
    called_for = ledger.witness(snapshot.name)
    if called_for is None or snapshot.invocation not in ("", called_for):
        return False
    return not systemd.witness_stands(snapshot.name)


def call(systemd: Systemd, ledger: Ledger, snapshot: UnitSnapshot) -> bool:
    """Has the witness stand for the unit's newest launch. False where systemd refuses that: the last one leaves."""
    try:
        if not systemd.witness_stands(snapshot.name):
            systemd.call_witness(snapshot.name)
    except BusLost:
        raise
    except BusError as error:
        log.debug("no witness", unit=snapshot.name, error=str(error))
        return False
    if ledger.witness(snapshot.name) != snapshot.invocation:
        ledger.save_witness(snapshot.name, snapshot.invocation)
    return True


def dismiss(systemd: Systemd, ledger: Ledger, unit: str) -> None:
    """For good: the unit is no longer acted on, or the watchdog ends."""
    ledger.forget_witness(unit)
    try:
        systemd.dismiss_witness(unit)
    except WatchdogError as error:
        log.warning("the witness stays", unit=unit, error=str(error))
