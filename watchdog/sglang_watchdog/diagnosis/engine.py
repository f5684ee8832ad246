"""Why a launch ended: one pure function from a case to a diagnosis.

Order decides before anything else: what was asked for or went wrong first is the cause, what came after it follows
from it. Then the figures (was the memory held by others?), then the definition (was it the one that was meant?).
"""

from dataclasses import replace

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause, first_cause
from sglang_watchdog.diagnosis.effective import Speculation, effective_settings, speculation_of, wordings_of
from sglang_watchdog.diagnosis.ending import Ending, judge_stop
from sglang_watchdog.diagnosis.explain import explain
from sglang_watchdog.diagnosis.held import held_memory
from sglang_watchdog.diagnosis.rollback import rollback_helps
from sglang_watchdog.diagnosis.signatures import catalog
from sglang_watchdog.diagnosis.stale import stale, stale_advice
from sglang_watchdog.diagnosis.starting import judge_kill, judge_manager, kernel_unseen, unknown
from sglang_watchdog.diagnosis.verdict import Verdict
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.outside import kernel_lines
from sglang_watchdog.domain.secrets import redact_mapping, redact_text

_GPU_OOM = frozenset({Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.WEIGHTS_OOM, Class.RUNTIME_CUDA_OOM})
_MOST_EVIDENCE = 12
_KERNEL_WOULD_TELL = frozenset({Class.UNKNOWN, Class.EXTERNAL_KILL, Class.CUDA_ERROR, Class.NCCL_ERROR})


def diagnose(case: Case) -> Diagnosis:
    """Never raises for what a case holds: what is not proven is `unknown`."""
    speculation = speculation_of(case)
    ending = Ending.of(case)
    verdict = _judge(case, ending, speculation)
    verdict = stale(case, verdict, speculation) or replace(
        verdict, advice=(*verdict.advice, *stale_advice(case, speculation))
    )
    return _diagnosis(case, verdict, speculation)


def _judge(case: Case, ending: Ending, speculation: Speculation) -> Verdict:
    if case.ended_for:
        return _ended_by_us(case)
    cause = first_cause(case)
    stop = judge_stop(ending, cause)
    if stop:
        return stop
    if cause:
        return _caused(case, ending, cause, speculation)
    return judge_manager(case, ending) or judge_kill(case, ending) or unknown(case, ending)


def _ended_by_us(case: Case) -> Verdict:
    """What the log says after that follows from the kill."""
    told = "The watchdog's own ledger: it brought this launch down, because it made no progress."
    return Verdict(Class.UNRESPONSIVE, 0.95, case.ended_for, evidence=(Evidence(Source.LEDGER, told),))


def _caused(case: Case, ending: Ending, cause: Cause, speculation: Speculation) -> Verdict:
    held = held_memory(case, cause) if cause.failure in _GPU_OOM else None
    verdict = explain(case, cause, speculation, held)
    context = tuple(e for e in ending.proofs() if e not in verdict.evidence)
    # A kill is ruled out where one is to be seen, or where the end is not in the input.
    ruled_out = (r for r in verdict.ruled_out if r.failure is not Class.EXTERNAL_KILL or ending.may_be_a_kill)
    return replace(verdict, evidence=(*verdict.evidence, *context), ruled_out=tuple(ruled_out))


def _diagnosis(case: Case, verdict: Verdict, speculation: Speculation) -> Diagnosis:
    return Diagnosis(
        failure=verdict.failure,
        confidence=verdict.confidence,
        summary=_sentence(redact_text(verdict.summary)),
        phase=_phase(case, verdict),
        rollback_helps=rollback_helps(case, verdict, speculation),
        effective=redact_mapping(effective_settings(case)),
        evidence=tuple(map(_redacted, verdict.evidence[:_MOST_EVIDENCE])),
        ruled_out=tuple(r for r in verdict.ruled_out if r.failure is not verdict.failure),
        advice=tuple(map(redact_text, (*verdict.advice, *_reading_notes(case, verdict)))),
    )


def _phase(case: Case, verdict: Verdict) -> Phase:
    if verdict.phase and verdict.phase is not Phase.UNKNOWN:
        return verdict.phase
    if verdict.failure in (Class.REQUESTED_STOP, Class.STOP_TIMEOUT_SIGKILL):
        return Phase.STOPPING
    return case.timeline.phase


def _sentence(text: str) -> str:
    """A secret at the end of a quotation takes the full stop with it when it is redacted."""
    return text if text.endswith(".") else f"{text}."


def _redacted(evidence: Evidence) -> Evidence:
    """Without secrets, and on one line without control characters: a log line must not steer a terminal."""
    printable = "".join(char if char.isprintable() else " " for char in evidence.text)
    return replace(evidence, text=redact_text(printable).strip())


def _reading_notes(case: Case, verdict: Verdict) -> tuple[str, ...]:
    """What the input itself lacks."""
    notes = [*case.input_notes]
    if case.timeline.lost_fields and not case.timeline.server_args:
        notes.append("The journal was written without --all, so long lines (server_args) are missing from it.")
    if kernel_unseen(case) and verdict.failure in _KERNEL_WOULD_TELL:
        notes.append(kernel_lines(case.inside))
    if case.timeline.suppressed:
        notes.append("journald dropped lines of this unit (rate limit): the log has gaps.")
    if verdict.cause or verdict.failure is Class.UNKNOWN:
        notes.extend(_release_note(case))
    return tuple(notes)


def _release_note(case: Case) -> tuple[str, ...]:
    """That the wordings of all releases were tried, and why."""
    if wordings_of(case).known:
        return ()
    version, known = case.launch.version if case.launch else "", catalog().known
    if not version:
        return ("SGLang's release cannot be told from this log: the wordings of all known releases were tried.",)
    return (
        f"SGLang {version} is not among the releases whose wordings are known ({known.since} to {known.until}): those "
        "of all of them were tried.",
    )
