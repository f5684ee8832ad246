"""Ends for which systemd's words are all that there is: starts that failed or took too long, and kills from outside."""

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.ending import Ending, client_kill, start_timeout
from sglang_watchdog.diagnosis.manager import Said, Word
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.diagnosis.verdict import Verdict, of_hit, of_said, of_unit
from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.failure import RuledOut
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.unit import ServiceResult

# systemd's own exit statuses: a step before the program could not be done (systemd.exec(5)).
_EXEC_STATUSES = range(200, 246)


def judge_manager(case: Case, ending: Ending) -> Verdict | None:
    """The first rule that has its proof, in order of how near its words are to a cause."""
    rules = (
        *(_memory_result, _native_end, _could_not_execute, _could_not_prepare, _refused_unit, _start_timeout),
        *(_client_kill, _usage, _start_limit),
    )
    verdicts = (rule(case, ending) for rule in rules)
    return next((verdict for verdict in verdicts if verdict), None)


def _memory_result(_case: Case, ending: Ending) -> Verdict | None:
    """Only the unit's Result tells: the words are not in the log."""
    if ending.result is not ServiceResult.OOM_KILL:
        return None
    limited = bool(ending.unit and ending.unit.memory_max)
    where = "the memory limit of its unit (MemoryMax=)" if limited else "the host's memory"
    return Verdict(
        Class.CGROUP_OOM_KILL if limited else Class.HOST_OOM_KILL,
        0.8,
        f"The kernel killed a process of the server because {where} ran out. GPU memory has no part in it.",
        evidence=ending.proofs(),
        advice=("Look at the kernel's log (`journalctl -k`) for what used the memory.",),
        ruled_out=(RuledOut(Class.EXTERNAL_KILL, "systemd saw the OOM killer at work in the unit's group"),),
    )


# Signals that a process brings upon itself; behind a container or a shell they are 128 and the number.
_OWN_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
_BY_SYSTEMD = (ServiceResult.WATCHDOG, ServiceResult.TIMEOUT)  # which may be told to send SIGABRT


def _native_end(case: Case, ending: Ending) -> Verdict | None:
    """The main process ended by a signal of its own doing, and its log says nothing of it."""
    code, _, status = ending.status.partition("/")
    number = (whole(status) or 0) - 128 * (code == "exited")
    asked_by_systemd = case.timeline.word(Word.WATCHDOG, Word.START_TIMED_OUT) or ending.result in _BY_SYSTEMD
    if number not in _OWN_SIGNALS or asked_by_systemd:
        return None
    full = number == 7
    what = "it touched a page that a full /dev/shm could not give" if full else "its native code is at fault"
    return Verdict(
        Class.SHM_OR_DISK_FULL if full else Class.SEGFAULT,
        0.6 if full else 0.75,
        f"The server's own process ended by {_OWN_SIGNALS[number]}: {what}.",
        evidence=ending.proofs(),
        advice=("See `df -h /dev/shm`." if full else "Look for a core dump (`coredumpctl`).",),
        ruled_out=(RuledOut(Class.EXTERNAL_KILL, "nobody kills with this signal: a process brings it upon itself"),),
    )


def _could_not_execute(_case: Case, ending: Ending) -> Verdict | None:
    code, _, status = ending.status.partition("/")
    if code != "exited" or whole(status) not in _EXEC_STATUSES:
        return _not_found(ending) if ending.status in _SHELL_STATUSES else None
    return Verdict(
        Class.MISSING_DEPENDENCY,
        0.9,
        f"The program never ran: systemd could not execute it (status {status}). The file, its rights or its security "
        "label are wrong.",
        evidence=ending.proofs(),
        phase=Phase.STARTING,
    )


# A shell's or a container client's word for a program that is not there, or may not be run.
_SHELL_STATUSES = ("exited/126", "exited/127")


def _not_found(ending: Ending) -> Verdict:
    return Verdict(
        Class.MISSING_DEPENDENCY,
        0.75,
        "A program or a library that the command needs was not found or may not be run (status 126 or 127).",
        evidence=ending.proofs(),
        phase=Phase.STARTING,
    )


def _refused_unit(case: Case, _ending: Ending) -> Verdict | None:
    said = case.timeline.word(Word.BAD_UNIT)
    if not said:
        return None
    return Verdict(
        Class.BAD_ARGUMENTS,
        0.8,
        "systemd refuses the unit's definition, so nothing was started.",
        evidence=(of_said(said),),
        advice=("`systemd-analyze verify UNIT` names the lines.",),
        phase=Phase.STARTING,
    )


def _could_not_prepare(case: Case, ending: Ending) -> Verdict | None:
    dependency = case.timeline.word(Word.DEPENDENCY)
    if dependency:
        return _dependency(dependency)
    said = case.timeline.word(Word.RESOURCES)
    if not said and ending.result is not ServiceResult.RESOURCES:
        return None
    drop_ins = ending.unit.drop_ins if ending.unit else ()
    return Verdict(
        Class.MISSING_DEPENDENCY,
        0.8,
        "The program never ran: systemd could not set it up, because a file that the unit names is missing.",
        evidence=((of_said(said),) if said else ending.proofs()) + _drop_ins(drop_ins),
        advice=(
            "See which file is meant with `systemctl cat UNIT`. A drop-in that was left behind shadows the unit file: "
            "look at DropInPaths of `systemctl show UNIT` first.",
        ),
        phase=Phase.STARTING,
    )


def _dependency(said: Said) -> Verdict:
    return Verdict(
        Class.MISSING_DEPENDENCY,
        0.75,
        "The program never ran: another unit that this one needs did not come up.",
        evidence=(of_said(said),),
        advice=("`systemctl list-dependencies UNIT` and `systemctl --failed` show which.",),
        phase=Phase.STARTING,
    )


def _drop_ins(paths: tuple[str, ...]) -> tuple[Evidence, ...]:
    return (of_unit(f"DropInPaths={' '.join(paths)}"),) if paths else ()


def _start_timeout(case: Case, ending: Ending) -> Verdict | None:
    said = case.timeline.word(Word.START_TIMED_OUT)
    return start_timeout(ending, said) if said else None


def _client_kill(case: Case, ending: Ending) -> Verdict | None:
    said = case.timeline.word(Word.CLIENT_KILL)
    return client_kill(ending, said) if said else None


def _usage(_case: Case, ending: Ending) -> Verdict | None:
    """The status by which programs refuse their command line."""
    if ending.status != "exited/2":
        return None
    return Verdict(
        Class.BAD_ARGUMENTS,
        0.6,
        "The command ended with status 2, by which programs refuse their command line. What was refused is not in this "
        "log.",
        evidence=ending.proofs(),
        advice=("Run the command of ExecStart= by hand, as the unit's user: it prints what it refuses.",),
        phase=Phase.STARTING,
    )


def _start_limit(case: Case, ending: Ending) -> Verdict | None:
    said = case.timeline.word(Word.START_LIMIT)
    if not said and ending.result is not ServiceResult.START_LIMIT_HIT:
        return None
    control = case.timeline.word(Word.CONTROL_EXIT)
    before = " The command that runs before the server failed each time." if control else ""
    return Verdict(
        Class.START_LIMIT_HIT,
        0.8,
        f"systemd gave up after too many failed starts.{before} This log does not say why they failed.",
        evidence=(*((of_said(control),) if control else ()), *((of_said(said),) if said else ending.proofs())),
        advice=("Look at the launches before this one; `systemctl reset-failed UNIT` allows the next start.",),
    )


def judge_kill(case: Case, ending: Ending) -> Verdict | None:
    """A SIGKILL that nobody explains. Only a whole log in which systemd itself saw no memory kill can exclude SGLang,
    the stop timeout and the kernel; then a person or another program is what is left."""
    timeline = case.timeline
    seen_whole = (
        timeline.complete
        and timeline.own_lines
        and not timeline.suppressed
        and not timeline.lost_fields
        and not kernel_unseen(case)
    )
    sent = ("-9", "-15")  # by whom, SGLang does not say; it sends its children no SIGTERM itself
    child = next((h for h in timeline.hits if h.means is Meaning.CHILD_DIED and h.groups.get("code") in sent), None)
    if not seen_whole or ending.result not in (ServiceResult.SIGNAL, ServiceResult.EXIT_CODE, ServiceResult.SUCCESS):
        return None
    if child:
        return _killed("a process of the server", (of_hit(child), *ending.proofs()), 0.6)
    if ending.status in _KILLS and not ending.own_kill() and _quiet(case):
        return _killed("the server", ending.proofs(), 0.65)
    return None


def kernel_unseen(case: Case) -> bool:
    """Inside a container the kernel's lines are the host's; some hand theirs on."""
    return bool(case.inside) and not case.timeline.kernel_seen


def _quiet(case: Case) -> bool:
    """Nothing in the log was wrong before the end."""
    return not case.timeline.failures and not case.timeline.first(Meaning.ECHO, Meaning.OTHER_RANK)


def _killed(what: str, evidence: tuple[Evidence, ...], confidence: float) -> Verdict:
    return Verdict(
        Class.EXTERNAL_KILL,
        confidence,
        f"Somebody or something outside killed {what}: nothing in its log was wrong before, no stop was asked for, and "
        "systemd saw no memory kill.",
        evidence=evidence,
        advice=("Ask who or what sends signals on this host: other supervisors, clean-up scripts, people.",),
        ruled_out=(
            RuledOut(Class.HOST_OOM_KILL, "no kernel line, and systemd's result is not oom-kill"),
            RuledOut(Class.SOFTWARE_EXCEPTION, "no exception was logged before the kill"),
            RuledOut(Class.STOP_TIMEOUT_SIGKILL, "no stop was asked for"),
        ),
    )


_MORE_TO_LOOK_AT = (
    "More tells more: the journal of the whole launch with the kernel's lines (`journalctl -b -o json --all "
    "_SYSTEMD_UNIT=UNIT + UNIT=UNIT + _TRANSPORT=kernel`), and `systemctl show UNIT`."
)


def unknown(case: Case, ending: Ending) -> Verdict:
    """The honest answer, with what can be said."""
    words = _unknown_words(case, ending)
    seen: list[Said] = [s for s in (case.timeline.word(Word.WATCHDOG),) if s]
    telling = (Meaning.CHILD_DIED, Meaning.OTHER_RANK, Meaning.ECHO, Meaning.OWN_KILL, Meaning.NAME_TAKEN)
    hints = [hit for hit in case.timeline.hits if hit.means in telling][:2]
    return Verdict(
        Class.UNKNOWN,
        0.3,
        words,
        evidence=(*map(of_said, seen), *map(of_hit, hints), *ending.proofs()),
        advice=(*(hit.signature.advice for hit in hints if hit.signature.advice), _MORE_TO_LOOK_AT),
        ruled_out=_not_memory(case),
    )


def _not_memory(case: Case) -> tuple[RuledOut, ...]:
    if case.timeline.first(Meaning.CHILD_DIED, Meaning.OWN_KILL) and not kernel_unseen(case):
        return (RuledOut(Class.HOST_OOM_KILL, "no line of the kernel or of systemd says so; SGLang only guesses it"),)
    return ()


def _own_kill_words(timeline: Timeline) -> str:
    echo = timeline.first(Meaning.ECHO)
    if echo is None:
        return (
            "A process of the server failed and SGLang then killed its own tree; the failure itself is not in this log."
        )
    return (
        f"{echo.rank or 'A process'} lost its connection to another process of the server, which ended without a word "
        "in this log, as one does that is killed by SIGKILL. SGLang then killed its own tree. Nothing tells who did it."
    )


_KILLS = ("killed/1", "killed/2", "killed/9", "killed/15")
_SAYS_NOTHING = (*_KILLS, "exited/1", "exited/137")  # the ways in which SGLang ends after any failure


def _unknown_words(case: Case, ending: Ending) -> str:
    timeline = case.timeline
    if timeline.ended and not timeline.own_lines and ending.status in _SAYS_NOTHING:
        return (
            "No line of the server itself is in this input, so why it ended is not to be seen: its output goes "
            "elsewhere, or systemd's lines alone were handed over."
        )
    if timeline.word(Word.WATCHDOG) or ending.result is ServiceResult.WATCHDOG:
        return (
            "The unit's own watchdog (WatchdogSec=) ended it. SGLang never answers that watchdog: remove the setting."
        )
    return _words_of_a_hit(timeline, ending) or _words_of_the_end(case, ending)


def _words_of_a_hit(timeline: Timeline, ending: Ending) -> str:
    if timeline.first(Meaning.OTHER_RANK):
        return "One rank waited for another that did not come. The other rank's own log says why; this one does not."
    if timeline.first(Meaning.CUDA_OOM):
        return "GPU memory ran out, but the log does not tell what was being allocated then."
    if timeline.first(Meaning.NAME_TAKEN):
        return "No container was started: one of the same name is there already, as an earlier launch leaves it behind."
    if ending.status == "exited/125":
        return (
            "The container's client failed by itself (status 125): no container was started. Its own message says why."
        )
    if ending.own_kill():
        return _own_kill_words(timeline)
    if timeline.first(Meaning.CHILD_DIED):
        return "A process of the server was ended by a signal. Nothing here says who sent it."
    return ""


def _words_of_the_end(case: Case, ending: Ending) -> str:
    if ending.status == "exited/137":
        return (
            "The server was ended by SIGKILL behind a container's or a shell's process. Nothing here says who sent it."
        )
    if ending.status == "exited/0":
        return "The server ended with status 0 although nobody asked it to. Nothing here says why."
    if not case.timeline.ended and not ending.status:
        return "Nothing here says that the launch ended, or why."
    if kernel_unseen(case) and ending.status == "killed/9":
        return (
            "The server was ended by SIGKILL. From inside a container it cannot be told whether the kernel did that "
            "for want of memory, or somebody."
        )
    return f"The server ended ({ending.status or ending.result or 'no status seen'}). Nothing here says why."
