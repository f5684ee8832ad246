"""One launch's lines as a timeline: phases, figures, exceptions; in bounded memory, whatever the order of ranks."""

import gc
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal_lines import SCHEDULER_PID, STARTED_LINES, LaunchLog, timeline_of
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.lines import parse_line
from sglang_watchdog.diagnosis.progress import Worker
from sglang_watchdog.diagnosis.timeline import TimelineReader
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.launch import Phase

DECODING = (
    "Decode batch, #running-req: 2, #token: 640, token usage: 0.30, gen throughput (token/s): 80.00, #queue-req: 1"
)


@pytest.mark.parametrize(
    ("text", "rank", "rest"),
    [
        ("[2026-03-09 22:35:06] hello", "", "hello"),
        ("[2026-03-09 22:35:06.123 TP0] hello", "TP0", "hello"),
        ("[2026-03-09 22:35:06 DP1 TP3 EP3] hello", "DP1 TP3 EP3", "hello"),
        ("[11:48:41 PP0] hello", "PP0", "hello"),
        ("[08-28 02:11:40] hello", "", "hello"),
        ("[TP0 EP0] hello", "TP0 EP0", "hello"),
        ("[gpu_id=0] hello", "gpu_id=0", "hello"),
        ("\x1b[32m[2026-03-09 22:35:06 TP1] hello\x1b[0m", "TP1", "hello"),
        ("sglang-1  | [2026-03-09 22:35:06 TP1] hello", "TP1", "hello"),
        ("0|sglang  | [2026-03-09 22:35:06 TP1] hello", "TP1", "hello"),
        ("[pod/sglang-0/sglang] [2026-03-09 22:35:06 TP1] hello", "TP1", "hello"),
        ("2026-03-09T22:35:06.123456789Z stderr F [2026-03-09 22:35:06 TP1] hello", "TP1", "hello"),
        ("\x1b[36m(SGLangActor pid=616, ip=10.0.0.9)\x1b[0m [2026-03-09 22:35:06 TP1] hello", "TP1", "hello"),
        ("3: [2026-03-09 22:35:06 DP0 ATTN_TP1 EP3] hello", "DP0 ATTN_TP1 EP3", "hello"),
        ("[2026-03-09 22:35:06 DisaggregationMode.DECODE TP1] hello", "TP1", "hello"),
        ("[rank3]: torch.OutOfMemoryError: hello", "", "torch.OutOfMemoryError: hello"),
        ("2026-03-09 22:35:06,123 - ERROR - sglang.srt.managers - hello", "", "hello"),
        ("2026-03-09 22:35:06.123 | ERROR    | sglang.srt.x:run:41 - hello", "", "hello"),
        ("2026-01-20T10:11:10.123456Z  INFO model_runner.load_model: hello", "", "hello"),
        (" INFO model_runner.load_model: hello", "", "hello"),
        ("2026-01-20 10:11:10.123 ERROR 120984 [ TP0 scheduler.py:3190] hello", "", "hello"),
        ("2026-01-20 10:11:10.123 ERROR torch.OutOfMemoryError: hello", "", "torch.OutOfMemoryError: hello"),
        ("ERROR:sglang.srt.managers.scheduler:hello", "", "hello"),
        ("(EngineCore_DP0 pid=88) ERROR 09-09 10:15:10 [core.py:710] hello", "", "hello"),
        ("INFO:     Shutting down", "", "INFO:     Shutting down"),
        ("  0%|    | 0/4\r 50%|##  | 2/4\r[2026-03-09 22:35:06] hello", "", "hello"),
        (
            "[rank1]:[W828 02:14:33.884 ProcessGroupNCCL.cpp:1771] x",
            "",
            "[rank1]:[W828 02:14:33.884 ProcessGroupNCCL.cpp:1771] x",
        ),
        ("[transformers] hello", "", "[transformers] hello"),
        ("no prefix", "", "no prefix"),
    ],
)
def test_a_line_is_taken_apart(text: str, rank: str, rest: str) -> None:
    line = parse_line(text)
    assert (line.rank, line.text) == (rank, rest)


def test_a_launch_goes_through_its_phases() -> None:
    log = LaunchLog().ready().sglang(DECODING).stopping()
    timeline = log.timeline()
    assert [mark.phase for mark in timeline.phases] == [
        Phase.STARTING,
        Phase.LOADING_WEIGHTS,
        Phase.ALLOCATING_KV,
        Phase.CAPTURING_GRAPHS,
        Phase.WARMING_UP,
        Phase.READY,
        Phase.SERVING,
        Phase.STOPPING,
    ]
    assert timeline.phases[0].time < timeline.phases[-1].time


def test_the_figures_of_memory_are_kept() -> None:
    memory = LaunchLog().ready().timeline().memory
    assert (memory.before_weights_gib, memory.after_weights_gib, memory.weights_gib) == (93.0, 63.0, 30.0)
    assert (memory.kv_cache_gib, memory.graphs_gib, memory.available_gib) == (48.0, 0.2, 12.7)
    assert (memory.max_total_num_tokens, memory.max_running_requests) == (300000, 48)


def test_of_several_ranks_the_one_with_least_memory_counts() -> None:
    log = LaunchLog().started()
    for rank, free in (("TP0", 93.0), ("TP1", 50.0), ("TP2", 92.0)):
        log.sglang(f"Load weight begin. avail mem={free:.2f} GB", rank=rank)
    assert log.timeline().memory.before_weights_gib == 50.0


def test_the_draft_worker_s_second_load_is_told_from_the_target_s() -> None:
    log = LaunchLog().started().sglang(*STARTED_LINES[2:6], "Load weight begin. avail mem=13.00 GB")
    log.raises("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    timeline = log.timeline()
    assert timeline.drafts
    assert timeline.failures[0].worker is Worker.DRAFT
    assert timeline.memory.before_weights_gib == 93.0


def test_the_last_decode_line_before_a_stop_is_kept() -> None:
    log = (
        LaunchLog()
        .ready()
        .sglang(DECODING)
        .stopping()
        .sigterm()
        .sglang(DECODING.replace("#running-req: 2", "#running-req: 1"))
    )
    timeline = log.timeline()
    assert timeline.decoding_at_stop is not None
    assert timeline.decoding is not None
    assert (timeline.decoding_at_stop.running, timeline.decoding_at_stop.queued) == (2, 1)
    assert timeline.decoding.running == 1
    assert timeline.decoding_at_stop.tokens == 640


def test_a_traceback_is_put_together_though_processes_interleave() -> None:
    log = LaunchLog().ready()
    log.sglang("Scheduler hit an exception: Traceback (most recent call last):", pid=1001, rank="TP1")
    log.sglang("Scheduler hit an exception: Traceback (most recent call last):", pid=1000, rank="TP0")
    log.sglang('  File "/x/sglang/srt/speculative/eagle_worker.py", line 1, in verify', pid=1001)
    log.sglang('  File "/x/sglang/srt/managers/scheduler.py", line 2, in run', pid=1000)
    log.sglang("TypeError: one", pid=1001).sglang("ValueError: two", pid=1000)
    first, second = log.timeline().failures
    assert (first.raised.text, first.raised.rank, first.raised.frames) == (
        "TypeError: one",
        "TP1",
        ("speculative/eagle_worker.py:verify",),
    )
    assert (second.raised.text, second.raised.rank) == ("ValueError: two", "TP0")


def test_a_chain_of_exceptions_is_one_failure_and_keeps_its_root() -> None:
    log = LaunchLog().ready()
    log.sglang("Scheduler hit an exception: Traceback (most recent call last):")
    log.sglang("KeyError: 'root'")
    for text in (
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
    ):
        log.entries.append(JournalEntry(log.now, text, pid=SCHEDULER_PID, invocation="a" * 32))
    log.sglang("RuntimeError: outer")
    (failure,) = log.timeline().failures
    assert failure.raised.text == "RuntimeError: outer"
    assert failure.raised.root.text == "KeyError: 'root'"


def test_a_traceback_of_a_good_start_is_no_failure() -> None:
    log = LaunchLog().ready()
    log.sglang("Can not initialize OpenAIServingResponses, error: Traceback (most recent call last):")
    log.sglang('  File "/x.py", line 1, in <module>', "ModuleNotFoundError: No module named 'openai_harmony'")
    timeline = log.timeline()
    assert not timeline.failures
    assert not timeline.hits


def test_entries_of_other_launches_and_of_a_later_start_are_left_out() -> None:
    log = LaunchLog().ready().ended()
    count = log.timeline().lines
    stranger = JournalEntry(log.now, "Load weight begin. avail mem=1.00 GB", pid=9, invocation="b" * 32)
    again = LaunchLog([*log.entries, stranger], log.now).started().sglang("Load weight begin. avail mem=1.00 GB")
    timeline = again.timeline()
    assert timeline.lines == count + 1
    assert timeline.memory.before_weights_gib == 93.0


def serve(reader: TimelineReader, log: LaunchLog, turns: int) -> int:
    """A serving launch with per-request errors and a host that kills strangers. Bytes in use after it."""
    for turn in range(turns):
        log.entries.clear()
        log.sglang(DECODING, f"Some module says {turn}", "ERROR:    Exception in ASGI application")
        log.sglang("Traceback (most recent call last):", f"ValueError: request {turn}", pid=2000 + turn)
        log.kernel(f"Out of memory: Killed process {turn} (chrome) total-vm:1kB")
        for entry in log.entries:
            reader.feed(entry)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_weeks_of_serving_are_read_in_constant_memory() -> None:
    reader = TimelineReader("sglang.service", "a" * 32)
    log = LaunchLog().ready()
    for entry in log.entries:
        reader.feed(entry)
    tracemalloc.start()
    try:
        after_some = serve(reader, log, 1000)
        after_many = serve(reader, log, 2000)
    finally:
        tracemalloc.stop()
    assert after_many - after_some < 64 * 1024


BENIGN = (
    "Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'",
    "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 1364",
    "[rank0]:[W1129 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called before exit",
    "Setup Custom allreduce failed with invalid argument. To silence this warning, specify --disable-custom-all-reduce",
    'INFO:     127.0.0.1:41740 - "GET /health HTTP/1.1" 503 Service Unavailable',
    "max_total_tokens=9 is larger than the profiled value 5. Use the profiled value instead.",
)


@given(seed=st.integers(0, 2**32), benign=st.lists(st.sampled_from(BENIGN), max_size=6), ranks=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_order_of_ranks_and_benign_lines_do_not_change_the_class(seed: int, benign: list[str], ranks: int) -> None:
    chance = random.Random(seed)
    log = LaunchLog().started()
    starts = [(number, list(STARTED_LINES[1:6])) for number in range(ranks)]
    while starts:
        number, lines = chance.choice(starts)
        log.sglang(lines.pop(0), rank=f"TP{number}", pid=1000 + number, after=0.01)
        starts = [start for start in starts if start[1]]
        if benign and chance.random() < 0.3:
            log.sglang(benign.pop(), after=0.01)
    failed = chance.randrange(ranks)
    for rank in chance.sample(range(ranks), ranks):
        log.sglang("Scheduler hit an exception: Traceback (most recent call last):", rank=f"TP{rank}", pid=1000 + rank)
        oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        log.sglang(
            oom if rank == failed else "RuntimeError: NCCL error: unhandled cuda error", pid=1000 + rank, after=0
        )
    assert log.own_kill().ended().diagnosis().failure is Class.CUDA_GRAPH_OOM


LINES = (
    *STARTED_LINES,
    *BENIGN,
    "Traceback (most recent call last):",
    "The above exception was the direct cause of the following exception:",
    '  File "a", line 1, in b',
    "X: y",
    "server_args=ServerArgs((",
    "server_args={",
    "Decode batch",
    "Decode batch, accept len: ., accept rate: .",
    "Main process exited, code=, status=",
    "Gracefully exiting... Remaining number of requests x",
)
text = st.text(max_size=200) | st.sampled_from(LINES)
junk = st.builds(
    JournalEntry,
    time=st.floats(0, 1e10),
    message=st.none() | text,
    pid=st.none() | st.integers(0, 3),
    transport=st.sampled_from(["", "kernel", "stdout"]),
    identifier=st.sampled_from(["", "systemd", "systemd-journald"]),
    invocation=st.sampled_from(["", "a" * 32]),
    message_id=st.sampled_from(["", "d989611b15e44c9dbf31e3c81256e4ed", "98e322203f7a4ed290d09fe03c09fe15"]),
    unit_result=st.sampled_from(["", "signal", "odd"]),
)


@given(st.lists(junk, max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_log_breaks_the_reader_or_the_diagnosis(entries: list[JournalEntry]) -> None:
    answer = diagnose(Case(timeline=timeline_of(entries)))
    assert 0.0 < answer.confidence <= 1.0
    assert answer.to_json()["class"] == answer.failure


@pytest.mark.parametrize(
    ("text", "spoke", "prefilled"),
    [
        ("[2026-03-09 22:35:06 TP0] Load weight begin. avail mem=94.00 GB", True, False),
        ('[2026-03-09 22:35:06] INFO:     10.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable', False, False),
        ('[2026-03-09 22:35:06] INFO:     10.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK', False, False),
        ("[2026-03-09 22:35:06 TP0] Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0", True, False),
        ("[2026-03-09 22:35:06 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0", True, True),
        ("[2026-03-09 22:35:06 TP0] Prefill batch, #new-seq: 2, #new-token: 9, #cached-token: 0", True, True),
    ],
)
def test_what_shows_progress_is_told_from_health_checks_and_probes(text: str, spoke: bool, prefilled: bool) -> None:
    reader = TimelineReader()
    reader.feed(JournalEntry(7.0, text, invocation="a", unit="sglang.service"))
    assert (reader.spoke_at, reader.prefilled_at) == (7.0 * spoke, 7.0 * prefilled)
