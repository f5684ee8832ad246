"""A launch that ran another definition than the one on disk."""

from dataclasses import replace

import pytest

from journal_lines import UNIT, LaunchLog
from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.effective import implied_draft_tokens, speculation_of
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import Definition, Launch, Shadowed
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot

OLD_DECODE = (
    "Decode batch, #running-req: 16, #token: 12210, token usage: 0.23, accept len: {length:.2f}, "
    "accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 410.11, #queue-req: 0"
)
OLD_RELEASE = "Load weight end. type=Qwen3NextForCausalLM, dtype=torch.bfloat16, avail mem=60.00 GB"
NEW_RELEASE = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB"
READY = "The server is fired up and ready to roll!"
NO_POOL = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


def argv(steps: int) -> tuple[str, ...]:
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1")
    return ("python3", "-m", "sglang.launch_server", "--model-path", "/m", *flags)


def settings(steps: int) -> str:
    return (
        "server_args=ServerArgs(model_path='/m', mem_fraction_static=0.85, speculative_algorithm='EAGLE', "
        f"speculative_num_steps={steps}, speculative_eagle_topk=1, speculative_num_draft_tokens={steps + 1})"
    )


@pytest.mark.parametrize(
    ("release", "length", "rate", "tokens"),
    [
        (OLD_RELEASE, 5.50, 0.92, 6),  # the launch that was believed to serve with steps 10
        (OLD_RELEASE, 3.00, 0.75, 4),
        (NEW_RELEASE, 5.50, 0.90, 6),
        (NEW_RELEASE, 3.00, 0.40, 6),
        ("", 5.50, 0.92, 6),  # only one of the two rules gives a whole number
        (OLD_RELEASE, 1.00, 0.00, None),
        (OLD_RELEASE, 1.10, 0.01, None),  # too coarse to tell
    ],
)
def test_accept_length_and_rate_tell_the_draft_tokens_that_ran(
    release: str, length: float, rate: float, tokens: int | None
) -> None:
    log = LaunchLog().started().sglang(*([release] if release else []), OLD_DECODE.format(length=length, rate=rate))
    timeline = log.timeline()
    assert implied_draft_tokens(timeline, timeline.releases) == tokens


def test_what_sglang_printed_counts_more_than_what_follows_from_its_figures() -> None:
    log = LaunchLog().started().sglang(settings(3), OLD_DECODE.format(length=5.5, rate=0.92))
    assert speculation_of(Case(timeline=log.timeline())).steps == 3


def served_with_steps_5() -> LaunchLog:
    log = LaunchLog().started().sglang(OLD_RELEASE, READY, OLD_DECODE.format(length=5.5, rate=0.92))
    return log.stopping().sigterm().ended()


def test_offline_a_launch_that_served_with_other_steps_than_the_unit_asks_for_was_stale() -> None:
    answer = served_with_steps_5().diagnosis(unit=UnitSnapshot(UNIT, exec_start=argv(10)))
    assert answer.failure is Class.STALE_UNIT_FILE
    assert "ran steps 5" in answer.summary
    assert "asks for steps 10" in answer.summary
    assert answer.rollback_helps is False
    assert any("accept len 5.50" in evidence.text for evidence in answer.evidence)


def test_a_definition_whose_variables_cannot_be_seen_makes_nothing_stale() -> None:
    unit = UnitSnapshot(UNIT, exec_start=("python3", "-m", "sglang.launch_server", "$SGLANG_SPECULATION_ARGS"))
    assert served_with_steps_5().diagnosis(unit=unit).failure is Class.REQUESTED_STOP


def test_the_same_steps_by_another_name_are_not_stale() -> None:
    log = LaunchLog().started().sglang(settings(5), READY).stopping().sigterm().ended()
    assert log.diagnosis(unit=UnitSnapshot(UNIT, exec_start=argv(5))).failure is Class.REQUESTED_STOP


def live(log: LaunchLog, *, ran: int, wanted: int, changed_before: bool) -> dict[str, object]:
    began = log.entries[0].time
    old, new = Definition("/u", {"/u": "1"}), Definition("/u", {"/u": "2"})
    return {
        "has_ledger": True,
        "launch": Launch(UNIT, "a" * 32, began, argv=argv(ran)),
        "loaded": old,
        "on_disk": new,
        "disk_changed": began - 60 if changed_before else began + 1,
        "intended": SpeculationConfig.of(argv(wanted)),
    }


def test_a_deploy_ends_a_launch_whose_file_has_just_changed_and_is_a_requested_stop() -> None:
    log = LaunchLog().ready().stopping().sigterm().ended()
    answer = log.diagnosis(**live(log, ran=4, wanted=10, changed_before=False))
    assert answer.failure is Class.REQUESTED_STOP


def test_a_launch_that_began_after_the_file_had_changed_ran_the_old_definition() -> None:
    log = LaunchLog().ready().stopping().sigterm().ended()
    answer = log.diagnosis(**live(log, ran=5, wanted=10, changed_before=True))
    assert answer.failure is Class.STALE_UNIT_FILE
    assert "/u" in " ".join(evidence.text for evidence in answer.evidence)


def test_a_running_launch_with_the_old_definition_is_told_as_stale_too() -> None:
    log = LaunchLog().ready()
    assert log.diagnosis(**live(log, ran=5, wanted=10, changed_before=True)).failure is Class.STALE_UNIT_FILE


def test_a_failure_that_the_file_on_disk_would_have_cured_is_stale() -> None:
    log = LaunchLog().started().sglang(settings(10)).raises(NO_POOL).ended()
    answer = log.diagnosis(**live(log, ran=10, wanted=4, changed_before=True))
    assert answer.failure is Class.STALE_UNIT_FILE
    assert "KV cache could not be sized" in answer.summary


@pytest.mark.parametrize(("wanted", "changed_before"), [(11, True), (4, False)])
def test_a_difference_that_explains_nothing_is_advice_and_no_class(wanted: int, changed_before: bool) -> None:
    log = LaunchLog().started().sglang(settings(10)).raises(NO_POOL).ended()
    answer = log.diagnosis(**live(log, ran=10, wanted=wanted, changed_before=changed_before))
    assert answer.failure is Class.KV_CACHE_OOM
    assert f"asks for steps {wanted}" in " ".join(answer.advice)


def test_a_stop_timeout_of_a_stale_launch_stays_a_stop_timeout() -> None:
    log = LaunchLog().ready().stopping().sigterm()
    log.systemd(f"{UNIT}: State 'stop-sigterm' timed out. Killing.").ended(result="timeout")
    assert log.diagnosis(**live(log, ran=5, wanted=10, changed_before=True)).failure is Class.STOP_TIMEOUT_SIGKILL


@pytest.mark.parametrize(("bytes_on_disk", "said"), [("1", False), ("2", True)])
def test_the_same_bytes_written_again_ask_for_no_reload(bytes_on_disk: str, said: bool) -> None:
    unit = UnitSnapshot(UNIT, need_daemon_reload=True, exec_start=argv(10))
    log = LaunchLog().started().sglang(settings(10)).raises(NO_POOL).ended()
    loaded, on_disk = Definition("/u", {"/u": "1"}), Definition("/u", {"/u": bytes_on_disk})
    answer = log.diagnosis(unit=unit, loaded=loaded, on_disk=on_disk)
    assert answer.failure is Class.KV_CACHE_OOM
    assert ("daemon-reload" in " ".join(answer.advice)) is said


def test_a_drop_in_that_shadows_the_unit_file_is_named() -> None:
    log = LaunchLog().ready()
    facts = live(log, ran=5, wanted=5, changed_before=True)
    shadowed = Shadowed("/etc/systemd/system/sglang.service.d/10.conf", SpeculationConfig.of(argv(10)), 1.0)
    answer = log.diagnosis(**facts, shadowed=shadowed)
    assert answer.failure is Class.STALE_UNIT_FILE
    assert "file, which /etc/systemd/system/sglang.service.d/10.conf shadows, asks for steps 10" in answer.summary
    assert "reload does not help" in answer.advice[0]
    assert log.diagnosis(**facts, shadowed=replace(shadowed, changed=log.now)).failure is not Class.STALE_UNIT_FILE
    assert log.diagnosis(**facts).failure is not Class.STALE_UNIT_FILE
