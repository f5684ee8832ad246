"""Out of GPU memory: which allocation, whose memory, how much was short, and what would fit."""

import pytest

from journal_lines import SCHEDULER_PID, TRACEBACK, UNIT, LaunchLog
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.gpu import Gpu, GpuHolder, GpuReading, HeldMemory
from sglang_watchdog.domain.launch import Launch, Phase, ProcessId, RecordedProcess
from sglang_watchdog.domain.speculation import SpeculationConfig

GIB = 2**30
HYBRID = (
    "server_args=ServerArgs(model_path='/m', mem_fraction_static={fraction}, max_running_requests=48, tp_size=1, "
    "dp_size=1, chunked_prefill_size=8192, speculative_algorithm={algorithm}, speculative_num_steps={steps}, "
    "speculative_eagle_topk=1, speculative_num_draft_tokens={tokens})"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 95.00 GiB "
    "of which 100.00 MiB is free. "
)
NO_POOL = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


def launch(steps: int | None = 10, fraction: float = 0.85, before: float = 93.0, after: float = 63.0) -> LaunchLog:
    """A start as far as the target's weights."""
    settings = {"fraction": fraction, "algorithm": "'EAGLE'" if steps else None, "steps": steps}
    log = LaunchLog().started().sglang(HYBRID.format(**settings, tokens=steps + 1 if steps else None))
    log.sglang(f"Load weight begin. avail mem={before:.2f} GB")
    return log.sglang(
        f"Load weight end. elapsed=1.00 s, type=X, avail mem={after:.2f} GB, mem usage={before - after:.2f} GB."
    )


def clean_cards(total: int = 95, used_gib: float = 0.6, holders: tuple[GpuHolder, ...] = ()) -> GpuReading:
    return GpuReading(1.0, "580", (Gpu(0, "GPU-0", "H", total * GIB, int(used_gib * GIB), holders),))


def test_a_pool_that_cannot_be_sized_is_a_kv_oom_and_speculation_is_to_blame() -> None:
    answer = launch().raises(NO_POOL).ended().diagnosis()
    assert answer.failure is Class.KV_CACHE_OOM
    assert answer.phase is Phase.ALLOCATING_KV
    assert answer.rollback_helps is True
    assert "steps 10" in answer.summary
    assert answer.effective["speculative_num_steps"] == 10


def test_without_speculation_a_rollback_of_it_cannot_help() -> None:
    answer = launch(steps=None).raises(NO_POOL).ended().diagnosis()
    assert answer.failure is Class.KV_CACHE_OOM
    assert answer.rollback_helps is False


def test_weights_that_exceed_the_budget_alone_are_not_blamed_on_speculation() -> None:
    answer = launch(steps=3, fraction=0.2).raises(NO_POOL).ended().diagnosis()
    assert answer.failure is Class.KV_CACHE_OOM
    assert answer.rollback_helps is False
    assert "use up --mem-fraction-static=0.2 and exceed it by 11.4 GiB" in answer.summary
    assert "0.323" in " ".join(answer.advice)


def test_advice_that_is_already_met_is_recognised_and_not_repeated() -> None:
    text = (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.85. Raise "
        "--mem-fraction-static above 0.323 (minimum viable = 1 - available/pre = 0.3226)."
    )
    advice = launch().raises(text).ended().diagnosis().advice
    assert "does not help" in advice[0]


def held(gib: float, *, ours: bool) -> HeldMemory:
    return HeldMemory(0, int(gib * GIB), "python3 (4711)", ours)


@pytest.mark.parametrize("ours", [True, False])
def test_memory_that_was_held_before_the_start_is_the_cause_and_not_the_configuration(ours: bool) -> None:
    log = launch(before=53.0, after=23.0).raises(NO_POOL).ended()
    answer = log.diagnosis(gpu_before=clean_cards(), held_before=(held(40, ours=ours),))
    assert answer.failure is Class.GPU_MEMORY_HELD
    assert answer.rollback_helps is False
    assert "40.0 GiB" in answer.summary
    assert ("earlier launch of this unit" in answer.summary) is ours


def test_a_holder_on_a_card_that_the_server_does_not_use_is_not_blamed() -> None:
    answer = launch().raises(NO_POOL).ended().diagnosis(gpu_before=clean_cards(), held_before=(held(40, ours=False),))
    assert answer.failure is Class.KV_CACHE_OOM


def test_bytes_that_no_process_accounts_for_are_held_too() -> None:
    log = launch(before=40.0, after=10.0).raises(NO_POOL).ended()
    answer = log.diagnosis(gpu_before=clean_cards(used_gib=54.0))
    assert answer.failure is Class.GPU_MEMORY_HELD
    assert "no visible process" in answer.summary
    assert "nvidia-smi --gpu-reset" in answer.advice[0]
    inside = log.diagnosis(gpu_before=clean_cards(used_gib=54.0), inside="lxc")
    assert "held from outside of this lxc container" in inside.advice[0]
    assert "pct exec CTID" in inside.advice[0]


def test_clean_cards_leave_the_configuration_to_blame() -> None:
    assert launch().raises(NO_POOL).ended().diagnosis(gpu_before=clean_cards()).failure is Class.KV_CACHE_OOM


def test_the_oom_s_own_words_name_a_stranger_on_the_card() -> None:
    text = f"{OOM}Process 2493 has 31.12 GiB memory in use."
    answer = LaunchLog().started().sglang("Load weight begin. avail mem=60.00 GB").raises(text).ended().diagnosis()
    assert answer.failure is Class.GPU_MEMORY_HELD
    assert "process 2493" in answer.summary


def test_another_process_of_the_same_launch_is_no_stranger() -> None:
    log = LaunchLog().started().sglang("Load weight begin. avail mem=93.00 GB")
    log.raises(f"{OOM}Process 511 has 31.12 GiB memory in use.").ended()
    record = Launch(UNIT, "a" * 32, 0.0, processes=(RecordedProcess(ProcessId(511, 1), "x", Phase.STARTING),))
    assert log.diagnosis(launch=record).failure is Class.WEIGHTS_OOM


def test_an_unbalanced_start_of_the_target_means_that_a_card_is_held() -> None:
    text = "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
    log = LaunchLog().started().sglang("Init torch distributed begin.", rank="TP1").raises(text, rank="TP1").ended()
    assert log.diagnosis().failure is Class.GPU_MEMORY_HELD


def test_the_same_check_for_the_draft_worker_is_a_false_alarm() -> None:
    text = "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
    log = launch(steps=3).sglang("Memory pool end. avail mem=10.00 GB", "Init torch distributed begin.")
    answer = log.raises(text).ended().diagnosis()
    assert answer.failure is Class.SOFTWARE_EXCEPTION
    assert answer.rollback_helps is True


POOL = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 20.00 GB, V size: 20.00 GB"
POOL_END = "Memory pool end. avail mem=0.79 GB"
DRAFT_LOAD = ("Load weight begin. avail mem=62.00 GB", "Load weight end. elapsed=0.10 s, type=XMTP, avail mem=61.00 GB")
CAPTURE = "Capture cuda graph begin. This can take up to several minutes. avail mem=0.79 GB"
UP = ("max_total_num_tokens=1000, max_running_requests=48", "The server is fired up and ready to roll!")
STAGES = {
    "while the target's pool is made": ((), (), Class.KV_CACHE_OOM),
    "after the last pool, before any capture": ((POOL, POOL_END), (), Class.CUDA_GRAPH_OOM),
    "while graphs are captured": ((POOL, POOL_END, CAPTURE), (), Class.CUDA_GRAPH_OOM),
    "in the draft's pool, after the target's": ((*DRAFT_LOAD, POOL, POOL_END), (), Class.KV_CACHE_OOM),
    "after the draft's pool": ((*DRAFT_LOAD, POOL, POOL_END, POOL, POOL_END), (), Class.CUDA_GRAPH_OOM),
    "while the draft's weights are loaded": ((POOL, POOL_END, DRAFT_LOAD[0]), (), Class.WEIGHTS_OOM),
    "while serving": ((POOL, POOL_END, *UP), (), Class.RUNTIME_CUDA_OOM),
    "in a graph runner while serving": (
        (POOL, POOL_END, *UP),
        (
            'managers/scheduler.py", line 1, in event_loop_overlap',
            'runner/decode_cuda_graph_runner.py", line 1, in replay',
        ),
        Class.RUNTIME_CUDA_OOM,
    ),
    "in the buffers of graphs, by its frames": (
        (),
        ('model_executor/model_runner.py", line 1, in init_cuda_graphs', 'x/triton_backend.py", line 2, in init_state'),
        Class.CUDA_GRAPH_OOM,
    ),
}


@pytest.mark.parametrize(("lines", "frames", "expected"), STAGES.values(), ids=STAGES.keys())
def test_a_raw_oom_is_told_by_its_stage(lines: tuple[str, ...], frames: tuple[str, ...], expected: Class) -> None:
    answer = launch(before=93.0).sglang(*lines).raises(OOM, *frames).ended().diagnosis()
    assert answer.failure is expected


def test_a_capture_that_fails_for_another_reason_is_not_memory_whatever_the_advice_says() -> None:
    log = launch().sglang(POOL, POOL_END, CAPTURE, TRACEBACK)
    log.sglang("Exception: Capture cuda graph failed: Ninja build failed. Ninja output:", after=0.0)
    log.sglang(" Possible solutions:", " 1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)", after=0.0)
    answer = log.own_kill().ended().diagnosis()
    assert answer.failure is Class.MISSING_DEPENDENCY
    assert Class.CUDA_GRAPH_OOM in {ruled_out.failure for ruled_out in answer.ruled_out}


def test_the_rank_that_ran_out_is_the_cause_though_another_rank_s_noise_came_first() -> None:
    log = launch().sglang(POOL, POOL_END, CAPTURE)
    log.sglang("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", rank="TP0")
    assert log.raises(OOM, rank="TP7").ended().diagnosis().failure is Class.CUDA_GRAPH_OOM


def test_an_oom_that_the_server_survived_did_not_end_it() -> None:
    log = launch().sglang(POOL, POOL_END, *UP).sglang(TRACEBACK, OOM)
    for _ in range(20):
        log.sglang("Decode batch, #running-req: 1, #token: 10, token usage: 0.10, #queue-req: 0", after=10.0)
    answer = log.stopping().sigterm().ended().diagnosis()
    assert answer.failure is Class.REQUESTED_STOP


def test_a_retracted_request_is_no_out_of_memory() -> None:
    log = launch().sglang(POOL, POOL_END, *UP)
    log.sglang("KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.0980 -> 0.9230")
    assert log.ended().diagnosis().failure is Class.EXTERNAL_KILL


def argv(steps: int) -> tuple[str, ...]:
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1")
    return ("python3", "-m", "sglang.launch_server", "--model-path", "/m", *flags)


@pytest.mark.parametrize(("good", "helps"), [(4, True), (10, False), (None, None)])
def test_with_a_ledger_a_rollback_needs_another_config_that_is_proven(good: int | None, helps: bool | None) -> None:
    answer = (
        launch()
        .raises(NO_POOL)
        .ended()
        .diagnosis(
            has_ledger=True,
            launch=Launch(UNIT, "a" * 32, 0.0, argv=argv(10)),
            known_good=SpeculationConfig.of(argv(good)) if good else None,
        )
    )
    assert answer.rollback_helps is helps


def test_with_a_ledger_a_managed_memory_flag_can_be_what_a_rollback_cures() -> None:
    managed = frozenset({"--mem-fraction-static"})
    command = ("python3", "-m", "sglang.launch_server", "--model-path", "/m", "--mem-fraction-static")
    answer = (
        launch(steps=None, fraction=0.01)
        .raises(NO_POOL)
        .ended()
        .diagnosis(
            has_ledger=True,
            managed=managed,
            launch=Launch(UNIT, "a" * 32, 0.0, argv=(*command, "0.01")),
            known_good=SpeculationConfig.of((*command, "0.85"), managed),
        )
    )
    assert answer.failure is Class.KV_CACHE_OOM
    assert answer.rollback_helps is True


@pytest.mark.parametrize(("good", "helps"), [(4, None), (10, False)])
def test_beside_a_stranger_a_proven_config_may_still_fit_unless_it_is_what_failed(
    good: int, helps: bool | None
) -> None:
    words = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps"]
    argv = ("python3", "-m", "sglang.launch_server", *words, "10")
    answer = (
        launch(before=53.0, after=23.0)
        .raises(NO_POOL)
        .ended()
        .diagnosis(
            has_ledger=True,
            launch=Launch("sglang.service", "a" * 32, 0.0, argv=argv),
            known_good=SpeculationConfig.of([*words, str(good)]),
            gpu_before=clean_cards(),
            held_before=(held(40, ours=False),),
        )
    )
    assert (answer.failure, answer.rollback_helps) == (Class.GPU_MEMORY_HELD, helps)


def of_release(version: str) -> dict[str, object]:
    return {"launch": Launch(unit=UNIT, invocation="a" * 32, started=1.0, version=version)}


@pytest.mark.parametrize("version", ["0.6.2", "0.3.1"])
def test_of_an_unknown_release_every_wording_counts_and_the_report_says_so(version: str) -> None:
    log = (
        LaunchLog().ready().raises("AssertionError: Failed to retract any request. No space left for only one request.")
    )
    answer = log.diagnosis(**of_release(version))
    assert answer.failure is Class.KV_CACHE_OOM
    assert f"SGLang {version} is not among the releases whose wordings are known (0.4.6 to 0.5.23)" in answer.advice[-1]


def test_a_wording_that_a_known_release_does_not_print_is_not_its_own() -> None:
    log = (
        LaunchLog()
        .ready()
        .raises("ValueError: Out of memory even after retracting all other requests in the decode batch.")
    )
    assert log.diagnosis(**of_release("0.5.9")).failure is Class.KV_CACHE_OOM
    assert log.diagnosis(**of_release("0.5.16")).failure is Class.SOFTWARE_EXCEPTION


def test_a_log_that_does_not_tell_its_release_is_read_with_the_wordings_of_all() -> None:
    answer = LaunchLog().sglang(TRACEBACK, NO_POOL).diagnosis()
    assert "SGLang's release cannot be told from this log" in answer.advice[-1]


SPECULATING = HYBRID.format(fraction=0.85, algorithm="'EAGLE'", steps=3, tokens=4)


@pytest.mark.parametrize(
    ("frame", "helps"),
    [
        ('managers/mm_utils.py", line 411, in general_mm_embed_routine', None),
        ('speculative/eagle_worker.py", line 9, in draft', True),
    ],
)
def test_what_ran_out_at_work_is_cured_by_less_speculation_where_that_is_what_ran(
    frame: str, helps: bool | None
) -> None:
    log = LaunchLog().started().sglang(SPECULATING, "The server is fired up and ready to roll!")
    log.raises(OOM, 'managers/scheduler.py", line 1108, in event_loop_overlap', frame).ended()
    answer = log.diagnosis()
    assert answer.failure is Class.RUNTIME_CUDA_OOM
    assert answer.rollback_helps is helps


def test_weights_that_exceed_the_fraction_without_figures_may_be_the_draft_s_or_not() -> None:
    text = (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.3. Raise "
        "--mem-fraction-static above 0.320 (minimum viable = 1 - available/pre = 0.3198)."
    )
    assert LaunchLog().started().sglang(SPECULATING).raises(text).ended().diagnosis().rollback_helps is None


def test_a_rank_of_the_launch_itself_is_nobody_who_held_memory_before_it() -> None:
    log = launch(before=53.0, after=23.0).raises(NO_POOL).ended()
    own, other = (HeldMemory(0, 40 * GIB, f"process {pid}", ours=False, pid=pid) for pid in (SCHEDULER_PID, 4711))
    assert log.diagnosis(gpu_before=clean_cards(), held_before=(own,)).failure is Class.KV_CACHE_OOM
    assert log.diagnosis(gpu_before=clean_cards(), held_before=(other,)).failure is Class.GPU_MEMORY_HELD
