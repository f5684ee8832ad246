"""Debian's Prometheus and Alertmanager, unpacked by packaging/prometheus.sh in a cache outside the checkout."""

import os
import platform
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CONTRIB = CHECKOUT / "contrib" / "prometheus"
RULES = CONTRIB / "sglang-watchdog.rules.yml"
_DEFAULT = (
    f"/var/cache/sglang-watchdog/prometheus-{platform.freedesktop_os_release().get('VERSION_CODENAME', 'unknown')}"
)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with `prometheus`, `promtool`, `prometheus-alertmanager` and `amtool`."""
    folder = Path(os.environ.get("SGLANG_WATCHDOG_PROMETHEUS", _DEFAULT)) / "usr" / "bin"
    if not (folder / "prometheus").exists():
        pytest.fail(f"{folder} has no prometheus: `make test-prometheus` fetches it", pytrace=False)
    return folder
