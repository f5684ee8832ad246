"""Holds GPU memory by plain CUDA calls and says so: a bystander, or a process that a server left over.

    hold.py BYTES [--pinned BYTES] [--stop]

Prints `holding PID BYTES` once it does. `--stop` then stops it by SIGSTOP. With GPU_LAB_CARD=simulated the memory is
that of the simulated NVML. Ends by itself after LIVES_S, so that nothing is left behind for ever.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

LIVES_S = 900


class CudaFailed(Exception):
    """A driver call and its status."""


def hold_cuda(size: int, pinned: int) -> None:
    """In the first card's primary context. Raises CudaFailed, OSError without a driver."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise CudaFailed(f"{name}: {status}")

    device, context, memory, host = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    if pinned:
        call("cuMemAllocHost_v2", ctypes.byref(host), ctypes.c_size_t(pinned))


def hold_simulated(size: int) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from sim_nvml import SimNvml

    # The number that /proc has for it: in a PID namespace of its own, os.getpid() is 1.
    SimNvml().take(0, int(Path("/proc/self").readlink().name), size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bytes", type=int)
    parser.add_argument("--pinned", type=int, default=0)
    parser.add_argument("--stop", action="store_true")
    asked = parser.parse_args()
    signal.alarm(LIVES_S)
    if os.environ.get("GPU_LAB_CARD") == "simulated":
        hold_simulated(asked.bytes)
    else:
        hold_cuda(asked.bytes, asked.pinned)
    print("holding", os.getpid(), asked.bytes, flush=True)
    if asked.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
