"""systemctl that cannot be run is a systemd that cannot be asked."""

import asyncio
from pathlib import Path

import pytest

from sglang_watchdog.domain.errors import BusError
from sglang_watchdog.host import systemctl


def test_a_systemctl_that_is_not_there_is_an_error_of_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusError, match="systemctl cannot be run: No such file"):
        asyncio.run(systemctl.daemon_reload())
