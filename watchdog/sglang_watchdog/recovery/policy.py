"""From a diagnosis and what the ledger knows to a plan. Pure: it decides and explains, the executor acts.

`REMEDY` says what each class asks for. A rollback goes down a ladder, and every ladder ends: the best proven config,
then a smaller proven one, then no speculation (where allowed), then hold and call a human. Three things keep it from
going round in circles: a config that is proven not to fit is a ceiling and never a target for its base; what a rollback
went away from is none again before it is proven anew; and there is a budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig

DAY_S = 86400.0


class Remedy(StrEnum):
    """What a class asks for, where a unit may be acted on."""

    REPORT = "report"  # no config of ours cures it: systemd's own restart policy goes on
    FREE = "free"  # end proven left-overs, start nothing
    FREE_AND_RETRY = "free_and_retry"  # something was in the way: end what is ours, try the same config once
    ROLL_BACK = "roll_back"  # where less or other speculation helps
    RESTART = "restart"  # of what hangs: end it, start the same config; what has ended by itself is reported


REMEDY = {
    FailureClass.KV_CACHE_OOM: Remedy.ROLL_BACK,
    FailureClass.CUDA_GRAPH_OOM: Remedy.ROLL_BACK,
    FailureClass.WEIGHTS_OOM: Remedy.ROLL_BACK,  # of the draft model
    FailureClass.RUNTIME_CUDA_OOM: Remedy.ROLL_BACK,
    FailureClass.SOFTWARE_EXCEPTION: Remedy.ROLL_BACK,
    FailureClass.CUDA_ERROR: Remedy.ROLL_BACK,
    FailureClass.SEGFAULT: Remedy.ROLL_BACK,
    FailureClass.BAD_ARGUMENTS: Remedy.ROLL_BACK,  # of a speculation flag
    FailureClass.MISSING_DEPENDENCY: Remedy.ROLL_BACK,  # of a draft model
    FailureClass.GPU_MEMORY_HELD: Remedy.FREE_AND_RETRY,
    FailureClass.STOP_TIMEOUT_SIGKILL: Remedy.FREE,
    FailureClass.HOST_OOM_KILL: Remedy.REPORT,
    FailureClass.CGROUP_OOM_KILL: Remedy.REPORT,
    FailureClass.HOST_MEMORY_SHORTAGE: Remedy.REPORT,
    FailureClass.SHM_OR_DISK_FULL: Remedy.REPORT,
    FailureClass.START_TIMEOUT: Remedy.REPORT,
    FailureClass.STALE_UNIT_FILE: Remedy.REPORT,
    FailureClass.START_LIMIT_HIT: Remedy.REPORT,
    FailureClass.REQUESTED_STOP: Remedy.REPORT,
    FailureClass.EXTERNAL_KILL: Remedy.REPORT,
    FailureClass.GPU_HARDWARE_FAULT: Remedy.REPORT,
    FailureClass.NCCL_ERROR: Remedy.REPORT,
    FailureClass.INTERNAL_WATCHDOG_HANG: Remedy.REPORT,
    FailureClass.UNRESPONSIVE: Remedy.RESTART,
    FailureClass.PORT_IN_USE: Remedy.FREE_AND_RETRY,  # a left-over that serves on has the port as well
    FailureClass.UNKNOWN: Remedy.REPORT,
}
CURABLE = frozenset(failure for failure, remedy in REMEDY.items() if remedy is Remedy.ROLL_BACK)
# Of these one occurrence on clean cards proves that the config does not fit: the same start would fail again. A pool
# that ran full while the server served is the traffic's doing.
PROVES_A_CEILING = frozenset({FailureClass.KV_CACHE_OOM, FailureClass.CUDA_GRAPH_OOM})
# Another config cures these only by needing less memory.
_OF_MEMORY = frozenset(
    {
        FailureClass.KV_CACHE_OOM,
        FailureClass.CUDA_GRAPH_OOM,
        FailureClass.WEIGHTS_OOM,
        FailureClass.RUNTIME_CUDA_OOM,
        FailureClass.GPU_MEMORY_HELD,
    }
)
_SERVED = frozenset({Phase.READY, Phase.SERVING, Phase.STOPPING})
_RETRY = (Step.HOLD, Step.FREE, Step.START, Step.VERIFY)
_ROLLBACK = (Step.HOLD, Step.FREE, Step.OVERRIDE, Step.RELOAD, Step.START, Step.VERIFY)


@dataclass(frozen=True, slots=True)
class Budget:
    """How often the watchdog may start a unit again, with another config or the same one. Seconds."""

    rollbacks: int
    window: float
    per_day: int
    cool_down: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision rests on beside the diagnosis. Times are Unix seconds.

    `known_good` has what is best to go back to first. `history` holds the unit's earlier incidents, newest first, but
    for those that a death of the watchdog left undone, `begun` the steps of the newest that were begun, and
    `rollbacks` those that changed the config, of the last day at least. `proven` is when a config of the unit was last
    proven: from then on the budget of the window counts anew, the day's does not.
    """

    now: float
    act: bool
    running: SpeculationConfig
    known_good: tuple[KnownGood, ...] = ()
    ceilings: tuple[SpeculationConfig, ...] = ()
    history: tuple[Incident, ...] = ()
    begun: frozenset[Step] = frozenset()
    rollbacks: tuple[Incident, ...] = ()
    starts: tuple[float, ...] = ()  # when the watchdog began to start the unit, of the last day at least
    proven: float = 0.0
    budget: Budget = Budget(rollbacks=3, window=3600, per_day=6, cool_down=0)
    paused: str = ""  # by hand, in words
    several_nodes: bool = False
    operator_stopped: bool = False
    left_overs: bool = False  # processes proven to be of an ended launch hold GPU memory
    out_of_reach: str = ""  # such ones that only a person can end, in words
    override_obstacle: str = ""  # why no config can be put in force (a shell script, no visible flags)
    allow_no_speculation: bool = False
    hangs: bool = False  # the launch runs, and makes no progress
    restart_unresponsive: bool = False
    starting: bool = False  # systemd itself has not called it started yet
    own_watchdog: bool = False  # SGLang's own may still end it


@dataclass(frozen=True, slots=True)
class Plan:
    """`steps` in order; empty where nothing is to be done. `hold` marks the ladder's end. `reason` is one sentence.
    `by_hand`: it says what only a person can do. `later`: it is to be made again, at the next look."""

    reason: str
    steps: tuple[Step, ...] = ()
    target: SpeculationConfig | None = None
    hold: bool = False
    by_hand: bool = False
    later: bool = False


def decide(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """The plan for one launch that ended, or that hangs."""
    if barred := _barred(diagnosis, facts):
        return Plan(barred)
    match REMEDY[diagnosis.failure]:
        case Remedy.FREE:
            return _after_stop_timeout(facts)
        case Remedy.FREE_AND_RETRY:
            return _free_and_retry(diagnosis, facts)
        case Remedy.ROLL_BACK if diagnosis.rollback_helps:
            return _roll_back(diagnosis, facts)
        case _ if proves_a_ceiling(diagnosis):
            return _next_rung_or_hold(diagnosis, facts)
        case Remedy.RESTART if facts.hangs:
            return _restart(facts)
        case Remedy.ROLL_BACK | Remedy.REPORT | Remedy.RESTART:
            return Plan(
                f"{diagnosis.failure} is not cured by another speculation config; systemd's own restart policy goes on."
            )


def proves_a_ceiling(diagnosis: Diagnosis) -> bool:
    """Whether the config is proven not to fit: it ran out of memory while it started."""
    return diagnosis.failure in PROVES_A_CEILING and diagnosis.phase not in _SERVED


def demotes(diagnosis: Diagnosis, plan: Plan) -> bool:
    """Whether what ran is no longer to be called known-good: it does not fit, or it failed by what another config
    cures. Memory that somebody else held says nothing against it."""
    return proves_a_ceiling(diagnosis) or (plan.target is not None and diagnosis.failure in CURABLE)


def _barred(diagnosis: Diagnosis, facts: Facts) -> str:
    if diagnosis.failure is FailureClass.REQUESTED_STOP:
        return "The stop was asked for; what was stopped by hand stays stopped."
    if not facts.act:
        return "Observing only: act = true is not set for this unit."
    if facts.paused:
        return f"The unit is {facts.paused}: nothing of it is touched."
    if facts.several_nodes:
        return "A launch of several nodes is never acted on from one of them."
    if facts.operator_stopped and diagnosis.failure is not FailureClass.STOP_TIMEOUT_SIGKILL:
        return "The unit was stopped by hand meanwhile, and stays stopped."
    return ""


def _restart(facts: Facts) -> Plan:
    """Nothing is held here: what hangs is left to a human as it is."""
    if not facts.restart_unresponsive:
        return Plan("It hangs, and is left as it is: restart_unresponsive is not set for this unit.")
    if facts.starting:
        return Plan("It hangs while systemd still starts it: TimeoutStartSec= is what ends that.")
    if facts.own_watchdog:
        return Plan("It hangs, and SGLang's own watchdog may still end it.", later=True)
    if spent := _spent(facts):
        return Plan(f"It hangs, and is left as it is: {spent}.", by_hand=True)
    return Plan("What hangs is ended, and the same config started again.", _RETRY)


def _after_stop_timeout(facts: Facts) -> Plan:
    if facts.left_overs:
        return Plan(
            "A stop that timed out says nothing against the config: only its left-overs are freed.", (Step.FREE,)
        )
    left = facts.out_of_reach or "Nothing is left to free."
    return Plan(f"A stop that timed out says nothing against the config. {left}", by_hand=bool(facts.out_of_reach))


_IN_THE_WAY = {
    FailureClass.GPU_MEMORY_HELD: "The memory is held by processes that are not proven to be this unit's",
    FailureClass.PORT_IN_USE: "No left-over of this unit holds GPU memory, so who has the port is not proven to be one",
}


def _free_and_retry(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """Free, try the same config once, then roll back where that can help. Where nothing is ours to free, systemd's
    restart is the try."""
    tried = _tried_before(diagnosis.failure, facts)
    if tried and diagnosis.rollback_helps is not False and _target(diagnosis, facts) is not None:
        return _roll_back(diagnosis, facts)
    if tried and Step.FREE in facts.begun:
        return Plan("The cards were freed once and the same config failed again.", (Step.HOLD,), hold=True)
    if not facts.left_overs:
        strangers = f"{_IN_THE_WAY[diagnosis.failure]}: a human has to decide."
        return Plan(facts.out_of_reach or strangers, by_hand=bool(facts.out_of_reach))
    if spent := _spent(facts):
        return _held(spent)
    return Plan("The cards were not clean: free them and try the same config once more.", _RETRY)


def _tried_before(failure: FailureClass, facts: Facts) -> bool:
    """The last incident was the same, lately: freed by us in vain, or with nothing to free."""
    last = facts.history[0] if facts.history else None
    return (
        last is not None
        and last.failure is failure
        and last.outcome in (Outcome.FAILED, Outcome.REPORTED)
        and (not last.steps or Step.FREE in facts.begun)
        and facts.now - last.opened < facts.budget.window
    )


def _roll_back(diagnosis: Diagnosis, facts: Facts) -> Plan:
    target = _target(diagnosis, facts)
    if target is None:
        return _held("no proven config is left to go back to")
    if facts.override_obstacle:
        return _held(f"the config {target.describe()} cannot be put in force: {facts.override_obstacle}")
    if spent := _spent(facts):
        return _held(spent)
    return Plan(f"Go back from {facts.running.describe()} to {target.describe()}.", _ROLLBACK, target)


def _next_rung_or_hold(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """An out-of-memory that the ledger does not call curable: the running config is known-good itself, or nothing is
    known. A known-good that fails is demoted by the caller, so that the next rung is a smaller one."""
    if diagnosis.rollback_helps is None or facts.running.speculates:
        return _roll_back(diagnosis, facts)
    return _held("the config that failed does not speculate, so a smaller one is not the watchdog's to choose")


def _held(why: str) -> Plan:
    return Plan(f"Held for a human: {why}.", (Step.HOLD,), hold=True)


def _target(diagnosis: Diagnosis, facts: Facts) -> SpeculationConfig | None:
    """The first proven config that may be tried; else none at all."""
    proven = (good.config for good in facts.known_good)
    last_rung = (facts.running.without_speculation(),) if facts.allow_no_speculation else ()
    left = tuple(_left(facts))
    return next((config for config in (*proven, *last_rung) if _may_try(config, diagnosis, facts, left)), None)


def _may_try(
    config: SpeculationConfig, diagnosis: Diagnosis, facts: Facts, left: tuple[SpeculationConfig, ...]
) -> bool:
    if any(config.same_as(other) for other in (facts.running, *facts.ceilings, *left)):
        return False
    return diagnosis.failure not in _OF_MEMORY or config.needs_more_than(facts.running) is not True


def _left(facts: Facts) -> Iterable[SpeculationConfig]:
    """What a rollback of the last day went away from, and was not proven since: never there and back."""
    for incident in facts.rollbacks:
        ran = incident.ran
        if ran is None or facts.now - incident.opened > DAY_S:
            continue
        if not any(good.config.same_as(ran) and good.proven > incident.opened for good in facts.known_good):
            yield ran


def _spent(facts: Facts) -> str:
    """Why no start is allowed now. The cool-down counts from the attempt, not from its end: that may never come.

    Where the clock was set back, starts and proofs may lie in the future. Such starts count, and such a proof clears
    nothing: nobody can tell which of the starts it came after."""
    done, budget = facts.starts, facts.budget
    proven = facts.proven if facts.proven <= facts.now else 0.0
    if _since(done, max(facts.now - budget.window, proven)) >= budget.rollbacks:
        return f"{budget.rollbacks} recoveries in {budget.window / 60:.0f} minutes are used up"
    if _since(done, facts.now - DAY_S) >= budget.per_day:
        return f"{budget.per_day} recoveries in one day are used up"
    if _since(done, facts.now - budget.cool_down):
        return f"the last recovery is less than {budget.cool_down:.0f} s ago"
    return ""


def _since(times: Iterable[float], start: float) -> int:
    return sum(1 for time in times if time > start)
