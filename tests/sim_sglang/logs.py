"""The lines of a server's log, in the format of each release; written to stderr at once, as the real root logger does.

Owns format and prefix. The order of lines is the business of scheduler.py and launcher.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sim_sglang.memory import Pools
from sim_sglang.profiles import GIB
from sim_sglang.release import Release

STDOUT, STDERR = 1, 2


@dataclass(frozen=True)
class Log:
    """One process's logger. `rank` is ` TP0` and its like, empty in the main process and without parallelism."""

    rank: str = ""

    def say(self, message: str) -> None:
        _write(STDERR, f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{self.rank}] {message}\n")

    def access(self, message: str) -> None:
        """uvicorn's access log: same format, on stdout."""
        _write(STDOUT, f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] INFO:     {message}\n")

    def bare(self, text: str) -> None:
        """Text past the logger: argument errors, tracebacks of the main process, progress bars."""
        _write(STDERR, text)


def _write(stream: int, text: str) -> None:
    # One write a line: lines of several processes then do not mix in a pipe or a journal socket.
    data = text.encode()
    while data:
        data = data[os.write(stream, data) :]


def gb(size: float) -> str:
    """Bytes as SGLang prints them: GiB called GB."""
    return f"{size / GIB:.2f} GB"


def weight_end(release: Release, model: str, elapsed: float, avail: int, used: int) -> str:
    dtype = ", " if release.at_least("0.5.10") else ", dtype=torch.bfloat16, "
    return f"Load weight end. elapsed={elapsed:.2f} s, type={model}{dtype}avail mem={gb(avail)}, mem usage={gb(used)}."


def mamba_cache(pools: Pools, speculative: bool) -> str:
    text = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {pools.states},"
        f" conv_state size: {pools.conv / GIB:.2f}GB, ssm_state size: {pools.ssm / GIB:.2f}GB "
    )
    if not speculative:
        return text
    return (
        f"{text}intermediate_ssm_state_cache size: {pools.intermediate_ssm / GIB:.2f}GB"
        f" intermediate_conv_window_cache size: {pools.intermediate_conv / GIB:.2f}GB "
    )


def kv_cache(release: Release, tokens: int, size: int) -> str:
    dtype = " dtype: torch.bfloat16," if release.sizes_pools_last else ""
    return f"KV Cache is allocated.{dtype} #tokens: {tokens}, K size: {gb(size / 2)}, V size: {gb(size / 2)}"


@dataclass(frozen=True)
class Capture:
    """One graph capture: its name in the old and the new wording, and what it takes."""

    old: str
    new: str
    tokens_each: int
    size: int

    def begin(self, release: Release, batches: Sequence[int], avail: int) -> str:
        if release.sizes_pools_last:
            shown = f" bs={list(batches)}," if release.at_least("0.5.16") else ""
            return (
                f"Capture {self.new} CUDA graph begin. backend=full, num_tokens_per_req={self.tokens_each},{shown}"
                f" avail mem={gb(avail)}"
            )
        return f"Capture {self.old} begin. This can take up to several minutes. avail mem={gb(avail)}"

    def end(self, release: Release, elapsed: float, avail: int) -> str:
        if release.sizes_pools_last:
            return (
                f"Capture {self.new} CUDA graph end. elapsed={elapsed:.2f} s,"
                f" mem usage={gb(self.size)}, avail mem={gb(avail)}."
            )
        return (
            f"Capture {self.old} end. Time elapsed: {elapsed:.2f} s. mem usage={gb(self.size)}. avail mem={gb(avail)}."
        )


def capture_failed(release: Release, reason: str) -> str:
    hints = (
        "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n"
        "3. disable torch compile by not using --enable-torch-compile\n"
        "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\n"
    )
    if release.sizes_pools_last:
        hints = (
            "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)\n"
            "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled."
            " (Not recommended. Huge performance loss)\n"
        )
    return (
        f"Exception: Capture cuda graph failed: {reason}\nPossible solutions:\n"
        f"1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n{hints}"
        "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
    )


def out_of_memory(gpu: int, wanted: int, total: int, free: int, own: int, others: dict[int, int]) -> str:
    """What torch says, others' memory with their pids in it."""
    strangers = "".join(f"Process {pid} has {held / GIB:.2f} GiB memory in use. " for pid, held in others.items())
    asked = f"{wanted / GIB:.2f} GiB" if wanted >= GIB else f"{wanted / (1 << 20):.2f} MiB"
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU {gpu} has a total capacity of {total / GIB:.2f} GiB"
        f" of which {free / (1 << 20):.2f} MiB is free. {strangers}Including non-PyTorch memory, this process has"
        f" {own / GIB:.2f} GiB memory in use. Of the allocated memory {max(0.0, own / GIB - 0.68):.2f} GiB is"
        " allocated by PyTorch, and 14.51 MiB is reserved by PyTorch but unallocated. If reserved but unallocated"
        " memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        "  See documentation for Memory Management "
        " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def exception(files: Sequence[str], error: str) -> str:
    """The line with which a scheduler dies; only its first line has the logger's prefix."""
    frames = "".join(f'  File "/opt/sglang/site/sglang/srt/{name}, in {where}\n' for name, where in map(_frame, files))
    return f"Scheduler hit an exception: Traceback (most recent call last):\n{frames}{error}\n"


def _frame(spot: str) -> tuple[str, str]:
    name, _, where = spot.partition(":")
    return f'{name}", line {100 + sum(spot.encode()) % 4000}', where


@dataclass(frozen=True)
class Usage:
    """What a batch line says of the pools."""

    tokens: int
    total: int
    hybrid: bool
    states: int
    total_states: int

    def text(self, decode: bool) -> str:
        share = self.tokens / max(1, self.total)
        if not self.hybrid:
            return (f"#token: {self.tokens}, " if decode else "") + f"token usage: {share:.2f}, "
        states = f"mamba usage: {self.states / max(1, self.total_states):.2f}, "
        if not decode:
            return f"full token usage: {share:.2f}, {states}"
        return f"#full token: {self.tokens}, full token usage: {share:.2f}, mamba num: {self.states}, {states}"


def prefill(
    release: Release, usage: Usage, sequences: int, tokens: int, running: int, queued: int, speed: float, graph: str
) -> str:
    pending = "#pending-token: 0, " if release.counts_pending_tokens else ""
    shown = [f"{graph} graph: False", f"input throughput (token/s): {speed:.2f}"]
    if release.prefill_graph_last:
        shown.reverse()
    return (
        f"Prefill batch, #new-seq: {sequences}, #new-token: {tokens}, #cached-token: 0, {usage.text(decode=False)}"
        f"#running-req: {running}, #queue-req: {queued}, {pending}{', '.join(shown)}"
    )


def decode(
    release: Release,
    usage: Usage,
    running: int,
    accept: tuple[float, int] | None,
    speed: float,
    queued: int,
    graph: str,
) -> str:
    accepted = ""
    if accept:
        length, draft_tokens = accept
        accepted = f"accept len: {length:.2f}, accept rate: {release.accept_rate(length, draft_tokens):.2f}, "
    captured = graph == "cuda"
    end = "" if release.at_least("0.5.10") else ", "
    return (
        f"Decode batch, #running-req: {running}, {usage.text(decode=True)}{accepted}"
        f"{graph} graph: {captured}, gen throughput (token/s): {speed:.2f}, #queue-req: {queued}{end}"
    )
