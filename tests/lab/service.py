"""A service unit on a lab host, with what a test asks of it again and again."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pystemd.dbuslib

from lab.host import LabHost
from waiting import wait_until

MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
DEADLINE_S = 20.0

# For scripts of Type=notify services: only then is `systemctl start` sure to return after the trap is set.
READY = "systemd-notify --ready\n"
IDLE = "sleep 600 & wait\n"


@dataclass(frozen=True)
class Service:
    """One unit; `define` may be called again to change it. Each test has its own (fixture `service`)."""

    host: LabHost
    name: str

    @property
    def script_path(self) -> str:
        return f"/opt/{self.name}.sh"

    @property
    def object_path(self) -> str:
        escaped = "".join(c if c.isalnum() else f"_{ord(c):02x}" for c in self.name)
        return f"/org/freedesktop/systemd1/unit/{escaped}"

    def define(self, script: str, *lines: str, unit: Sequence[str] = ("StartLimitIntervalSec=0",)) -> None:
        """A unit that runs `script` by sh, with more `lines` in its [Service] and `unit` in its [Unit]."""
        self.host.write(self.script_path, script)
        self.write_unit(f"ExecStart=/bin/sh {self.script_path}", *lines, unit=unit)
        self.host.systemctl("daemon-reload")

    def write_unit(self, *lines: str, unit: Sequence[str] = ()) -> None:
        """The unit file only: systemd does not know of it yet."""
        self.host.write(self.file_path, "\n".join(("[Unit]", *unit, "[Service]", *lines, "")))

    @property
    def file_path(self) -> str:
        return f"/etc/systemd/system/{self.name}"

    def start(self, *args: str, check: bool = True) -> None:
        self.host.systemctl("start", *args, self.name, check=check)

    def stop(self, *args: str) -> None:
        self.host.systemctl("stop", *args, self.name)

    def show(self, *properties: str) -> tuple[str, ...]:
        """The values, in the order asked for."""
        shown = self.host.show(self.name, *properties)
        return tuple(shown[name] for name in properties)

    def state(self) -> str:
        """Such as `active/running`."""
        return "/".join(self.show("ActiveState", "SubState"))

    def wait_for(self, *states: str) -> str:
        def reached() -> str:
            state = self.state()
            return state if state in states else ""

        return wait_until(reached, DEADLINE_S, f"{self.name} is {' or '.join(states)}")

    def wait_for_end(self) -> str:
        return self.wait_for("failed/failed", "inactive/dead")

    def end(self) -> tuple[str, str, str]:
        """Result, ExecMainCode and ExecMainStatus, as the product reads them."""
        result, code, status = self.show("Result", "ExecMainCode", "ExecMainStatus")
        return result, code, status

    def call(self, method: str, signature: str = "", *args: str, check: bool = True) -> str:
        """A call of systemd's manager on the bus; what it answered or, unchecked, what it complained about."""
        done = self.host.run("busctl", "call", *MANAGER, method, signature, *args, check=check)
        return (done.stdout or done.stderr).strip()

    def said(self) -> list[str]:
        """What the unit's own processes printed, in order."""
        return [entry["MESSAGE"] for entry in self.host.journal(f"_SYSTEMD_UNIT={self.name}", "_TRANSPORT=stdout")]

    def told(self, *match: str) -> list[dict[str, Any]]:
        """PID 1's entries about the unit, in order."""
        return self.host.journal("_PID=1", f"UNIT={self.name}", *match)

    def messages(self, *match: str) -> list[str]:
        return [entry["MESSAGE"] for entry in self.told(*match)]

    def reference(self) -> "Reference":
        return Reference(self)

    def remove(self) -> None:
        """Ends it, whatever it ignores, and forgets it."""
        script = 'rm -rf "$2" "$2.d"; systemctl kill -s KILL "$1"; systemctl stop "$1"; systemctl reset-failed "$1"'
        self.host.run("sh", "-c", script, "remove", self.name, self.file_path, check=False)


@dataclass
class Reference:
    """`Unit.Ref()`, held while the block runs.

    A reference lives as long as the connection that took it, so neither busctl nor dbus-send can hold one. This one is
    a connection of the test process itself to the host's bus, which works for any version and needs nothing inside.
    """

    service: Service
    _bus: Any = dataclasses.field(init=False)

    def __enter__(self) -> None:
        self._bus = pystemd.dbuslib.DBusAddress(self.service.host.bus_address.encode())
        self._bus.open()
        destination, path = MANAGER[0].encode(), self.service.object_path.encode()
        self._bus.call_method(destination, path, b"org.freedesktop.systemd1.Unit", b"Ref", [])

    def __exit__(self, *_: object) -> None:
        self._bus.close()
