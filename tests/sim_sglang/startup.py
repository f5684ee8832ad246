"""What one scheduler does from its first log line until it is ready: distributed init, weights, pools, graph captures.

Owns the order of lines and of allocations, which is that of the release. Raises StartFailed with the last words of the
traceback; how a scheduler dies of it is scheduler.py's business.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from sim_sglang import logs, noise
from sim_sglang.card import COLLECTIVES, CONTEXT, Card, OutOfMemory
from sim_sglang.faults import Fault, Faults
from sim_sglang.flags import ServerArgs
from sim_sglang.logs import Capture, Log, gb
from sim_sglang.memory import Demand, PoolError, Pools, refusal, size_pools
from sim_sglang.messages import Minimum
from sim_sglang.profiles import Profile
from sim_sglang.settings import Settings

WEIGHT_SHARDS = 4
# Real seconds of each part; the time scale shortens them.
INIT_S, WEIGHTS_S, DRAFT_S, POOLS_S, CAPTURE_S = 0.6, 8.0, 1.0, 0.5, 1.4

TORCH_OOM = "torch.OutOfMemoryError: "
LOADING = ("managers/scheduler.py:init_tp_model_worker", "model_executor/model_runner.py:load_model")
POOLING = ("managers/scheduler.py:init_memory_pools", "mem_cache/kv_cache_configurator.py:configure")
OLD_POOLING = (
    "model_executor/model_runner.py:initialize",
    "model_executor/model_runner_kv_cache_mixin.py:init_memory_pool",
)
CAPTURING = ("managers/scheduler.py:init_all_cuda_graphs", "model_executor/model_runner.py:init_cuda_graphs")
NCCL = ("distributed/device_communicators/pynccl.py:__init__",)
NCCL_FAILED = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
NCCL_SEGMENT = 9_637_888
HOST_CACHE = ("managers/scheduler.py:init_cache_with_memory_pool", "mem_cache/memory_pool_host.py:__init__")
HOST_RESERVE = 10 << 30
TIMINGS = (
    "Engine startup timings (s): load_weight=8.00, kv_cache_allocation=0.50, scheduler_e2e=21.40, cuda_graph="
    "{prefill=0.00, decode=0.00, target_verify=1.40, draft_prefill=0.00, draft_decode=1.40, draft_extend=1.40},"
    " tokenizer_e2e=4.10"
)


class StartFailed(Exception):
    """A start that ends in an exception: where it was raised, and `type: message`."""

    def __init__(self, files: tuple[str, ...], error: str) -> None:
        super().__init__(error)
        self.files, self.error = files, error


@dataclass
class Startup:
    """One rank's start."""

    rank: int
    args: ServerArgs
    profile: Profile
    settings: Settings
    faults: Faults
    card: Card
    link: Connection
    log: Log

    def run(self) -> Pools:
        """Take the rank to readiness; the answer is what it serves with."""
        release = self.args.release
        before = self._init_distributed()
        self._load(self.profile.architecture, self.profile.weights // self.args.tp, WEIGHTS_S)
        self._hang_if_asked()
        if release.sizes_pools_last:
            self._load_draft()
        after = self._least_free()
        pools = self._size(before, after)
        self._allocate_target(pools)
        if release.sizes_pools_last:
            self._allocate_draft(pools)
        self._allocate_host_cache()
        self._end_by_signal_if_asked()
        captures = self._captures()
        self._capture(captures[:1])
        if not release.sizes_pools_last and self._has_draft:
            self._load_draft()
            self._allocate_draft(pools)
        self._capture(captures[1:])
        self._report(pools)
        return pools

    # -- group

    def _least(self, value: int) -> int:
        """The least of all ranks' numbers; an orphan goes on with its own."""
        try:
            self.link.send(Minimum(value))
            answer = self.link.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return value
        assert isinstance(answer, Minimum)
        return answer.value

    def _least_free(self) -> int:
        return self._least(self.card.free())

    def _init_distributed(self) -> int:
        """Join the group; the answer is the free memory before weights, the least of all ranks."""
        name = self.args.release.init_line
        with self._as_error(("managers/scheduler.py:__init__",), TORCH_OOM):
            self.card.settle()
            self.card.take(CONTEXT if not self.args.on_cpu else 0)
            for line in noise.scheduler_imports(self.args):
                self.log.say(line)
            self.log.say(f"{name} begin.")
            self._mention_cpu()
            shared = COLLECTIVES if self.args.tp > 1 else 0
            self._share_memory()
            self.card.take(shared)
        self.settings.rest(INIT_S)
        if self.args.release.at_least("0.5.23"):
            self.log.say(f"{name} ends. elapsed={INIT_S:.2f} s")
            self.log.say(f"Memory baseline taken. mem usage={gb(shared)}")
        else:
            self.log.say(f"{name} ends. elapsed={INIT_S:.2f} s, mem usage={gb(shared)}")
        for line in noise.model_imports(self.args):
            self.log.say(line)
        before = self._least_free()
        self._check_balance(before)
        return before

    def _share_memory(self) -> None:
        """NCCL's segment in /dev/shm, which is unlinked once the ranks have met."""
        if self.args.tp == 1 or self.args.on_cpu:
            return
        name = f"nccl-sim-{os.getpid()}"
        segment = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(segment, 0, NCCL_SEGMENT)
        except OSError as full:
            where = f"host:{os.getpid()}:{os.getpid()} [{self.rank}] include/shm.h"
            words = f"Call to posix_fallocate failed : {full.strerror}"
            segment_words = f"Error while creating shared memory segment {name} (size {NCCL_SEGMENT})"
            self.log.bare(f"{where}:28 NCCL WARN {words}\n{where}:48 NCCL WARN {segment_words}\n")
            raise StartFailed(NCCL, NCCL_FAILED) from full
        finally:
            os.close(segment)
            os.unlink(f"/dev/shm/{name}")

    def _mention_cpu(self) -> None:
        if self.args.on_cpu:
            self.log.say(
                "init_cpu_threads_env and shared memory based AllReduce is disabled, only intel amx backend and arm64"
                " are supported"
            )

    def _check_balance(self, least: int) -> None:
        """Clean ranks complain of the one whose card is occupied, the occupied one does not."""
        own = self.card.free()
        if self.args.tp == 1 or least >= own * 0.9:
            return
        local, low = own / (1 << 30), least / (1 << 30)
        name = "pre_model_load_memory" if self.args.release.at_least("0.5.23") else "min_per_gpu_memory"
        text = (
            "The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
            f" {name}={low}, local_gpu_memory={local}, local_gpu_memory * 0.9={local * 0.9}"
        )
        if os.environ.get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK") in ("0", "false"):
            self.log.say(text)
            return
        raise StartFailed(("model_executor/model_runner.py:init_torch_distributed",), f"RuntimeError: {text}")

    # -- weights

    @property
    def _has_draft(self) -> bool:
        return self.args.get("speculative_algorithm") not in (None, "NGRAM")

    def _load_draft(self) -> None:
        if self._has_draft:
            self._load(self.profile.draft_architecture, self.profile.draft_weights // self.args.tp, DRAFT_S)

    def _load(self, model: str, size: int, seconds: float) -> None:
        self.log.say(f"Load weight begin. avail mem={gb(self._least_free())}")
        with self._as_error(LOADING, TORCH_OOM):
            if self.faults.on(Fault.WEIGHTS_OOM):
                raise self.card.refuse(448 << 20)
            for _ in range(WEIGHT_SHARDS):
                self.settings.rest(seconds / WEIGHT_SHARDS)
                self.card.take(size // WEIGHT_SHARDS)
            self.card.take(size - size // WEIGHT_SHARDS * WEIGHT_SHARDS)
        self.log.say(logs.weight_end(self.args.release, model, seconds, self._least_free(), size))

    # -- pools

    @property
    def _pooling(self) -> tuple[str, ...]:
        return POOLING if self.args.release.sizes_pools_last else OLD_POOLING

    def _size(self, before: int, after: int) -> Pools:
        release, demand = self.args.release, self._demand()
        if not release.sizes_pools_last:
            self.log.say("Using KV cache dtype: torch.bfloat16")
        try:
            if self.faults.on(Fault.KV_OOM):
                raise refusal(release, demand, before, after)
            return size_pools(release, self.profile, demand, before, after)
        except PoolError as refused:
            raise StartFailed(self._pooling, str(refused)) from refused

    def _demand(self) -> Demand:
        args = self.args
        return Demand(
            tp=args.tp,
            mem_fraction=args.get("mem_fraction_static"),
            draft_tokens=args.draft_tokens,
            max_running=args.get("max_running_requests"),
            max_total_tokens=args.get("max_total_tokens"),
            max_states=args.get("max_mamba_cache_size"),
            radix=args.radix,
            draft_counted=bool(args.get("speculative_draft_model_path")),
        )

    def _allocate_target(self, pools: Pools) -> None:
        with self._as_error(self._pooling, TORCH_OOM):
            self.card.take(pools.target)
        self.settings.rest(POOLS_S)
        if pools.states is not None:
            self.log.say(logs.mamba_cache(pools, bool(self.args.draft_tokens)))
        self.log.say(logs.kv_cache(self.args.release, pools.tokens, pools.kv))
        self.log.say(f"Memory pool end. avail mem={gb(self._least_free())}")

    def _allocate_host_cache(self) -> None:
        """The hierarchical cache in host memory, which the release refuses where the host has not that much free."""
        if not self.args.get("enable_hierarchical_cache"):
            return
        wanted = int(self.args.get("hicache_size")) * 10**9
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - HOST_RESERVE
        if wanted > free:
            error = (
                f"ValueError: Not enough host memory available. Requesting {wanted / 1e9:.2f} GB but only have"
                f" {free / 1e9:.2f} GB free. Please reduce the size of the hierarchical cache."
            )
            raise StartFailed(HOST_CACHE, error)
        self.log.say(f"Allocating {wanted / 1e9:.2f} GB host memory for hierarchical KV cache.")

    def _allocate_draft(self, pools: Pools) -> None:
        if not self._has_draft:
            return
        with self._as_error(self._pooling, TORCH_OOM):
            self.card.take(pools.draft_kv)
        self.log.say(logs.kv_cache(self.args.release, pools.tokens, pools.draft_kv))
        self.log.say(f"Memory pool end. avail mem={gb(self._least_free())}")

    # -- graphs

    def _captures(self) -> list[Capture]:
        """The captures of this start; each needs memory by its tokens and batch sizes."""
        args, profile = self.args, self.profile
        largest = max(args.graph_batches, default=0) / 48
        drafts, steps = max(1, args.draft_tokens), args.steps
        each = int(profile.graph_per_token * largest)
        name = "target verify" if args.draft_tokens else "target decode"
        found = [Capture("cuda graph", name, drafts, int(profile.graph_base * largest) + each * drafts)]
        if self._has_draft and steps > 1:
            found.append(Capture("draft cuda graph", "draft decode", 1, each * steps // 8))
        if self._has_draft:
            found.append(Capture("draft extend cuda graph", "draft extend", drafts, each * drafts // 5))
        return found

    def _capture(self, captures: list[Capture]) -> None:
        release, batches = self.args.release, self.args.graph_batches
        if not batches:
            self._say_not_captured(captures)
            return
        for capture in captures:
            if self.faults.on(Fault.GRAPH_BUFFERS_OOM):
                self._fail_in_buffers()
            self.log.say(capture.begin(release, batches, self._least_free()))
            self._record(capture)
            self.log.say(capture.end(release, CAPTURE_S, self._least_free()))

    def _say_not_captured(self, captures: list[Capture]) -> None:
        if captures and self.args.release.sizes_pools_last:
            self.log.say(
                "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled'"
                " (e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
            )
        elif captures and self.args.release.at_least("0.5.10"):
            self.log.say("Disable piecewise CUDA graph because --disable-piecewise-cuda-graph is set")

    def _record(self, capture: Capture) -> None:
        batches = self.args.graph_batches
        if self.rank == 0 and not self.args.release.sizes_pools_last:
            self.log.say(f"Capture {capture.old} bs {batches}")
        try:
            if self.faults.on(Fault.GRAPH_OOM):
                raise self.card.refuse(32 << 20)
            self.settings.rest(CAPTURE_S)
            self.card.take(capture.size)
        except OutOfMemory as full:
            raise StartFailed(CAPTURING, logs.capture_failed(self.args.release, str(full))) from full
        if self.rank == 0:
            free = self.card.free() / (1 << 30)
            bar = f"Capturing batches (bs={batches[0]} avail_mem={free:.2f} GB): 100%|██████████| "
            self.log.bare(f"\r{bar}{len(batches)}/{len(batches)} [00:01<00:00, 13.33it/s]\n")

    def _fail_in_buffers(self) -> None:
        refused = self.card.refuse(414 << 20)
        files = (*CAPTURING, "model_executor/cuda_graph_buffer_registry.py:register_slot")
        raise StartFailed(files, TORCH_OOM + str(refused))

    # -- the end

    def _report(self, pools: Pools) -> None:
        self._least(0)
        if self.rank:
            return
        free, where = gb(self.card.free()), "cpu" if self.args.on_cpu else "gpu"
        context = self.args.get("context_length") or self.profile.context_len
        chunk = self.args.get("chunked_prefill_size") or 2048
        self.log.say(
            f"max_total_num_tokens={pools.tokens}, chunked_prefill_size={chunk}, max_prefill_tokens=16384,"
            f" max_running_requests={pools.max_running}, context_len={context}, available_{where}_mem={free}"
        )
        for line in self._tree_cache(hybrid=pools.states is not None):
            self.log.say(line)

    def _tree_cache(self, *, hybrid: bool) -> list[str]:
        release = self.args.release
        if not release.sizes_pools_last:
            return []
        unified = "Unified" if release.at_least("0.5.20") else ""
        kind = "ChunkCache" if self.args.get("disable_radix_cache") else f"{unified}RadixCache"
        end = "hicache_attached=False" if release.at_least("0.5.18") else "hierarchical=False"
        streaming = "" if release.at_least("0.5.23") else " streaming_wrapped=False"
        found = (
            f"Tree cache initialized: source=default impl={kind} hybrid_swa=False hybrid_ssm={hybrid} {end}{streaming}"
        )
        components = "(<ComponentType.FULL: 0>,)"
        first = [f"Init Unified Radix Cache. Components: {components}. Tree Core: UnifiedTreeCore"] if unified else []
        return [*first, found, *([TIMINGS] if release.prints_timings else [])]

    # -- faults

    def _hang_if_asked(self) -> None:
        while self.faults.on(Fault.INIT_HANG):
            self.settings.rest(1)

    def _end_by_signal_if_asked(self) -> None:
        number = self.faults.get(Fault.INIT_SIGNAL)
        if number is not None and self.rank == 0:
            os.kill(os.getpid(), signal.Signals(number))

    @contextmanager
    def _as_error(self, files: tuple[str, ...], kind: str) -> Iterator[None]:
        try:
            yield
        except OutOfMemory as full:
            raise StartFailed(files, kind + str(full)) from full
