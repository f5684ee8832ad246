"""Every launch of an input, and how an answer came about, as the command prints them."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpus_cases import CORPUS
from sglang_watchdog.domain.failure import FailureClass

FAILED = CORPUS / "recorded_gpu" / "story_steps10_fail" / "journal.jsonl"
SERVED = CORPUS / "recorded_gpu" / "story_steps3_ok" / "journal.jsonl"
LOOP = CORPUS / "recorded" / "0.5.16-kv-oom-loop" / "journal.jsonl"
HOUR_US = 3_600_000_000


def run(*words: str | Path, **environment: str) -> str:
    command = [sys.executable, "-m", "sglang_watchdog", "diagnose", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def later(path: Path, hours: int, name: str) -> list[str]:
    """The same launch under another invocation id and at another time."""
    entries: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in entries:
        entry["__REALTIME_TIMESTAMP"] = str(int(entry["__REALTIME_TIMESTAMP"]) + hours * HOUR_US)
        for field in {"INVOCATION_ID", "_SYSTEMD_INVOCATION_ID"} & set(entry):
            entry[field] = name * 32
    return [json.dumps(entry) for entry in entries]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Nine launches, one an hour: more than are kept open at once."""
    path = tmp_path / "journal"
    launches = [later(FAILED if hour % 3 else SERVED, hour, f"{hour}") for hour in range(1, 10)]
    path.write_text("".join(f"{line}\n" for launch in launches for line in launch))
    return path


def test_every_launch_is_listed_newest_first(journal: Path) -> None:
    rows = json.loads(run("--journal", journal, "--all", "--json"))
    assert [row["invocation"][0] for row in rows] == list("987654321")
    assert {row["class"] for row in rows if int(row["invocation"][0]) % 3} == {"kv_cache_oom"}
    assert rows[0]["began"] - rows[1]["began"] > 0
    alone = json.loads(run("--journal", journal, "--invocation", "1" * 32, "--json"))
    assert {key: rows[-1][key] for key in alone} == alone


def test_the_list_for_people_has_a_line_for_each(journal: Path) -> None:
    header, *rows = run("--journal", journal, "--all", COLUMNS="40").splitlines()
    assert header.split() == ["last", "entry,", "UTC", "class", "sure", "ran", "launch"]
    assert len(rows) == 9
    assert "kv_cache_oom" in rows[1]
    assert "steps 10" in rows[1]
    assert "steps 3" in rows[0]


def test_the_launches_of_other_services_are_not_listed(journal: Path, tmp_path: Path) -> None:
    entry = {"_SYSTEMD_UNIT": "cron.service", "_TRANSPORT": "stdout", "MESSAGE": "(root) CMD (true)"}
    others = [
        json.dumps({**entry, "__REALTIME_TIMESTAMP": "1780000000000000", "_SYSTEMD_INVOCATION_ID": f"{n:032x}"})
        for n in range(0xF00, 0xF40)
    ]
    mixed = tmp_path / "mixed"
    mixed.write_text("\n".join([*others[:30], *journal.read_text().splitlines(), *others[30:]]))
    rows = json.loads(run("--journal", mixed, "--all", "--json"))
    assert len(rows) == 9
    chosen, expected = (json.loads(run("--journal", path, "--json")) for path in (mixed, journal))
    assert chosen == expected


def test_a_log_of_several_starts_lists_each(tmp_path: Path) -> None:
    def messages(path: Path) -> list[str]:
        entries = map(json.loads, path.read_text().splitlines())
        return [str(entry["MESSAGE"]) for entry in entries if entry.get("_TRANSPORT") == "stdout"]

    log = tmp_path / "log"
    log.write_text("\n".join([*messages(FAILED), *messages(FAILED), *messages(SERVED)[:30]]))
    rows = json.loads(run("--text", log, "--all", "--json"))
    assert [(row["invocation"], row["class"]) for row in rows][1:] == [
        ("text-2", "kv_cache_oom"),
        ("text-1", "kv_cache_oom"),
    ]
    assert json.loads(run("--text", log, "--json"))["class"] == "kv_cache_oom"


def test_which_launch_and_all_of_them_exclude_each_other(journal: Path) -> None:
    command = [sys.executable, "-m", "sglang_watchdog", "diagnose", "--journal", str(journal), "--all"]
    done = subprocess.run([*command, "--invocation", "1" * 32], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


# Explain


@pytest.mark.parametrize("path", [FAILED, LOOP], ids=lambda path: path.parent.name)
def test_an_explanation_tells_what_matched_where_and_why_each_other_class_lost(path: Path) -> None:
    answer = json.loads(run("--journal", path, "--explain", "--json"))
    explain = answer.pop("explain")
    assert answer == json.loads(run("--journal", path, "--json"))
    lost = {row["class"]: row["because"] for row in explain["lost"]}
    assert set(lost) == set(FailureClass) - {answer["class"]}
    assert all(lost.values())
    assert {row["class"]: row["because"] for row in answer["ruled_out"]}.items() <= lost.items()
    proof = next(row for row in explain["matched"] if row["means"] == "kv_unsizable")
    assert proof["signature"]
    assert proof["pid"]
    assert proof["line"] > 1
    assert any(e["text"].startswith(proof["text"][:100]) for e in answer["evidence"])


def test_a_later_class_is_told_to_have_come_after_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[2026-03-09 22:35:06 TP0] Load weight begin. avail mem=93.00 GB\n"
        "[2026-03-09 22:35:07] ERROR: [Errno 98] error while attempting to bind on address: address already in use\n"
        "OSError: [Errno 28] No space left on device\n"
    )
    answer = json.loads(run("--text", log, "--explain", "--json"))
    lost = {row["class"]: row["because"] for row in answer["explain"]["lost"]}
    assert answer["class"] == "port_in_use"
    assert lost["shm_or_disk_full"] == "line 3 says so, after the cause in line 2"


def test_people_get_the_explanation_too() -> None:
    shown = run("--journal", FAILED, "--explain")
    assert "What matched\n" in shown
    assert "Why not another class\n" in shown


# The terminal


def on_a_terminal(*words: str | Path, **environment: str) -> str:
    """What the command writes to a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sglang_watchdog", "diagnose", *map(str, words)]
    names = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    full = {**names, "COLUMNS": "60", "TERM": "xterm-256color", **environment}
    with subprocess.Popen(command, stdout=theirs, env=full) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # Linux answers so when the other end is closed
            pass
        process.wait(60)
    os.close(ours)
    return said.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_and_long_log_lines_cut() -> None:
    assert "\x1b[" in on_a_terminal("--journal", FAILED)
    assert "\x1b[" not in run("--journal", FAILED)
    plain = on_a_terminal("--journal", FAILED, NO_COLOR="1")
    assert "\x1b[3" not in plain
    why = plain.partition("Why")[2].partition("It was not")[0]
    assert max(map(len, why.splitlines())) <= 2 * 60
    assert "…" in why
    assert "…" not in run("--journal", FAILED)
