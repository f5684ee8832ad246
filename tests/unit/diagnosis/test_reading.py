"""What a person hands over: journals, plain logs and `systemctl show` output, whole, cut off, or something else."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from corpus_cases import CORPUS
from sglang_watchdog.diagnosis.entries import entry_or_none, read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.plain import read_text
from sglang_watchdog.diagnosis.server_args import parse_server_args, shown
from sglang_watchdog.diagnosis.show import parse_show, seconds
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.unit import ExitCode, ServiceResult

STOP_TIMEOUT = CORPUS / "recorded" / "0.5.16-stop-timeout"


def line(**fields: Any) -> bytes:
    return json.dumps({"__REALTIME_TIMESTAMP": "1780000000000000", "MESSAGE": "x"} | fields).encode() + b"\n"


def entries(*lines: bytes) -> list[JournalEntry]:
    return list(read_journal(lines, "journal.json"))


def test_a_message_that_is_no_utf8_comes_as_numbers_and_is_read() -> None:
    (entry,) = entries(line(MESSAGE=[27, 91, 51, 49, 109, 104, 105, 255]))
    assert entry.message == "\x1b[31mhi\ufffd"


def test_a_field_that_is_given_twice_counts_with_its_last_value() -> None:
    (entry,) = entries(line(MESSAGE=["one", "two"], UNIT=["a.service", "b.service"]))
    assert entry.message == "one\ntwo"
    assert entry.unit == "b.service"


def test_a_message_that_journalctl_left_out_is_null_and_said() -> None:
    (entry,) = entries(line(MESSAGE=None))
    assert entry.message is None
    timeline = read_launch([entry])
    assert timeline.lost_fields == 1


def test_a_last_line_that_was_cut_off_loses_only_itself() -> None:
    assert len(entries(line(), line(), line()[:30])) == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((b"[1, 2, 3]\n",), "line 1: JSON, but no journal entry"),
        ((b"\x00\x01\x02\n",), "line 1: not JSON"),
        ((b"",), "is empty"),
        ((b"-- No entries --\n",), "line 1: not JSON"),
        ((b"{" * 100_000 + b"\n",), "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_with_its_line(lines: Iterable[bytes], words: str) -> None:
    with pytest.raises(UnusableInput, match=words):
        entries(*lines)


def test_a_live_pull_passes_over_what_is_no_entry() -> None:
    assert entry_or_none(b"{") is None
    assert entry_or_none(line()) is not None


def test_a_plain_log_is_read_like_a_journal() -> None:
    lines = [
        b"systemd[1]: Started sglang.service - SGLang.\n",
        b"[2026-03-09 22:35:06 TP0] Load weight begin. avail mem=93.00 GB\n",
        b"Mar 09 22:35:09 host kernel: Out of memory: Killed process 7 (sglang::schedul) total-vm:1kB\n",
        b"Mar 09 22:35:10 host systemd[1]: sglang.service: Main process exited, code=killed, status=9/KILL\n",
    ]
    timeline = read_launch(read_text(lines, "log"))
    assert timeline.complete
    assert timeline.ended
    assert timeline.kernel_seen
    assert timeline.phase is Phase.LOADING_WEIGHTS


def test_launches_in_a_plain_log_are_told_apart_by_systemd_s_starts() -> None:
    once = (
        b"systemd[1]: Started sglang.service.\n",
        b"[2026-03-09 22:35:06] The server is fired up and ready to roll!\n",
        b"systemd[1]: sglang.service: Failed with result 'signal'.\n",
    )
    running = (b"systemd[1]: Started sglang.service.\n", b"[2026-03-09 22:40:00] Init torch distributed begin.\n")
    assert read_launch(read_text([*once, *running], "log")).phase is Phase.READY
    assert read_launch(read_text([*once, *running], "log"), "text-2").phase is Phase.STARTING


def test_docker_s_time_stamps_are_taken_off() -> None:
    lines = [b"2026-03-09T22:35:06.123456789Z [2026-03-09 22:35:06] Load weight begin. avail mem=9.00 GB\n"]
    (entry,) = read_text(lines, "log")
    assert entry.message == "[2026-03-09 22:35:06] Load weight begin. avail mem=9.00 GB"
    assert entry.time == pytest.approx(1773095706.123456)


@pytest.mark.parametrize("content", [[], [b"\x00\x00\n"]])
def test_an_empty_log_is_refused(content: list[bytes]) -> None:
    with pytest.raises(UnusableInput):
        list(read_text(content, "log"))


def journal_of(*launches: tuple[str, bool]) -> list[JournalEntry]:
    """Launches as (invocation, ended)."""
    lines = []
    for invocation, ended in launches:
        manager = {"_PID": "1", "SYSLOG_IDENTIFIER": "systemd", "INVOCATION_ID": invocation, "UNIT": "s.service"}
        lines.append(line(**manager, MESSAGE="Started s.service."))
        lines.append(line(_SYSTEMD_INVOCATION_ID=invocation, _PID="7", MESSAGE=f"I am {invocation}"))
        if ended:
            lines.append(line(**manager, MESSAGE="s.service: Failed with result 'signal'."))
    return entries(*lines)


def test_of_several_launches_the_newest_that_ended_is_chosen() -> None:
    assert read_launch(journal_of(("a", True), ("b", True), ("c", False))).invocation == "b"
    assert read_launch(journal_of(("a", False))).invocation == "a"


def test_a_launch_can_be_asked_for_and_is_kept_among_thousands() -> None:
    many = [(f"{n:032x}", True) for n in range(200)]
    assert read_launch(journal_of(*many), many[0][0]).invocation == many[0][0]
    assert read_launch(journal_of(*many)).invocation == many[-1][0]
    with pytest.raises(UnusableInput, match="no entry of invocation"):
        read_launch(journal_of(*many), "f" * 32)


def test_a_unit_is_read_from_systemctl_show() -> None:
    unit = parse_show((STOP_TIMEOUT / "show.txt").read_text(), "show.txt")
    assert unit is not None
    assert (unit.name, unit.invocation) == ("s0516f.service", "76a8bc72dbf64b34a5ce8ee4c8311dd8")
    assert (unit.result, unit.exec_main_code, unit.exec_main_status) == (ServiceResult.TIMEOUT, ExitCode.KILLED, 9)
    assert (unit.stop_timeout, unit.runtime_max, unit.memory_max) == (4.0, None, None)
    assert unit.exec_start[:4] == ("/opt/sglang/bin/python", "-W", "ignore", "-m")
    assert unit.exec_start[-2:] == ("--mem-fraction-static", "0.2")
    assert unit.exec_main_started == 1795956547
    assert unit.kill_mode == "mixed"
    assert "MemoryHigh" in unit.known


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1min 30s", 90.0), ("4s", 4.0), ("100ms", 0.1), ("infinity", None), ("", None), ("2h 1min", 7260.0)],
)
def test_spans_of_time_are_in_seconds(text: str, expected: float | None) -> None:
    assert seconds(text) == expected


def test_an_empty_show_file_says_nothing_and_another_text_is_refused() -> None:
    assert parse_show("\n", "show.txt") is None
    with pytest.raises(UnusableInput, match=r"show.txt: not the output of"):
        parse_show("hello\n", "show.txt")


def test_of_two_units_the_first_is_taken() -> None:
    unit = parse_show("Id=a.service\nResult=signal\n\nId=b.service\nResult=timeout\n", "show.txt")
    assert unit is not None
    assert (unit.name, unit.result) == ("a.service", ServiceResult.SIGNAL)


CALL = "server_args=ServerArgs(model_path='/m', tp_size=4, api_key='sk-abc', mem_fraction_static=0.85, x=<Odd.V: 1>)"


def test_settings_are_read_though_some_values_are_no_literals() -> None:
    values = parse_server_args(CALL)
    assert (values["tp_size"], values["mem_fraction_static"], values["model_path"]) == (4, 0.85, "/m")
    assert "sk-abc" not in str(values)


def test_settings_are_read_from_the_newer_form_and_from_a_line_that_was_cut_off() -> None:
    newer = "server_args={'model_path': '/m', 'speculative_num_steps': 4, 'disable_radix_cache': True, 'a': [1, 2]}"
    assert parse_server_args(newer)["speculative_num_steps"] == 4
    assert parse_server_args(newer[:80])["speculative_num_steps"] == 4
    assert parse_server_args(CALL[:80])["tp_size"] == 4
    assert parse_server_args("nothing here") == {}


@pytest.mark.parametrize("log", sorted((CORPUS / "startup").glob("*.log")), ids=lambda p: p.stem)
def test_the_start_of_every_release_is_followed_to_ready(log: Any) -> None:
    timeline = read_launch(read_text(log.read_bytes().splitlines(), log.name))
    assert timeline.reached(Phase.READY)
    assert shown(timeline.server_args)["model_path"] == "/models/tiny"
    assert timeline.memory.max_total_num_tokens == 4096
    release = tuple(int(part) for part in log.stem.removeprefix("sglang-").split(".")[:3])
    since, until = timeline.releases.since, timeline.releases.until
    assert since is None or since.numbers <= release
    assert until is None or release <= until.numbers
    assert not timeline.failures
