"""Whether a launch that runs makes progress, from what was seen of it and when. Pure: `liveness.py` looks and asks.

HTTP 200 is no progress: up to SGLang 0.5.9 main stays, and answers, when its scheduler is dead. What counts is a line
of the log while it starts, and tokens once it serves: a decode line, or an answer to a small request of ours that came
from the unit's own process. In doubt the answer is unknown, never hung.

All times are monotonic seconds of the watchdog, noted when a sign was first seen: a clock that is set makes no hang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import Diagnosis, FailureClass, RuledOut
from sglang_watchdog.domain.launch import Phase

# A request that waits behind a long prefill is no hang yet; two in a row, over a whole budget, are.
ENOUGH_PROBES = 2
_OWN_WATCHDOG_S = 300.0  # SGLang's default for --watchdog-timeout
# It looks every half of its time, so it fires after one to one and a half of it, and then rests for 5 s.
_OWN_WATCHDOG_FIRES = 1.5
_OWN_WATCHDOG_RESTS_S = 10.0
_RAREST_DECODE_LINE = 1000  # steps: a minute or so of a slow model; SGLang's default is 40


class Stage(StrEnum):
    """What a launch is busy with, as far as its progress shows in different ways."""

    LOADING = "loading"  # imports, weights, pools
    CAPTURING = "capturing"
    WARMING = "warming"
    SERVING = "serving"


_STAGES = {
    Phase.STARTING: Stage.LOADING,
    Phase.LOADING_WEIGHTS: Stage.LOADING,
    Phase.ALLOCATING_KV: Stage.LOADING,
    Phase.CAPTURING_GRAPHS: Stage.CAPTURING,
    Phase.WARMING_UP: Stage.WARMING,
    Phase.READY: Stage.SERVING,
    Phase.SERVING: Stage.SERVING,
}


class Life(StrEnum):
    LIVE = "live"
    UNKNOWN = "unknown"  # slow, or not to be told
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds without progress after which a launch hangs; 0: that stage is not judged."""

    loading: float
    capturing: float
    warming: float
    serving: float

    def of(self, stage: Stage) -> float:
        return {
            Stage.LOADING: self.loading,
            Stage.CAPTURING: self.capturing,
            Stage.WARMING: self.warming,
            Stage.SERVING: self.serving,
        }[stage]


@dataclass(frozen=True, slots=True)
class Signs:
    """When each sign was seen last; `since` is when the stage began, or the watchdog to look. What is older counts from
    there. `deaf`: why silence of the log says nothing. `mute`: why it cannot be asked, or who else could answer."""

    now: float
    phase: Phase
    since: float
    line: float = 0.0  # of its own, but for answers to clients
    bytes_moved: float = 0.0  # that its processes read or wrote, more than a log takes
    tokens: float = 0.0  # a decode line, or tokens for a probe
    prefill: float = 0.0  # a batch that is larger than a probe, ours or a health check's
    served: bool = False  # this launch has given tokens to a probe
    unanswered: int = 0  # probes in a row that the unit's own process took, since the last sign of progress
    deaf: str = ""
    mute: str = ""
    dead: str = ""  # its schedulers that are gone, in words


@dataclass(frozen=True, slots=True)
class Judgement:
    """`silent`: seconds without progress. `sentence` says why."""

    life: Life
    sentence: str
    stage: Stage | None = None
    silent: float = 0.0


def stage_of(phase: Phase) -> Stage | None:
    """None where its log tells nothing, or it is on its way out."""
    return _STAGES.get(phase)


def judge(signs: Signs, budgets: Budgets) -> Judgement:
    stage = stage_of(signs.phase)
    if stage is None:
        return Judgement(Life.UNKNOWN, "Its log does not say what it is busy with.")
    budget, silent = budgets.of(stage), signs.now - _progress(signs, stage)
    if not budget:
        return Judgement(Life.UNKNOWN, f"Its {stage} is not judged.", stage, silent)
    if silent < budget / 2:
        return Judgement(Life.LIVE, f"It made progress {silent:.0f} s ago.", stage, silent)
    if silent < budget:
        return Judgement(Life.UNKNOWN, f"No progress for {silent:.0f} s, of {budget:.0f} s.", stage, silent)
    if doubt := _doubt(signs, stage):
        return Judgement(Life.UNKNOWN, f"No progress was seen for {silent:.0f} s, but {doubt}.", stage, silent)
    return Judgement(Life.HUNG, _sentence(signs, stage, silent), stage, silent)


def _progress(signs: Signs, stage: Stage) -> float:
    match stage:
        case Stage.LOADING:
            return max(signs.since, signs.line, signs.bytes_moved)
        case Stage.CAPTURING | Stage.WARMING:
            return max(signs.since, signs.line)
        case Stage.SERVING:
            return max(signs.since, signs.tokens, signs.prefill)


def _doubt(signs: Signs, stage: Stage) -> str:
    """Why silence is no proof; empty where it is one."""
    if signs.deaf or stage is not Stage.SERVING:
        return signs.deaf
    if signs.mute:
        return signs.mute
    if not signs.served:
        return "it has never given tokens to the watchdog, so that its silence says nothing"
    if signs.unanswered < ENOUGH_PROBES:
        return f"it has left {signs.unanswered} of {ENOUGH_PROBES} requests unanswered"
    return ""


def _sentence(signs: Signs, stage: Stage, silent: float) -> str:
    if stage is Stage.SERVING:
        dead = f" Of its schedulers {signs.dead}." if signs.dead else ""
        return (
            f"The server has generated nothing for {silent:.0f} s, while its main process runs and took "
            f"{signs.unanswered} small requests.{dead}"
        )
    what = ", and its processes read and wrote next to nothing" if stage is Stage.LOADING else ""
    doing = {Stage.LOADING: "loads", Stage.CAPTURING: "captures graphs", Stage.WARMING: "warms up"}[stage]
    return f"The launch {doing} and has said nothing for {silent:.0f} s{what}."


def own_watchdog_is_due(judgement: Judgement, signs: Signs, server_args: Mapping[str, object]) -> bool:
    """Whether SGLang's own watchdog can still end it by itself, which leaves better traces than we do. There is none
    before it serves, and it lives in the scheduler, so that a dead one has none either."""
    if judgement.stage is not Stage.SERVING or signs.dead:
        return False
    timeout = server_args.get("watchdog_timeout")
    seconds = float(timeout) if isinstance(timeout, int | float) and timeout > 0 else _OWN_WATCHDOG_S
    return judgement.silent < seconds * _OWN_WATCHDOG_FIRES + _OWN_WATCHDOG_RESTS_S


def may_be_asked(server_args: Mapping[str, object]) -> str:
    """Why a server with these settings is not asked for tokens; empty where it may be. What it is not made for it might
    not survive."""
    if server_args.get("is_embedding"):
        return "it is a server of embeddings, which generates nothing"
    if server_args.get("disaggregation_mode") not in (None, "null", "None"):
        return "it does half of the work of a disaggregated server"
    if server_args.get("enable_memory_saver"):
        return "its memory can be taken away from it for a while (--enable-memory-saver), and a request then ends it"
    return ""


def is_not_told(phase: Phase, server_args: Mapping[str, object]) -> str:
    """Why the log of a server would not show that it generates; empty where it does. Then a request that waits behind
    many others looks like one that is never answered."""
    if phase is Phase.READY:  # our own first request would have been told as well
        return "its log tells nothing of requests"
    interval = server_args.get("decode_log_interval")
    if isinstance(interval, int) and interval > _RAREST_DECODE_LINE:
        return f"it logs a decode line only every {interval} steps"
    return ""


def hang(judgement: Judgement, signs: Signs, seen: tuple[Evidence, ...], known: Diagnosis) -> Diagnosis:
    """The diagnosis of a launch that hangs. `seen`: what was looked at while it hung; `known`: what its log tells."""
    because = "it runs, and SGLang's own watchdog has not ended it"
    return Diagnosis(
        failure=FailureClass.UNRESPONSIVE,
        confidence=0.95 if signs.dead else 0.85,
        summary=judgement.sentence,
        phase=signs.phase,
        rollback_helps=None,
        effective=known.effective,
        evidence=(*_evidence(judgement, signs), *seen),
        ruled_out=(RuledOut(FailureClass.INTERNAL_WATCHDOG_HANG, because),),
        advice=(
            "Read the stacks: what several processes wait for in the same place is what it hangs in.",
            "Then restart the unit. What hangs heeds no SIGTERM: its stop may last for all of TimeoutStopSec=.",
        ),
    )


def _evidence(judgement: Judgement, signs: Signs) -> tuple[Evidence, ...]:
    if judgement.stage is not Stage.SERVING:
        ago = signs.now - max(signs.since, signs.line)
        return (Evidence(Source.SGLANG, f"its last line came {ago:.0f} s ago, while {signs.phase}"),)
    tokens = signs.now - max(signs.since, signs.tokens)
    prefill = signs.now - max(signs.since, signs.prefill)
    return (
        Evidence(Source.PROBE, f"{signs.unanswered} requests for a few tokens, one after the other, were not answered"),
        Evidence(
            Source.SGLANG, f"no decode line or token for {tokens:.0f} s, no prefill of others for {prefill:.0f} s"
        ),
        *((Evidence(Source.PROCESS, f"of its schedulers {signs.dead}"),) if signs.dead else ()),
    )
