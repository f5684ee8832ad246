"""Who ended the server: SGLang itself, a stop, a stop timeout, a time limit, the kernel, or somebody outside."""

import pytest

from journal_lines import MAIN_PID, SCHEDULER_PID, UNIT, LaunchLog
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.unit import UnitSnapshot

TIMED_OUT = f"{UNIT}: State 'stop-sigterm' timed out. Killing."
KILLING = f"{UNIT}: Killing process {MAIN_PID} (python) with signal SIGKILL."
DECODING = (
    "Decode batch, #running-req: 16, #token: 16000, token usage: 0.30, accept len: 3.20, accept rate: 0.80, "
    "cuda graph: True, gen throughput (token/s): 800.00, #queue-req: 0"
)
OLD_LOAD = "Load weight end. type=Qwen3NextForCausalLM, dtype=torch.bfloat16, avail mem=60.00 GB"


def stop_that_timed_out() -> LaunchLog:
    log = LaunchLog().ready().sglang(DECODING).stopping().sigterm()
    return log.systemd(TIMED_OUT, after=60.0).systemd(KILLING).ended(result="timeout")


def test_a_stop_that_outlived_its_timeout_is_no_fault_of_the_configuration() -> None:
    answer = stop_that_timed_out().diagnosis()
    assert answer.failure is Class.STOP_TIMEOUT_SIGKILL
    assert answer.phase is Phase.STOPPING
    assert answer.rollback_helps is False
    assert "16 requests" in answer.summary


def test_a_stop_timeout_says_what_the_drain_would_have_needed() -> None:
    advice = " ".join(stop_that_timed_out().diagnosis().advice)
    assert "about 1000 tokens long each, at 50 tokens/s each: an answer of 4096 takes 82 s" in advice


def test_a_drain_that_can_never_end_is_answered_with_killmode_and_not_with_a_number() -> None:
    log = LaunchLog().started().sglang(OLD_LOAD, "The server is fired up and ready to roll!", DECODING)
    log.stopping().sigterm().systemd(TIMED_OUT, after=60.0).systemd(KILLING).ended(result="timeout")
    answer = log.diagnosis(unit=UnitSnapshot(UNIT, kill_mode="control-group", stop_timeout=60.0))
    assert answer.failure is Class.STOP_TIMEOUT_SIGKILL
    (advice,) = answer.advice
    assert "KillMode=mixed" in advice
    assert "would not help" in advice


@pytest.mark.parametrize(
    ("code", "status", "result"), [("killed", "9", "signal"), ("exited", "0", "success"), ("killed", "15", "success")]
)
def test_a_stop_in_time_is_a_requested_stop_whatever_the_exit_status(code: str, status: str, result: str) -> None:
    answer = LaunchLog().ready().stopping().sigterm().ended(code, status, result).diagnosis()
    assert answer.failure is Class.REQUESTED_STOP
    assert answer.rollback_helps is False


def test_children_that_die_of_the_stop_s_own_sigterm_are_no_crash() -> None:
    log = LaunchLog().ready().stopping().sigterm()
    log.sglang("Subprocess scheduler_0 (pid=510) crashed with exit code -15. Triggering SIGQUIT for cleanup...")
    log.sglang("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
    answer = log.ended().diagnosis()
    assert answer.failure is Class.REQUESTED_STOP
    assert Class.SOFTWARE_EXCEPTION in {ruled_out.failure for ruled_out in answer.ruled_out}


def test_a_crash_whose_stuck_child_then_times_out_in_a_stop_state_is_the_crash() -> None:
    log = LaunchLog().ready().raises("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    log.ended()
    entries = [*log.entries[:-1]]
    stuck = LaunchLog(entries, log.now).systemd(TIMED_OUT, after=90.0).systemd(KILLING)
    answer = LaunchLog([*stuck.entries, log.entries[-1]], stuck.now).diagnosis()
    assert answer.failure is Class.CUDA_ERROR


def test_a_kill_from_outside_whose_stuck_child_times_out_is_no_stop_timeout() -> None:
    log = LaunchLog().ready()
    log.systemd(f"{UNIT}: Main process exited, code=killed, status=9/KILL").systemd(TIMED_OUT, after=90.0)
    answer = log.systemd(f"{UNIT}: Failed with result 'signal'.").diagnosis()
    assert answer.failure is Class.EXTERNAL_KILL


def test_a_run_time_limit_is_said_to_be_one() -> None:
    log = LaunchLog().ready().systemd(f"{UNIT}: Service reached runtime time limit. Stopping.").sigterm()
    answer = log.systemd(TIMED_OUT, after=60.0).systemd(KILLING).ended(result="timeout").diagnosis()
    assert answer.failure is Class.EXTERNAL_KILL
    assert "RuntimeMaxSec" in answer.summary


def test_a_stop_whose_request_is_before_the_excerpt_is_recognised_with_less_confidence() -> None:
    log = LaunchLog().sglang("INFO:     Application shutdown complete.", pid=MAIN_PID)
    answer = log.systemd(TIMED_OUT).systemd(KILLING).ended(result="timeout").diagnosis()
    assert answer.failure is Class.STOP_TIMEOUT_SIGKILL
    assert answer.confidence < 0.9


def test_a_stop_after_a_crash_is_not_what_ended_the_launch() -> None:
    log = LaunchLog().ready().raises("RuntimeError: CUDA error: unspecified launch failure")
    assert log.stopping().ended().diagnosis().failure is Class.CUDA_ERROR


def test_a_client_s_kill_names_its_signal() -> None:
    log = LaunchLog().ready().systemd(f"{UNIT}: Sent signal SIGKILL to main process 500 (python) on client request.")
    answer = log.ended().diagnosis()
    assert answer.failure is Class.EXTERNAL_KILL
    assert "SIGKILL" in answer.summary


def test_a_silent_kill_of_a_healthy_server_is_external_and_said_with_little_confidence() -> None:
    answer = LaunchLog().ready().ended().diagnosis()
    assert answer.failure is Class.EXTERNAL_KILL
    assert answer.confidence < 0.8


def test_without_the_beginning_of_the_log_a_silent_kill_is_unknown() -> None:
    log = LaunchLog().sglang(DECODING).ended()
    assert log.diagnosis().failure is Class.UNKNOWN


def test_sglang_s_guess_about_the_oom_killer_proves_nothing() -> None:
    log = LaunchLog().sglang("Load weight begin. avail mem=93.00 GB")
    log.sglang(
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
        "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    )
    answer = log.diagnosis()
    assert answer.failure is Class.UNKNOWN
    assert answer.rollback_helps is None


def kernel_killed(pid: int, comm: str = "sglang::schedul") -> str:
    return f"Out of memory: Killed process {pid} ({comm}) total-vm:1kB, anon-rss:1kB, UID:0 oom_score_adj:0"


def child_killed(log: LaunchLog) -> LaunchLog:
    line = "Subprocess scheduler_0 (pid=510) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    return log.sglang(line, pid=MAIN_PID).own_kill().ended()


def test_the_kernel_s_kill_of_a_scheduler_is_proven_by_its_pid() -> None:
    log = child_killed(LaunchLog().ready().kernel(kernel_killed(SCHEDULER_PID, "python3")))
    assert log.diagnosis().failure is Class.HOST_OOM_KILL


def test_the_kernel_s_kill_of_a_stranger_is_not_ours() -> None:
    log = child_killed(LaunchLog().ready().kernel(kernel_killed(99999, "chrome")))
    assert log.diagnosis().failure is Class.EXTERNAL_KILL


def test_the_kernel_names_the_group_of_what_it_kills() -> None:
    def killed_in(group: str) -> Diagnosis:
        log = (
            LaunchLog()
            .ready()
            .kernel(
                f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
                f"task_memcg={group},task=sglang::schedul,pid=777,uid=0"
            )
        )
        return child_killed(log.kernel(kernel_killed(777))).diagnosis()

    assert killed_in(f"/system.slice/{UNIT}").failure is Class.HOST_OOM_KILL
    assert killed_in("/system.slice/another.service").failure is Class.EXTERNAL_KILL


def test_systemd_s_word_of_a_memory_kill_explains_the_noise_of_the_other_ranks() -> None:
    log = LaunchLog().ready().sglang("RuntimeError: NCCL error: unhandled system error", rank="TP1")
    log.systemd(f"{UNIT}: A process of this unit has been killed by the OOM killer.")
    assert log.ended(result="oom-kill").diagnosis().failure is Class.HOST_OOM_KILL


def test_a_memory_limit_of_the_unit_makes_it_the_group_s_kill() -> None:
    log = LaunchLog().ready().systemd(f"{UNIT}: A process of this unit has been killed by the OOM killer.")
    answer = log.ended(result="oom-kill").diagnosis(unit=UnitSnapshot(UNIT, memory_max=2**30))
    assert answer.failure is Class.CGROUP_OOM_KILL


def test_an_eviction_is_somebody_else_s_doing() -> None:
    log = LaunchLog().ready().sglang("deregistered worker 10.0.0.3:30000 (lease revoked)").sigterm().ended()
    assert log.diagnosis().failure is Class.EXTERNAL_KILL


def test_an_end_with_status_0_that_nobody_asked_for_is_unknown_and_said() -> None:
    answer = LaunchLog().ready().ended("exited", "0", "success").diagnosis()
    assert answer.failure is Class.UNKNOWN
    assert "status 0" in answer.summary


def test_a_wrapper_s_watchdog_is_told_in_the_sentence() -> None:
    log = LaunchLog().ready().systemd(f"{UNIT}: Watchdog timeout (limit 30s)!").ended("dumped", "6", "watchdog")
    answer = log.diagnosis()
    assert answer.failure is Class.UNKNOWN
    assert "WatchdogSec" in answer.summary


def test_what_a_later_launch_of_the_unit_ended_on_is_not_taken_for_this_one() -> None:
    other = UnitSnapshot(UNIT, invocation="b" * 32, stop_timeout=5.0)
    answer = stop_that_timed_out().diagnosis(unit=other)
    assert "TimeoutStopSec=5" not in answer.summary


def test_an_exception_that_is_the_last_thing_said_ended_a_launch_of_which_systemd_says_nothing() -> None:
    log = LaunchLog().sglang("Traceback (most recent call last):", "KeyError: 'sweep'", pid=MAIN_PID)
    answer = log.diagnosis()
    assert answer.failure is Class.SOFTWARE_EXCEPTION
    assert "KeyError: 'sweep'" in answer.summary


@pytest.mark.parametrize(
    ("refused", "helps"),
    [("argument --speculative-algorithm: invalid choice: 'EAGLE4'", None), ("unrecognized arguments: --tpp 4", False)],
)
def test_a_refusal_that_names_speculation_may_be_cured_by_going_back(refused: str, helps: bool | None) -> None:
    log = LaunchLog().started().sglang(f"sglang serve: error: {refused}", pid=500).ended("exited", "2", "exit-code")
    assert log.diagnosis().failure is Class.BAD_ARGUMENTS
    assert log.diagnosis().rollback_helps is helps


# Inside a container


def killed() -> LaunchLog:
    return LaunchLog().ready().sglang(DECODING).ended("killed", "9", "signal")


def test_a_kill_that_nobody_explains_is_somebodys_on_a_host_and_unknown_inside_a_container() -> None:
    assert killed().diagnosis().failure is Class.EXTERNAL_KILL
    answer = killed().diagnosis(inside="lxc")
    assert answer.failure is Class.UNKNOWN
    assert "for want of memory" in answer.summary
    assert Class.HOST_OOM_KILL not in {ruled_out.failure for ruled_out in answer.ruled_out}
    more, advice = answer.advice
    assert "systemctl show UNIT" in more
    assert "journalctl -k" in advice
    assert "pct config CTID" in advice


def test_only_an_lxc_is_told_of_proxmox() -> None:
    assert "pct" not in " ".join(killed().diagnosis(inside="docker").advice)


def test_a_container_that_is_handed_the_kernels_lines_is_a_host_like_any() -> None:
    log = LaunchLog().ready().sglang(DECODING).kernel("eth0: link is up").ended("killed", "9", "signal")
    assert log.diagnosis(inside="lxc").failure is Class.EXTERNAL_KILL


def test_inside_a_container_systemds_own_count_still_tells_a_kill_for_memory() -> None:
    log = LaunchLog().ready().sglang(DECODING)
    log.systemd(f"{UNIT}: A process of this unit has been killed by the OOM killer.")
    answer = log.ended("killed", "9", "oom-kill").diagnosis(inside="lxc")
    assert answer.failure in (Class.HOST_OOM_KILL, Class.CGROUP_OOM_KILL)
    assert not any("container" in advice for advice in answer.advice)


def test_a_stop_that_was_asked_for_says_nothing_of_a_kernel() -> None:
    assert LaunchLog().ready().stopping().sigterm().ended().diagnosis(inside="lxc").advice == ()


def test_what_the_watchdog_ended_because_it_hung_is_no_kill_of_somebody_elses_and_no_stop() -> None:
    log = LaunchLog().ready().sglang(DECODING).ended(code="killed", status="9", result="signal")
    assert log.diagnosis().failure is not Class.UNRESPONSIVE
    answer = log.diagnosis(ended_for="The server has generated nothing for 500 s.")
    assert (answer.failure, answer.summary) == (Class.UNRESPONSIVE, "The server has generated nothing for 500 s.")
    assert "brought this launch down" in answer.evidence[0].text
