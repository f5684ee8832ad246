"""Everything that a diagnosis may look at, as plain values. What is not known is None or empty."""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.domain.gpu import GpuAnswer, HeldMemory
from sglang_watchdog.domain.launch import Definition, Launch, MemoryFigures, Shadowed
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch, ended or not. `unit` may be of a later launch: it says of which itself."""

    timeline: Timeline
    unit: UnitSnapshot | None = None
    launch: Launch | None = None  # the ledger's record: what really ran
    gpu_before: GpuAnswer | None = None  # NVML just before the start
    held_before: tuple[HeldMemory, ...] = ()
    held_when_proven: Mapping[int, int] | None = None  # bytes of others by card, when known-good was started
    memory_when_proven: MemoryFigures | None = None  # what SGLang printed when known-good was proven
    loaded: Definition | None = None  # what systemd had loaded when the launch began
    on_disk: Definition | None = None  # now
    disk_changed: float | None = None  # when the definition on disk last changed, Unix seconds
    intended: SpeculationConfig | None = None  # what the definition on disk asks for now
    shadowed: Shadowed | None = None
    ended_for: str = ""  # why the watchdog itself brought it down; empty where it did not
    surprise_told: bool = False  # that it runs an old definition was reported while it served
    known_good: SpeculationConfig | None = None
    inside: str = ""  # the kind of container that the host itself is; empty where it is none, or not known
    has_ledger: bool = False
    managed: frozenset[str] = frozenset()
    input_notes: tuple[str, ...] = ()  # what of the input could not be read, for people
