"""Which of a timeline's lines can have ended the launch, each with the class that it proves, earliest first.

A line counts only if the launch did not go on after it, and a cause explains what follows from it: ranks that abort
because another one died, collectives that break when a process is killed, a hang behind a fault.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_watchdog.diagnosis.allocation import GUESS, is_negative_pool, judge_oom, pins_host_memory
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.effective import wordings_of
from sglang_watchdog.diagnosis.manager import Said, Word
from sglang_watchdog.diagnosis.progress import Worker
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.diagnosis.timeline import Failure, Hit, Timeline
from sglang_watchdog.diagnosis.tracebacks import Raised
from sglang_watchdog.domain.evidence import Source
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import Phase

# Xids of the card, its memory, its link or the driver. Others (13, 31, 43, 45) follow an application's fault or a kill.
_CARD_XIDS = frozenset(
    {8, 38, 46, 48, 54, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 121, 123, 136, 140}
    | {*range(143, 151), *range(154, 161)}
)
_FAULT_XIDS = frozenset({13, 31})
_GOES_ON_SAME_RANK = 5.0  # seconds of decoding on the same rank that prove that a line was not the end
_GOES_ON = 90.0  # on any rank: SGLang's crash diagnostics keep the others alive for up to 65 s
_SAME_EVENT = 60.0
_NEXT_TO = 40  # lines
_SILENT = 120.0  # seconds between the last failed health check and the end
_LAST_LINES = 3
_TITLES = ("sglang", "sgl_", "VLLM::")  # by which engines name their processes
_PROGRAMS = ("python", "pt_main_thread", "ray::", "llama-server", "ollama")
_KILLED_WITHIN = 15.0  # seconds in which a killed process is missed
_CLIENT_ENDS = 15.0  # within which a container's client ends after its container
_OTHER_RANK = 30.0  # within which the rank that failed first may be logged after one that failed because of it

_PLAIN: dict[Meaning, tuple[Class, float]] = {
    Meaning.KV_UNSIZABLE: (Class.KV_CACHE_OOM, 0.95),
    Meaning.KV_EXHAUSTED: (Class.KV_CACHE_OOM, 0.85),
    Meaning.HELD: (Class.GPU_MEMORY_HELD, 0.85),
    Meaning.WEIGHTS_UNFIT: (Class.WEIGHTS_OOM, 0.9),
    Meaning.OOM_KILLED: (Class.CGROUP_OOM_KILL, 0.9),
    Meaning.MEMORY_MONITOR: (Class.HOST_OOM_KILL, 0.75),
    Meaning.HOST_ALLOCATION: (Class.HOST_MEMORY_SHORTAGE, 0.9),
    Meaning.NO_SPACE: (Class.SHM_OR_DISK_FULL, 0.9),
    Meaning.HARDWARE: (Class.GPU_HARDWARE_FAULT, 0.95),
    Meaning.CUDA_FAULT: (Class.CUDA_ERROR, 0.9),
    Meaning.NCCL_FAULT: (Class.NCCL_ERROR, 0.85),
    Meaning.ABORTED: (Class.SEGFAULT, 0.6),
    Meaning.HANG: (Class.INTERNAL_WATCHDOG_HANG, 0.9),
    Meaning.PROBER_KILL: (Class.UNRESPONSIVE, 0.85),
    Meaning.BAD_ARGUMENT: (Class.BAD_ARGUMENTS, 0.95),
    Meaning.DRAFT_MISSING: (Class.BAD_ARGUMENTS, 0.8),
    Meaning.MISSING: (Class.MISSING_DEPENDENCY, 0.9),
    Meaning.PORT: (Class.PORT_IN_USE, 0.95),
    Meaning.SOFTWARE: (Class.SOFTWARE_EXCEPTION, 0.8),
}
# A child's exit code where a signal of its own doing ended it: SIGBUS is a page of a full /dev/shm that was touched.
_BY_CHILD = {
    "-4": (Class.SEGFAULT, 0.85),
    "-5": (Class.SEGFAULT, 0.75),
    "-6": (Class.SEGFAULT, 0.55),
    "-7": (Class.SHM_OR_DISK_FULL, 0.7),
    "-8": (Class.SEGFAULT, 0.85),
    "-11": (Class.SEGFAULT, 0.85),
}
_OF_SYSTEMD = frozenset(f"exited/{status}" for status in range(200, 244))
_KILLS = frozenset({Class.HOST_OOM_KILL, Class.CGROUP_OOM_KILL})
_MEMORY = frozenset(
    {Class.KV_CACHE_OOM, Class.CUDA_GRAPH_OOM, Class.WEIGHTS_OOM, Class.RUNTIME_CUDA_OOM, Class.GPU_MEMORY_HELD}
    | {Class.HOST_MEMORY_SHORTAGE, Class.SHM_OR_DISK_FULL}
)
_SOFT = frozenset({Class.CUDA_ERROR, Class.NCCL_ERROR, Class.SEGFAULT, Class.SOFTWARE_EXCEPTION})
_OF_MEMORY_TOO = _SOFT | {Class.MISSING_DEPENDENCY}
_BARE = re.compile(r"(?:\w+\.)*\w+(?:Error|Exception):?\s*")  # an exception that says nothing more
_STALLS = frozenset({Class.INTERNAL_WATCHDOG_HANG, Class.UNRESPONSIVE})


@dataclass(frozen=True, slots=True)
class Cause:
    """`in_speculation`: it happened in the draft worker or in the code that verifies drafts."""

    failure: Class
    confidence: float
    order: int
    time: float
    text: str
    source: Source
    phase: Phase
    worker: Worker
    hit: Hit | None = None
    in_speculation: bool = False


def first_cause(case: Case) -> Cause | None:
    """The earliest cause, or a later one that explains it."""
    causes = sorted(_all(case), key=lambda cause: cause.order)
    if not causes:
        return None
    first = causes[0]
    explaining = next((cause for cause in causes[1:] if _explains(cause, first)), None)
    # It began with the first, also where a stop was asked for between the two.
    return replace(explaining, order=first.order) if explaining else first


def _explains(cause: Cause, first: Cause) -> bool:
    """What is logged later can be what came before: the kernel's line, or the line of the rank that failed first."""
    apart = abs(cause.time - first.time)
    if _is_an_xid(first) and not _is_an_xid(cause) and first.failure is cause.failure is Class.CUDA_ERROR:
        # The same fault, of which the server says more than the kernel. In a plain log the kernel's line may have no
        # time of its own.
        return apart <= _SAME_EVENT or cause.order - first.order <= _NEXT_TO
    if first.failure is cause.failure and _BARE.fullmatch(first.text) and not _BARE.fullmatch(cause.text):
        return apart <= _OTHER_RANK
    if cause.failure in _KILLS:
        return first.failure in _OF_MEMORY_TOO | _STALLS and apart <= _SAME_EVENT
    if cause.failure is Class.GPU_HARDWARE_FAULT:
        return first.failure in _SOFT | _STALLS and apart <= _SAME_EVENT
    if cause.failure is Class.INTERNAL_WATCHDOG_HANG:
        return first.failure is Class.UNRESPONSIVE  # the same hang, which health checks may see before
    if cause.failure in _MEMORY and first.confidence <= GUESS < cause.confidence:
        return apart <= _OTHER_RANK
    if cause.failure in (Class.CUDA_ERROR, Class.SEGFAULT):
        return first.failure is Class.NCCL_ERROR and apart <= _OTHER_RANK and not _is_an_abort(cause)
    # A compiler that finds no room reports that inside of its "build failed", which is logged first.
    return cause.failure in _MEMORY and first.failure in _OF_MEMORY_TOO and apart <= _OTHER_RANK


def _is_an_xid(cause: Cause) -> bool:
    return cause.hit is not None and cause.hit.means is Meaning.XID


def _is_an_abort(cause: Cause) -> bool:
    """A process that aborts does so because of something: of a collective that failed, for one."""
    hit = cause.hit
    return hit is not None and (hit.means is Meaning.ABORTED or hit.groups.get("code") == "-6")


def _all(case: Case) -> Iterator[Cause]:
    return (cause for cause, went_on in weighed_causes(case) if not went_on)


def weighed_causes(case: Case) -> Iterator[tuple[Cause, bool]]:
    """Everything that could be a cause, and whether the launch went on after it (then it was none)."""
    timeline = case.timeline
    judged = (
        *(_of_hit(hit, case) for hit in timeline.hits),
        *(_of_failure(failure, case) for failure in timeline.failures),
        *(_of_said(said, case) for said in timeline.said),
    )
    return ((cause, _went_on(cause, timeline)) for cause in judged if cause)


def _went_on(cause: Cause, timeline: Timeline) -> bool:
    """Whether the launch served on after the line, or became ready after it: then the line was not its end."""
    rank = cause.hit.rank if cause.hit else ""
    if timeline.alive_by_rank.get(rank, 0.0) > cause.time + _GOES_ON_SAME_RANK and rank:
        return True
    if timeline.alive > cause.time + _GOES_ON:
        return True
    if cause.failure in _KILLS or cause.failure in (Class.GPU_HARDWARE_FAULT, Class.PORT_IN_USE):
        return False
    if cause.failure is Class.MISSING_DEPENDENCY and not rank and cause.phase in (Phase.UNKNOWN, Phase.STARTING):
        # A start script, or an import that can be done without: the server came to its weights all the same.
        return any(mark.phase not in _EARLY and mark.time > cause.time for mark in timeline.phases)
    return any(mark.phase is Phase.READY and mark.time > cause.time for mark in timeline.phases)


def _of_hit(hit: Hit, case: Case) -> Cause | None:
    judged = _judge(hit, case)
    if judged is None or not _is_printed(hit, case):
        return None
    failure, confidence = judged
    return Cause(
        failure=failure,
        confidence=hit.signature.confidence or confidence,
        order=hit.order,
        time=hit.time,
        text=hit.text,
        source=hit.signature.source,
        phase=_phase(hit, failure),
        worker=hit.worker,
        hit=hit,
        in_speculation=_in_speculation(_telling_frames(hit.frames, failure), hit.worker) or _of_the_draft(hit, failure),
    )


def _is_printed(hit: Hit, case: Case) -> bool:
    """Whether the launch's release has that wording: else it is another one in the same words."""
    return hit.signature.releases.overlaps(wordings_of(case))


def _of_the_draft(hit: Hit, failure: Class) -> bool:
    """The wording itself says so, or the check of free memory that only fails wrongly for a draft worker."""
    draft_check = hit.means is Meaning.UNBALANCED and failure is Class.SOFTWARE_EXCEPTION
    return draft_check or hit.means is Meaning.DRAFT_MISSING


def _judge(hit: Hit, case: Case) -> tuple[Class, float] | None:
    match hit.means:
        case Meaning.CUDA_OOM:
            return judge_oom(hit, case.timeline)
        case Meaning.CUDA_FAULT if pins_host_memory(hit):
            return Class.HOST_MEMORY_SHORTAGE, 0.75
        case Meaning.NATIVE_CRASH:
            ours = hit.signature.source is not Source.KERNEL or _killed_ours(hit, case)
            return (Class.SEGFAULT, 0.85) if ours else None
        case Meaning.UNBALANCED:
            draft = hit.worker is Worker.DRAFT or _allocated_before(hit, case.timeline)
            return (Class.SOFTWARE_EXCEPTION, 0.75) if draft else (Class.GPU_MEMORY_HELD, 0.9)
        case Meaning.HOST_KILL | Meaning.CGROUP_KILL:
            kind = Class.HOST_OOM_KILL if hit.means is Meaning.HOST_KILL else Class.CGROUP_OOM_KILL
            return (kind, 0.95) if _killed_ours(hit, case) else (kind, 0.8) if _died_of_it(hit, case) else None
        case Meaning.CGROUP_COUNTER:
            return (Class.CGROUP_OOM_KILL, 0.85) if _killed_by_nine(case) else None
        case Meaning.DRIVER_NO_MEMORY:
            loading = hit.phase is Phase.LOADING_WEIGHTS
            return (Class.WEIGHTS_OOM, 0.6) if loading else (Class.HOST_MEMORY_SHORTAGE, 0.6)
        case Meaning.XID:
            return _xid(int(hit.groups.get("xid", "0")))
        case Meaning.CHILD_DIED:
            code = hit.groups.get("code", "")
            return None if code == "-6" and _was_made_to_abort(hit, case.timeline) else _BY_CHILD.get(code)
        case Meaning.ABORTED if "Aborted" in hit.text and _was_made_to_abort(hit, case.timeline):
            return None
        case Meaning.NO_PROGRESS:
            silent = _prober_followed(hit, case.timeline) or _silent_to_the_end(hit, case.timeline)
            return (Class.UNRESPONSIVE, 0.6) if silent else None
        case _:
            return _PLAIN.get(hit.means)


def _was_made_to_abort(hit: Hit, timeline: Timeline) -> bool:
    """By the end of a process that it worked with, or by systemd, for its watchdog or a start that took too long: its
    native code is not at fault."""
    echoes = (other for other in timeline.hits if other.means is Meaning.ECHO and other.order < hit.order)
    echoed = any(not other.time or hit.time - other.time <= _SAME_EVENT for other in echoes)
    asked = timeline.word(Word.WATCHDOG, Word.START_TIMED_OUT)
    return echoed or (asked is not None and asked.order < hit.order)


def _xid(code: int) -> tuple[Class, float] | None:
    if code in _CARD_XIDS:
        return Class.GPU_HARDWARE_FAULT, 0.9
    return (Class.CUDA_ERROR, 0.6) if code in _FAULT_XIDS else None


def _allocated_before(hit: Hit, timeline: Timeline) -> bool:
    """The check of free memory ran again, for the draft worker, over what the target itself had allocated."""
    later = (Phase.ALLOCATING_KV, Phase.CAPTURING_GRAPHS)
    return any(mark.phase in later and mark.time <= hit.time for mark in timeline.phases)


def _killed_ours(hit: Hit, case: Case) -> bool:
    """Whether the process that the kernel killed, or saw crash, was the launch's: by its control group, by pid or by an
    engine's title."""
    if _never_ran(case):
        return False
    pid, comm = int(hit.groups.get("pid", "0")), hit.groups.get("comm", "")
    group = _memory_group(pid, case.timeline)
    if group and case.timeline.unit and ".service" in group:
        return f"/{case.timeline.unit}" in group
    recorded = {process.id.pid for process in case.launch.processes} if case.launch else set()
    if pid in recorded or pid in case.timeline.pids:
        return True
    if comm.startswith(_TITLES):
        return not recorded or _killed_by_nine(case)
    if hit.means is Meaning.NATIVE_CRASH and not case.timeline.pids and not recorded:
        return comm.startswith(_PROGRAMS) and _killed_by_nine(case)
    return _ended_a_container(hit, case.timeline)


def _died_of_it(hit: Hit, case: Case) -> bool:
    """Whether a process of the launch, whose pids nobody recorded, ended by SIGKILL right after the kernel had killed
    one that has only the name of its program."""
    main = case.timeline.word(Word.MAIN_EXIT)
    by_kernel = main is not None and main.detail == "killed/9" and not case.timeline.first(Meaning.OWN_KILL)
    ends = [main.time] if main and by_kernel else []
    ends += [h.time for h in case.timeline.hits if h.means is Meaning.CHILD_DIED and h.groups.get("code") == "-9"]
    of_a_program = hit.groups.get("comm", "").startswith(_PROGRAMS)
    known = case.launch is not None or bool(_memory_group(int(hit.groups.get("pid", "0")), case.timeline))
    return of_a_program and not known and any(0 <= end - hit.time <= _KILLED_WITHIN for end in ends)


def _never_ran(case: Case) -> bool:
    """systemd could not even set the process up: exit statuses 200 to 243 are its own (systemd.exec(5))."""
    main = case.timeline.word(Word.MAIN_EXIT)
    return main is not None and main.detail in _OF_SYSTEMD


def _ended_a_container(hit: Hit, timeline: Timeline) -> bool:
    """Of a container the unit has its client's pid alone. It ends with 137 when the container's first process is
    killed, and right after it."""
    main = timeline.word(Word.MAIN_EXIT)
    return main is not None and main.detail == "exited/137" and 0 <= main.time - hit.time <= _CLIENT_ENDS


def _memory_group(pid: int, timeline: Timeline) -> str:
    """The control group of the killed process, as the kernel names it just before."""
    contexts = (hit for hit in timeline.hits if hit.means is Meaning.KILL_CONTEXT)
    return next((hit.groups["group"] for hit in contexts if hit.groups.get("pid") == str(pid)), "")


def _killed_by_nine(case: Case) -> bool:
    """A process of the launch ended by a SIGKILL: a child that SGLang names, or main (137 behind a container)."""
    children = any(h.means is Meaning.CHILD_DIED and h.groups.get("code") == "-9" for h in case.timeline.hits)
    main = case.timeline.word(Word.MAIN_EXIT)
    return children or (main is not None and main.detail in ("killed/9", "exited/137"))


def _prober_followed(hit: Hit, timeline: Timeline) -> bool:
    return any(other.means is Meaning.PROBER_KILL and other.order > hit.order for other in timeline.hits)


def _silent_to_the_end(hit: Hit, timeline: Timeline) -> bool:
    """No sign of generation after the failed check, and such checks until shortly before the end (or the last word of
    a launch that runs): one that failed long before proves nothing of what came then."""
    newest = max(other.time for other in timeline.hits if other.means is Meaning.NO_PROGRESS)
    return timeline.alive <= hit.time and timeline.last - newest <= _SILENT


def _phase(hit: Hit, failure: Class) -> Phase:
    """The phase that the class itself proves, where the log begins too late to tell."""
    match failure:
        case Class.CUDA_GRAPH_OOM:
            return Phase.CAPTURING_GRAPHS
        case Class.WEIGHTS_OOM:
            return Phase.LOADING_WEIGHTS
        case Class.KV_CACHE_OOM if hit.means is Meaning.KV_UNSIZABLE:
            return Phase.ALLOCATING_KV
        case _:
            return hit.phase


def _of_said(said: Said, case: Case) -> Cause | None:
    """systemd saw the kernel's OOM killer, or its own, at work in the unit's memory group."""
    if said.word not in (Word.OUT_OF_MEMORY, Word.OOMD):
        return None
    limited = said.word is Word.OOMD or bool(case.unit and case.unit.memory_max)
    which = limited or case.unit is not None or case.timeline.kernel_seen
    return Cause(
        failure=Class.CGROUP_OOM_KILL if limited else Class.HOST_OOM_KILL,
        confidence=0.85 if which else 0.55,
        order=said.order,
        time=said.time,
        text=said.text,
        source=Source.SYSTEMD,
        phase=case.timeline.phase,
        worker=Worker.TARGET,
    )


_EARLY = (Phase.UNKNOWN, Phase.STARTING)
_UP = (Phase.READY, Phase.SERVING, Phase.STOPPING)
_OTHER_PACKAGES = ("torch/", "triton/", "flashinfer/", "transformers/", "sgl_kernel/", "deep_ep/", "vllm/")
_ARGUMENT_FRAMES = ("server_args.py:", "arg_groups/", "server_args_config_parser", "argparse.py:")


def _of_failure(failure: Failure, case: Case) -> Cause | None:
    """An exception that no signature knows: the launch's end if SGLang ends after its header, or if it is main's own
    before the server was up."""
    raised, timeline = failure.raised, case.timeline
    if failure.recognised and not _is_of_other_releases(failure, case):
        return None
    early = failure.phase in (Phase.UNKNOWN, Phase.STARTING) and not timeline.server_args
    if early and any(part in frame for frame in raised.frames for part in _ARGUMENT_FRAMES):
        judged = (Class.BAD_ARGUMENTS, 0.9)
    elif failure.phase not in _UP and is_negative_pool(raised.text, raised.frames):
        judged = (Class.KV_CACHE_OOM, 0.8)
    elif raised.fatal:
        # A start asks much of its surroundings, and a wording that is not known may be of any of it.
        judged = (Class.SOFTWARE_EXCEPTION, 0.75 if failure.phase in _UP else 0.65)
    elif failure.phase not in _UP and _was_the_end(raised, timeline):
        judged = (Class.SOFTWARE_EXCEPTION, 0.55)
    else:
        return None
    return Cause(
        failure=judged[0],
        confidence=judged[1],
        order=raised.order,
        time=raised.time,
        text=raised.text,
        source=Source.SGLANG,
        phase=failure.phase,
        worker=failure.worker,
        in_speculation=judged[0] is Class.SOFTWARE_EXCEPTION and _in_speculation(raised.frames, failure.worker),
    )


def _is_of_other_releases(failure: Failure, case: Case) -> bool:
    hits = [hit for hit in case.timeline.hits if hit.order in (failure.raised.order, failure.raised.root.order)]
    return bool(hits) and not any(_is_printed(hit, case) for hit in hits)


def _was_the_end(raised: Raised, timeline: Timeline) -> bool:
    """Whether an exception that nobody announced was main's own: main exits on it; in a log without systemd's
    words, it is the last thing said."""
    if not timeline.said:
        return timeline.lines - raised.order <= _LAST_LINES
    # 3 is uvicorn's own status of a start that failed.
    ends = ("exited/1", "exited/3")
    return any(said.word is Word.MAIN_EXIT and said.detail in ends for said in timeline.said)


def _telling_frames(frames: tuple[str, ...], failure: Class) -> tuple[str, ...]:
    """With speculation every forward passes through its code, the target's own too. A fault of the card is reported
    late and somewhere, so that only the frame of SGLang's that it came out of tells anything."""
    if failure not in (Class.CUDA_ERROR, Class.SEGFAULT, Class.NCCL_ERROR):
        return frames
    return next(((frame,) for frame in reversed(frames) if _is_of_sglang(frame)), ())


def _in_speculation(frames: tuple[str, ...], worker: Worker) -> bool:
    """Files of speculation, and functions and files that name a draft (`set_draft_kv_pool`), run with speculation
    alone; importing them happens always."""
    run = [frame for frame in frames if not frame.endswith(":<module>")]
    named = (frame for frame in run if _is_of_sglang(frame) and "draft" in frame.rpartition("/")[2])
    return worker is Worker.DRAFT or any("speculative/" in frame for frame in run) or any(named)


def _is_of_sglang(frame: str) -> bool:
    """By its path within the package; other packages are known by their own name."""
    return not frame.startswith(("/", "<", *_OTHER_PACKAGES))
