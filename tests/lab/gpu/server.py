"""The simulated SGLang on a real card: its pools and graphs are CUDA allocations, and so its out-of-memory is torch's.

Everything that is seen from outside (processes, log, HTTP, exits) stays the simulator's. `install` puts the card under
it, in every process of the server. Steered by GPU_LAB_* variables, beside those of the simulator:

GPU_LAB_CARD      `simulated` leaves the card simulated, for a rehearsal without a GPU (cuda)
GPU_LAB_STRAYS    processes that outlive the server's main process, `KIND:MIB,…`: see `Stray` (none)
GPU_LAB_HOST_MIB  host memory that a scheduler takes at its start, as a hierarchical cache does (none)
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from sim_nvml.state import Gpu, SimNvml
from sim_sglang import launcher, scheduler
from sim_sglang.card import CONTEXT, Card, OutOfMemory
from sim_sglang.logs import Capture
from sim_sglang.memory import Pools
from sim_sglang.profiles import GIB, MIB, PROFILES, Profile, StateShape
from sim_sglang.startup import Startup

HOLD = Path(__file__).with_name("hold.py")
# A real allocator fails at one block of many, not at the whole pool.
BLOCK = 2 * GIB

# One card of 140 GiB: with --mem-fraction-static 0.8 and --disable-radix-cache steps 4 and 5 fit, the states of steps
# 10 do not; with 0.95 they do, and its graphs do not.
H200 = Profile(
    name="h200",
    architecture="Qwen3_5MoeForConditionalGeneration",
    draft_architecture="Qwen3_5ForCausalLMMTP",
    context_len=262_144,
    weights=60 * GIB,
    draft_weights=1536 * MIB,
    cell=48 * 1024,
    draft_cell=1024,
    default_steps=3,
    mem_fraction=0.8,
    tokens_per_second={0: 74.0, 1: 123.0, 2: 186.0, 3: 234.0, 4: 277.0, 5: 282.0},
    accept_len={1: 1.93, 2: 2.84, 3: 3.72, 4: 4.61, 5: 5.50},
    graph_base=600 * MIB,
    graph_per_token=600 * MIB,
    state=StateShape(conv=2 * MIB, ssm=100 * MIB),
)


class Stray(StrEnum):
    """What kind of process is left over."""

    OWN_SESSION = "session"  # a daemon of its own, in the unit's group
    STOPPED = "stopped"  # the same, and it does not run: SIGTERM reaches it only when it is continued
    PID_NAMESPACE = "pidns"  # the first process of a PID namespace, for which SIGTERM does nothing


def install() -> None:
    """Puts the card under the simulator of this process."""
    PROFILES[H200.name] = H200
    _patch(scheduler, "Startup", CudaStartup)
    if not simulated():
        _patch(scheduler, "Card", CudaCard)
        _patch(launcher, "SimNvml", VisibleCards)


def simulated() -> bool:
    return os.environ.get("GPU_LAB_CARD", "cuda") == "simulated"


def start_strays() -> None:
    """Of the main process, each in a session of its own; each ends by itself after a while."""
    for word in filter(None, os.environ.get("GPU_LAB_STRAYS", "").split(",")):
        kind, _, mib = word.partition(":")
        command = stray_command(Stray(kind), int(mib) * MIB, simulated=simulated())
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")


def stray_command(kind: Stray, size: int, *, simulated: bool) -> list[str]:
    hold = [sys.executable, str(HOLD), str(size)]
    match kind:
        case Stray.OWN_SESSION:
            return hold
        case Stray.STOPPED:
            return [*hold, "--stop"]
        case Stray.PID_NAMESPACE:
            # CUDA looks itself up in /proc: beside the /proc of another PID namespace cuInit fails with 304. The
            # simulated card, the other way round, needs the number that the host has for it.
            return ["unshare", "--pid", "--fork", *([] if simulated else ["--mount-proc"]), *hold]


class VisibleCards(SimNvml):
    """What the main process has to know of the cards: how many there are."""

    def cards(self) -> list[Gpu]:
        count = torch().cuda.device_count()
        return [Gpu(index, 0, 0, "", "") for index in range(count)]


class CudaCard(Card):
    """One card as this process sees it. Blocks are kept until the process ends."""

    def __init__(self, nvml: SimNvml, gpu: int, driver_lag_s: float) -> None:
        super().__init__(nvml, gpu, driver_lag_s)
        self._device = torch().device("cuda", gpu)
        self._kept: list[Any] = []
        self._context_is_there = False
        self._captures = False

    def settle(self) -> None:
        """Makes the context, which waits for the teardown of those that ended before."""
        torch().zeros(1, device=self._device)

    def take(self, size: int) -> None:
        if size == CONTEXT and not self._context_is_there:
            self._context_is_there = True  # made by `settle`
            return
        try:
            self._kept += self._captured(size) if self._captures else self._blocks(size)
        except RuntimeError as error:
            raise OutOfMemory(_first_line_of_oom(error)) from error
        self.own += size

    def free(self) -> int:
        return int(torch().cuda.mem_get_info(self._device)[0])

    def refuse(self, wanted: int) -> OutOfMemory:
        """torch's own words, for more than there is."""
        try:
            torch().empty(self.free() + wanted, dtype=torch().uint8, device=self._device)
        except RuntimeError as error:
            return OutOfMemory(_first_line_of_oom(error))
        raise AssertionError("more than is free was allocated")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What is taken inside is taken by a graph."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def _blocks(self, size: int) -> list[Any]:
        sizes = [BLOCK] * (size // BLOCK) + ([size % BLOCK] if size % BLOCK else [])
        return [torch().empty(one, dtype=torch().uint8, device=self._device) for one in sizes]

    def _captured(self, size: int) -> list[Any]:
        graph = torch().cuda.CUDAGraph()
        with torch().cuda.graph(graph):
            blocks = self._blocks(size)
            for block in blocks:
                block[: 1 << 20].zero_()
        graph.replay()
        torch().cuda.synchronize()
        return [graph, *blocks]


class CudaStartup(Startup):
    """A start whose captures are captures, and that takes host memory where it is told to."""

    def _record(self, capture: Capture) -> None:
        if not isinstance(self.card, CudaCard):
            super()._record(capture)
            return
        with self.card.capturing():
            super()._record(capture)

    def _allocate_target(self, pools: Pools) -> None:
        super()._allocate_target(pools)
        _HOST_MEMORY.extend(b"\1" * (64 * MIB) for _ in range(int(os.environ.get("GPU_LAB_HOST_MIB", "0")) // 64))


_HOST_MEMORY: list[bytes] = []


def _first_line_of_oom(error: BaseException | None) -> str:
    """Of the out-of-memory that is behind `error`: the end of a capture reports its own failure on top."""
    while error is not None:
        if isinstance(error, torch().cuda.OutOfMemoryError):
            return str(error)
        cause, error = error, error.__context__
    raise AssertionError("no out-of-memory") from cause


@functools.cache
def torch() -> Any:
    """Imported as late as it is needed: only the processes that compute pay for it."""
    return importlib.import_module("torch")


def _patch(module: Any, name: str, value: Any) -> None:
    assert hasattr(module, name)
    setattr(module, name, value)
