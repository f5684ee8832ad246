"""The commands against a daemon that is not there, not for us, or says something long; and what they cost to start."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import sglang_watchdog.hand_back
from alert_samples import with_most
from corpus_cases import CORPUS
from sglang_watchdog.cli import may_start, operate
from sglang_watchdog.cli.app import COMPLETE_VARIABLE
from sglang_watchdog.cli.client import NotRunning, ask
from sglang_watchdog.cli.run import hand_back
from sglang_watchdog.control import ControlServer
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome
from sglang_watchdog.hand_back import Tell
from sglang_watchdog.settings import Settings

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, whose the control socket is")
LONG = "sglang-" + "very-" * 30 + "long@qwen.service"
STORY = CORPUS / "recorded_gpu" / "story_steps10_fail"
SERVING = CORPUS / "recorded_gpu" / "story_steps3_ok"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "40"}
    command = [sys.executable, "-m", "sglang_watchdog", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@contextmanager
def somebody_else() -> Iterator[None]:
    nobody = 65534
    os.setresuid(nobody, nobody, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_the_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sglang-watchdog {version('sglang-watchdog')}\n", "")


# The daemon's answers


class Daemon:
    """Answers as the daemon would, and keeps what it was asked."""

    freed: str = ""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def status(self) -> dict[str, object]:
        row = {
            "unit": LONG,
            "act": False,
            "state": "active (running)",
            "phase": "serving",
            "running": "steps 10",
            "known_good": "",
            "proven": [{"id": "g1a2b3c4d", "config": "steps 4", "proven": 0.0, "traffic": False}],
            "ceilings": [{"id": "c5e6f7a8b", "config": "steps 12", "seen": 0.0, "class": "kv_cache_oom"}],
            "paused_until": 60.0,
            "paused": "paused until 1970-01-01 00:01:00 UTC",
            "last_incident": {"id": "c8b047994eb7", "class": "kv_cache_oom", "outcome": "contained"},
        }
        return {"units": [row], "blind": ["NVML: no card can be read"]}

    async def may_start(self, unit: str) -> dict[str, object]:
        return self._said("may-start", unit)

    async def gpus(self) -> dict[str, object]:
        holder = {"pid": 4711, "used_bytes": 10 << 30, "whose": f"{LONG}: ours", "why": "its pid was recorded"}
        nameless = {"pid": None, "used_bytes": 1 << 30, "whose": "unknown", "why": "NVML cannot name the process"}
        card = {"index": 0, "name": "NVIDIA H200", "total_bytes": 96 << 30, "used_bytes": 11 << 30}
        return {"gpus": [{**card, "holders": [holder, nameless]}]}

    async def free(self, unit: str, *, dry_run: bool) -> dict[str, object]:
        self.freed = unit
        return {"ended": [], "spared": [], "summary": "Nothing was touched." if dry_run else "Nothing to end."}

    async def pause(self, unit: str, seconds: float) -> dict[str, object]:
        return self._said("pause", unit, seconds)

    async def resume(self, unit: str) -> dict[str, object]:
        return self._said("resume", unit)

    async def roll_back(self, unit: str, to: str) -> dict[str, object]:
        return self._said("rollback", unit, to)

    async def mark_good(self, unit: str) -> dict[str, object]:
        return self._said("mark-good", unit)

    async def forget(self, unit: str, name: str) -> dict[str, object]:
        return self._said("forget", unit, name)

    def _said(self, *words: object) -> dict[str, object]:
        self.asked.append(words)
        return {"summary": "As asked."}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f'runtime_dir = "{tmp_path}"\n')
    return path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    answers = Daemon()
    server = ControlServer(answers, tmp_path)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield answers
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@needs_root
@pytest.mark.usefixtures("daemon")
def test_a_pipe_gets_status_whole_however_long_the_names_are(config: Path) -> None:
    done = run("status", "--config", config)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{LONG}  active (running), serving",
        "    runs steps 10, known-good: nothing yet",
        f"    g1a2b3c4d  steps 4, proven {_local(0)}, by probes alone",
        f"    c5e6f7a8b  steps 12 does not fit: kv_cache_oom, {_local(0)}",
        f"    may act: no, paused until {_local(60)}",
        "    last incident: kv_cache_oom (contained)  c8b047994eb7",
        "cannot see: NVML: no card can be read",
    ]


def _local(time: float) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%m-%d %H:%M")


@needs_root
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("pause", LONG), ("pause", LONG, 7200.0)),
        (("pause", LONG, "--for", "1h30m"), ("pause", LONG, 5400.0)),
        (("resume", LONG), ("resume", LONG)),
        (("rollback", LONG), ("rollback", LONG, "")),
        (("rollback", LONG, "--to", "g1a2b3c4d"), ("rollback", LONG, "g1a2b3c4d")),
        (("mark-good", LONG), ("mark-good", LONG)),
        (("forget", LONG, "c5e6f7a8b"), ("forget", LONG, "c5e6f7a8b")),
    ],
)
def test_a_command_asks_the_daemon_for_what_was_typed(
    config: Path, daemon: Daemon, words: tuple[str, ...], asked: tuple[object, ...]
) -> None:
    done = run(*words, "--config", config)
    assert (done.returncode, done.stdout, done.stderr) == (0, "As asked.\n", "")
    assert daemon.asked == [asked]


@pytest.mark.parametrize("length", ["2x", "", "h", "-1h", "1.5h", "2 h"])
def test_a_length_of_time_that_is_none_is_told_with_what_would_be(length: str) -> None:
    for command, option in ((operate.pause, "--for"), (may_start.may_start, "--wait")):
        done = CliRunner().invoke(command, [LONG, f"{option}={length}"])
        assert done.exit_code == 2
        wanted = f"Invalid value for '{option}': {length} is no length of time; write 90s, 30m, 2h, 1d or 1h30m"
        assert wanted in done.stderr


@needs_root
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("query", ["", "?seconds=", "?seconds=soon"])
def test_a_pause_without_its_length_is_refused(tmp_path: Path, query: str) -> None:
    with pytest.raises(UnusableInput, match="needs its length"):
        ask(tmp_path, "POST", f"/v1/units/sglang.service/pause{query}")


@needs_root
@pytest.mark.usefixtures("daemon")
def test_a_pipe_gets_every_holder_whole(config: Path) -> None:
    assert run("gpus", "--config", config).stdout.splitlines() == [
        "0 NVIDIA H200  11.0 GiB of 96.0 GiB used",
        f"    process 4711 holds 10.0 GiB  {LONG}: ours (its pid was recorded)",
        "    a process that is not visible here holds 1.0 GiB  unknown (NVML cannot name the process)",
    ]


@needs_root
@pytest.mark.parametrize("unit", ["a/b.service", "a?dry_run=false#.service", "sglang@a\\x2db %41.service"])
def test_the_daemon_is_asked_for_the_very_unit_that_was_typed(config: Path, daemon: Daemon, unit: str) -> None:
    assert run("free", "--dry-run", unit, "--config", config).stdout == "Nothing was touched.\n"
    assert daemon.freed == unit


def test_a_socket_that_nobody_listens_on_is_a_daemon_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="systemctl start sglang-watchdog"):
        ask(tmp_path, "GET", "/v1/status")


@needs_root
@pytest.mark.usefixtures("daemon")
def test_who_may_not_use_the_socket_is_told_to_be_root(tmp_path: Path) -> None:
    with somebody_else(), pytest.raises(NotRunning, match="run this as root"):
        ask(tmp_path, "GET", "/v1/status")


# hand-back


def handed_back(config: Path) -> Result:
    return CliRunner().invoke(hand_back, ["--config", str(config)], catch_exceptions=False)


@needs_root
def test_who_may_not_start_units_is_told_to_be_root(config: Path) -> None:
    with somebody_else(), pytest.raises(WatchdogError, match="run this as root"):
        handed_back(config)


@needs_root
@pytest.mark.parametrize("content", [None, "not = [toml", 'log_level = "loud"\nsok = 3\n'])
def test_settings_that_cannot_be_used_do_not_keep_a_unit_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """They may be what the daemon died of."""
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_text(content)
    used: list[Settings] = []

    def hand_back_units(settings: Settings, _: Tell) -> list[str]:
        used.append(settings)
        return ["sglang.service: Handed back."]

    monkeypatch.setattr(sglang_watchdog.hand_back, "hand_back_units", hand_back_units)
    printed = handed_back(path)
    assert used == [Settings()]
    assert printed.stdout == "sglang.service: Handed back.\n"
    assert printed.stderr.count("\n") == 1
    assert f"{path}" in printed.stderr


@needs_root
def test_hooks_are_told_of_what_was_handed_back_even_where_another_unit_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\nexec cat >{told}\n")
    hook.chmod(0o755)
    path = tmp_path / "config.toml"
    path.write_text(f'[hooks]\ncommand = ["{hook}"]\n')
    closed = Incident("c8b047994eb7", "a.service", "a" * 32, 1.0, FailureClass.UNKNOWN, "", Outcome.YIELDED, 2.0)

    def hand_back_units(_: Settings, tell: Tell) -> list[str]:
        tell(closed)
        raise WatchdogError("b.service: no answer")

    monkeypatch.setattr(sglang_watchdog.hand_back, "hand_back_units", hand_back_units)
    with pytest.raises(WatchdogError, match="no answer"):
        handed_back(path)
    message = json.loads(told.read_text())
    assert [message[name] for name in ("event", "incident", "outcome")] == ["closed", closed.id, "yielded"]


# What a command costs to start

DAEMON = frozenset({"aiohttp", "pystemd", "pynvml", "psutil", "prometheus_client", "structlog"})
ENGINE, SETTINGS = "sglang_watchdog.diagnosis.engine", "sglang_watchdog.settings"
HEAVY = DAEMON | {"asyncio", "sqlite3", ENGINE, SETTINGS}
JOURNAL = str(STORY / "journal.jsonl")


def loaded_by(*words: str, **environment: str) -> set[str]:
    """The modules that the interpreter has loaded by the end of a command."""
    code = (
        "import sys, sglang_watchdog.__main__ as edge\n"
        "sys.argv[0] = 'sglang-watchdog'\n"
        "try: edge.main()\n"
        "finally: print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (("--help",), HEAVY),
        (("status", "--help"), HEAVY),
        (("--version",), HEAVY | {"rich"}),
        (("diagnose", "--journal", JOURNAL), HEAVY - {ENGINE}),
        (("diagnose", "--journal", JOURNAL, "--json"), HEAVY - {ENGINE} | {"rich"}),
    ],
)
def test_a_command_loads_only_what_it_works_with(words: tuple[str, ...], unwanted: frozenset[str]) -> None:
    assert not unwanted & loaded_by(*words)


def test_check_config_loads_the_settings_and_nothing_else(config: Path) -> None:
    assert HEAVY & loaded_by("check-config", "--config", str(config)) == {SETTINGS}


@needs_root
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("words", [("status",), ("pause", LONG)])
def test_asking_the_daemon_loads_nothing_of_it(config: Path, words: tuple[str, ...]) -> None:
    assert not (HEAVY | {"rich"}) & loaded_by(*words, "--config", str(config))


def test_the_start_gate_loads_nothing_heavy(config: Path) -> None:
    """It runs before each start of a server."""
    assert not (HEAVY | {"rich"}) & loaded_by("may-start", LONG, "--config", str(config))


def test_a_completion_loads_nothing_heavy() -> None:
    """It runs at each TAB."""
    typed = {"COMP_WORDS": "sglang-watchdog di", "COMP_CWORD": "1", COMPLETE_VARIABLE: "bash_complete"}
    assert not (HEAVY | {"rich"}) & loaded_by(**typed)


def test_a_mistake_in_another_setting_keeps_nobody_from_asking_the_daemon(config: Path) -> None:
    config.write_text(f'log_level = "loud"\nsok = 3\n{config.read_text()}')
    assert "sglang-watchdog is not running" in run("status", "--config", config).stderr


@pytest.mark.parametrize("content", ["runtime_dir = 3", 'runtime_dir = "run"', "not = [toml"])
def test_settings_that_do_not_tell_where_the_daemon_listens_are_explained(config: Path, content: str) -> None:
    config.write_text(content)
    done = run("status", "--config", config)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"sglang-watchdog: {config}: ")


# The journal with our own words in it


def alerts_after(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    """As `journalctl -u UNIT` shows them among the unit's own: they quote what other launches said."""
    common = {
        "__REALTIME_TIMESTAMP": entries[-1]["__REALTIME_TIMESTAMP"],
        "_SYSTEMD_UNIT": "sglang-watchdog.service",
        "_SYSTEMD_INVOCATION_ID": "9" * 32,
        "_TRANSPORT": "journal",
        "_PID": "99",
    }
    quoting = [f"sglang.service: unknown: it said: {words}" for words in QUOTED]
    alerts = [*(alert.fields() for alert in with_most().values()), *({"MESSAGE": words} for words in quoting)]
    return [{"SYSLOG_IDENTIFIER": "sglang-watchdog", **common, **fields} for fields in alerts]


QUOTED = (
    "Scheduler hit an exception: Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "Received sigquit from a child process. It usually means the child failed.",
)


def running() -> list[dict[str, str]]:
    """The journal of a launch that has not ended, which makes it hard to tell from what never ends in it."""
    lines = (SERVING / "journal.jsonl").read_text().splitlines()
    entries: list[dict[str, str]] = [json.loads(line) for line in lines]
    ready = next(number for number, entry in enumerate(entries) if "ready to roll" in entry["MESSAGE"])
    return entries[: ready + 1]


@pytest.mark.parametrize("form", ["--journal", "--text"])
def test_our_own_alerts_in_a_journal_are_no_evidence_and_no_launch(tmp_path: Path, form: str) -> None:
    """Whatever they quote, the answer is the one without them."""
    write = json.dumps if form == "--journal" else _short
    entries = running()
    answers = []
    for name, shown in (("plain", entries), ("mixed", [*entries, *alerts_after(entries)])):
        (tmp_path / name).write_text("".join(f"{write(entry)}\n" for entry in shown))
        answers.append(run("diagnose", form, tmp_path / name).stdout)
    assert answers[0]
    assert answers[1] == answers[0]


def _short(entry: dict[str, str]) -> str:
    """As `journalctl` prints it by default."""
    when = datetime.fromtimestamp(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, UTC).strftime("%b %d %H:%M:%S")
    pid = f"[{entry['_PID']}]" if "_PID" in entry else ""
    return f"{when} host {entry['SYSLOG_IDENTIFIER']}{pid}: {entry['MESSAGE']}"
