"""The GPU of one scheduler: what it takes there, what is free, and the words of an allocation that failed.

Memory is that of sim_nvml, held under this process's own pid, and so given back by its death alone. A server on the CPU
has a card without end.
"""

from __future__ import annotations

import os
import time

from sim_nvml.state import GpuFull, SimNvml
from sim_sglang import logs
from sim_sglang.profiles import MIB

# What CUDA and torch take before the first tensor, and NCCL for a group of ranks.
CONTEXT = 700 * MIB
COLLECTIVES = 512 * MIB
SETTLE_S = 0.5
HOST_MEMORY = int(21.74 * 1024) * MIB


class OutOfMemory(Exception):
    """torch.OutOfMemoryError; the text is its message."""


class Card:
    """One simulated GPU as a process sees it through CUDA."""

    def __init__(self, nvml: SimNvml, gpu: int, driver_lag_s: float) -> None:
        self.nvml, self.gpu, self.lag_s, self.own = nvml, gpu, driver_lag_s, 0

    def settle(self) -> None:
        """Making a context waits for the teardown of those that ended before: their memory is back then."""
        end = time.monotonic() + SETTLE_S
        while self.nvml.lingering(self.gpu) and time.monotonic() < end:
            time.sleep(0.01)

    def take(self, size: int) -> None:
        """Hold `size` more bytes until this process ends. Raises OutOfMemory."""
        try:
            self.nvml.take(self.gpu, os.getpid(), size, lag_s=self.lag_s)
        except GpuFull as full:
            raise self.refuse(full.wanted) from full
        self.own += size

    def free(self) -> int:
        return self.nvml.free(self.gpu)

    def refuse(self, wanted: int) -> OutOfMemory:
        """The error for an allocation of so many bytes, with the other processes on the card named."""
        others = {pid: held for pid, held in self.nvml.processes(self.gpu).items() if pid not in (0, os.getpid())}
        total = self.nvml.cards()[self.gpu].total
        free = self.free()
        # A real allocator asks for a block at a time and fails at the one that is more than what is left.
        asked = min(wanted, max(2 * MIB, free + 32 * MIB))
        return OutOfMemory(logs.out_of_memory(self.gpu, asked, total, free, self.own, others))


class HostMemory(Card):
    """Stands in for a card where the server runs on the CPU."""

    def __init__(self) -> None:
        super().__init__(SimNvml("/nonexistent"), 0, 0.0)

    def settle(self) -> None:
        """Nothing to wait for."""

    def take(self, size: int) -> None:
        self.own += size

    def free(self) -> int:
        return HOST_MEMORY - self.own
