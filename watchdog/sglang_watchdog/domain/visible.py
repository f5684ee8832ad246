"""Which cards a launch uses: what CUDA shows to it, and what SGLang takes of that. Pure.

Everything here is on the side of doubt: what is not understood is None, and then every card counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_watchdog.domain.gpu import Gpu, GpuReading
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.speculation import Command

DEVICES = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
VARIABLES = (DEVICES, _ORDER)
_MIG = "MIG-"
# SGLang's names of one setting; the first is as `server_args` has it.
_SIZES = {
    "tp_size": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "pp_size": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "dp_size": ("--dp-size", "--dp", "--data-parallel-size"),
    "nnodes": ("--nnodes",),
    "gpu_id_step": ("--gpu-id-step",),
}
_BASE = "base_gpu_id"


def cards_of(
    argv: Sequence[str], printed: Mapping[str, object], cuda: Mapping[str, str] | None, gpus: Sequence[Gpu]
) -> frozenset[str] | None:
    """UUIDs of the cards. `argv` is the main process's, `printed` what SGLang printed of its settings, `cuda` the
    variables of CUDA in the environment of the main process (None where it could not be read). None where it cannot be
    told."""
    if cuda is None or not _is_server(argv):
        return None
    seen = _shown(cuda, gpus)
    if seen is None:
        return None
    settings = _settings(argv, printed)
    if settings is None or settings["nnodes"] != 1:
        return None
    ranks = settings["tp_size"] * settings["pp_size"]
    if not (printed.get("enable_dp_attention") or "--enable-dp-attention" in argv):
        ranks *= settings["dp_size"]
    base, step = settings[_BASE], settings["gpu_id_step"]
    taken = [base + rank * step for rank in range(ranks)]
    return frozenset(seen[i] for i in taken) if step > 0 and taken and max(taken) < len(seen) else None


def only(reading: GpuReading, cards: frozenset[str] | None) -> GpuReading:
    """The reading of these cards alone; of all where they are not known."""
    return reading if cards is None else replace(reading, gpus=tuple(gpu for gpu in reading.gpus if gpu.uuid in cards))


def seen_before(launch: Launch) -> GpuReading | None:
    """What was on the launch's own cards before it began; None where the cards could not be read."""
    before = launch.gpu_before
    if before is None:
        return None
    return only(before, cards_of(launch.argv, launch.server_args, launch.cuda, before.gpus))


def _is_server(argv: Sequence[str]) -> bool:
    """Started directly: a shell, or the client of a container, has another environment than the server."""
    return bool(argv) and argv[0].rpartition("/")[2].startswith("python") and any("sglang" in word for word in argv)


def _shown(cuda: Mapping[str, str], gpus: Sequence[Gpu]) -> list[str] | None:
    """UUIDs in CUDA's order. CUDA numbers by speed where it is not told otherwise, NVML by the bus: the same where all
    cards are alike. Of a list CUDA shows what comes before the first word that names no card."""
    in_order = cuda.get(_ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) <= 1
    by_number = in_order and not any(gpu.uuid.startswith(_MIG) for gpu in gpus)
    devices = cuda.get(DEVICES)
    if devices is None:
        return [gpu.uuid for gpu in gpus] if by_number else None
    seen: list[str] = []
    for word in (word.strip() for word in devices.split(",")):
        if (number := whole(word)) is not None:
            if not by_number:
                return None
            found = [gpus[number].uuid] if number < len(gpus) else []
        else:
            found = [gpu.uuid for gpu in gpus if word and gpu.uuid.startswith(word)]  # CUDA takes a beginning of it
        if len(found) != 1:
            break
        seen += found
    return seen


def _settings(argv: Sequence[str], printed: Mapping[str, object]) -> dict[str, int] | None:
    names = {**_SIZES, _BASE: ("--base-gpu-id",)}
    if not printed and "--config" in argv:  # a file of flags
        return None
    command = Command.parse(argv)
    found = {}
    for name, flags in names.items():
        given = [values[0] for flag, values in command.options if flag in flags and values]
        value = printed.get(name, given[-1] if given else int(name != _BASE))
        number = whole(str(value))
        if number is None:
            return None
        found[name] = number
    return found
