"""Whether going back to less or no speculation would have avoided the end. None where that cannot be known."""

import re

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.effective import Speculation, argv_of
from sglang_watchdog.diagnosis.progress import Worker
from sglang_watchdog.diagnosis.shortage import budget_in
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.diagnosis.verdict import Verdict
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.speculation import SPECULATIVE_PREFIX, Flag, SpeculationConfig

_DEPENDS = frozenset({Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.WEIGHTS_OOM, Class.RUNTIME_CUDA_OOM})
_POOLS = frozenset({Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.RUNTIME_CUDA_OOM})
_SOFTWARE = frozenset({Class.SOFTWARE_EXCEPTION, Class.CUDA_ERROR, Class.SEGFAULT, Class.BAD_ARGUMENTS})
# A refusal that names them may be of the flags alone, or of what they are for.
_NAMES_OF_SPECULATION = ("--speculative-", "peculative decoding", "speculative_")
# In as many words: without speculation it would have started.
_REFUSED = re.compile(
    r"(?:not |in)compatible with speculative decoding|(?:does not|doesn't|do not|cannot) support speculative decoding"
    r"|[Ss]peculative decoding (?:is|are) not (?:yet )?(?:supported|compatible)"
)
_UNCERTAIN = frozenset({Class.UNKNOWN, Class.UNRESPONSIVE, Class.INTERNAL_WATCHDOG_HANG})


def rollback_helps(case: Case, verdict: Verdict, speculation: Speculation) -> bool | None:
    helps = _would_help(case, verdict, speculation)
    return _with_ledger(case, verdict, helps) if case.has_ledger else helps


def _with_ledger(case: Case, verdict: Verdict, helps: bool | None) -> bool | None:
    """There has to be something proven to go back to, and it has to be another config. Where the operator lets the
    memory flags be changed too, they can be what differs."""
    argv, good = argv_of(case), case.known_good
    if good is None or not argv:
        return None if helps else helps
    ran = SpeculationConfig.of(argv, case.managed)
    if verdict.failure is Class.GPU_MEMORY_HELD:
        return False if ran.same_as(good) else None  # what is proven may need less than is left
    if ran.same_as(good):
        return False if verdict.failure in _DEPENDS | _SOFTWARE else helps
    if helps and _is_refused(verdict) and any(name.startswith(SPECULATIVE_PREFIX) for name, _ in good.flags):
        return False  # with other steps it is refused again
    if verdict.failure in _POOLS and _others(ran) != _others(good):
        return True
    return helps


def _is_refused(verdict: Verdict) -> bool:
    """Speculation as such, whatever its steps."""
    refusal = verdict.failure in (Class.BAD_ARGUMENTS, Class.SOFTWARE_EXCEPTION)
    return refusal and verdict.cause is not None and bool(_REFUSED.search(verdict.cause.text))


def _others(config: SpeculationConfig) -> tuple[Flag, ...]:
    return tuple(flag for flag in config.flags if not flag[0].startswith(SPECULATIVE_PREFIX))


def _would_help(case: Case, verdict: Verdict, speculation: Speculation) -> bool | None:
    cause = verdict.cause
    if speculation.on is False:
        return False
    if verdict.failure in _DEPENDS:
        return _memory(case, verdict, speculation)
    if verdict.failure in _SOFTWARE:
        if cause and (cause.in_speculation or _is_refused(verdict)):
            return True
        if verdict.failure is Class.BAD_ARGUMENTS:
            return None if cause and any(name in cause.text for name in _NAMES_OF_SPECULATION) else False
        return None
    return None if verdict.failure in _UNCERTAIN else False


def _memory(case: Case, verdict: Verdict, speculation: Speculation) -> bool | None:
    cause = verdict.cause
    if verdict.failure is Class.WEIGHTS_OOM:
        # The target's own weights are in then.
        return cause is not None and (cause.worker is Worker.DRAFT or cause.in_speculation)
    if speculation.on is None or (cause and cause.hit and cause.hit.means is Meaning.KV_EXHAUSTED):
        return None  # of a pool that runs full load decides, and speculation only in part
    if _is_of_other_code(cause) or _is_of_weights(cause, case):
        return None
    budget = budget_in(case)
    target_alone_exceeds = budget is not None and not budget.fits_without_draft
    return not (verdict.failure is Class.KV_CACHE_OOM and target_alone_exceeds)


def _is_of_other_code(cause: Cause | None) -> bool:
    """It ran out at work, and not in the code of speculation: less of that may leave enough, or not."""
    if cause is None or cause.failure is not Class.RUNTIME_CUDA_OOM or cause.hit is None:
        return False
    return bool(cause.hit.frames) and not cause.in_speculation


def _is_of_weights(cause: Cause | None, case: Case) -> bool:
    """The weights exceed the fraction by SGLang's own words, and no figure tells how many of them are the draft's."""
    groups = cause.hit.groups if cause and cause.hit else {}
    return "viable" in groups and float(groups["fraction"]) < float(groups["viable"]) and budget_in(case) is None
