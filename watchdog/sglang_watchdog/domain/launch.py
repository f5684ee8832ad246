"""One launch of a unit (systemd's InvocationID): what really ran, how far it came, what it printed about memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_watchdog.domain.container import Container
from sglang_watchdog.domain.gpu import GpuReading, HeldMemory
from sglang_watchdog.domain.speculation import SpeculationConfig


class Phase(StrEnum):
    """How far a launch has come. The draft worker repeats loading, allocating and capturing."""

    STARTING = "starting"
    LOADING_WEIGHTS = "loading_weights"
    ALLOCATING_KV = "allocating_kv"
    CAPTURING_GRAPHS = "capturing_graphs"
    WARMING_UP = "warming_up"
    READY = "ready"
    SERVING = "serving"
    STOPPING = "stopping"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """A phase was entered at `time` (Unix seconds)."""

    phase: Phase
    time: float


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process that cannot be mistaken for a later one: `start_ticks` is field 22 of /proc/PID/stat (clock ticks
    since boot), so a recycled pid differs."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """A process seen in the unit's own cgroup, or in that of a container of the launch, while the launch ran: proof of
    ownership after it."""

    id: ProcessId
    title: str  # as /proc/PID/cmdline showed it, secrets removed
    phase: Phase


@dataclass(frozen=True, slots=True)
class Definition:
    """Which definition of the unit systemd had loaded: digests (SHA-256) by path. `exec_start` is the argv as D-Bus
    parsed it, variables not expanded, secrets removed."""

    fragment: str
    digests: Mapping[str, str]
    exec_start: tuple[str, ...] = ()

    def differs_from(self, other: "Definition") -> tuple[str, ...]:
        """Paths that were added, removed or changed between the two."""
        paths = sorted({*self.digests, *other.digests})
        return tuple(p for p in paths if self.digests.get(p) != other.digests.get(p))


@dataclass(frozen=True, slots=True)
class Shadowed:
    """The unit file was changed in vain: `drop_in` sets another command, and was there before. `asked` is what the file
    alone asks for, `changed` when it came to (Unix seconds)."""

    drop_in: str
    asked: SpeculationConfig
    changed: float


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory figures that SGLang printed, of the rank that had least. GiB as printed (its 'GB' is 2^30)."""

    before_weights_gib: float | None = None  # `Load weight begin. avail mem`
    after_weights_gib: float | None = None
    weights_gib: float | None = None
    kv_cache_gib: float | None = None
    mamba_gib: float | None = None
    graphs_gib: float | None = None
    available_gib: float | None = None  # the last `avail mem` of all
    after_draft_gib: float | None = None  # `avail mem` once the draft's weights were in too
    draft_weights_gib: float | None = None
    mamba_slots: int | None = None  # max_mamba_cache_size
    intermediate_gib: float | None = None  # states of the draft tokens in flight, of hybrid models
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What is known of one launch. `argv` is the main process's, secrets removed; `server_args` are the effective
    values that SGLang printed. Times are Unix seconds; `ended` is None while it runs."""

    unit: str
    invocation: str
    started: float
    boot_id: str = ""
    argv: tuple[str, ...] = ()
    server_args: Mapping[str, object] = field(default_factory=dict)
    version: str = ""
    model_digest: str | None = None  # of the model's content; None where it could not be read
    definition: Definition | None = None
    phases: tuple[PhaseMark, ...] = ()
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    processes: tuple[RecordedProcess, ...] = ()
    containers: tuple[Container, ...] = ()  # that it started
    cuda: Mapping[str, str] | None = None  # of the main process's environment, where that could be read
    gpu_before: GpuReading | None = None  # without what the launch itself held by then
    held_before: tuple[HeldMemory, ...] = ()
    served: bool = False  # tokens came from it, for a request of the watchdog's
    ended: float | None = None

    @property
    def phase(self) -> Phase:
        return self.phases[-1].phase if self.phases else Phase.UNKNOWN

    def reached(self, phase: Phase) -> bool:
        return any(mark.phase is phase for mark in self.phases)
