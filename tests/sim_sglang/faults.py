"""The faults that can be asked for, and where they are asked: SIM_SGLANG_FAULT, or a file named by SIM_SGLANG_CONTROL.

The file holds one fault a line, with a number behind it where it takes one; it is read anew at every question, so a
fault can be set or taken back while the server runs. An empty or absent file means none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sim_sglang.settings import Settings


class Fault(StrEnum):
    """What can go wrong on request."""

    KV_OOM = "kv_oom"  # the KV pool cannot be sized
    GRAPH_OOM = "graph_oom"  # out of memory inside a graph capture
    GRAPH_BUFFERS_OOM = "graph_buffers_oom"  # the same before it, without the wrapping words
    WEIGHTS_OOM = "weights_oom"  # out of memory while weights load
    RUNTIME_OOM = "runtime_oom"  # out of memory in the prefill of the Nth request (1)
    CUDA_FAULT = "cuda_fault"  # an illegal access in the prefill of a request
    NCCL_FAULT = "nccl_fault"  # a collective that fails in the prefill of a request
    EAT_MEMORY = "eat_memory"  # scheduler 0 takes N MiB (4096) of host memory when it serves
    CRASH_AFTER = "crash_after"  # a software exception after N finished requests (1)
    INIT_SIGNAL = "init_signal"  # scheduler 0 ends by signal N (9) before graphs are captured
    INIT_HANG = "init_hang"  # a start that stops after its weights, without a word
    LEAK_CHILD = "leak_child"  # the last rank outlives its parent and keeps its memory; with 1 it heeds no SIGTERM
    NO_DRAIN = "no_drain"  # requests do not end any more
    HANG = "hang"  # the scheduler stands still; SGLang's own health check sees it
    HANG_HEALTHY = "hang_healthy"  # requests stand still while every endpoint answers 200
    DEAD_SCHEDULER = "dead_scheduler"  # scheduler 0 is gone and main does not notice, in any release


DEFAULTS = {Fault.RUNTIME_OOM: 1, Fault.CRASH_AFTER: 1, Fault.INIT_SIGNAL: 9, Fault.EAT_MEMORY: 4096}


@dataclass(frozen=True)
class Faults:
    """Answers which faults are asked for at this moment."""

    fixed: dict[Fault, int]
    control: Path | None

    @classmethod
    def of(cls, settings: Settings) -> Faults:
        control = Path(settings.control) if settings.control else None
        return cls(parse(settings.faults.replace(",", "\n")), control)

    def get(self, fault: Fault) -> int | None:
        """The number given with this fault (0 where it takes none), or None if it is not asked for."""
        return (self.fixed | self._from_file()).get(fault)

    def on(self, fault: Fault) -> bool:
        return self.get(fault) is not None

    def _from_file(self) -> dict[Fault, int]:
        if self.control is None:
            return {}
        try:
            return parse(self.control.read_text())
        except FileNotFoundError:
            return {}


def parse(text: str) -> dict[Fault, int]:
    """Faults by name with their numbers; raises ValueError for a name that is none."""
    found = {}
    for line in text.splitlines():
        name, _, number = line.replace("=", " ").strip().partition(" ")
        if name:
            fault = Fault(name)
            found[fault] = int(number) if number.strip() else DEFAULTS.get(fault, 0)
    return found
