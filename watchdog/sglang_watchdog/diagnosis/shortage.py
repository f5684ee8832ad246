"""Says in figures how much GPU memory was short, and what would have fitted: from what SGLang and PyTorch printed."""

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.effective import Speculation, releases_of, server_args_of
from sglang_watchdog.diagnosis.held import to_gib
from sglang_watchdog.diagnosis.memory_fit import Budget, States, budget_of, per_slot_of, states_of
from sglang_watchdog.domain.evidence import Evidence, Source

_NOTHING_GIB = 0.05  # the figures are printed with two digits
_CROWDED = 0.97  # a fraction above it leaves nothing for graphs and for the work itself


def budget_in(case: Case) -> Budget | None:
    return budget_of(case.timeline.memory, server_args_of(case), releases_of(case))


def describe(case: Case, cause: Cause, speculation: Speculation) -> tuple[str, ...]:
    """Sentences on a pool that could not be sized; none where a figure is missing."""
    budget = budget_in(case)
    if budget is None:
        return ()
    if budget.rest <= _NOTHING_GIB:
        return (_weights_alone(budget), *_without_draft(budget))
    states = _states(case, cause)
    tokens, requests = speculation.draft_tokens, _requests(case)
    if states and tokens and states.needed(tokens) > budget.rest:
        return (_too_many_states(states, budget, tokens, speculation),)
    left = f"The weights left {budget.rest:.1f} GiB of the budget, "
    if states or not tokens or not requests:
        return (f"{left}and that was not enough.",)
    return (
        f"{left}but the state caches for {requests} running requests with {tokens} draft tokens each "
        f"({speculation.describe()}) need more.",
    )


def _weights_alone(budget: Budget) -> str:
    exceed = f" and exceed it by {-budget.rest:.1f} GiB" if budget.rest <= -_NOTHING_GIB else ""
    return (
        f"The weights alone use up --mem-fraction-static={budget.fraction:g}{exceed} ({budget.available:.1f} of "
        f"{budget.before:.1f} GiB were free after them)."
    )


def _without_draft(budget: Budget) -> tuple[str, ...]:
    draft = budget.target_only - budget.available
    if draft < _NOTHING_GIB or budget.rest_without_draft <= _NOTHING_GIB:
        return ()
    return (
        f"{draft:.1f} GiB of them are the draft model's: without it {budget.rest_without_draft:.1f} GiB would be left "
        "for the pools.",
    )


def _too_many_states(states: States, budget: Budget, tokens: int, speculation: Speculation) -> str:
    needed = states.needed(tokens)
    return (
        f"The weights left {budget.rest:.1f} GiB of the budget, but the state caches for {states.requests} running "
        f"requests with {tokens} draft tokens each ({speculation.describe()}) need {needed:.1f} GiB, before the KV "
        f"cache gets any: {needed - budget.rest:.1f} GiB are short{_fitting(states, budget, tokens, speculation)}."
    )


def _fitting(states: States, budget: Budget, tokens: int, speculation: Speculation) -> str:
    steps = states.most_steps(budget.rest, speculation.steps or tokens - 1)
    requests = states.most_requests(budget.rest, tokens)
    fits = [f"steps {steps}"] if steps else []
    fits += [f"{requests} running requests"] if requests else []
    return f"; {' or '.join(fits)} would fit" if fits else "; no number of steps or requests would fit"


def _states(case: Case, cause: Cause) -> States | None:
    """By the size of a slot that the message tells, else by that of the launch that proved known-good."""
    text = cause.hit.groups.get("per_request_mb") if cause.hit else None
    proven = per_slot_of(case.memory_when_proven) if case.memory_when_proven else None
    per_slot = float(text) / 1024 if text else proven
    return states_of(per_slot, server_args_of(case), releases_of(case)) if per_slot else None


def _requests(case: Case) -> int | None:
    value = server_args_of(case).get("max_running_requests")
    return value if isinstance(value, int) else None


def budget_evidence(budget: Budget | None) -> tuple[Evidence, ...]:
    if budget is None:
        return ()
    text = (
        f"{budget.before:.2f} GiB free before the weights, {budget.available:.2f} after; the fraction "
        f"{budget.fraction:g} leaves {budget.rest:.2f} GiB for the pools"
    )
    return (Evidence(Source.SGLANG, text),)


def advise(case: Case, cause: Cause, speculation: Speculation) -> tuple[str, ...]:
    """What to do about a pool that could not be sized. SGLang's own advice is checked against the card first."""
    budget, groups = budget_in(case), cause.hit.groups if cause.hit else {}
    advice, met = [], "viable" in groups and float(groups["fraction"]) > float(groups["viable"])
    viable = float(groups["viable"]) if "viable" in groups else None
    if met:
        advice.append(
            f"SGLang's own advice does not help: --mem-fraction-static is {groups['fraction']} already, and it asks "
            f"for no more than {groups['viable']}, which leaves out what the state caches need."
        )
    elif viable is not None or (budget and budget.rest <= 0):
        advice.append(_raise_to(viable, budget, groups.get("fraction", "")))
    if speculation.on:
        advice.append("Use fewer speculative steps: each draft token takes memory for every running request.")
    if speculation.on or met:
        advice.append("Fewer running requests (--max-running-requests) save as much.")
    if not advice:
        advice.append("Raise --mem-fraction-static, or use a smaller context or more GPUs.")
    return tuple(advice)


def _raise_to(viable: float | None, budget: Budget | None, fraction: str) -> str:
    """What the message asks for counts what SGLang counted; what the figures give is of the weights alone."""
    least = max(viable or 0.0, budget.smallest_fraction if budget else 0.0)
    if least >= _CROWDED:
        return (
            f"No --mem-fraction-static helps on this card: the weights alone need {least:.3f} of what was free. Use "
            "more GPUs or a quantised model."
        )
    is_now = f"--mem-fraction-static is {fraction} and must" if fraction else "--mem-fraction-static must"
    return f"{is_now} be above {least:.3f} for the weights alone: the pools and their requests come on top."


def missing(cause: Cause) -> str:
    """What the allocation that failed lacked, in words with a blank before; empty where PyTorch did not say."""
    lacked = missing_gib(cause)
    if lacked <= 0 or cause.hit is None:
        return ""
    groups = cause.hit.groups
    return (
        f" {groups['tried']} were asked for and {groups['free']} were free: {lacked:.2f} GiB were short for that alone."
    )


def missing_gib(cause: Cause) -> float:
    groups = cause.hit.groups if cause.hit else {}
    if "tried" not in groups or "free" not in groups:
        return 0.0
    return to_gib(groups["tried"]) - to_gib(groups["free"])


def lower_fraction(case: Case, cause: Cause) -> str:
    """What the fraction may be at most, for what was allocated after the pools; empty where the figures do not tell."""
    budget, lacked = budget_in(case), missing_gib(cause)
    if budget is None or lacked <= 0:
        return ""
    most = budget.fraction - lacked / budget.before
    return f" (at most {most:.3f} would have left that; it was {budget.fraction:g})" if most > 0 else ""
