"""One fact, with where it comes from and when it was so."""

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where a fact was seen."""

    UNIT = "unit"  # a property of the unit, by D-Bus or `systemctl show`
    SYSTEMD = "systemd"  # a journal entry of PID 1 about the unit
    SGLANG = "sglang"  # a journal entry of the unit's own processes
    KERNEL = "kernel"
    NVML = "nvml"
    FILE = "file"  # a unit file, drop-in or environment file
    PROCESS = "process"  # /proc
    PROBE = "probe"  # an HTTP request to the server
    LEDGER = "ledger"  # what an earlier launch was recorded to do


@dataclass(frozen=True, slots=True)
class Evidence:
    """`time` is Unix seconds, None where the source has no clock of its own (a property)."""

    source: Source
    text: str
    time: float | None = None
