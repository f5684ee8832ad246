"""One incident: an id over evidence, diagnosis, actions and outcome."""

from dataclasses import dataclass, field
from enum import StrEnum

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.speculation import SpeculationConfig


class Outcome(StrEnum):
    """How an incident ended. `contained` is a rollback that serves again: never called a success."""

    OPEN = "open"
    REPORTED = "reported"  # observed only: nothing was to be done, or nothing may be done
    CONTAINED = "contained"  # an older config serves
    RECOVERED = "recovered"  # the same config serves again
    YIELDED = "yielded"  # the operator acted, and wins
    HELD = "held"  # the ladder's end: a human is called
    FAILED = "failed"  # an action did not reach its result


class Step(StrEnum):
    """What the watchdog can do to a unit, in the order in which a plan may use it."""

    HOLD = "hold"  # keep systemd from starting it again
    FREE = "free"  # end proven left-overs, wait for NVML's bytes
    OVERRIDE = "override"  # put a speculation config in force
    RELOAD = "reload"  # daemon-reload, only where the override is a drop-in
    START = "start"
    VERIFY = "verify"  # real tokens from the unit's own process


@dataclass(frozen=True, slots=True)
class Intent:
    """A step that was begun, recorded before it was. `outcome` is empty while it runs."""

    id: int
    incident: str
    step: Step
    begun: float
    finished: float | None = None
    outcome: str = ""


UNDONE = "The watchdog ended before it acted."


@dataclass(frozen=True, slots=True)
class Incident:
    """`ran` is the config that failed (None in records of before 0.1.0); `target` is the one that the plan puts in
    force, None where it leaves the config alone."""

    id: str
    unit: str
    invocation: str
    opened: float
    failure: FailureClass
    summary: str
    outcome: Outcome = Outcome.OPEN
    closed: float | None = None
    steps: tuple[Step, ...] = ()
    target: SpeculationConfig | None = None
    reason: str = ""
    diagnosis: dict[str, object] = field(default_factory=dict)
    ran: SpeculationConfig | None = None

    @property
    def undone(self) -> bool:
        """It says nothing of what was tried: no step of it was begun when the watchdog died, and systemd went on."""
        return self.reason == UNDONE
