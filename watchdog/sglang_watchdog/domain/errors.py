"""The project's own exception family: what an adapter raises when the outside world fails it."""


class WatchdogError(Exception):
    """Base of all. Its text is one sentence for a person: what, where, what to do."""


class UnusableInput(WatchdogError):
    """What a person handed over (a file, a setting, a unit name) cannot be used."""


class BusError(WatchdogError):
    """systemd could not be asked, or refused. `name` is the D-Bus error name, where there is one."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class BusLost(BusError):
    """The connection to systemd is gone: what is to be asked again is asked over a new one."""


class JobRefused(BusError):
    """systemd refused a job because another one is queued (mode `fail`): the operator wins, we yield."""


class DeadlineExceeded(WatchdogError):
    """Something outside did not answer in time."""


class LedgerError(WatchdogError):
    """The ledger cannot be opened or written."""


class LedgerBroken(LedgerError):
    """The ledger's file is no sound database."""
