"""`sglang-watchdog diagnose` as an operator runs it: in a process of its own, on files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_cases import CORPUS

STORY = CORPUS / "recorded_gpu" / "story_steps10_fail"
FIELDS = {"class", "confidence", "summary", "phase", "effective", "rollback_helps", "evidence", "ruled_out", "advice"}


def run(*arguments: str | Path, terminal: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "sglang_watchdog", "diagnose", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | ({"FORCE_COLOR": "1"} if terminal else {}),
    )


def test_programs_get_the_documented_json() -> None:
    done = run("--journal", STORY / "journal.jsonl", "--show", STORY / "show.txt", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert set(answer) == FIELDS
    assert answer["class"] == "kv_cache_oom"
    assert answer["rollback_helps"] is True
    assert answer["effective"]["speculative_num_draft_tokens"] == 11
    assert set(answer["evidence"][0]) == {"source", "time", "text"}


def test_the_unit_s_properties_are_optional() -> None:
    assert json.loads(run("--journal", STORY / "journal.jsonl", "--json").stdout)["class"] == "kv_cache_oom"


def test_a_person_gets_what_happened_why_what_it_was_not_and_what_to_do() -> None:
    report = run("--journal", STORY / "journal.jsonl", "--show", STORY / "show.txt").stdout
    assert report.startswith("kv_cache_oom sglang.service")
    order = [report.index(title) for title in ("could not be sized", "\nWhy\n", "\nIt was not\n", "\nWhat to do\n")]
    assert order == sorted(order)
    assert "0.2603" in report


def test_a_pipe_gets_no_colours_and_a_terminal_does() -> None:
    assert "\x1b[" not in run("--journal", STORY / "journal.jsonl").stdout
    assert "\x1b[" in run("--journal", STORY / "journal.jsonl", terminal=True).stdout


def test_a_plain_log_is_diagnosed_too() -> None:
    done = run("--text", CORPUS / "startup" / "sglang-0.5.16.log", "--json")
    assert json.loads(done.stdout)["class"] == "requested_stop"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a journal\nat all\n", "for a plain log use --text"),
        (b"", "is empty"),
        (b"x" * 20_000_000, "is no journal"),
    ],
)
def test_unusable_input_is_one_sentence_and_status_2(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "journal.json"
    file.write_bytes(content)
    done = run("--journal", file)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--journal", "--text"])
def test_a_dash_is_what_a_pipe_gives(option: str) -> None:
    command = [sys.executable, "-m", "sglang_watchdog", "diagnose", option, "-", "--json"]
    with (STORY / "journal.jsonl").open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["class"] == "kv_cache_oom"


def test_a_file_that_is_not_there_is_named() -> None:
    done = run("--journal", "/nowhere/journal.json")
    assert done.returncode == 2
    assert "/nowhere/journal.json" in done.stderr


def test_nothing_to_diagnose_is_said() -> None:
    done = run()
    assert done.returncode == 2
    assert "--journal" in done.stderr


def test_no_secret_reaches_the_answer(tmp_path: Path) -> None:
    lines = (STORY / "journal.jsonl").read_text().replace("api_key=None", "api_key='sk-very-secret'")
    lines = lines.replace("ValueError: Loaded", "ValueError: --api-key sk-very-secret Loaded")
    (tmp_path / "journal").write_text(lines)
    show = (STORY / "show.txt").read_text().replace("--port 23500", "--port 23500 --api-key sk-very-secret")
    (tmp_path / "show").write_text(show)
    for form in ([], ["--json"]):
        done = run("--journal", tmp_path / "journal", "--show", tmp_path / "show", *form)
        assert done.returncode == 0
        assert "very-secret" not in done.stdout


def test_a_log_line_cannot_steer_the_terminal(tmp_path: Path) -> None:
    lines = (
        (STORY / "journal.jsonl")
        .read_text()
        .replace("Loaded weights leave", "\\u001b]0;owned\\u0007Loaded weights leave")
    )
    (tmp_path / "journal").write_text(lines)
    assert "\x07" not in run("--journal", tmp_path / "journal").stdout
