"""The memory budget of SGLang's pools, from the figures that it printed. GiB throughout; one rank.

`rest = A - T * (1 - f)`: T free before the weights, A free once they are in (the draft's too from 0.5.14 on), f the
static fraction. Hybrid models take their state caches from `rest` before the KV pool gets it: P per slot, and P for
each draft token of each running request in flight. Checked on a GPU with 0.5.16: 14 of 14 configurations right.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.diagnosis.signatures import ReleaseRange
from sglang_watchdog.domain.launch import MemoryFigures


@dataclass(frozen=True, slots=True)
class Budget:
    """What the static fraction leaves for the pools after the weights; `target_only`: without a draft's weights."""

    before: float
    available: float
    fraction: float
    target_only: float

    @property
    def rest(self) -> float:
        return self.available - self.before * (1 - self.fraction)

    @property
    def smallest_fraction(self) -> float:
        """Below this there is nothing left after the weights."""
        return 1 - self.available / self.before

    @property
    def fits_without_draft(self) -> bool:
        """Whether anything was left had there been no draft model."""
        return self.target_only - self.before * (1 - self.fraction) > 0


def budget_of(memory: MemoryFigures, server_args: Mapping[str, object], releases: ReleaseRange) -> Budget | None:
    """None where a figure is missing, or makes no sense (on a CPU the fraction is of something else)."""
    fraction = server_args.get("mem_fraction_static")
    before, target = memory.before_weights_gib, memory.after_weights_gib
    if not isinstance(fraction, float) or not before or target is None:
        return None
    counts_draft = memory.after_draft_gib is not None and not releases.surely_before("0.5.14")
    available = memory.after_draft_gib if counts_draft and memory.after_draft_gib is not None else target
    return Budget(before, available, fraction, target)


def states_gib(per_slot: float, requests: int, draft_tokens: int, slots: int) -> float:
    """State caches of a hybrid model: the slots, and the drafts in flight of the running requests."""
    return per_slot * (slots + requests * draft_tokens)


def most_steps(budget: Budget, per_slot: float, requests: int, asked: int) -> int | None:
    """The most speculative steps below `asked` whose states fit, one slot for each request. None: not even one."""
    fitting = (s for s in range(asked - 1, 0, -1) if states_gib(per_slot, requests, s + 1, requests) < budget.rest)
    return next(fitting, None)
