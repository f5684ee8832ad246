"""A kernel log of a host's own, for kernel lines that no test may bring about on the machine that it runs on.

journald reads them as it reads a real kernel's: records of /dev/kmsg, trusted, with `_TRANSPORT=kernel`. A host has no
/dev/kmsg of its own, so a FIFO is one. Nothing written here leaves the host. Not for a host with the machine's
(`kmsg=True`).
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lab.host import LabHost

_WARNING = 4


@dataclass
class KernelLog:
    host: LabHost
    _fifo: int
    _said: int = 0

    @classmethod
    @contextmanager
    def of(cls, host: LabHost) -> "Iterator[KernelLog]":
        """Makes it and has journald read it. Before any unit of interest runs: journald is restarted."""
        host.run("mkfifo", "-m", "0600", "/dev/kmsg")
        # Open for both, so that nobody who opens it to write (systemd does) has to wait for a reader.
        fifo = os.open(host.root / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
        try:
            host.systemctl("restart", "systemd-journald.service")
            yield cls(host, fifo)
        finally:
            os.close(fifo)

    def say(self, line: str) -> None:
        """One record; returns once it is in the journal."""
        self._said += 1
        os.write(self._fifo, f"{_WARNING},{self._said},{time.monotonic_ns() // 1000},-;{line}\n".encode())
        self.host.run("journalctl", "--sync")
