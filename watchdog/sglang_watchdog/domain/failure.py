"""What can have ended a launch, and the verdict of a diagnosis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.launch import Phase


class FailureClass(StrEnum):
    """Why a launch ended. The values are an interface: metrics, journal fields and scripts carry them."""

    KV_CACHE_OOM = "kv_cache_oom"
    CUDA_GRAPH_OOM = "cuda_graph_oom"
    WEIGHTS_OOM = "weights_oom"
    RUNTIME_CUDA_OOM = "runtime_cuda_oom"
    GPU_MEMORY_HELD = "gpu_memory_held"
    HOST_OOM_KILL = "host_oom_kill"
    CGROUP_OOM_KILL = "cgroup_oom_kill"
    HOST_MEMORY_SHORTAGE = "host_memory_shortage"
    SHM_OR_DISK_FULL = "shm_or_disk_full"
    STOP_TIMEOUT_SIGKILL = "stop_timeout_sigkill"
    START_TIMEOUT = "start_timeout"
    STALE_UNIT_FILE = "stale_unit_file"
    START_LIMIT_HIT = "start_limit_hit"
    REQUESTED_STOP = "requested_stop"
    EXTERNAL_KILL = "external_kill"
    GPU_HARDWARE_FAULT = "gpu_hardware_fault"
    CUDA_ERROR = "cuda_error"
    NCCL_ERROR = "nccl_error"
    SEGFAULT = "segfault"
    SOFTWARE_EXCEPTION = "software_exception"
    INTERNAL_WATCHDOG_HANG = "internal_watchdog_hang"
    UNRESPONSIVE = "unresponsive"
    BAD_ARGUMENTS = "bad_arguments"
    MISSING_DEPENDENCY = "missing_dependency"
    PORT_IN_USE = "port_in_use"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A class that looks alike, and the one reason why it is not the answer."""

    failure: FailureClass
    because: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why one launch ended.

    `confidence` is 0 to 1 and calibrated: of the answers given 0.9, nine in ten are right. `rollback_helps` is None
    where the input cannot tell. `effective` holds the flags that really ran, SGLang's own names without dashes.
    """

    failure: FailureClass
    confidence: float
    summary: str
    phase: Phase
    rollback_helps: bool | None = None
    effective: Mapping[str, object] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The documented JSON form of `sglang-watchdog diagnose --json`."""
        return {
            "class": self.failure.value,
            "confidence": round(self.confidence, 2),
            "summary": self.summary,
            "phase": self.phase.value,
            "effective": dict(self.effective),
            "rollback_helps": self.rollback_helps,
            "evidence": [{"source": e.source.value, "time": e.time, "text": e.text} for e in self.evidence],
            "ruled_out": [{"class": r.failure.value, "because": r.because} for r in self.ruled_out],
            "advice": list(self.advice),
        }
