"""What belongs to another launch, or was said for another reason, and must not be taken for this one's cause."""

from journal_lines import SCHEDULER_PID, UNIT, LaunchLog
from sglang_watchdog.domain.failure import FailureClass as Class

KILL = f"Out of memory: Killed process {SCHEDULER_PID} (sglang::schedul) total-vm:312004512kB, anon-rss:198233112kB"
XID = "NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal   XC0 i0 Link 00"
SILENT = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 1"
PREFILL = "Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0, #running-req: 0, #queue-req: 0"


def test_what_the_kernel_said_before_the_launch_began_was_about_another() -> None:
    for line in (KILL, XID):
        log = LaunchLog().kernel(line).ready().stopping().sigterm().ended()
        assert log.diagnosis().failure is Class.REQUESTED_STOP


def test_a_start_that_never_was_has_no_kernel_line_before_it_either() -> None:
    log = LaunchLog().kernel(KILL).systemd(f"{UNIT}: Failed to load environment files: No such file or directory")
    assert log.systemd(f"{UNIT}: Failed with result 'resources'.").diagnosis().failure is Class.MISSING_DEPENDENCY


def test_a_start_whose_process_speaks_before_systemd_does_has_no_kernel_line_before_it() -> None:
    log = LaunchLog().kernel(XID).sglang("an early word", after=7.0).systemd(f"Started {UNIT} - SGLang.")
    log = log.systemd(f"{UNIT}: Main process exited, code=exited, status=203/EXEC")
    assert log.systemd(f"{UNIT}: Failed with result 'exit-code'.").diagnosis().failure is Class.MISSING_DEPENDENCY


def test_a_process_that_systemd_could_not_set_up_was_not_killed_by_the_kernel() -> None:
    log = LaunchLog().systemd(f"Started {UNIT} - SGLang.").kernel(KILL)
    log = log.systemd(f"{UNIT}: Main process exited, code=exited, status=203/EXEC")
    assert log.systemd(f"{UNIT}: Failed with result 'exit-code'.").diagnosis().failure is Class.MISSING_DEPENDENCY


def test_a_hang_before_a_stop_that_timed_out_is_told_with_the_stop() -> None:
    log = LaunchLog().ready().sglang(PREFILL).sglang(SILENT, after=20.0).stopping().sigterm()
    log = log.systemd(f"{UNIT}: State 'stop-sigterm' timed out. Killing.")
    answer = log.ended(result="timeout").diagnosis()
    assert answer.failure is Class.STOP_TIMEOUT_SIGKILL
    assert "stopped answering its health checks" in answer.summary


def test_what_the_kernel_says_once_the_launch_is_over_is_about_a_later_one() -> None:
    log = LaunchLog().ready().ended().kernel(KILL, after=30.0)
    assert log.diagnosis().failure is Class.EXTERNAL_KILL


def test_a_line_of_the_kernel_that_comes_a_moment_late_still_counts() -> None:
    log = LaunchLog().ready().ended().kernel(KILL, after=0.5)
    assert log.diagnosis().failure is Class.HOST_OOM_KILL


def test_a_start_that_timed_out_is_no_stop_though_the_server_logs_the_sigterm() -> None:
    log = LaunchLog().ready().systemd(f"{UNIT}: start operation timed out. Terminating.").sigterm()
    assert log.ended(result="timeout").diagnosis().failure is Class.START_TIMEOUT


def test_a_server_that_was_silent_to_its_end_was_unresponsive() -> None:
    answer = LaunchLog().ready().sglang(PREFILL).sglang(SILENT, after=20.0).ended().diagnosis()
    assert answer.failure is Class.UNRESPONSIVE
    assert answer.rollback_helps is None


def test_a_silent_server_that_still_runs_is_told_so() -> None:
    assert LaunchLog().ready().sglang(PREFILL).sglang(SILENT, after=20.0).diagnosis().failure is Class.UNRESPONSIVE


def test_a_health_check_that_failed_once_long_before_is_not_the_cause() -> None:
    served_on = LaunchLog().ready().sglang(SILENT).sglang(PREFILL, after=10.0).ended()
    idle = LaunchLog().ready().sglang(SILENT).sglang("No life sign", after=3600.0).ended()
    assert served_on.diagnosis().failure is Class.EXTERNAL_KILL
    assert idle.diagnosis().failure is Class.EXTERNAL_KILL


def test_sglangs_own_watchdog_tells_more_of_a_hang_than_the_health_check_before_it() -> None:
    fired = "Scheduler watchdog timeout (self.watchdog_timeout=20, self.soft=False)"
    log = LaunchLog().ready().sglang(PREFILL).sglang(SILENT, after=20.0).sglang(fired, after=2.0).ended()
    assert log.diagnosis().failure is Class.INTERNAL_WATCHDOG_HANG
