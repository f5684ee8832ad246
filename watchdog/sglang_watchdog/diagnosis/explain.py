"""Says a cause in words: one sentence that an operator understands at three in the morning, and what to do."""

from sglang_watchdog.diagnosis import shortage
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.causes import Cause
from sglang_watchdog.diagnosis.effective import Speculation
from sglang_watchdog.diagnosis.held import NOBODY, Held, held_by_others
from sglang_watchdog.diagnosis.progress import Worker
from sglang_watchdog.diagnosis.signatures import Meaning
from sglang_watchdog.diagnosis.verdict import Verdict, of_cause
from sglang_watchdog.domain.evidence import Source
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.failure import RuledOut
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.outside import held_from_outside

_QUOTED = frozenset(
    {Class.BAD_ARGUMENTS, Class.MISSING_DEPENDENCY, Class.PORT_IN_USE, Class.SOFTWARE_EXCEPTION, Class.CUDA_ERROR}
    | {Class.NCCL_ERROR, Class.SHM_OR_DISK_FULL, Class.HOST_MEMORY_SHORTAGE}
)
_KILLED_BY_OTHERS = frozenset({Class.HOST_OOM_KILL, Class.CGROUP_OOM_KILL, Class.UNRESPONSIVE})
_LONGEST_QUOTE = 160
_ENOUGH = 60  # characters after the beginning of what was recognised
_WORTH_NAMING = 1 << 30  # a bare CUDA context is half a GiB
_GPU_ONLY = RuledOut(Class.HOST_OOM_KILL, "GPU memory ran out; the kernel's OOM killer has no part in that")
_OWN_KILL = RuledOut(Class.EXTERNAL_KILL, "SGLang ends its own processes after a failure: a 9/KILL is its own doing")


def explain(case: Case, cause: Cause, speculation: Speculation, held: Held | None) -> Verdict:
    """The verdict on a cause."""
    if held:
        return _held(case, cause, held)
    match cause.failure:
        case Class.KV_CACHE_OOM if cause.hit and cause.hit.means is Meaning.KV_EXHAUSTED:
            return _exhausted(cause)
        case Class.KV_CACHE_OOM if cause.hit and cause.hit.means is Meaning.CUDA_OOM:
            return _pool_raw(case, cause)
        case Class.KV_CACHE_OOM:
            return _unsizable(case, cause, speculation)
        case Class.CUDA_GRAPH_OOM:
            return _graph(case, cause, speculation)
        case Class.GPU_MEMORY_HELD:
            return _held_by_word(case, cause)
        case _:
            return _plain(cause)


def _held(case: Case, cause: Cause, held: Held) -> Verdict:
    whose = {True: " by an earlier launch of this unit", False: "", None: ""}[held.ours]
    amount = f"{held.gib:.1f} GiB of it were" if held.gib else "some of it was"
    name = f" ({held.who})" if held.who not in ("", "another process") else ""
    return Verdict(
        Class.GPU_MEMORY_HELD,
        held.confidence,
        f"GPU memory ran out because {amount} held{whose or ' by another process'}{name}, "
        "not because this configuration needs too much.",
        evidence=(of_cause(cause), held.evidence),
        advice=(
            f"What no visible process holds is {held_from_outside(case.inside)}."
            if held.who == NOBODY
            else "Free the GPU (see `sglang-watchdog gpus`), then start the same configuration again.",
        ),
        ruled_out=(
            RuledOut(cause.failure, "the card was not clean, so its lack of memory says nothing of the configuration"),
            _GPU_ONLY,
        ),
        phase=cause.phase,
        cause=cause,
    )


def _held_by_word(case: Case, cause: Cause) -> Verdict:
    unbalanced = cause.hit is not None and cause.hit.means is Meaning.UNBALANCED
    too_early = cause.hit is not None and cause.hit.means is Meaning.CUDA_OOM
    how = (
        "before it loaded anything the server found much less free memory on one GPU than on the others"
        if unbalanced
        else "it ran out before the server had loaded anything"
        if too_early
        else "the card was not free when the server asked for it"
    )
    return Verdict(
        Class.GPU_MEMORY_HELD,
        cause.confidence,
        f"GPU memory is held by {_holders(case) or 'somebody else'}: {how}.",
        evidence=(of_cause(cause),),
        advice=(
            _own_advice(cause)
            or "See who holds it with `sglang-watchdog gpus`, end what was left behind, then start the same "
            "configuration again. Memory that no process accounts for needs a reset of the GPU or a reboot.",
        ),
        phase=cause.phase,
        cause=cause,
    )


def _own_advice(cause: Cause) -> str:
    """What the wording that was met says of what to do; empty where that of its class is all."""
    return cause.hit.signature.advice if cause.hit else ""


def _holders(case: Case) -> str:
    """Who held more than a context's worth of a card before the launch began, and whose that is."""
    big = [held for held in held_by_others(case) if held.held_bytes >= _WORTH_NAMING]
    return ", ".join(
        f"{'a left-over of this unit, ' * held.ours}{held.who} ({held.held_bytes / 2**30:.1f} GiB of GPU {held.gpu})"
        for held in big
    )


def _exhausted(cause: Cause) -> Verdict:
    own = _own_advice(cause)
    what = "The pool of mamba states" if "mamba" in cause.text else "The KV cache"
    return Verdict(
        Class.KV_CACHE_OOM,
        cause.confidence,
        f"{what} ran full while serving, and this release of SGLang ends on that instead of waiting.",
        evidence=(of_cause(cause),),
        advice=(own or "Allow fewer requests at once (--max-running-requests), or give the pool more memory.",),
        ruled_out=(RuledOut(Class.RUNTIME_CUDA_OOM, "SGLang's own pool was full; no allocation on the GPU failed"),),
        phase=cause.phase,
        cause=cause,
    )


def _pool_raw(case: Case, cause: Cause) -> Verdict:
    whose = "the draft model's KV cache" if cause.worker is Worker.DRAFT else "the KV cache"
    why = (
        " The target's pool had taken nearly everything before; releases that do not count the draft's pool in the "
        "fraction end so when the fraction is high."
        if cause.worker is Worker.DRAFT
        else ""
    )
    return Verdict(
        Class.KV_CACHE_OOM,
        cause.confidence,
        f"GPU memory ran out while {whose} was allocated.{shortage.missing(cause)}{why}",
        evidence=(of_cause(cause),),
        advice=(
            f"Lower --mem-fraction-static{shortage.lower_fraction(case, cause)}; fewer draft tokens or requests help "
            "as well.",
        ),
        ruled_out=(
            RuledOut(Class.CUDA_GRAPH_OOM, "it was a pool that was being allocated; no graph had been begun"),
            _GPU_ONLY,
            _OWN_KILL,
        ),
        phase=cause.phase,
        cause=cause,
    )


def _unsizable(case: Case, cause: Cause, speculation: Speculation) -> Verdict:
    figures = shortage.describe(case, cause, speculation)
    return Verdict(
        Class.KV_CACHE_OOM,
        cause.confidence,
        " ".join(("The KV cache could not be sized: no GPU memory was left for it when the server started.", *figures)),
        evidence=(of_cause(cause), *shortage.budget_evidence(shortage.budget_in(case))),
        advice=shortage.advise(case, cause, speculation),
        ruled_out=(
            RuledOut(Class.CUDA_GRAPH_OOM, "it failed before any graph was captured"),
            _GPU_ONLY,
            _OWN_KILL,
        ),
        phase=cause.phase,
        cause=cause,
    )


def _graph(case: Case, cause: Cause, speculation: Speculation) -> Verdict:
    wrapped = "graph failed" in cause.text
    what = "while CUDA graphs were captured" if wrapped else "while the buffers of the CUDA graphs were allocated"
    lower = shortage.lower_fraction(case, cause)
    advice = [f"Lower --mem-fraction-static{lower}, so that the pools leave room for the graphs."]
    if speculation.on:
        advice.append("Fewer speculative steps make the graphs smaller.")
    advice.append("A smaller largest batch (--cuda-graph-max-bs) makes them smaller too.")
    return Verdict(
        Class.CUDA_GRAPH_OOM,
        cause.confidence,
        f"GPU memory ran out {what}: the KV cache had been made, and left too little.{shortage.missing(cause)}",
        evidence=(of_cause(cause),),
        advice=tuple(advice),
        ruled_out=(
            RuledOut(Class.KV_CACHE_OOM, "the pools had been allocated before"),
            _GPU_ONLY,
            _OWN_KILL,
        ),
        phase=Phase.CAPTURING_GRAPHS,
        cause=cause,
    )


# For the rest one sentence and one piece of advice each.
_SENTENCES: dict[Class, tuple[str, str]] = {
    Class.WEIGHTS_OOM: (
        "GPU memory ran out while the model's weights were loaded: they do not fit as configured.",
        "Use more GPUs, a quantised model, or a larger share for the weights.",
    ),
    Class.RUNTIME_CUDA_OOM: (
        "GPU memory ran out while the server was at work: a batch needed more than the pools had left.",
        "Lower --mem-fraction-static or --chunked-prefill-size, so that more is left for the work itself.",
    ),
    Class.HOST_OOM_KILL: (
        "The kernel killed a process of the server because the host's memory (RAM) ran out.",
        "Find what used the RAM (`journalctl -k`). GPU settings and speculation have no part in it.",
    ),
    Class.CGROUP_OOM_KILL: (
        "The kernel killed a process of the server because the memory limit of its unit or container was reached.",
        "Raise that limit, or use less host memory (--hicache-size, shared memory).",
    ),
    Class.HOST_MEMORY_SHORTAGE: (
        "The host's memory (RAM, or a limit on it) was too small for an allocation.",
        "Free RAM, or ask for less of it (--hicache-size, --hicache-ratio).",
    ),
    Class.SHM_OR_DISK_FULL: (
        "A file system was full: /dev/shm or a disk.",
        "See which with `df -h /dev/shm /tmp /`; left-over files of killed servers in /dev/shm can be removed.",
    ),
    Class.GPU_HARDWARE_FAULT: (
        "The GPU, its link or its driver failed.",
        "Look at `dmesg` and `nvidia-smi -q`. The card may need a reset, a reboot or a repair.",
    ),
    Class.CUDA_ERROR: (
        "A GPU kernel failed (an illegal access or a failed launch).",
        "Restart. If it comes back, look for a known fault of this SGLang release with this model and backend.",
    ),
    Class.NCCL_ERROR: (
        "The GPUs could not talk to each other: a collective operation failed first.",
        "Look at the network and its limits (LimitMEMLOCK=, interfaces); NCCL_DEBUG=INFO says more.",
    ),
    Class.SEGFAULT: (
        "A process of the server crashed in native code.",
        "Look for a core dump (`coredumpctl`) and for a known fault of this release.",
    ),
    Class.SOFTWARE_EXCEPTION: (
        "The server ended on a fault in its own software.",
        "Look for the exception's text among the known faults of this release.",
    ),
    Class.INTERNAL_WATCHDOG_HANG: (
        "The server made no progress for so long that SGLang's own watchdog ended it.",
        "Find what it hung in (stack dumps before the end of the log); a longer --watchdog-timeout only hides it.",
    ),
    Class.UNRESPONSIVE: (
        "The server stopped answering its health checks while its main process was alive.",
        "Look at what it was doing before the health checks failed. Up to SGLang 0.5.9 the main process stays when its "
        "scheduler has died: only a restart of the unit helps then.",
    ),
    Class.BAD_ARGUMENTS: (
        "The server refused its command line or settings.",
        "Correct the command in the unit; the message names what was refused.",
    ),
    Class.MISSING_DEPENDENCY: (
        "Something that the server needs is missing, or may not be used: a file, a model, a library or a tool.",
        "Put it in place; the message names it. Memory advice that SGLang prints beside it does not apply.",
    ),
    Class.PORT_IN_USE: (
        "Another process has a port that the server needs.",
        "See which with `ss -ltnp`, end it, or choose another port.",
    ),
}


_DRAFT_WEIGHTS = (
    "GPU memory ran out while the draft model's weights were loaded: the target and its pools had taken too much.",
    "Lower --mem-fraction-static, or go without a draft model: not all releases count its weights in the fraction.",
)


# It acts on a group that stalls on memory, or on swap that runs out, long before a limit or the kernel would.
_BY_OOMD = (
    "systemd-oomd killed the server's processes because they stalled on memory (RAM), or swap ran out.",
    "See `oomctl` and `journalctl -u systemd-oomd`. Use less host memory (--hicache-size), raise MemoryHigh=, or set "
    "ManagedOOMPreference=avoid for the unit.",
)


_BY_MONITOR = "A watcher of the host's memory ended a process of the server because the memory (RAM) was running out."


_SURE = 0.6
_UP = (Phase.READY, Phase.SERVING, Phase.STOPPING)
_BY_SOME_OOM_KILLER = (
    "The kernel's OOM killer ended a process of the server. Whether the host's memory (RAM) ran out, or a limit of the "
    "unit or its container, is not in this input: the kernel's lines are missing.",
    "Look at `journalctl -k` of that time, and at MemoryMax= of the unit. GPU settings and speculation have no part in "
    "it.",
)
_OUT_AT_SOME_POINT = "GPU memory ran out. In which stage of the server is not in this log."
_OUT_BEFORE_IT_WAS_UP = {
    Phase.STARTING: "GPU memory ran out before the server was up.",
    Phase.WARMING_UP: "GPU memory ran out in the first requests, by which the server warms itself up: the pools had "
    "left too little.",
}
_FAULT_OF_A_START = (
    "It will likely come back at each start. Look for a known fault of this release with this model and card; another "
    "--attention-backend, --disable-custom-all-reduce or --disable-cuda-graph shows which part it is of."
)
_WITHOUT_IT = "Without speculation that code does not run; fewer steps may help as well."


def _plain(cause: Cause) -> Verdict:
    sentence, advice = _SENTENCES[cause.failure]
    if cause.failure is Class.WEIGHTS_OOM and (cause.worker is Worker.DRAFT or cause.in_speculation):
        sentence, advice = _DRAFT_WEIGHTS
    elif cause.failure is Class.CGROUP_OOM_KILL and "systemd-oomd" in cause.text:
        sentence, advice = _BY_OOMD
    elif cause.failure is Class.HOST_OOM_KILL and cause.confidence < _SURE:
        sentence, advice = _BY_SOME_OOM_KILLER
    elif cause.failure is Class.RUNTIME_CUDA_OOM and cause.phase not in _UP:
        sentence = _OUT_BEFORE_IT_WAS_UP.get(cause.phase, _OUT_AT_SOME_POINT)
    elif cause.failure is Class.CUDA_ERROR and cause.phase not in (*_UP, Phase.UNKNOWN):
        advice = _FAULT_OF_A_START
    elif cause.hit and cause.hit.means is Meaning.MEMORY_MONITOR:
        sentence = _BY_MONITOR
    if cause.in_speculation and cause.source is Source.SGLANG and cause.failure is not Class.WEIGHTS_OOM:
        sentence += " It happened in the code of speculative decoding."
    in_software = cause.failure in (Class.SOFTWARE_EXCEPTION, Class.CUDA_ERROR)
    sentence += shortage.missing(cause)
    if cause.failure in _QUOTED:
        sentence += f' The log says: "{_quote(cause)}".'
    ruled_out = (_OWN_KILL,) if cause.source is Source.SGLANG and cause.failure not in _KILLED_BY_OTHERS else ()
    return Verdict(
        cause.failure,
        cause.confidence,
        sentence,
        evidence=(of_cause(cause),),
        advice=(_own_advice(cause) or advice, *((_WITHOUT_IT,) if cause.in_speculation and in_software else ())),
        ruled_out=ruled_out + _not_memory(cause),
        phase=cause.phase,
        cause=cause,
    )


def _quote(cause: Cause) -> str:
    """A part of a long line: what tells may be far from its beginning."""
    text, at = cause.text.strip(), cause.hit.at if cause.hit else 0
    if len(text) <= _LONGEST_QUOTE:
        return text.rstrip(".")
    begin = 0 if at < _LONGEST_QUOTE - _ENOUGH else at - _ENOUGH // 2
    part = text[begin : begin + _LONGEST_QUOTE]
    return f"{'…' * bool(begin)}{part}{'…' * (begin + _LONGEST_QUOTE < len(text))}"


def _not_memory(cause: Cause) -> tuple[RuledOut, ...]:
    """A capture that fails for another reason is printed with the same advice about memory."""
    if cause.phase is Phase.CAPTURING_GRAPHS and "graph" in cause.text and cause.failure is not Class.WEIGHTS_OOM:
        because = "graph capture failed for another reason; the memory advice printed with it is always the same"
        return (RuledOut(Class.CUDA_GRAPH_OOM, because),)
    return ()
