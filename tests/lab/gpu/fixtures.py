"""Makes cases of the corpus out of what a run on the machine with a GPU recorded.

    fixtures.py RECORDS CORPUS      RECORDS is the unpacked records.tar.gz

Only what the case needs is kept: the unit's own entries of one launch, PID 1's about it, the kernel's out-of-memory
lines, and the unit's properties without its environment. Paths of the machine are replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.story import SECRET
from lab.host import CHECKOUT

UNIT = "sglang.service"
FIELDS = (
    *(
        "__CURSOR",
        "__REALTIME_TIMESTAMP",
        "__MONOTONIC_TIMESTAMP",
        "_SOURCE_REALTIME_TIMESTAMP",
        "_BOOT_ID",
        "PRIORITY",
    ),
    *("MESSAGE", "MESSAGE_ID", "_PID", "_COMM", "SYSLOG_IDENTIFIER", "UNIT", "INVOCATION_ID", "_SYSTEMD_UNIT"),
    *("_SYSTEMD_INVOCATION_ID", "_TRANSPORT", "JOB_ID", "JOB_TYPE", "JOB_RESULT", "COMMAND", "EXIT_CODE"),
    *("EXIT_STATUS", "UNIT_RESULT", "_SYSTEMD_CGROUP"),
)
KERNEL_WORDS = ("oom-kill:", "Memory cgroup out of memory", "memory.oom.group")
SIMULATED = "recorded: simulated SGLang 0.5.16 with real CUDA allocations on one H200, systemd 252 with cgroup v2"
REAL = "recorded: SGLang 0.5.16, hybrid dummy model, one H200, systemd 252, watched by sglang-watchdog"

TWO_CARDS = REAL.replace("one H200", "tensor parallel on two H200")


@dataclass(frozen=True)
class Wanted:
    """One case: which launch of a scenario (`incident` names its class; empty: the last), and its class."""

    name: str
    scenario: str
    expected: str
    rollback_helps: bool | None
    seen_in: str = SIMULATED
    incident: str = ""
    also: tuple[str, ...] = field(default=())


WANTED = (
    Wanted("cgroup_oom_kill", "host_memory", "cgroup_oom_kill", False),
    Wanted("oomd_kill", "pressure", "cgroup_oom_kill", False),
    Wanted("graph_oom_torch", "graph_oom", "cuda_graph_oom", True),
    Wanted("draft_pool_oom_torch", "pool_oom", "kv_cache_oom", True),
    Wanted("weights_beside_100_gib", "held_weights", "gpu_memory_held", False),
    Wanted("states_refused", "states_refused", "kv_cache_oom", True),
    Wanted("left_over_after_stop_timeout", "night", "stop_timeout_sigkill", False, incident="stop_timeout_sigkill"),
    Wanted("weights_beside_left_over", "night", "gpu_memory_held", False, incident="gpu_memory_held"),
    Wanted("real_steps_10", "real_story", "kv_cache_oom", True, REAL, incident="kv_cache_oom"),
    Wanted("real_frozen_stop", "real_crowded", "stop_timeout_sigkill", False, REAL),
    # The other rank found the connection closed before SGLang looked at its children, so that no line names the kill.
    Wanted("real_rank_killed", "real_ranks", "unknown", None, TWO_CARDS, incident="unknown", also=("external_kill",)),
    Wanted("real_rank_segfault", "real_ranks", "segfault", None, TWO_CARDS, incident="segfault"),
    Wanted(
        "real_rank_frozen",
        "real_ranks",
        "internal_watchdog_hang",
        None,
        TWO_CARDS,
        incident="internal_watchdog_hang",
    ),
    Wanted("real_ranks_hang", "real_ranks", "internal_watchdog_hang", None, TWO_CARDS),
)


def main() -> None:
    records, corpus = map(Path, sys.argv[1:])
    for wanted in WANTED:
        source = records / wanted.scenario / "end"
        if source.is_dir():
            _write(wanted, source, corpus / wanted.name)


def _write(wanted: Wanted, source: Path, target: Path) -> None:
    history = json.loads((source / "history.json").read_text())
    launch = _launch(wanted, history)
    entries = [json.loads(line) for line in (source / "journal.jsonl").read_text().splitlines()]
    target.mkdir(parents=True, exist_ok=True)
    kept = list(_kept(entries, launch["invocation"]))
    (target / "journal.jsonl").write_text("".join(f"{_clean(json.dumps(entry))}\n" for entry in kept))
    (target / "show.txt").write_text(_clean(_show(source, launch, kept)))
    case = {
        "id": f"gpu-lab-{wanted.name}",
        "seen_in": wanted.seen_in,
        "version": "0.5.16",
        "expected_class": wanted.expected,
        "also_acceptable": list(wanted.also),
        "rollback_helps": wanted.rollback_helps,
        "hard": True,
    }
    (target / "case.json").write_text(json.dumps(case, indent=1) + "\n")


def _launch(wanted: Wanted, history: dict[str, Any]) -> dict[str, Any]:
    invocations = [one["invocation"] for one in history["incidents"] if one["class"] == wanted.incident]
    if not invocations:
        return dict(history["launches"][0])
    return next(dict(one) for one in history["launches"] if one["invocation"] == invocations[0])


def _kept(entries: list[dict[str, Any]], invocation: str) -> Iterator[dict[str, Any]]:
    for entry in entries:
        of_launch = invocation in (entry.get("_SYSTEMD_INVOCATION_ID"), entry.get("INVOCATION_ID"))
        if (of_launch and UNIT in (entry.get("_SYSTEMD_UNIT"), entry.get("UNIT"))) or _is_kill(entry):
            yield {name: entry[name] for name in FIELDS if name in entry}


def _is_kill(entry: dict[str, Any]) -> bool:
    text = entry.get("MESSAGE")
    if entry.get("SYSLOG_IDENTIFIER") == "systemd-oomd" and UNIT in str(text):
        return True
    return entry.get("_TRANSPORT") == "kernel" and isinstance(text, str) and any(word in text for word in KERNEL_WORDS)


def _show(source: Path, launch: dict[str, Any], kept: list[dict[str, Any]]) -> str:
    """As recorded where it is of this launch; else what PID 1 said of its end."""
    text = (source / "show.txt").read_text()
    if f"InvocationID={launch['invocation']}" in text:
        lines = [line for line in text.splitlines() if not line.startswith(("Environment=", "DropIn"))]
        return "\n".join(lines) + "\n"
    end = next(entry for entry in kept if entry.get("EXIT_CODE") and entry.get("_PID") == "1")
    result = next((entry["UNIT_RESULT"] for entry in kept if entry.get("UNIT_RESULT")), "success")
    argv = " ".join(launch["argv"])
    values = {
        "Id": UNIT,
        "InvocationID": launch["invocation"],
        "Result": result,
        "ExecMainCode": "2" if end["EXIT_CODE"] == "killed" else "1",
        "ExecMainStatus": "9" if end["EXIT_STATUS"] == "KILL" else end["EXIT_STATUS"],
        "ExecStart": f"{{ path={launch['argv'][0]} ; argv[]={argv} ; ignore_errors=no ; pid=0 ; code=(null) }}",
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _clean(text: str) -> str:
    for found, shown in ((str(CHECKOUT), "/opt/lab"), ("/opt/torch/.venv", "/opt/sglang"), (SECRET, "REDACTED")):
        text = text.replace(found, shown)
    return text


if __name__ == "__main__":
    main()
