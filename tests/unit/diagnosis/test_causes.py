"""Which line is the cause, and whether speculation had a part in it: by short logs."""

import pytest

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class

UP = "[2026-03-09 22:00:00] The server is fired up and ready to roll!"
DECODES = "[2026-03-09 22:35:06 TP0] Decode batch, #running-req: 1, #token: 100, token usage: 0.10, #queue-req: 0"
XID = "kernel: NVRM: Xid (PCI:0000:dc:00): 31, pid=4101, name=sglang::schedul, MMU Fault"
SIGTERM = "[2026-03-09 22:35:08] SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
HEADER = "[2026-03-09 22:35:06 TP0] Scheduler hit an exception: Traceback (most recent call last):"
OVER = (
    "[2026-03-09 22:35:07] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    "systemd[1]: sglang.service: Main process exited, code=killed, status=9/KILL",
)
LOOP = "/opt/sglang/python/sglang/srt/managers/scheduler.py:event_loop_overlap"
DRAFTS = "/opt/sglang/python/sglang/srt/speculative/eagle_worker.py:forward_batch_generation"
TARGET = (
    "/opt/sglang/python/sglang/srt/managers/tp_worker.py:forward",
    "/opt/sglang/python/sglang/srt/models/m.py:forward",
)
TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py:_call_impl"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
SOFTWARE = "RuntimeError: The expanded size of the tensor must match the existing size"


def raised(error: str, *frames: str, header: str = HEADER) -> tuple[str, ...]:
    lines = []
    for frame in frames:
        path, _, function = frame.rpartition(":")
        lines += [f'  File "{path}", line 7, in {function}', "    something()"]
    return (header, *lines, error)


def told(*lines: str) -> Diagnosis:
    timeline = read_launch(read_text([f"{line}\n".encode() for line in lines], "log"))
    return diagnose(Case(timeline=timeline))


@pytest.mark.parametrize("before", [(), (DECODES, XID)], ids=["alone", "after an Xid"])
@pytest.mark.parametrize(
    ("frames", "helps"),
    [((LOOP, DRAFTS), True), ((LOOP, DRAFTS, TORCH), True), ((LOOP, DRAFTS, *TARGET), None), ((LOOP, *TARGET), None)],
    ids=["verifies drafts", "below it", "the target, through it", "the target"],
)
def test_a_fault_of_the_card_is_of_speculation_where_it_came_out_of_its_code(
    before: tuple[str, ...], frames: tuple[str, ...], helps: bool | None
) -> None:
    """With speculation the target's own forward passes through that code as well."""
    answer = told(UP, *before, *raised(ILLEGAL, *frames), *OVER)
    assert (answer.failure, answer.rollback_helps) == (Class.CUDA_ERROR, helps)
    assert "illegal memory access" in answer.summary


@pytest.mark.parametrize(
    ("frames", "helps"),
    [
        ((LOOP, DRAFTS, *TARGET), True),
        ((LOOP, "/opt/sglang/python/sglang/srt/managers/cache_controller.py:set_draft_kv_pool"), True),
        (("/opt/serve_draft.py:<module>", "/opt/serve_draft.py:main"), None),
        (("/opt/sglang/python/sglang/srt/speculative/spec_info.py:<module>",), None),
        ((LOOP, *TARGET), None),
    ],
    ids=["in it", "the draft's pool", "a script of that name", "an import", "elsewhere"],
)
def test_an_exception_is_of_speculation_where_its_code_ran(frames: tuple[str, ...], helps: bool | None) -> None:
    answer = told(*raised(SOFTWARE, *frames), *OVER)
    assert (answer.failure, answer.rollback_helps) == (Class.SOFTWARE_EXCEPTION, helps)


def test_a_stop_asked_for_between_a_fault_and_its_last_word_is_no_cause() -> None:
    answer = told(UP, DECODES, XID, SIGTERM, *raised(ILLEGAL, LOOP, *TARGET), OVER[1])
    assert answer.failure is Class.CUDA_ERROR


def test_an_exception_without_a_word_is_told_by_the_one_that_has_some() -> None:
    bare = raised("AssertionError", LOOP, header=HEADER.replace("TP0", "TP1"))
    other = raised("AssertionError", LOOP, header=HEADER.replace("TP0", "TP2"))
    answer = told(*bare, *other, *raised(SOFTWARE, LOOP), *OVER)
    assert "The expanded size" in answer.summary


def test_of_a_long_line_that_part_is_quoted_which_tells() -> None:
    for padding in (100, 1900, 2600, 30_000):
        error = f"RuntimeError: {'x' * padding} CUDA error: an illegal memory access was encountered"
        answer = told(UP, *raised(error, LOOP, *TARGET), *OVER)
        assert "illegal memory access" in answer.summary
        assert any("illegal memory access" in evidence.text for evidence in answer.evidence)


def test_a_line_of_code_in_a_traceback_is_not_the_error() -> None:
    frames = ['  File "/opt/sglang/python/sglang/srt/pynccl_wrapper.py", line 350, in NCCL_CHECK']
    code = 'raise RuntimeError(f"NCCL error: {error_str}")'
    error = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    for source in (f"    {code}", code):  # a shipper of logs may have taken the blanks away
        answer = told(HEADER, *frames, source, error, *OVER)
        assert answer.failure is Class.NCCL_ERROR
        assert "unhandled system error" in answer.summary


@pytest.mark.parametrize("status", ["killed, status=9/KILL", "killed, status=15/TERM", "exited, status=1/FAILURE"])
def test_without_a_line_of_the_server_every_usual_end_is_told_the_same(status: str) -> None:
    answer = told(
        "systemd[1]: Started sglang.service - SGLang.",
        f"systemd[1]: sglang.service: Main process exited, code={status}",
    )
    assert answer.failure is Class.UNKNOWN
    assert "No line of the server itself" in answer.summary
