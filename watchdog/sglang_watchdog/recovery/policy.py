"""From a diagnosis and what the ledger knows to a plan. Pure: it decides and explains, the executor acts.

Every ladder ends: the newest known-good config, then a smaller proven one, then no speculation (where allowed), then
hold and call a human. A config that is proven not to fit is a ceiling and is never a target again for its base.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig

DAY_S = 86400.0

# Classes that another speculation config can cure. All others are never rolled back (DESIGN: what may be blamed).
CURABLE = frozenset(
    {
        FailureClass.KV_CACHE_OOM,
        FailureClass.CUDA_GRAPH_OOM,
        FailureClass.WEIGHTS_OOM,
        FailureClass.RUNTIME_CUDA_OOM,
        FailureClass.SOFTWARE_EXCEPTION,
        FailureClass.CUDA_ERROR,
        FailureClass.SEGFAULT,
        FailureClass.BAD_ARGUMENTS,  # of a speculation flag
        FailureClass.MISSING_DEPENDENCY,  # of a draft model
    }
)
# Of these one occurrence on clean cards proves that the config does not fit: the same start would fail again. A pool
# that ran full while the server served is the traffic's doing.
PROVES_A_CEILING = frozenset({FailureClass.KV_CACHE_OOM, FailureClass.CUDA_GRAPH_OOM})
_SERVED = frozenset({Phase.READY, Phase.SERVING, Phase.STOPPING})


@dataclass(frozen=True, slots=True)
class Budget:
    """How often the watchdog may start a unit again, with another config or the same one. Seconds."""

    rollbacks: int
    window: float
    per_day: int
    cool_down: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision rests on beside the diagnosis. `history` holds the unit's earlier incidents, newest first."""

    now: float
    act: bool
    running: SpeculationConfig
    known_good: tuple[KnownGood, ...] = ()
    ceilings: tuple[SpeculationConfig, ...] = ()
    history: tuple[Incident, ...] = ()
    starts: tuple[float, ...] = ()  # when the watchdog began to start the unit (Unix seconds), of the last day at least
    budget: Budget = Budget(rollbacks=3, window=3600, per_day=6, cool_down=0)
    several_nodes: bool = False
    operator_stopped: bool = False
    left_overs: bool = False  # processes proven to be of an ended launch hold GPU memory
    override_obstacle: str = ""  # why no config can be put in force (a shell script, no visible flags)
    allow_no_speculation: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`steps` in order; empty where nothing is to be done. `hold` marks the ladder's end. `reason` is one sentence."""

    reason: str
    steps: tuple[Step, ...] = ()
    target: SpeculationConfig | None = None
    hold: bool = False


def decide(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """The plan for one ended launch."""
    if barred := _barred(diagnosis, facts):
        return Plan(barred)
    match diagnosis.failure:
        case FailureClass.STOP_TIMEOUT_SIGKILL:
            return _after_stop_timeout(facts)
        case FailureClass.GPU_MEMORY_HELD:
            return _after_held_memory(diagnosis, facts)
        case failure if failure in CURABLE and diagnosis.rollback_helps:
            return _roll_back(facts)
        case _ if proves_a_ceiling(diagnosis):
            return _next_rung_or_hold(diagnosis, facts)
        case failure:
            return Plan(f"{failure} is not cured by another speculation config; systemd's own restart policy goes on.")


def proves_a_ceiling(diagnosis: Diagnosis) -> bool:
    """Whether the config is proven not to fit: it ran out of memory while it started."""
    return diagnosis.failure in PROVES_A_CEILING and diagnosis.phase not in _SERVED


def _barred(diagnosis: Diagnosis, facts: Facts) -> str:
    if diagnosis.failure is FailureClass.REQUESTED_STOP:
        return "The stop was asked for; what was stopped by hand stays stopped."
    if not facts.act:
        return "Observing only: act = true is not set for this unit."
    if facts.several_nodes:
        return "A launch of several nodes is never acted on from one of them."
    if facts.operator_stopped and diagnosis.failure is not FailureClass.STOP_TIMEOUT_SIGKILL:
        return "The unit was stopped by hand meanwhile, and stays stopped."
    return ""


def _after_stop_timeout(facts: Facts) -> Plan:
    if facts.left_overs:
        return Plan(
            "A stop that timed out says nothing against the config: only its left-overs are freed.", (Step.FREE,)
        )
    return Plan("A stop that timed out says nothing against the config, and nothing is left to free.")


def _after_held_memory(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """Free, try the same config once, then roll back. Where nothing is ours to free, systemd's restart is the try."""
    if diagnosis.rollback_helps is not False and _tried_before(facts) and _target(facts) is not None:
        return _roll_back(facts)
    if _freed_before(facts):
        return Plan("The cards were freed once and the same config failed again.", (Step.HOLD,), hold=True)
    if not facts.left_overs:
        return Plan("The memory is held by processes that are not proven to be this unit's: a human has to decide.")
    if spent := _spent(facts):
        return _held(spent)
    steps = (Step.HOLD, Step.FREE, Step.START, Step.VERIFY)
    return Plan("The cards were not clean: free them and try the same config once more.", steps)


def _tried_before(facts: Facts) -> bool:
    """The last incident was the same, lately: freed by us in vain, or with nothing to free."""
    last = facts.history[0] if facts.history else None
    return (
        last is not None
        and last.failure is FailureClass.GPU_MEMORY_HELD
        and last.outcome in (Outcome.FAILED, Outcome.REPORTED)
        and facts.now - last.opened < facts.budget.window
    )


def _freed_before(facts: Facts) -> bool:
    """The last incident freed the cards, and the config failed again all the same."""
    return _tried_before(facts) and Step.FREE in facts.history[0].steps


def _roll_back(facts: Facts) -> Plan:
    target = _target(facts)
    if target is None:
        return _held("no proven config is left to go back to")
    if facts.override_obstacle:
        return _held(f"the config {target.describe()} cannot be put in force: {facts.override_obstacle}")
    if spent := _spent(facts):
        return _held(spent)
    steps = (Step.HOLD, Step.FREE, Step.OVERRIDE, Step.RELOAD, Step.START, Step.VERIFY)
    return Plan(f"Go back from {facts.running.describe()} to {target.describe()}.", steps, target)


def _next_rung_or_hold(diagnosis: Diagnosis, facts: Facts) -> Plan:
    """An out-of-memory that the ledger does not call curable: the running config is known-good itself, or nothing is
    known. A known-good that fails is demoted by the caller, so that the next rung is a smaller one."""
    if diagnosis.rollback_helps is None or facts.running.speculates:
        return _roll_back(facts)
    return _held("the config that failed does not speculate, so a smaller one is not the watchdog's to choose")


def _held(why: str) -> Plan:
    return Plan(f"Held for a human: {why}.", (Step.HOLD,), hold=True)


def _target(facts: Facts) -> SpeculationConfig | None:
    """The newest proven config that is neither the failing one nor a ceiling; else a smaller one; else none at all."""
    for good in facts.known_good:
        if _may_try(good.config, facts):
            return good.config
    nothing = facts.running.without_speculation()
    return nothing if facts.allow_no_speculation and _may_try(nothing, facts) else None


def _may_try(config: SpeculationConfig, facts: Facts) -> bool:
    return not any(config.same_as(other) for other in (facts.running, *facts.ceilings))


def _spent(facts: Facts) -> str:
    done = facts.starts
    if _since(done, facts.now - facts.budget.window) >= facts.budget.rollbacks:
        return f"{facts.budget.rollbacks} recoveries in {facts.budget.window / 60:.0f} minutes are used up"
    if _since(done, facts.now - DAY_S) >= facts.budget.per_day:
        return f"{facts.budget.per_day} recoveries in one day are used up"
    if _since(done, facts.now - facts.budget.cool_down):
        return f"the last recovery is less than {facts.budget.cool_down:.0f} s ago"
    return ""


def _since(times: Iterable[float], start: float) -> int:
    return sum(1 for time in times if time > start)
