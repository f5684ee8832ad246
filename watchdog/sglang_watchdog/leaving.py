"""What a purge of the package may take away. Its maintainer scripts run this while there still is a product to ask.

An override keeps a unit from the config that it replaced. Where that one is proven not to fit, or cannot be known, the
override stays: removing it would have the unit's next start fail.
"""

from pathlib import Path

from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.host.unit_files import OVERRIDES, drop_in_of, environment_file_of
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.settings import Settings, load


def removable(ledger: Ledger, state: Path) -> list[Path]:
    """Files of overrides whose removal exposes no known ceiling, of whatever base. Raises `LedgerError`."""
    return [path for unit in ledger.overridden() if _safe(ledger, unit) for path in _files(unit, state)]


def _safe(ledger: Ledger, unit: str) -> bool:
    override = ledger.override(unit)
    if override is None or override[0] is None:
        return False
    return not any(ceiling.config.same_as(override[0]) for ceiling in ledger.ceilings_of(unit))


def _files(unit: str, state: Path) -> list[Path]:
    return [path for path in (environment_file_of(unit, state / OVERRIDES.name), drop_in_of(unit)) if path.exists()]


def main() -> None:
    try:
        settings = load()
    except WatchdogError:
        settings = Settings()
    ledger = Ledger.open(settings.state_dir / LEDGER_NAME, read_only=True)
    for path in removable(ledger, settings.state_dir):
        print(f"remove {path}")
    ledger.close()


if __name__ == "__main__":
    main()
