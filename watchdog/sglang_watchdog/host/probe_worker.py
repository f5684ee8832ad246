"""The helper process that does everything which can hang: NVML, what /proc says of GPU holders, a model's files.

Run as `python -m sglang_watchdog.host.probe_worker` with one socket or a pair of pipes as stdin and stdout. It answers
one JSON line for each, in order, and ends when its input does. It decides nothing, keeps nothing but an initialised
NVML, and imports little, because its start is part of every deadline. Its parent may kill it at any time.

Requests: `{"do": "gpus"}`, `{"do": "process", "pid": N}`, `{"do": "device_holders"}`,
`{"do": "server_files", "model": PATH, "interpreter": PATH}`. Answers: `{"answer": …}`, or
`{"error": "one sentence"}` for what the driver refused.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

# Codes of NVML (nvml.h) that say "this card has no such thing", which is no failure.
_NO_PERMISSION = 4
_NO_SUCH_INSTANCE = 6  # NOT_FOUND: fewer were made than fit
_NO_SUCH_LIST = frozenset({3, 13})  # NOT_SUPPORTED, FUNCTION_NOT_FOUND
_DEVICES = "/dev/nvidia"
_READ_TRIES = 5
# A handle on nvidiactl alone is a client of NVML: this process, a monitor. CUDA opens nvidia-uvm too.
_MEMORY_DEVICE = "/dev/nvidia-uvm"


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()
    # No nvmlShutdown: it can hang, and the kernel cleans up all the same.
    os._exit(0)


def _answer(request: Json) -> Json:
    match request["do"]:
        case "gpus":
            return _gpus()
        case "process":
            return {"answer": process(request["pid"])}
        case "device_holders":
            return {"answer": device_holders()}
        case "server_files":
            return {"answer": _server_files(request["model"], request["interpreter"])}
        case unknown:
            return {"error": f"the probe worker knows no request {unknown!r}"}


def _server_files(model_path: str, interpreter: str) -> Json:
    from sglang_watchdog.host import model  # not needed for any other question

    return {"model_digest": model.model_digest(model_path), "version": model.sglang_version(interpreter)}


# NVML


def _gpus() -> Json:
    import pynvml  # 15 ms, and not needed for a look at /proc

    what = "NVML"
    try:
        if not _Nvml.initialised:
            pynvml.nvmlInit()
            _Nvml.initialised = True
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            what = f"GPU {index}"
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus += [_gpu(pynvml, one, index) for one in _instances(pynvml, handle) or [handle]]
    except pynvml.NVMLError as error:
        return {"error": f"{what}: {error} (NVML error {error.value})"}
    return {"answer": {"driver": driver, "gpus": gpus}}


class _Nvml:
    """Once in the life of a worker. After an error the parent starts a new worker: only a new process loads the
    library of a driver that was replaced meanwhile."""

    initialised = False


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """Of a card in MIG mode its instances, which a process cannot leave: each has memory and a list of processes of
    its own. Empty for other cards."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
    except nvml.NVMLError as error:
        if error.value in _NO_SUCH_LIST:
            return []
        raise
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError as error:
            if error.value == _NO_PERMISSION:
                return []  # root sees the sum of all of them on the card itself
            if error.value != _NO_SUCH_INSTANCE:
                raise
    return found


def _gpu(nvml: Any, handle: Any, index: int) -> Json:
    memory, holders = _consistent(nvml, handle)
    return {
        "index": index,
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "total": memory.total,
        "used": memory.used,
        "holders": holders,
    }


def _consistent(nvml: Any, handle: Any) -> tuple[Any, list[tuple[int | None, int]]]:
    """Used bytes and holders that belong together: what is allocated between two calls would be memory without a
    holder, or a holder of memory that is not used. On a card that never rests, the last try counts."""
    # The first version of the call counts the driver's own reserve as used.
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    holders: list[tuple[int | None, int]] = []
    for _ in range(_READ_TRIES):
        before, holders = memory, _holders(nvml, handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        if memory.used == before.used:
            break
    return memory, holders


def _holders(nvml: Any, handle: Any) -> list[tuple[int | None, int]]:
    """(pid, bytes) of all that hold memory. A process can be in several lists, with the same bytes in each."""
    held: dict[int, int] = {}
    nameless: list[int] = []
    for call in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        for process in _listed(nvml, call, handle):
            bytes_ = process.usedGpuMemory or 0  # None where the driver cannot tell
            if process.pid:
                held[process.pid] = max(held.get(process.pid, 0), bytes_)
            else:
                nameless.append(bytes_)
    return [*held.items(), *((None, bytes_) for bytes_ in nameless)]


def _listed(nvml: Any, call: Any, handle: Any) -> list[Any]:
    try:
        return list(call(handle))
    except nvml.NVMLError as error:
        if error.value in _NO_SUCH_LIST:
            return []
        raise


# /proc


def process(pid: int) -> Json:
    """What can only be read through the memory of the process: its command line, and of its environment the
    INVOCATION_ID alone. None for what cannot be read."""
    argv = _words(pid, "cmdline")
    environment = _words(pid, "environ") or ()
    found = [word.partition("=")[2] for word in environment if word.startswith("INVOCATION_ID=")]
    return {"argv": argv, "invocation": found[0] if found else None}


def _words(pid: int, what: str) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return [word.decode(errors="replace") for word in text.rstrip(b"\0").split(b"\0")] if text else []


def device_holders(devices: str = _DEVICES, memory_device: str = _MEMORY_DEVICE) -> list[Json]:
    """The second source beside NVML: every process that has the driver's memory device open, with its cards."""
    holders = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        opened = sorted({path for path in _open_files(pid) if path.startswith(devices)})
        if memory_device in opened:
            cards = [path for path in opened if path.removeprefix(devices).isdigit()]
            holders.append({"pid": pid, "devices": cards})
    return sorted(holders, key=lambda holder: holder["pid"])


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
        for fd in os.listdir(f"/proc/{pid}/fd"):
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


if __name__ == "__main__":
    main()
