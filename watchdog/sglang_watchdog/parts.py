"""The adapters and stores that every watched unit shares, put together once by the daemon."""

from dataclasses import dataclass
from pathlib import Path

from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.clock import Clock
from sglang_watchdog.host.gpu import ProbeWorker
from sglang_watchdog.host.journal import Journal
from sglang_watchdog.host.server_files import ServerFilesReader
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.reporting.hooks import Hooks
from sglang_watchdog.reporting.metrics import Metrics, Sense


@dataclass(frozen=True, slots=True)
class Parts:
    """`may_act` is False where the ledger cannot be written: without intents nothing is ever done."""

    systemd: Systemd
    journal: Journal
    probe: ProbeWorker
    files: ServerFilesReader
    clock: Clock
    ledger: Ledger
    metrics: Metrics
    hooks: Hooks
    state_dir: Path
    may_act: bool = True

    def ledger_was_written(self) -> None:
        """The ledger works, if it is one: not where it is kept in memory, nor before a person knows that one broke."""
        self.metrics.sees(Sense.LEDGER, well=self.may_act and not self.ledger.unacknowledged)
