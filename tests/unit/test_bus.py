"""The listening connection on a bus that dies: a real message bus, without systemd behind it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pystemd.dbuslib import DBus

from sglang_watchdog.domain.errors import BusLost
from sglang_watchdog.host import bus
from sglang_watchdog.host.bus import SignalFeed
from waiting import wait_until

# A process() for each thing that sd-bus does when its peer has gone: it sees that, it tells, it closes.
MOST_LOOKS = 10


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    socket = tmp_path / "bus"
    address = f"unix:path={socket}"
    command = ["dbus-daemon", "--session", "--nofork", f"--address={address}"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("no dbus-daemon here")
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    wait_until(socket.exists, 10, "the bus listens")
    yield process
    process.kill()
    process.wait()


class WithoutSystemd(DBus):  # type: ignore[misc]
    """Whose subscription to systemd's signals is not refused, though there is no systemd on this bus."""

    def call_method(self, *_arguments: object) -> None:
        return None


def test_a_bus_that_dies_is_told_before_its_file_descriptor_is_gone(
    daemon: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll says nothing of a descriptor that sd-bus has closed: who is not told then waits for ever."""
    monkeypatch.setattr(bus, "DBus", WithoutSystemd)
    feed = SignalFeed(("sglang.service",))
    feed.open()
    assert feed.drain() == []
    daemon.kill()
    daemon.wait()
    with pytest.raises(BusLost):
        drain_while_open(feed)
    feed.close()


def drain_while_open(feed: SignalFeed) -> None:
    for _ in range(MOST_LOOKS):
        assert feed.fileno() >= 0, "closed, and nobody was told"
        feed.drain()


def test_a_witness_is_a_slice_below_no_other_one_whatever_its_unit_is_called() -> None:
    assert bus._witness("my-sglang@a.service") == "sglang_watchdog_witness_my\\x2dsglang\\x40a.service.slice"
    assert bus._witness("schön.service") == "sglang_watchdog_witness_sch\\xc3\\xb6n.service.slice"
