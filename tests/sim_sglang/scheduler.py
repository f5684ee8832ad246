"""A scheduler process (TP worker): starts, serves its batch, and dies as the real one does.

Rank 0 does the work that is seen; the others hold their cards and wait. Nothing here catches SIGTERM, which ends it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from sim_nvml.state import SimNvml
from sim_sglang import logs
from sim_sglang.batch import Batch
from sim_sglang.bond import enter
from sim_sglang.card import Card, HostMemory
from sim_sglang.faults import Fault, Faults
from sim_sglang.flags import ServerArgs
from sim_sglang.logs import Log, Usage
from sim_sglang.memory import Pools
from sim_sglang.messages import Abort, AskInfo, Info, Kind, Output, Ready, Request, Shutdown, Stats
from sim_sglang.profiles import GIB, PROFILES, Profile
from sim_sglang.settings import Settings
from sim_sglang.startup import TORCH_OOM, StartFailed, Startup

# How long a scheduler takes from its last words to giving its memory back, and from a polite request to its end.
LAST_BREATH_S, ENDING_S = 3.4, 1.5
TICK_S = 0.008
ORPHAN_LIVES_S = 900
SERVING = ("managers/scheduler.py:run_event_loop", "managers/scheduler.py:run_batch")
# What torch and NCCL say of a fault; nothing but a card can bring one about.
IN_A_FORWARD = {
    Fault.CUDA_FAULT: "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    Fault.NCCL_FAULT: (
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled"
        " system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
    ),
}
CUSTOM_MASK = (
    "RuntimeError: The expanded size of the tensor (8388608) must match the existing size (8388736) at non-singleton"
    " dimension 0.  Target sizes: [8388608].  Tensor sizes: [8388736]"
)


@dataclass(frozen=True)
class Seat:
    """Where a scheduler sits: its rank, its card, its pipes (`output` for rank 0 alone)."""

    rank: int
    gpu: int
    link: Connection
    output: Connection | None


def run_scheduler(seat: Seat, args: ServerArgs, settings: Settings) -> None:
    """Entry point of the process."""
    faults = Faults.of(settings)
    leaks = _leaks(seat, args, faults)
    if leaks and faults.get(Fault.LEAK_CHILD) == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    suffix = f"_TP{seat.rank}" if args.tp > 1 else ""
    enter(f"sglang::scheduler{suffix}", settings, follow_parent=not leaks)
    log = Log(suffix.replace("_", " "))
    card = HostMemory() if args.on_cpu else Card(SimNvml(), seat.gpu, settings.driver_lag_s)
    profile = PROFILES[settings.profile]
    try:
        pools = Startup(seat.rank, args, profile, settings, faults, card, seat.link, log).run()
        seat.link.send(Ready(_scheduler_info(profile, pools)))
        Scheduler(seat, args, profile, settings, faults, card, log, pools).serve()
    except StartFailed as failed:
        _last_words(log, logs.exception(failed.files, failed.error), settings)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _live_on()


def _leaks(seat: Seat, args: ServerArgs, faults: Faults) -> bool:
    """Is this the rank that outlives its parent?"""
    return faults.on(Fault.LEAK_CHILD) and seat.rank == args.tp - 1


def _last_words(log: Log, text: str, settings: Settings) -> None:
    log.say(text)
    if os.getppid() != 1:  # the real one signals whoever its parent is by now; here no PID 1 is hurt
        os.kill(os.getppid(), signal.SIGQUIT)
    settings.rest(LAST_BREATH_S)


def _live_on() -> None:
    """An orphan without a bond keeps what it holds; here not for ever, lest a test leave one behind."""
    signal.alarm(ORPHAN_LIVES_S)
    while True:
        signal.pause()


def _scheduler_info(profile: Profile, pools: Pools) -> dict[str, Any]:
    return {
        "status": "ready",
        "max_total_num_tokens": pools.tokens,
        "max_req_input_len": min(pools.tokens, profile.context_len) - 6,
        "max_running_requests": pools.max_running,
    }


class Crash(Exception):
    """An exception while serving; the text ends the traceback."""


class Scheduler:
    """The event loop of one rank."""

    def __init__(
        self,
        seat: Seat,
        args: ServerArgs,
        profile: Profile,
        settings: Settings,
        faults: Faults,
        card: Card,
        log: Log,
        pools: Pools,
    ) -> None:
        self.seat, self.args, self.profile, self.settings = seat, args, profile, settings
        self.faults, self.card, self.log, self.pools = faults, card, log, pools
        self.batch = Batch(max(1, pools.max_running), pools.tokens)
        self.alone = profile.rate(args.steps)
        self.accepted = profile.accepted(args.steps) if args.draft_tokens else 1.0
        self.leaks = _leaks(seat, args, faults)
        self.clients = 0
        self.logged_steps = 0.0

    def serve(self) -> None:
        """Work until the process ends or is asked to."""
        try:
            if self.seat.output is None:
                while not isinstance(self.seat.link.recv(), Shutdown):
                    pass
            else:
                self._loop(self.seat.output)
            if self.leaks:
                _live_on()
            self.settings.rest(ENDING_S)
        except Crash as crash:
            _last_words(self.log, logs.exception(SERVING, str(crash)), self.settings)

    def _loop(self, output: Connection) -> None:
        last = time.monotonic()
        while self._receive():
            self._suffer()
            self._prefill()
            now = time.monotonic()
            passed, last = (now - last) / self.settings.time_scale, now
            if not self.batch.running:
                continue
            running, speed = len(self.batch.running), self.batch.speed(self.alone)
            tokens = self._advance(passed)
            if tokens:
                output.send(Output(tokens, self._stats()))
            self._decode_line(running, speed)
            self._retract()
            if self.faults.on(Fault.CRASH_AFTER) and self.batch.finished >= (self.faults.get(Fault.CRASH_AFTER) or 1):
                raise Crash(CUSTOM_MASK)

    def _receive(self) -> bool:
        """Take what came; wait for it while nothing runs. False once this process is asked to end."""
        wait = TICK_S if self.batch.running else 0.1
        while self.seat.link.poll(wait):
            wait = 0.0
            match self.seat.link.recv():
                case Request() as request:
                    self.batch.add(request)
                case Abort(rid):
                    self.batch.drop(rid)
                case AskInfo(rid):
                    assert self.seat.output is not None
                    self.seat.output.send(Info(rid, self._internal_state(), self._stats()))
                case Shutdown():
                    return False
        return True

    def _advance(self, seconds: float) -> list[tuple[str, int, bool]]:
        if self.faults.on(Fault.HANG_HEALTHY):
            checks = [rid for rid, live in self.batch.running.items() if live.request.kind is not Kind.CLIENT]
            for rid in checks:
                self.batch.drop(rid)
            return [(rid, 1, True) for rid in checks]
        endless = self.faults.on(Fault.NO_DRAIN)
        return self.batch.advance(seconds, self.alone, self.accepted, endless)

    # -- lines

    @property
    def _graph(self) -> str:
        return "cpu" if self.args.on_cpu else "cuda"

    def _usage(self) -> Usage:
        states = len(self.batch.running)
        return Usage(
            self.batch.tokens, self.pools.tokens, self.pools.states is not None, states, self.pools.states or 0
        )

    def _prefill(self) -> None:
        usage, running = self._usage(), len(self.batch.running)
        taken = self.batch.admit()
        if not taken:
            return
        self._count_clients([one.request for one in taken if not one.produced])
        tokens = sum(one.tokens for one in taken)
        speed, queued = tokens / 1.05, len(self.batch.waiting)
        self.log.say(logs.prefill(self.args.release, usage, len(taken), tokens, running, queued, speed, self._graph))

    def _decode_line(self, running: int, speed: float) -> None:
        interval = self.args.get("decode_log_interval") or 40
        if self.batch.steps - self.logged_steps < interval:
            return
        self.logged_steps = self.batch.steps
        accept = (self.accepted, self.args.draft_tokens) if self.args.draft_tokens else None
        queued = len(self.batch.waiting)
        self.log.say(logs.decode(self.args.release, self._usage(), running, accept, speed, queued, self._graph))

    def _retract(self) -> None:
        back = self.batch.retract()
        if back:
            gained = sum(one.tokens for one in back)
            self.log.say(
                f"KV cache pool is full. Retract requests. #retracted_reqs: {len(back)}, #new_tokens_gained: {gained},"
                " #new_token_ratio: 0.0980 -> 0.9230"
            )

    # -- faults

    def _count_clients(self, taken: list[Request]) -> None:
        self.clients += sum(one.kind is Kind.CLIENT for one in taken)
        limit = self.faults.get(Fault.RUNTIME_OOM)
        if limit is not None and self.clients >= limit:
            raise Crash(TORCH_OOM + str(self.card.refuse(192 << 20)))
        for fault, error in IN_A_FORWARD.items():
            if self.clients and self.faults.on(fault):
                raise Crash(error)

    def _suffer(self) -> None:
        if self.faults.on(Fault.DEAD_SCHEDULER):
            os.kill(os.getpid(), signal.SIGKILL)
        self._eat_if_asked()
        began = time.monotonic()
        limit = 1.25 * (self.args.get("watchdog_timeout") or 300) * self.settings.time_scale
        while self.faults.on(Fault.HANG):
            time.sleep(0.02)
            if self.batch.running and time.monotonic() - began > limit:
                self._internal_watchdog()

    def _eat_if_asked(self) -> None:
        """Takes memory for good; on a host with less than that the kernel ends it on the way."""
        mib = self.faults.get(Fault.EAT_MEMORY)
        if mib is not None:
            held = [b"\x01" * (16 << 20) for _ in range(mib // 16)]
            self.log.say(f"holding {len(held) * 16} MiB of host memory")
            _live_on()

    def _internal_watchdog(self) -> None:
        """SGLang's own: only while a batch runs, and never before the start is over."""
        timeout = self.args.get("watchdog_timeout") or 300
        new = self.args.release.at_least("0.5.8")
        soft, name = (", self.soft=False", "Scheduler watchdog") if new else ("", "Watchdog")
        self.log.say(f"{name} timeout (self.watchdog_timeout={timeout}{soft})")
        self.settings.rest(5)
        os.kill(os.getppid(), signal.SIGQUIT)
        _live_on()

    # -- what it tells

    def _stats(self) -> Stats:
        batch = self.batch
        speed = batch.speed(self.alone)
        accepted = self.accepted if self.args.draft_tokens else 0.0
        running, queued = len(batch.running), len(batch.waiting)
        return Stats(running, queued, batch.tokens, speed, accepted, batch.generated, batch.finished)

    def _internal_state(self) -> dict[str, Any]:
        state = self.args.plain() | {
            "last_gen_throughput": self.batch.speed(self.alone) or self.alone,
            "memory_usage": {
                "weight": round(self.profile.weights / self.args.tp / GIB, 2),
                "kvcache": round(self.pools.target / GIB, 2),
                "token_capacity": self.pools.tokens,
                "graph": 0.72,
            },
            "effective_max_running_requests_per_dp": self.pools.max_running,
        }
        if self.args.draft_tokens and self.batch.steps:
            state["avg_spec_accept_length"] = self.accepted
        return state
