"""Ends that systemd, an operator or somebody outside brought about: the stops, the time limits, the kills.

A result of 9/KILL says nothing by itself: SGLang kills its own tree after a fault and, up to 0.5.18, after every clean
stop. Order tells: a stop that was asked for before anything failed is a stop, whatever the exit status.
"""

from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.drain import drain_advice, in_flight
from sglang_watchdog.diagnosis.effective import is_of, releases_of
from sglang_watchdog.diagnosis.manager import Said, Word
from sglang_watchdog.diagnosis.signatures import Meaning, ReleaseRange
from sglang_watchdog.diagnosis.timeline import Hit, Timeline
from sglang_watchdog.diagnosis.verdict import Verdict, of_hit, of_said, of_unit
from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.failure import RuledOut
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.unit import ExitCode, ServiceResult, UnitSnapshot

_START_STATES = frozenset({"start", "start-pre", "start-post", "condition"})


@dataclass(frozen=True, slots=True)
class Ending:
    """How a launch ended, as far as systemd and SGLang's own words about signals tell."""

    timeline: Timeline
    unit: UnitSnapshot | None  # of this launch
    stopping: Said | None
    sigterm: Hit | None
    main_exit: Said | None
    releases: ReleaseRange

    @classmethod
    def of(cls, case: Case) -> "Ending":
        unit = case.unit if case.unit and is_of(case.unit, case.timeline) else None
        timeline = case.timeline
        main_exit = timeline.word(Word.MAIN_EXIT)
        stopping = timeline.word(Word.STOPPING)
        if stopping and main_exit and stopping.order > main_exit.order:
            stopping = None  # the stop of what was left, after main had ended by itself
        return cls(timeline, unit, stopping, timeline.first(Meaning.SIGTERM), main_exit, releases_of(case))

    @property
    def result(self) -> ServiceResult:
        """systemd's Result: from the launch's own last words, else from the unit, if it is still about this launch."""
        failed = self.timeline.word(Word.FAILED)
        if failed and failed.detail in ServiceResult.__members__.values():
            return ServiceResult(failed.detail)
        if self.timeline.word(Word.SUCCEEDED):
            return ServiceResult.SUCCESS
        return self.unit.result if self.unit else ServiceResult.UNKNOWN

    @property
    def status(self) -> str:
        """`killed/9`, `exited/1`; empty where it is not known."""
        if self.main_exit:
            return self.main_exit.detail
        if self.unit and self.unit.exec_main_code is not ExitCode.NONE:
            word = {ExitCode.EXITED: "exited", ExitCode.KILLED: "killed", ExitCode.DUMPED: "dumped"}
            return f"{word[self.unit.exec_main_code]}/{self.unit.exec_main_status}"
        return ""

    @property
    def may_be_a_kill(self) -> bool:
        """By SIGKILL, or behind a container or a shell by 137."""
        return self.status in ("", "killed/9", "exited/137")

    @property
    def asked_order(self) -> int | None:
        """When the stop was asked for: the earlier of systemd's word and SGLang's."""
        orders = [said.order for said in (self.stopping, self.sigterm) if said]
        return min(orders, default=None)

    def own_kill(self) -> Hit | None:
        return self.timeline.first(Meaning.OWN_KILL)

    def proofs(self) -> tuple[Evidence, ...]:
        """The end in systemd's words, else in the unit's properties."""
        said = [s for s in (self.main_exit, self.timeline.word(Word.FAILED, Word.SUCCEEDED)) if s]
        if said:
            return tuple(map(of_said, said))
        return (of_unit(f"Result={self.result}, main process {self.status}"),) if self.status else ()


def judge_stop(ending: Ending, cause: Cause | None) -> Verdict | None:
    """A stop that was asked for before anything else was wrong. None where it was not."""
    asked = ending.asked_order
    if cause is None and asked is None:
        return _unseen_stop(ending)
    late = ending.timeline.word(Word.START_TIMED_OUT)
    if late and asked is not None and late.order < asked and (cause is None or cause.order > late.order):
        return start_timeout(ending, late)  # SGLang logs the SIGTERM that systemd then sends like any other
    command = _failed_command(ending)
    if command and asked is not None and command.order < asked and (cause is None or cause.order > command.order):
        return _stopped_for(ending, command)
    # A server that hung before its stop is told among the stops: whether that stop timed out decides.
    if asked is not None and (cause is None or cause.order > asked or cause.failure is Class.UNRESPONSIVE):
        return _asked(ending)
    return None


def _failed_command(ending: Ending) -> Said | None:
    """A command beside the server that failed while nobody asked for a stop: systemd then ends the server as well."""
    command = ending.timeline.word(Word.CONTROL_EXIT)
    failed = command is not None and command.detail.startswith("exited/") and command.detail != "exited/0"
    return command if failed and not ending.stopping else None


def _stopped_for(ending: Ending, command: Said) -> Verdict:
    return Verdict(
        Class.UNKNOWN,
        0.3,
        "systemd ended the server because a command beside it failed (ExecStartPost= or another of the unit). Nobody "
        "asked for a stop, and nothing here says that the server itself failed.",
        evidence=(of_said(command), *((of_hit(ending.sigterm),) if ending.sigterm else ()), *ending.proofs()),
        advice=("Look at what that command waits for, and for how long: a server that loads may need longer.",),
        ruled_out=(RuledOut(Class.REQUESTED_STOP, "the SIGTERM is systemd's own, for the command that failed"),),
    )


def _asked(ending: Ending) -> Verdict:
    runtime_limit = ending.timeline.word(Word.RUNTIME_LIMIT)
    if runtime_limit and not ending.stopping:
        return _runtime_limit(ending, runtime_limit)
    timed_out = _stop_timed_out(ending)
    if timed_out and ending.stopping:
        return _stop_timeout(ending, timed_out, 0.97)
    if timed_out:
        return _stop_timeout(ending, timed_out, 0.8)
    if _outlived_by_properties(ending):
        return _stop_timeout(ending, None, 0.75)
    forced = ending.timeline.first(Meaning.STOP_FORCED)
    if forced:
        return _stop_forced(ending, forced)
    evicted = ending.timeline.first(Meaning.EVICTED)
    if evicted and not ending.stopping:
        return _evicted(ending, evicted)
    client = ending.timeline.word(Word.CLIENT_KILL)
    if client and not ending.stopping:
        return client_kill(ending, client)
    silent = _silent_before(ending)
    return _restarted_for_silence(ending, silent) if silent else _requested(ending)


def _silent_before(ending: Ending) -> Hit | None:
    """The server's last word before the stop was that it gives no answer: the stop is then meant for that."""
    asked = ending.asked_order or 0
    hits = [h for h in ending.timeline.hits if h.means is Meaning.NO_PROGRESS and h.order < asked]
    return hits[-1] if hits and ending.timeline.alive <= hits[-1].time else None


def _restarted_for_silence(ending: Ending, silent: Hit) -> Verdict:
    seen = [ending.stopping] if ending.stopping else []
    return Verdict(
        Class.UNRESPONSIVE,
        0.65,
        "The server had stopped answering, and was stopped or restarted for that: it generated nothing between its "
        "failed health check and the stop.",
        evidence=(of_hit(silent), *map(of_said, seen), *ending.proofs()),
        advice=("Look at what it was doing before it fell silent; the stop itself is no failure.",),
        ruled_out=(RuledOut(Class.STOP_TIMEOUT_SIGKILL, "no stop state timed out"),),
    )


def _stop_timed_out(ending: Ending) -> Said | None:
    """A stop state that timed out. `State … timed out` is logged too when a crash leaves a stuck child behind: then
    main has ended before, and the result is another."""
    said = ending.timeline.word(Word.STATE_TIMED_OUT)
    if said and said.detail not in _START_STATES and ending.result in (ServiceResult.TIMEOUT, ServiceResult.UNKNOWN):
        return said
    return None


def _outlived_by_properties(ending: Ending) -> bool:
    """The unit's properties say so of a server that was up, where systemd's own lines are not in the log."""
    unit = ending.unit
    if unit is None or unit.service_type not in ("simple", "exec") or unit.runtime_max is not None:
        return False  # a start, or a run time, can have timed out as well
    by_kill = ending.result is ServiceResult.TIMEOUT and ending.status == "killed/9"
    return by_kill and (ending.timeline.reached(Phase.READY) or ending.timeline.reached(Phase.SERVING))


def _stop_timeout(ending: Ending, timed_out: Said | None, confidence: float) -> Verdict:
    limit = ending.unit.stop_timeout if ending.unit else None
    after = f" after TimeoutStopSec={limit:g} s" if limit else ""
    busy = in_flight(ending.timeline)
    with_requests = f" with {busy} requests still in flight" if busy else ""
    silent = _silent_before(ending)
    before = (of_hit(silent),) if silent else ()
    hung = " It had stopped answering its health checks before." if silent else ""
    killing = ending.timeline.word(Word.KILLING)
    seen = [said for said in (ending.stopping, timed_out, killing) if said]
    asked = ending.asked_order is not None
    begin = "A stop was asked for" if asked else "systemd was stopping it (the request is not in this log)"
    return Verdict(
        Class.STOP_TIMEOUT_SIGKILL,
        confidence,
        f"{begin}, the server was still shutting down{with_requests}, and systemd ended it with SIGKILL{after}. "
        f"That says nothing against its configuration.{hung}",
        evidence=(
            *before,
            *_sigterm(ending),
            *map(of_said, seen),
            *_drain_line(ending),
            *ending.proofs(),
        ),
        advice=drain_advice(ending.timeline, ending.unit, ending.releases),
        ruled_out=(
            RuledOut(Class.HOST_OOM_KILL, "systemd itself sent the SIGKILL, after its stop timeout"),
            RuledOut(Class.EXTERNAL_KILL, "the stop was asked of systemd, and systemd sent the SIGKILL"),
        ),
    )


def _stop_forced(ending: Ending, hit: Hit) -> Verdict:
    busy = in_flight(ending.timeline)
    with_requests = f" with {busy} requests still in flight" if busy else ""
    return Verdict(
        Class.STOP_TIMEOUT_SIGKILL,
        0.9,
        f"A stop was asked for, the server was still shutting down{with_requests}, and whoever supervises it "
        "ended it with SIGKILL. That says nothing against its configuration.",
        evidence=(*_sigterm(ending), of_hit(hit), *ending.proofs()),
        advice=(
            "Give the stop more time there (`docker stop --time`, `podman run --stop-timeout`, `stopwaitsecs=`, a "
            "pod's grace period).",
        ),
        ruled_out=(
            RuledOut(Class.EXTERNAL_KILL, "the supervisor that stopped it says itself that it sent the SIGKILL"),
        ),
    )


def _sigterm(ending: Ending) -> tuple[Evidence, ...]:
    return (of_hit(ending.sigterm),) if ending.sigterm and not ending.stopping else ()


def _drain_line(ending: Ending) -> tuple[Evidence, ...]:
    hit = ending.timeline.first(Meaning.STOPPING)
    return (of_hit(hit),) if hit and ending.timeline.drain else ()


def _requested(ending: Ending) -> Verdict:
    by_systemd = ending.stopping is not None
    how = "by systemd" if by_systemd else _how(ending.sigterm)
    in_time = ending.status or ending.timeline.word(Word.STOPPED, Word.SUCCEEDED)
    died = ending.timeline.first(Meaning.CHILD_DIED)
    ruled_out = [RuledOut(Class.STOP_TIMEOUT_SIGKILL, "no stop state timed out")]
    note = ""
    if died and died.groups.get("code") == "-15":
        ruled_out.append(RuledOut(Class.SOFTWARE_EXCEPTION, "the child's exit code -15 is the stop's own SIGTERM"))
        note = " (`crashed with exit code -15` is that stop: systemd signals all processes of the unit)"
    elif ending.status == "killed/9":
        ruled_out.append(RuledOut(Class.EXTERNAL_KILL, "SGLang ends its own tree with SIGKILL when a stop is done"))
        note = " (9/KILL is how this release of SGLang ends a stop)"
    seen = [ending.stopping] if ending.stopping else []
    return Verdict(
        Class.REQUESTED_STOP,
        0.95 if by_systemd else 0.75 if ending.sigterm else 0.6,
        f"The server was stopped on request, {how}, and ended in time{note}. This is no failure."
        if in_time
        else f"The server was asked to stop, {how}. Whether it ended in time is not in this log.",
        evidence=(*map(of_said, seen), *((of_hit(ending.sigterm),) if ending.sigterm else ()), *ending.proofs()),
        ruled_out=tuple(ruled_out),
    )


def _how(signal: Hit | None) -> str:
    if signal is None:
        return "by whom is not in this log"
    return "from its terminal" if signal.text == "KeyboardInterrupt" else "with SIGTERM"


def _runtime_limit(ending: Ending, said: Said) -> Verdict:
    return Verdict(
        Class.EXTERNAL_KILL,
        0.9,
        "systemd ended the server because it had run for RuntimeMaxSec= of its unit. No stop was asked for, and "
        "nothing was wrong with the server.",
        evidence=(of_said(said), *ending.proofs()),
        advice=("Raise or remove RuntimeMaxSec= in the unit if the server is to run on.",),
        ruled_out=(RuledOut(Class.STOP_TIMEOUT_SIGKILL, "no stop was asked for: the unit's run time was over"),),
    )


def _evicted(ending: Ending, hit: Hit) -> Verdict:
    return Verdict(
        Class.EXTERNAL_KILL,
        0.85,
        "Another supervisor took the server off this machine: it withdrew its place and then ended it.",
        evidence=(of_hit(hit), *((of_hit(ending.sigterm),) if ending.sigterm else ()), *ending.proofs()),
        advice=("Look in that supervisor's own log for the reason; the server itself did not fail.",),
    )


def start_timeout(ending: Ending, said: Said) -> Verdict:
    return Verdict(
        Class.START_TIMEOUT,
        0.9,
        "The server was not up within the unit's start timeout, and systemd ended it while it was still starting.",
        evidence=(of_said(said), *ending.proofs()),
        advice=("Raise TimeoutStartSec= in the unit, or find out what made the start so slow.",),
        ruled_out=(RuledOut(Class.STOP_TIMEOUT_SIGKILL, "it was the start that timed out, not a stop"),),
    )


def client_kill(ending: Ending, said: Said) -> Verdict:
    return Verdict(
        Class.EXTERNAL_KILL,
        0.95,
        f"Somebody sent {said.detail} to the server through systemd (`systemctl kill`).",
        evidence=(of_said(said), *ending.proofs()),
        ruled_out=(
            RuledOut(Class.HOST_OOM_KILL, "systemd names a client's request as the sender of the signal"),
            RuledOut(Class.STOP_TIMEOUT_SIGKILL, "no stop was asked for"),
        ),
    )


def _unseen_stop(ending: Ending) -> Verdict | None:
    """A stop whose request is not in the excerpt, told by what only a stop brings about."""
    timeline = ending.timeline
    runtime_limit = timeline.word(Word.RUNTIME_LIMIT)
    if runtime_limit:
        return _runtime_limit(ending, runtime_limit)
    timed_out = _stop_timed_out(ending)
    outlived = timed_out and not (ending.main_exit and ending.main_exit.order < timed_out.order)
    silent = timeline.first(Meaning.NO_PROGRESS)
    if timed_out and outlived and silent:
        return _gave_no_answer(ending, silent, timed_out)
    if timed_out and outlived and not timeline.complete and not timeline.word(Word.START_TIMED_OUT):
        return _stop_timeout(ending, timed_out, 0.75)
    forced, evicted = timeline.first(Meaning.STOP_FORCED), timeline.first(Meaning.EVICTED)
    if forced or evicted:
        return _stop_forced(ending, forced) if forced else _evicted(ending, evicted) if evicted else None
    control = timeline.word(Word.CONTROL_EXIT)
    stopped = timeline.word(Word.STOPPED)
    if control and control.detail == "killed/15" and stopped and not timeline.word(Word.START_TIMED_OUT):
        return _superseded(control, stopped)
    shut = timeline.first(Meaning.STOPPING)
    return _requested(ending) if shut and _ended_by_itself(ending) and not timeline.failures else None


def _gave_no_answer(ending: Ending, silent: Hit, timed_out: Said) -> Verdict:
    return Verdict(
        Class.UNRESPONSIVE,
        0.65,
        "The server had stopped answering, and did not end on SIGTERM either: the stop that timed out came of that, "
        "and not that of the stop.",
        evidence=(of_hit(silent), of_said(timed_out), *ending.proofs()),
        advice=("Look at what it was doing before it fell silent: a stack dump (`py-spy dump`) of a hang tells most.",),
        ruled_out=(RuledOut(Class.STOP_TIMEOUT_SIGKILL, "it gave no answer before the stop already"),),
    )


def _ended_by_itself(ending: Ending) -> bool:
    """An end that goes with a server's own word that it shuts down; a crash has another one."""
    return not ending.own_kill() and ending.status in ("", "exited/0", "killed/15", "killed/2")


def _superseded(control: Said, stopped: Said) -> Verdict:
    return Verdict(
        Class.REQUESTED_STOP,
        0.75,
        "The start was called off by another stop or restart, which ended the command that runs before the server. "
        "This is no failure of the server.",
        evidence=(of_said(control), of_said(stopped)),
        ruled_out=(RuledOut(Class.START_TIMEOUT, "no start timeout was reported"),),
    )
