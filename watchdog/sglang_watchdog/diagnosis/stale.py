"""Whether a launch ran another definition than the one that the operator believed in.

Blame goes to the command that ran. A difference to the file on disk is a class of its own only where it explains the
end (the fix was on disk, and not in force) or the surprise (a launch that began after the file had changed served with
the old settings); else it is advice.
"""

from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.effective import Speculation, is_of, plain_command, server_args_of
from sglang_watchdog.diagnosis.verdict import Verdict, of_unit
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.failure import RuledOut
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot

_DEPENDS = frozenset({Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.RUNTIME_CUDA_OOM, Class.WEIGHTS_OOM})
_NO_FAILURE = frozenset({Class.REQUESTED_STOP, Class.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Difference:
    """What ran, against what the definition asks for now. `from_start`: it asked for it when the launch began already;
    None where that is not known."""

    ran: str
    wanted: str
    less_wanted: bool  # the definition asks for less speculation than ran
    from_start: bool | None
    evidence: tuple[Evidence, ...]
    shadowing: str = ""  # the drop-in that undoes what the unit file asks for


def stale(case: Case, verdict: Verdict, ran: Speculation) -> Verdict | None:
    """The verdict that staleness makes of another one, None where it explains nothing."""
    difference = difference_of(case, ran)
    if difference is None:
        return None
    explains_end = verdict.failure in _DEPENDS and difference.less_wanted and difference.from_start
    # A surprise that was told while it served is told; its end is then an end like any other.
    no_failure = frozenset[Class]() if case.surprise_told else _NO_FAILURE
    surprises = verdict.failure in no_failure and difference.from_start is not False and _ran_far(case)
    if explains_end:
        return _verdict(difference, verdict, f"{verdict.summary} That came of the old definition")
    return _verdict(difference, verdict, "It was an old definition that ran") if surprises else None


def _ran_far(case: Case) -> bool:
    reached = case.timeline.reached
    return reached(Phase.READY) or reached(Phase.SERVING) or case.timeline.decoding is not None


def _verdict(difference: Difference, verdict: Verdict, begin: str) -> Verdict:
    sure = difference.from_start is True
    return Verdict(
        Class.STALE_UNIT_FILE,
        0.9 if sure else 0.7,
        f"{begin}: this launch ran {difference.ran}, while the unit's {_asker(difference)} asks for "
        f"{difference.wanted}. "
        f"{difference.wanted.capitalize()} has not been tried by it.",
        evidence=(*difference.evidence, *verdict.evidence),
        advice=(_what_to_do(difference),),
        ruled_out=(
            *verdict.ruled_out,
            RuledOut(verdict.failure, "that is how this launch ended, but it was not running what was meant"),
        ),
        phase=verdict.phase,
        cause=verdict.cause,
    )


def _asker(difference: Difference) -> str:
    return f"file, which {difference.shadowing} shadows," if difference.shadowing else "definition"


def _what_to_do(difference: Difference) -> str:
    if difference.shadowing:
        return (
            f"Take ExecStart= out of {difference.shadowing} or change it there: a reload does not help while it "
            "shadows the unit file. Do not judge the new settings by this launch."
        )
    return "Run `systemctl daemon-reload`, then restart the unit; do not judge the new settings by this launch."


def stale_advice(case: Case, ran: Speculation) -> tuple[str, ...]:
    """For an end that staleness does not explain."""
    difference = difference_of(case, ran)
    if difference and difference.shadowing:
        return (f"The unit file asks for {difference.wanted}, but {difference.shadowing} shadows it.",)
    if difference:
        return (
            f"The unit's definition asks for {difference.wanted}; this launch ran {difference.ran}. The next start "
            "uses the definition that systemd has loaded then.",
        )
    if case.unit and case.unit.need_daemon_reload and not _same_bytes(case):
        return ("The unit's files changed since systemd loaded them: `systemctl daemon-reload` puts them in force.",)
    return ()


def difference_of(case: Case, ran: Speculation) -> Difference | None:
    wanted = case.intended or _loaded_now(case.unit)
    if wanted is None or ran.on is None:
        return None
    if not _differ(wanted, ran):
        return _shadowed(case, ran)
    return Difference(
        ran=ran.describe(),
        wanted=wanted.describe() if wanted.flags else "no speculation",
        less_wanted=_less(wanted, ran),
        from_start=_from_start(case),
        evidence=_evidence(case, ran, wanted),
    )


def _shadowed(case: Case, ran: Speculation) -> Difference | None:
    """What ran is what the definition as a whole asks for; but the unit file was changed, and a drop-in undid that."""
    shadowed = case.shadowed
    if shadowed is None or not _differ(shadowed.asked, ran):
        return None
    began = case.launch.started if case.launch else case.timeline.began
    asks = shadowed.asked.describe() if shadowed.asked.flags else "no speculation"
    text = f"{shadowed.drop_in} sets ExecStart= and shadows the unit file, which asks for {asks}"
    return Difference(
        ran=ran.describe(),
        wanted=asks,
        less_wanted=_less(shadowed.asked, ran),
        from_start=shadowed.changed <= began,
        evidence=(Evidence(Source.FILE, text, shadowed.changed),),
        shadowing=shadowed.drop_in,
    )


def _less(wanted: SpeculationConfig, ran: Speculation) -> bool:
    steps = wanted.steps if wanted.speculates or wanted.flags else 0
    return (steps or 0) < (ran.steps or (ran.draft_tokens or 1) - 1)


def _loaded_now(unit: UnitSnapshot | None) -> SpeculationConfig | None:
    command = plain_command(unit) if unit else ()
    return SpeculationConfig.of(command) if command else None


def _differ(wanted: SpeculationConfig, ran: Speculation) -> bool:
    """By what is written out only: SGLang fills in the rest itself, and NEXTN becomes EAGLE."""
    if wanted.speculates != bool(ran.on):
        return True
    if wanted.steps is not None and ran.steps is not None:
        return wanted.steps != ran.steps
    if wanted.draft_tokens is not None and ran.draft_tokens is not None:
        return wanted.draft_tokens != ran.draft_tokens
    return False


def _from_start(case: Case) -> bool | None:
    began = case.launch.started if case.launch else case.timeline.began
    if case.disk_changed is not None:
        return case.disk_changed <= began
    # On a live host every deploy ends a launch whose definition has just changed: without a time it is taken for one.
    return False if case.has_ledger else None


def _evidence(case: Case, ran: Speculation, wanted: SpeculationConfig) -> tuple[Evidence, ...]:
    line = case.timeline.verifying
    if ran.source == "accept len and accept rate" and line:
        text = (
            f"accept len {line.accept_len:.2f}, accept rate {line.accept_rate:.2f}: that is {ran.draft_tokens} draft "
            f"tokens, steps {ran.steps}"
        )
        shown = Evidence(Source.SGLANG, text, line.time or None)
    else:
        shown = Evidence(Source.SGLANG if server_args_of(case) else Source.PROCESS, f"{ran.source}: {ran.describe()}")
    asks = f"the unit's definition asks for {wanted.describe() if wanted.flags else 'no speculation'}"
    changed = _changed(case)
    return (shown, Evidence(Source.FILE, asks) if case.intended else of_unit(asks), *changed)


def _same_bytes(case: Case) -> bool:
    """systemd goes by the time of a file: it asks for a reload when the same bytes are written again."""
    return case.loaded is not None and case.on_disk is not None and not case.loaded.differs_from(case.on_disk)


def _changed(case: Case) -> tuple[Evidence, ...]:
    if case.loaded and case.on_disk:
        paths = case.loaded.differs_from(case.on_disk)
        if paths:
            return (Evidence(Source.FILE, f"changed since systemd loaded them: {', '.join(paths)}", case.disk_changed),)
    if case.unit and case.unit.need_daemon_reload and is_of(case.unit, case.timeline) and not _same_bytes(case):
        return (of_unit("NeedDaemonReload=yes"),)
    return ()
