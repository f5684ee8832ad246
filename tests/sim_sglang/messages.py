"""What the processes of one server tell each other through pipes.

Main to a scheduler: Minimum (the answer), Request, Abort, AskInfo, Shutdown. A scheduler to main while it starts:
Minimum, Ready. Scheduler 0 through the detokenizer to main: Output, Info.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Whose request it is: a client's counts for faults and for the drain."""

    CLIENT = "client"
    WARMUP = "warmup"
    HEALTH = "health"


@dataclass(frozen=True)
class Minimum:
    """All ranks meet here; each learns the least of their numbers."""

    value: int


@dataclass(frozen=True)
class Ready:
    """A rank has everything it needs to serve."""

    info: dict[str, Any]


@dataclass(frozen=True)
class Request:
    rid: str
    kind: Kind
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Abort:
    rid: str


@dataclass(frozen=True)
class AskInfo:
    rid: str


@dataclass(frozen=True)
class Shutdown:
    pass


@dataclass(frozen=True)
class Stats:
    """What the metrics endpoint shows."""

    running: int = 0
    queued: int = 0
    used_tokens: int = 0
    speed: float = 0.0
    accept_len: float = 0.0
    generated: int = 0
    finished: int = 0


@dataclass(frozen=True)
class Output:
    """New tokens by request id, and whether that request is done."""

    tokens: list[tuple[str, int, bool]]
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Info:
    rid: str
    internal_state: dict[str, Any]
    stats: Stats
