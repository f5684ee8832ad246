"""The state of simulated GPUs, as files that the simulated libnvidia-ml.so.1 reads (nvml.c describes them).

Owns the writing of that folder, and a reading of it for tests and for the simulated SGLang, which must not go through
NVML (CUDA answers when NVML hangs). Needs nothing but the standard library. Bytes are bytes, times are seconds.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
DEFAULT_FOLDER = Path("/run/sim-nvml")
# What an H200 showed: 615 MiB are used while nothing runs, and killed processes give memory back 0.07 to 0.3 s later.
IDLE_RESERVED = 615 * MIB
DRIVER_LAG_S = 0.2
RTX_PRO_6000 = 97_887 * MIB

_EVERYBODY = 0o777  # servers of any user, and the watchdog with its umask, share the cards
_serial = itertools.count()


class GpuFull(Exception):
    """The card has fewer free bytes than were asked for; carries what a CUDA out-of-memory message names."""

    def __init__(self, gpu: int, wanted: int, free: int) -> None:
        super().__init__(f"GPU {gpu}: {wanted} bytes wanted, {free} free")
        self.gpu, self.wanted, self.free = gpu, wanted, free


@dataclass(frozen=True)
class Gpu:
    """One simulated card."""

    index: int
    total: int
    reserved: int
    uuid: str
    name: str


@dataclass(frozen=True)
class Allocation:
    """Bytes that one process holds on one card.

    `pid` 0 belongs to no process that can be looked up: it stays until it is released. `show` is the pid that
    NVML's process list names (0 or a stranger's number, as seen in containers). `wedged` bytes belong to nobody
    and are in no list.
    """

    id: str
    gpu: int
    pid: int
    start: int
    bytes: int
    lag_s: float
    wedged: bool
    show: int
    kind: str
    listed: bool
    instance: int = 0

    def line(self) -> str:
        return (
            f"gpu={self.gpu} pid={self.pid} start={self.start} bytes={self.bytes} lag_ms={round(self.lag_s * 1000)}"
            f" wedged={int(self.wedged)} show={self.show} listed={int(self.listed)} kind={self.kind}"
            f" mig={self.instance}\n"
        )


class SimNvml:
    """One folder of simulated cards; any number of processes may hold one at the same time."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or os.environ.get("SIM_NVML_DIR") or DEFAULT_FOLDER)

    # -- cards

    def gpus(
        self,
        count: int,
        total_bytes: int = RTX_PRO_6000,
        *,
        reserved_bytes: int = IDLE_RESERVED,
        name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ecc_errors: int = 0,
        instances: int = 0,
    ) -> None:
        """Put `count` equal cards in; what was held stays held. With `instances` they are in MIG mode, each divided
        into so many equal ones."""
        for part in ("alloc", "gone", "faults"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
            (self.folder / part).chmod(_EVERYBODY)
        self.folder.chmod(_EVERYBODY)
        lines = (
            f"total={total_bytes} reserved={reserved_bytes} uuid={_uuid(i)} minor={i} bus={0x19 + 0x11 * i}"
            f" persistence=1 compute_mode=0 ecc={ecc_errors} mig={instances} name={name}\n"
            for i in range(count)
        )
        _replace(self.folder / "gpus", "".join(lines))

    def cards(self) -> list[Gpu]:
        """The cards as they are now; empty where there are none."""
        try:
            lines = (self.folder / "gpus").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [_gpu(i, line) for i, line in enumerate(lines)]

    # -- memory

    def hold(
        self,
        gpu: int,
        pid: int,
        bytes: int,  # noqa: A002 - the field's own word for it
        *,
        lag_s: float = DRIVER_LAG_S,
        wedged: bool = False,
        show_pid: int | None = None,
        kind: str = "compute",
        listed: bool = True,
        instance: int = 0,
    ) -> str:
        """Occupy memory without asking whether there is room; the answer is the id for `release`.

        The bytes go back `lag_s` after process `pid` was first seen gone; with `wedged` never.
        """
        start = start_time(pid) or 0 if pid else 0
        show = pid if show_pid is None else show_pid
        name = f"{gpu}-{pid}-{os.getpid()}-{time.monotonic_ns()}-{next(_serial)}"
        allocation = Allocation(name, gpu, pid, start, bytes, lag_s, wedged, show, kind, listed, instance)
        self._forget_the_gone(gpu)
        _replace(self.folder / "alloc" / name, allocation.line())
        return name

    def take(self, gpu: int, pid: int, bytes: int, *, lag_s: float = DRIVER_LAG_S) -> str:  # noqa: A002
        """As `hold`, but raises GpuFull where the card has no room for it, as an allocator would."""
        with self._locked():
            free = self.free(gpu)
            if bytes > free:
                raise GpuFull(gpu, bytes, free)
            return self.hold(gpu, pid, bytes, lag_s=lag_s)

    def release(self, allocation_id: str) -> None:
        """Give the bytes back at once."""
        for part in ("alloc", "gone"):
            (self.folder / part / allocation_id).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give all bytes back at once, wedged ones too."""
        for allocation in list(self.allocations()):
            self.release(allocation.id)

    def allocations(self, gpu: int | None = None) -> Iterator[Allocation]:
        """Everything that occupies a card now, by the same rule as nvml.c."""
        for found in self._written(gpu):
            if self._occupies(found):
                yield found

    def _written(self, gpu: int | None) -> Iterator[Allocation]:
        """Those of this card, or of all, that have a file. Its name begins with the card's index."""
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder / "alloc")):
                wanted = not name.startswith(".") if gpu is None else name.startswith(f"{gpu}-")
                found = _allocation(self.folder / "alloc" / name) if wanted else None
                if found:
                    yield found

    def lingering(self, gpu: int) -> list[Allocation]:
        """What occupies the card although its process is gone and the driver will give it back."""
        return [one for one in self.allocations(gpu) if one.pid and not one.wedged and not _runs(one.pid, one.start)]

    def used(self, gpu: int) -> int:
        """Bytes used on the card, the driver's reserve among them (as nvmlDeviceGetMemoryInfo, first version, says)."""
        card = self.cards()[gpu]
        return min(card.total, card.reserved + sum(one.bytes for one in self.allocations(gpu)))

    def free(self, gpu: int) -> int:
        """Bytes that can still be taken."""
        return self.cards()[gpu].total - self.used(gpu)

    def processes(self, gpu: int) -> dict[int, int]:
        """Bytes by the pid shown, as NVML's list of compute processes."""
        shown: dict[int, int] = {}
        for one in self.allocations(gpu):
            if not one.wedged and one.listed and one.kind == "compute":
                shown[one.show] = shown.get(one.show, 0) + one.bytes
        return shown

    # -- faults

    def hang(self, call: str = "all") -> None:
        """From now on this NVML call (or every call) blocks until `heal`."""
        self._fault(call, "hang")

    def slow(self, seconds: float, call: str = "all") -> None:
        """From now on this NVML call (or every call) takes so much longer."""
        self._fault(call, f"slow {round(seconds * 1000)}")

    def fail(self, code: int, call: str = "all") -> None:
        """From now on this NVML call (or every call) answers this NVML code, such as 15 for a lost GPU."""
        self._fault(call, f"fail {code}")

    def heal(self) -> None:
        """No more faults; calls that hang go on."""
        for path in (self.folder / "faults").iterdir():
            path.unlink(missing_ok=True)

    def _fault(self, call: str, text: str) -> None:
        _replace(self.folder / "faults" / call, text + "\n")

    # -- the rule of who still occupies a card

    def _forget_the_gone(self, gpu: int) -> None:
        """Take away the files of allocations that no longer count, so that a long test does not read ever more."""
        for found in list(self._written(gpu)):
            if not self._occupies(found):
                self.release(found.id)

    def _occupies(self, allocation: Allocation) -> bool:
        if allocation.wedged or not allocation.pid or _runs(allocation.pid, allocation.start):
            return True
        since = self._gone_since(allocation.id)
        return time.monotonic() - since < allocation.lag_s

    def _gone_since(self, allocation_id: str) -> float:
        path = self.folder / "gone" / allocation_id
        now = time.monotonic_ns()
        try:
            with path.open("x") as file:
                file.write(f"{now}\n")
                os.fchmod(file.fileno(), _EVERYBODY)
        except FileExistsError:
            text = path.read_text()
            return int(text) / 1e9 if text else now / 1e9
        return now / 1e9

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                os.fchmod(file.fileno(), _EVERYBODY)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started; None where there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def parse_bytes(text: str) -> int:
    """`40GiB`, `512MiB` or a bare number of bytes."""
    for suffix, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * unit)
    return int(text)


def _runs(pid: int, start: int) -> bool:
    fields = _stat(pid)
    return fields is not None and int(fields[19]) == start and fields[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (the name before it may hold blanks and brackets)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _gpu(index: int, line: str) -> Gpu:
    pairs, _, name = line.partition(" name=")
    field = dict(pair.split("=", 1) for pair in pairs.split())
    return Gpu(index, int(field["total"]), int(field["reserved"]), field["uuid"], name)


def _allocation(path: Path) -> Allocation | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    field = dict(pair.split("=", 1) for pair in text.split())
    return Allocation(
        id=path.name,
        gpu=int(field["gpu"]),
        pid=int(field["pid"]),
        start=int(field["start"]),
        bytes=int(field["bytes"]),
        lag_s=int(field["lag_ms"]) / 1000,
        wedged=field["wedged"] == "1",
        show=int(field["show"]),
        kind=field["kind"],
        listed=field["listed"] == "1",
        instance=int(field["mig"]),
    )


def _uuid(index: int) -> str:
    return f"GPU-5119a000-0000-4000-8000-{index:012x}"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden names are skipped by every reader, so that half a file is never seen.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}")
    scratch.write_text(text)
    scratch.chmod(_EVERYBODY)
    scratch.replace(path)
