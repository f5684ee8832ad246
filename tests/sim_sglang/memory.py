"""How SGLang sizes its pools: pure arithmetic from free bytes to tokens, requests and states, or the error it raises.

The formulas are those of its sources (0.5.9 to 0.5.12 "old", 0.5.14 on "new") and were right in 14 of 14 starts on an
H200. All bytes are one rank's. Nothing here touches a card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim_sglang.profiles import GIB, Profile
from sim_sglang.release import Release

# State slots that one request needs: itself, two for the prefix cache, two for the overlapped scheduler.
EXTRA_BUFFER_RATIO = 5
MAMBA_SHARE = 0.9 / 1.9
DEFAULT_SPECULATIVE_REQUESTS = 48


class PoolError(Exception):
    """The pools cannot be sized; the text is `type: message`, as at the end of the real traceback."""


@dataclass(frozen=True)
class Demand:
    """What the flags ask of the pools."""

    tp: int
    mem_fraction: float
    draft_tokens: int  # 0 without speculation
    max_running: int | None
    max_total_tokens: int | None
    max_states: int | None
    radix: bool
    draft_counted: bool  # --speculative-draft-model-path was given


@dataclass(frozen=True)
class Pools:
    """What was sized, and its bytes."""

    tokens: int
    max_running: int
    kv: int
    draft_kv: int
    states: int | None = None
    conv: int = 0
    ssm: int = 0
    intermediate_conv: int = 0
    intermediate_ssm: int = 0

    @property
    def target(self) -> int:
        return self.kv + self.conv + self.ssm + self.intermediate_conv + self.intermediate_ssm


@dataclass(frozen=True)
class _States:
    slots: int
    requests: int
    left: int


def size_pools(release: Release, profile: Profile, demand: Demand, before: int, after: int) -> Pools:
    """The pools for `before` bytes free ahead of the weights and `after` bytes free behind them.

    Raises PoolError in the release's own words.
    """
    rest = int(after - before * (1 - demand.mem_fraction)) + profile.run_spread.get(demand.draft_tokens, 0)
    states = _states(release, profile, demand, rest) if profile.state else None
    left = states.left if states else rest
    if release.sizes_pools_last and left <= 0:
        raise PoolError(_no_room_left(demand.mem_fraction, before, after))
    tokens = _tokens(release, profile, demand, left)
    if tokens <= 0:
        raise PoolError(_not_enough_memory(release, demand.mem_fraction))
    requests = _requests(release, profile, demand, tokens)
    if not states:
        return Pools(tokens, requests, *_kv(profile, demand, tokens))
    requests = min(requests, states.requests)
    if release.degrades_hybrid and requests <= 0:
        raise PoolError(_too_small(states.slots, _ratio(demand), requests))
    return _with_states(profile, demand, tokens, requests, states.slots)


def refusal(release: Release, demand: Demand, before: int, after: int) -> PoolError:
    """What a pool that does not fit is called by this release, whatever the figures are."""
    if release.sizes_pools_last:
        return PoolError(_no_room_left(demand.mem_fraction, before, after))
    return PoolError(_not_enough_memory(release, demand.mem_fraction))


def _states(release: Release, profile: Profile, demand: Demand, rest: int) -> _States:
    slot, ratio = _slot(profile, demand), _ratio(demand)
    wanted = demand.max_running or (DEFAULT_SPECULATIVE_REQUESTS if demand.draft_tokens else 4096)
    fixed = demand.max_states or (None if demand.radix else min(wanted, DEFAULT_SPECULATIVE_REQUESTS))
    if not release.degrades_hybrid:
        rest -= slot * wanted * demand.draft_tokens
        slots = fixed if fixed is not None else int(rest * MAMBA_SHARE // slot)
        return _States(slots, min(wanted, slots // ratio), rest - slots * slot)
    if fixed is None:
        slots = int(rest * MAMBA_SHARE // (slot * (1 + demand.draft_tokens / ratio)))
    else:
        slots = fixed
    rest -= slot * min(wanted, slots // ratio) * demand.draft_tokens
    if slots <= 0:
        raise PoolError(_no_states(slots, rest, slot))
    return _States(slots, min(wanted, slots // ratio), rest - slots * slot)


def _ratio(demand: Demand) -> int:
    return EXTRA_BUFFER_RATIO if demand.radix else 1


def _slot(profile: Profile, demand: Demand) -> int:
    assert profile.state is not None
    return (profile.state.conv + profile.state.ssm) // demand.tp


def _tokens(release: Release, profile: Profile, demand: Demand, left: int) -> int:
    cell = profile.cell // demand.tp
    if release.sizes_pools_last and demand.draft_tokens and demand.draft_counted:
        cell += profile.draft_cell // demand.tp
    tokens = left // cell
    return min(tokens, demand.max_total_tokens) if demand.max_total_tokens else tokens


def _requests(release: Release, profile: Profile, demand: Demand, tokens: int) -> int:
    if demand.max_running:
        wanted = demand.max_running
    elif demand.draft_tokens:
        wanted = DEFAULT_SPECULATIVE_REQUESTS
    else:
        wanted = max(2048, min(4096, tokens * 512 // profile.context_len))
    return min(wanted, tokens // 2) if release.at_least("0.5.10") else wanted


def _kv(profile: Profile, demand: Demand, tokens: int) -> tuple[int, int]:
    draft = tokens * profile.draft_cell // demand.tp if demand.draft_tokens else 0
    return tokens * profile.cell // demand.tp, draft


def _with_states(profile: Profile, demand: Demand, tokens: int, requests: int, slots: int) -> Pools:
    assert profile.state is not None
    conv, ssm = profile.state.conv // demand.tp, profile.state.ssm // demand.tp
    drafts = (max(0, requests) + 1) * demand.draft_tokens
    kv, draft_kv = _kv(profile, demand, tokens)
    return Pools(
        tokens,
        requests,
        kv,
        draft_kv,
        states=slots,
        conv=conv * (slots + 1),
        ssm=ssm * (slots + 1),
        intermediate_conv=conv * drafts,
        intermediate_ssm=ssm * drafts,
    )


# -- the words


def _not_enough_memory(release: Release, fraction: float) -> str:
    text = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    if release.at_least("0.5.11") or not release.at_least("0.5.4"):
        return text
    name = "mem_fraction_static" if release.at_least("0.5.10") else "self.server_args.mem_fraction_static"
    return f"{text} Current value: {name}={fraction}"


def _no_room_left(fraction: float, before: int, after: int) -> str:
    least = 1 - after / before
    return (
        f"ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}."
        f" Raise --mem-fraction-static above {math.ceil(least * 1000) / 1000:.3f}"
        f" (minimum viable = 1 - available/pre = {least:.4f})."
        " If using speculative decoding, draft weights are now counted."
    )


def _no_states(slots: int, rest: int, slot: int) -> str:
    return (
        "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache."
        f" Computed max_mamba_cache_size={slots} (total_rest_memory={rest / GIB:.2f} GB,"
        f" mamba_cache_per_req={slot / (1 << 20):.2f} MB). Try: (1) reduce --max-running-requests,"
        " (2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens,"
        " or (4) use GPUs with more memory."
    )


def _too_small(slots: int, ratio: int, requests: int) -> str:
    return (
        "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests."
        f" max_mamba_cache_size={slots}, mamba_ratio={ratio}, resulting max_num_reqs={requests}."
        " Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static,"
        " or (3) use GPUs with more memory."
    )
