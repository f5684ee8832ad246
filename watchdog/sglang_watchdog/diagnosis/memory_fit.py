"""The memory budget of SGLang's pools, from the figures that it printed. GiB throughout; one rank.

`rest = A - T * (1 - f)`: T free before the weights, A free once they are in (the draft's too from 0.5.14 on), f the
static fraction. Hybrid models take their state caches from `rest` before the KV pool gets it: P per slot, and P for
each draft token of each running request in flight. Checked on a GPU with 0.5.16: 14 of 14 configurations right.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.diagnosis.signatures import ReleaseRange
from sglang_watchdog.domain.launch import MemoryFigures

_SHARE = 0.9  # SGLang's default of --mamba-full-memory-ratio: states against the KV pool
_BUFFERED = ("extra_buffer",)  # strategies of the radix cache that keep two more slots for each request


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
        return self.rest_without_draft > 0

    @property
    def rest_without_draft(self) -> float:
        return self.target_only - self.before * (1 - self.fraction)


def budget_of(memory: MemoryFigures, server_args: Mapping[str, object], releases: ReleaseRange) -> Budget | None:
    """None where a figure is missing, or makes no sense (on a CPU the fraction is of something else)."""
    fraction = server_args.get("mem_fraction_static")
    before, target = memory.before_weights_gib, memory.after_weights_gib
    if not isinstance(fraction, float) or not before or target is None:
        return None
    counts_draft = memory.after_draft_gib is not None and not releases.surely_before("0.5.14")
    available = memory.after_draft_gib if counts_draft and memory.after_draft_gib is not None else target
    return Budget(before, available, fraction, target)


@dataclass(frozen=True, slots=True)
class States:
    """The state caches of a hybrid model, as a launch asks for them.

    `requests` run at once on one worker. `slots` is their number where it is fixed, None where SGLang divides what is
    left (`share`) between states and KV pool. `every_request`: the states of drafts in flight are reserved for all
    requests that are asked for (releases up to 0.5.12), not only for those that the slots allow.
    """

    per_slot: float
    requests: int
    slots: int | None
    slots_per_request: int
    share: float
    every_request: bool

    def needed(self, draft_tokens: int, requests: int | None = None) -> float:
        """The least `rest` with which a server starts that can run one request. The KV pool comes on top."""
        wanted = self.requests if requests is None else requests
        if self.slots is not None:
            slots = wanted if self.slots == self.requests else self.slots
            drafting = wanted if self.every_request else min(wanted, slots // self.slots_per_request)
            return self.per_slot * (slots + drafting * draft_tokens)
        if self.every_request:
            return self.per_slot * (wanted * draft_tokens + self.slots_per_request * (1 + self.share) / self.share)
        return self.per_slot * (self.slots_per_request + draft_tokens) * (1 + self.share) / self.share

    def most_steps(self, rest: float, asked: int) -> int | None:
        """The most speculative steps below `asked` that fit. None: not even one."""
        return next((steps for steps in range(asked - 1, 0, -1) if self.needed(steps + 1) < rest), None)

    def most_requests(self, rest: float, draft_tokens: int) -> int | None:
        """The most running requests below those asked for that fit with these draft tokens. None: not even one."""
        fewer = range(self.requests - 1, 0, -1)
        return next((count for count in fewer if self.needed(draft_tokens, count) < rest), None)


def states_of(per_slot: float, server_args: Mapping[str, object], releases: ReleaseRange) -> States | None:
    """None where the number of running requests is not printed."""
    requests = server_args.get("max_running_requests")
    if not isinstance(requests, int) or requests < 1:
        return None
    workers = server_args.get("dp_size") if server_args.get("enable_dp_attention") is True else 1
    requests = max(1, requests // workers) if isinstance(workers, int) and workers > 1 else requests
    radix = server_args.get("disable_radix_cache") is not True
    asked, share = server_args.get("max_mamba_cache_size"), server_args.get("mamba_full_memory_ratio")
    strategy = server_args.get("mamba_radix_cache_strategy") or server_args.get("mamba_scheduler_strategy")
    return States(
        per_slot=per_slot,
        requests=requests,
        slots=asked if isinstance(asked, int) and asked > 0 else None if radix else requests,
        slots_per_request=1 if not radix else 5 if strategy in _BUFFERED else 3,
        share=share if isinstance(share, float) and share > 0 else _SHARE,
        every_request=releases.surely_before("0.5.14"),
    )


def per_slot_of(memory: MemoryFigures) -> float | None:
    """One slot's size, by the line about the state caches of a launch that made them (one slot is for padding)."""
    if not memory.mamba_gib or not memory.mamba_slots:
        return None
    return memory.mamba_gib / (memory.mamba_slots + 1)
