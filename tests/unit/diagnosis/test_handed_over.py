"""What people hand over is not always what was asked for: parts that are missing, more forms, files that do not belong
together. What is not in the input is not claimed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_cases import CORPUS
from sglang_watchdog.cli.files import diagnose_offline
from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.failure import FailureClass as Class

TIMEOUT = CORPUS / "recorded" / "0.5.16-stop-timeout"
KILLED = CORPUS / "recorded" / "0.5.16-scheduler-kill9"
POOL = CORPUS / "recorded_gpu" / "story_steps10_fail"
LIMITED = CORPUS / "gpu" / "cgroup_oom_kill"
MONOTONIC = "[{monotonic:12.6f}] host {name}[{pid}]: {message}"
NO_HOST = "Nov 29 12:49:07 {name}[{pid}]: {message}"
NO_HOST_ISO = "2026-11-29T12:49:07+01:00 {name}[{pid}]: {message}"
WITH_UNIT = "Nov 29 12:49:07 host {by}[{pid}]: {message}"
BARE = "{message}"


def entries(case: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (case / "journal.jsonl").read_text().splitlines()]


def of_the_server(entry: dict[str, str]) -> bool:
    return entry["_TRANSPORT"] == "stdout"


def printed(case: Path, form: str, *, server_alone: bool = False) -> str:
    lines = []
    for number, entry in enumerate(entries(case)):
        if server_alone and not of_the_server(entry):
            continue
        name = "python3" if of_the_server(entry) else "systemd"
        by = "sglang.service" if of_the_server(entry) else "init.scope"
        pid, message = entry.get("_PID", "1"), entry["MESSAGE"]
        lines.append(form.format(monotonic=5000 + number / 10, name=name, by=by, pid=pid, message=message))
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "handed-over"


def of_text(file: Path, text: str, show: Path | None = None) -> Diagnosis:
    file.write_text(text)
    return diagnose_offline(text=file, show=show).diagnosis


def of_journal(file: Path, rows: list[dict[str, str]], invocation: str = "") -> Diagnosis:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return diagnose_offline(journal=file, invocation=invocation).diagnosis


def test_a_stop_that_timed_out_is_told_by_the_units_properties_where_systemds_lines_are_missing(file: Path) -> None:
    told = of_text(file, printed(TIMEOUT, BARE, server_alone=True), TIMEOUT / "show.txt")
    assert told.failure is Class.STOP_TIMEOUT_SIGKILL


@pytest.mark.parametrize("line", ["Type=notify", "RuntimeMaxUSec=1d"])
def test_properties_that_allow_another_limit_prove_no_stop_timeout(file: Path, tmp_path: Path, line: str) -> None:
    shown = (TIMEOUT / "show.txt").read_text().splitlines()
    name = line.partition("=")[0]
    changed = [line, *(one for one in shown if not one.startswith(f"{name}="))]
    (tmp_path / "show").write_text("\n".join(changed))
    told = of_text(file, printed(TIMEOUT, BARE, server_alone=True), tmp_path / "show")
    assert told.failure is not Class.STOP_TIMEOUT_SIGKILL


def test_whether_a_stop_ended_in_time_is_not_claimed_where_the_end_is_missing(file: Path) -> None:
    told = of_text(file, printed(TIMEOUT, BARE, server_alone=True))
    assert told.failure is Class.REQUESTED_STOP
    assert "Whether it ended in time is not in this log." in told.summary


def test_whose_memory_ran_out_is_not_claimed_without_the_kernels_lines(file: Path) -> None:
    told = of_journal(file, [row for row in entries(LIMITED) if row["_TRANSPORT"] != "kernel"])
    assert told.failure is Class.HOST_OOM_KILL
    assert told.confidence < 0.6
    assert "the kernel's lines are missing" in told.summary


@pytest.mark.parametrize("case", [POOL, CORPUS / "gpu" / "real_rank_segfault"], ids=lambda case: case.name)
def test_without_a_line_of_the_server_nobody_is_blamed(file: Path, case: Path) -> None:
    told = of_journal(file, [row for row in entries(case) if not of_the_server(row) and row["_TRANSPORT"] != "kernel"])
    assert told.failure is Class.UNKNOWN
    assert "No line of the server itself is in this input" in told.summary


@pytest.mark.parametrize(
    "first",
    [
        "",
        "-- Journal begins at Mon 2026-03-09 22:35:06 CET, ends at Tue 2026-03-10 10:00:00 CET. --",
        "-- Logs begin at Mon 2026-03-09 22:35:06 CET, end at Tue 2026-03-10 10:00:00 CET. --",
        "-- Boot 1b2b3c4d5e6f708192a3b4c5d6e7f809 --",
        "Hint: You are currently not seeing messages from other users and the system.\n"
        "      Users in groups 'adm', 'systemd-journal' can see all messages.\n"
        "      Pass -q to turn off this notice.",
    ],
)
def test_journalctls_own_words_are_nobodys_log(file: Path, first: str) -> None:
    text = printed(KILLED, "Nov 29 12:49:07 host {name}[{pid}]: {message}")
    assert of_text(file, f"{first}\n{text}") == of_text(file, text)


@pytest.mark.parametrize("form", [MONOTONIC, NO_HOST, NO_HOST_ISO, WITH_UNIT])
@pytest.mark.parametrize("case", [TIMEOUT, KILLED, POOL], ids=lambda case: case.name)
def test_every_form_for_people_names_systemd(file: Path, form: str, case: Path) -> None:
    expected = diagnose_offline(journal=case / "journal.jsonl").diagnosis.failure
    for show in (None, case / "show.txt"):
        assert of_text(file, printed(case, form), show).failure is expected


def test_a_byte_order_mark_costs_no_entry(file: Path) -> None:
    content = (KILLED / "journal.jsonl").read_bytes()
    file.write_bytes(b"\xef\xbb\xbf" + content)
    assert diagnose_offline(journal=file) == diagnose_offline(journal=KILLED / "journal.jsonl")


@pytest.mark.parametrize("case", [LIMITED, TIMEOUT, POOL], ids=lambda case: case.name)
def test_a_journal_that_runs_backwards_is_refused(file: Path, case: Path) -> None:
    with pytest.raises(UnusableInput, match="newest entry first"):
        of_journal(file, entries(case)[::-1])


def test_properties_of_another_unit_are_refused() -> None:
    with pytest.raises(UnusableInput, match=r"tells of s0516\w\.service, and .* give both of the same unit"):
        diagnose_offline(journal=POOL / "journal.jsonl", show=TIMEOUT / "show.txt")


def test_a_containers_own_journal_goes_with_the_properties_of_its_unit(file: Path) -> None:
    """Docker's journald driver: every line is docker.service's."""
    lines = [
        row | {"_SYSTEMD_UNIT": "docker.service", "_TRANSPORT": "journal"}
        for row in entries(POOL)
        if of_the_server(row)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    assert diagnose_offline(journal=file, show=POOL / "show.txt").diagnosis.failure is Class.KV_CACHE_OOM


def test_the_beginning_of_an_id_names_a_launch(file: Path) -> None:
    rows = entries(POOL)
    (invocation,) = {row["_SYSTEMD_INVOCATION_ID"] for row in rows if "_SYSTEMD_INVOCATION_ID" in row} - {""}
    expected = of_journal(file, rows)
    assert of_journal(file, rows, invocation[:12].upper()) == expected
    with pytest.raises(UnusableInput, match="--all lists the launches"):
        of_journal(file, rows, "f" * 12)


def ran(*words: str, command: str, **environment: str) -> tuple[int, str, str]:
    shell = ("/bin/sh", "-c", command.replace("python", sys.executable, 1).replace("WORDS", " ".join(words)))
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


def test_a_terminal_of_no_width_loses_nothing() -> None:
    words = ("diagnose", "--journal", str(POOL / "journal.jsonl"))
    of_none = ran(*words, command="exec python -m sglang_watchdog WORDS", COLUMNS="0")
    assert of_none == ran(*words, command="exec python -m sglang_watchdog WORDS")
    assert "kv_cache_oom" in of_none[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exec python -m sglang_watchdog diagnose --journal - <&-", "standard input is closed"),
        (
            "exec python -m sglang_watchdog --version >/dev/full",
            "the answer cannot be written: No space left on device",
        ),
        ("exec python -m sglang_watchdog check-config --config /dev/zero", "is larger than 1 MiB"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(command: str, words: str) -> None:
    status, out, complaint = ran(command=command)
    assert status in (1, 2)
    assert out == ""
    assert words in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("content", ["a = " + "[" * 100_000, "log_level = " + "9" * 10_000, "\ufeffsok = 3"])
def test_settings_of_any_content_are_told_in_sentences(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.toml").write_text(content)
    command = f"exec python -m sglang_watchdog check-config --config {tmp_path}/config.toml"
    status, _, complaint = ran(command=command)
    assert status == 2
    assert complaint.startswith(f"{tmp_path}/config.toml: ")
    assert "Traceback" not in complaint
