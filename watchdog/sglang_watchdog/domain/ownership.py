"""Whose a process that holds GPU memory is, and what can be known of it."""

from dataclasses import dataclass
from enum import StrEnum

from sglang_watchdog.domain.container import Container
from sglang_watchdog.domain.launch import ProcessId


class Owner(StrEnum):
    """Only a process that is OURS may ever be ended."""

    OURS = "ours"  # of an ended launch of the unit, proven
    CURRENT_LAUNCH = "current_launch"  # of the launch that runs now
    STRANGER = "stranger"
    UNKNOWN = "unknown"  # what would decide cannot be seen


class Proof(StrEnum):
    """What makes a process the unit's own."""

    RECORDED_PROCESS = "recorded_process"  # pid and start time were recorded from the unit's cgroup
    DESCENDANT = "descendant"  # of a recorded process
    INVOCATION = "invocation"  # an ended launch's INVOCATION_ID in its environment
    CGROUP = "cgroup"  # it is in the unit's cgroup, and the unit is down
    CONTAINER = "container"  # recorded, or below one that was, in a container that an ended launch started


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process above another one. `name` is the kernel's (comm, at most 15 characters)."""

    id: ProcessId
    name: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process as /proc shows it. `started` is Unix seconds; `ancestors` has the parent first.

    `argv` has its secrets removed and is None where it cannot be read (a process that is stuck in the driver blocks
    whoever reads it); it is empty for a zombie and a kernel thread. `invocation` is None where the environment has no
    INVOCATION_ID or cannot be read: a title set by setproctitle overwrites the environment. `terminal`: it has a
    controlling one, as what a person runs in a shell has.
    """

    id: ProcessId
    started: float
    name: str
    state: str
    uid: int
    cgroup: str | None
    ancestors: tuple[Ancestor, ...] = ()
    argv: tuple[str, ...] | None = None
    invocation: str | None = None
    terminal: bool = False

    @property
    def zombie(self) -> bool:
        """Dead, but perhaps not released: its threads may still be giving memory back to the driver."""
        return self.state == "Z"


@dataclass(frozen=True, slots=True)
class Ownership:
    """The verdict on one process. `reason` is one sentence for a person; `proof` is there exactly where it is OURS.
    `container` is the one that it lives in, where a launch of the unit started that: its engine ends it, nobody else.
    """

    owner: Owner
    reason: str
    process: ProcessId | None = None
    proof: Proof | None = None
    in_unit_cgroup: bool = False  # there systemd signals, not we
    container: Container | None = None

    def __post_init__(self) -> None:
        if (self.owner is Owner.OURS) != (self.proof is not None and self.process is not None):
            raise ValueError("a process is ours exactly where there is a proof")
