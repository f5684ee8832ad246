"""What is proven of a base: configs that served, and configs that do not fit."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.speculation import Command, SpeculationConfig

# Options that say where a server listens or how it logs, not what it needs of a card.
_NOT_OF_THE_BASE = frozenset({"--host", "--port", "--log-level", "--log-level-http", "--api-key", "--admin-api-key"})


@dataclass(frozen=True, slots=True)
class KnownGood:
    """A config that became ready, generated real tokens and held for the soak time. `traffic`: others than our probes
    had tokens of it meanwhile."""

    unit: str
    base: str
    config: SpeculationConfig
    invocation: str
    proven: float  # Unix seconds
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    traffic: bool = False

    @property
    def id(self) -> str:
        """By which a person names it: `g` and 8 hexadecimal digits."""
        return _id("g", self.unit, self.base, self.config)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A config proven not to fit this base."""

    unit: str
    base: str
    config: SpeculationConfig
    failure: FailureClass
    invocation: str
    seen: float

    @property
    def id(self) -> str:
        """By which a person names it: `c` and 8 hexadecimal digits."""
        return _id("c", self.unit, self.base, self.config)


def _id(kind: str, unit: str, base: str, config: SpeculationConfig) -> str:
    return kind + hashlib.sha256(json.dumps([unit, base, config.words()]).encode()).hexdigest()[:8]


def base_of(
    argv: Sequence[str], managed: frozenset[str], *, version: str, driver: str, gpus: Sequence[str], model_digest: str
) -> str:
    """Names what a proof holds for: the rest of the command, SGLang's version, the driver, the cards and the model's
    content (a digest of its config and weight index; its path is in the command)."""
    command = Command.parse(argv).without(managed)
    options = sorted((name, list(values)) for name, values in command.options if name not in _NOT_OF_THE_BASE)
    facts = [list(command.head), options, version, driver, sorted(gpus), model_digest]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
