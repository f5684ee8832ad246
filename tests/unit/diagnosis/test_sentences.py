"""What a person reads of a case: it has to fit that case, not only its class."""

import pytest

from corpus_cases import snippets
from journal_lines import UNIT, LaunchLog
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class

CRASH = "Scheduler hit an exception: Traceback (most recent call last):"
SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)"


def told(name: str) -> Diagnosis:
    return next(case for case in snippets() if case.name == name).diagnosis()


def started() -> LaunchLog:
    return LaunchLog().systemd(f"Started {UNIT} - SGLang.")


def test_a_wording_may_say_itself_what_to_do() -> None:
    answer = started().sglang(CRASH).sglang(f"RuntimeError: {SEGMENT}").diagnosis()
    assert answer.failure is Class.SHM_OR_DISK_FULL
    assert "--shm-size" in answer.advice[0]


def test_that_a_card_is_busy_asks_for_more_than_its_free_memory() -> None:
    assert "-d COMPUTE" in told("device-busy").advice[0]


@pytest.mark.parametrize(("status", "said"), [("exited, status=1/FAILURE", False), ("killed, status=9/KILL", True)])
def test_a_kill_is_ruled_out_only_where_there_may_have_been_one(status: str, said: bool) -> None:
    log = started().sglang("bash: line 1: /opt/venv/bin/activate: No such file or directory")
    answer = log.systemd(f"{UNIT}: Main process exited, code={status}").diagnosis()
    assert answer.failure is Class.MISSING_DEPENDENCY
    assert (Class.EXTERNAL_KILL in {ruled_out.failure for ruled_out in answer.ruled_out}) is said


def test_a_container_s_name_that_is_taken_is_shown_with_what_to_do() -> None:
    answer = told("container-name-is-taken")
    assert "same name" in answer.summary
    assert "already in use by container" in answer.evidence[0].text
    assert "docker rm -f" in answer.advice[0]


def test_a_client_that_failed_for_a_reason_not_known_is_told_from_a_server_that_did() -> None:
    answer = started().systemd(f"{UNIT}: Main process exited, code=exited, status=125/n/a").diagnosis()
    assert answer.failure is Class.UNKNOWN
    assert "no container was started" in answer.summary


def test_a_watcher_of_memory_is_not_called_the_kernel() -> None:
    assert told("earlyoom").summary.startswith("A watcher of the host's memory")


def test_draft_weights_are_told_from_their_frames_where_the_log_begins_late() -> None:
    answer = told("draft-weights-in-a-log-that-begins-late")
    assert "the draft model's weights" in answer.summary
    assert answer.rollback_helps is True


def test_a_left_over_of_which_nobody_knows_the_bytes_is_named_without_them() -> None:
    answer = told("left-over-scheduler-and-no-pool")
    assert "some of it was held by an earlier launch of this unit (process 4150)" in answer.summary
    assert "Found left-over process" in answer.evidence[1].text


def test_what_the_kernel_killed_by_its_program_s_name_is_less_sure_than_by_its_pid() -> None:
    by_name, by_title = told("kernel-kills-by-the-program-s-name"), told("vllm-engine-killed-for-its-group")
    assert (by_name.failure, by_title.failure) == (Class.HOST_OOM_KILL, Class.CGROUP_OOM_KILL)
    assert by_name.confidence < by_title.confidence


def test_a_command_beside_the_server_that_fails_is_what_systemd_ended_it_for() -> None:
    answer = told("start-post-gave-up")
    assert "a command beside it failed" in answer.summary
    assert Class.REQUESTED_STOP in {ruled_out.failure for ruled_out in answer.ruled_out}


@pytest.mark.parametrize("name", ["autoheal", "docker-events-oom", "earlyoom"])
def test_a_kill_by_others_is_not_called_the_server_s_own_doing(name: str) -> None:
    assert not any("its own doing" in ruled_out.because for ruled_out in told(name).ruled_out)


def test_a_refusal_of_which_only_the_status_is_there_is_told_as_that() -> None:
    answer = told("usage-alone")
    assert answer.failure is Class.BAD_ARGUMENTS
    assert "status 2" in answer.summary
    assert answer.confidence <= 0.6


@pytest.mark.parametrize("name", ["glog-segfault", "core-dump-of-a-rank", "trap-in-native-code"])
def test_a_native_crash_is_told_by_whoever_saw_it(name: str) -> None:
    assert told(name).failure is Class.SEGFAULT
