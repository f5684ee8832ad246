"""What NVML says about the cards, as plain values. Bytes everywhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that NVML lists on a card. `pid` is None where NVML cannot name it (0, or another PID namespace)."""

    pid: int | None
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, or, of a card in MIG mode, one of its instances: those share the index and differ by `uuid`.
    `used_bytes` counts what the driver reserves for itself too, so an idle card is never at 0."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All cards at one moment (`time`: Unix seconds)."""

    time: float
    driver: str
    gpus: tuple[Gpu, ...]

    @property
    def used_bytes(self) -> int:
        return sum(gpu.used_bytes for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """GPU memory that was in use before a launch began. `who` is for people; `ours`: left by an earlier launch."""

    gpu: int
    held_bytes: int
    who: str
    ours: bool
    pid: int | None = None  # None where NVML cannot name the process
    uuid: str = ""  # of the card


@dataclass(frozen=True, slots=True)
class GpuUnknown:
    """No reading could be had (driver hung, NVML missing). Never to be read as 'free'."""

    time: float
    reason: str


GpuAnswer = GpuReading | GpuUnknown
