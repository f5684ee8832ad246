"""The corpus of failed launches: real runs with their journals, and public reports as cases.

A case is a log with what is known of it; `write` makes of it what an operator would hand over, and
`python -m corpus_cases` (in tests/) prints how the diagnosis does on all of them.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.entries import read_journal
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.show import parse_show
from sglang_watchdog.domain.failure import Diagnosis

CORPUS = Path(__file__).parent / "corpus"
INVOCATION = "5e1f0c0de5e1f0c0de5e1f0c0de5e1f0"
_CODES = {"exited": 1, "killed": 2, "dumped": 3}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_UNIT = re.compile(r"systemd\[\d+\]: (?:\w+ )?([\w@.\-]+\.(?:service|scope))")
_MANAGER = re.compile(r"systemd\[(\d+)\]: (.*)")
_KERNEL = re.compile(r"(?:kernel: |\[ *\d+\.\d+\] (?=NVRM|Out of memory|Memory cgroup|oom))(.*)")
_TAGGED = re.compile(r"([\w.\-]+)\[(\d+)\]: (.*)")


@dataclass(frozen=True)
class CorpusCase:
    """What is expected of one launch. `rollback_helps` is None where nobody can know."""

    name: str
    journal: bytes
    show: str
    expected: str
    acceptable: frozenset[str]
    rollback_helps: bool | None

    def diagnosis(self) -> Diagnosis:
        timeline = read_launch(read_journal(self.journal.splitlines(), self.name))
        return diagnose(Case(timeline=timeline, unit=parse_show(self.show, self.name)))

    def text(self) -> list[str]:
        """The lines as a plain log shows them, each with the name of systemd or the kernel where it is theirs."""
        return [_plain(json.loads(line)) for line in self.journal.splitlines()]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The journal and the `systemctl show` output as files."""
        journal, show = folder / "journal.jsonl", folder / "show.txt"
        journal.write_bytes(self.journal)
        show.write_text(self.show)
        return journal, show


def recorded() -> Iterator[CorpusCase]:
    """Launches of real SGLang servers: under systemd on a CPU, and on one GPU."""
    for path in sorted(CORPUS.glob("recorded*/*/case.json")):
        facts = json.loads(path.read_text())
        journal = path.with_name("journal.jsonl").read_bytes()
        yield _case(facts, journal, path.with_name("show.txt").read_text())


def reported() -> Iterator[CorpusCase]:
    """Cases made from public reports."""
    for path in sorted(CORPUS.glob("cases/*.json")):
        facts = json.loads(path.read_text())
        lines = [json.dumps(entry) for entry in _entries(facts)]
        yield _case(facts, "".join(f"{line}\n" for line in lines).encode(), _show(facts))


def snippets() -> Iterator[CorpusCase]:
    """Short launches in the wordings of public reports, one file for each kind of failure."""
    for path in sorted(CORPUS.glob("snippets/*.toml")):
        for case in tomllib.loads(path.read_text())["case"]:
            yield from_text({"also_acceptable": case.get("also", []), "expected_class": case["expected"], **case})


def from_text(facts: dict[str, Any]) -> CorpusCase:
    """A case of which `log` is text, and `rollback_helps` is missing where nobody can know."""
    whole = {"rollback_helps": None, **facts, "log": facts["log"].strip("\n").split("\n")}
    lines = [json.dumps(entry) for entry in _entries(whole)]
    return _case(whole, "".join(f"{line}\n" for line in lines).encode(), _show(whole))


def everything() -> list[CorpusCase]:
    return [*recorded(), *reported(), *snippets()]


def _case(facts: dict[str, Any], journal: bytes, show: str) -> CorpusCase:
    return CorpusCase(
        name=facts["id"],
        journal=journal,
        show=show,
        expected=facts["expected_class"],
        acceptable=frozenset({facts["expected_class"], *facts["also_acceptable"]}),
        rollback_helps=facts["rollback_helps"],
    )


def _plain(entry: dict[str, Any]) -> str:
    message = entry.get("MESSAGE") or ""
    text = bytes(message).decode("utf-8", "replace") if isinstance(message, list) else str(message)
    name = entry.get("SYSLOG_IDENTIFIER")
    return f"{name}[{entry.get('_PID', 0)}]: {text}" if name in ("systemd", "kernel") else text


def _unit(log: list[str]) -> str:
    found = next((match for line in log if (match := _UNIT.match(line))), None)
    return found[1] if found else "sglang.service"


def _entries(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    unit = _unit(facts["log"])
    for number, line in enumerate(facts["log"]):
        entry = {
            "__CURSOR": f"s=0;i={number:x}",
            "__REALTIME_TIMESTAMP": str(1_780_000_000_000_000 + number * 250_000),
            "__MONOTONIC_TIMESTAMP": str(9_000_000_000 + number * 250_000),
            "_BOOT_ID": "b" * 32,
        }
        yield entry | _fields(line, unit)


def _fields(line: str, unit: str) -> dict[str, Any]:
    """The fields by which journald tells systemd, the kernel and the unit's own processes apart."""
    if manager := _MANAGER.match(line):
        names = {"SYSLOG_IDENTIFIER": "systemd", "_COMM": "systemd", "UNIT": unit, "INVOCATION_ID": INVOCATION}
        own = {"_PID": manager[1], "_TRANSPORT": "journal", "PRIORITY": "6", "MESSAGE": manager[2]}
        return names | own
    if kernel := _KERNEL.match(line):
        return {"SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "kernel", "PRIORITY": "3", "MESSAGE": kernel[1]}
    tagged = _TAGGED.match(line)
    text = tagged[3] if tagged else line
    return {
        "_PID": tagged[2] if tagged else "4242",
        "SYSLOG_IDENTIFIER": tagged[1] if tagged else "python3",
        "_SYSTEMD_UNIT": unit,
        "_SYSTEMD_INVOCATION_ID": INVOCATION,
        "_TRANSPORT": "stdout",
        "PRIORITY": "6",
        "MESSAGE": list(text.encode()) if _ANSI.search(text) else text,
    }


def _show(facts: dict[str, Any]) -> str:
    """As `systemctl show` prints it; empty where the case says nothing of systemd and no flags."""
    systemd = facts.get("systemd") or {}
    flags = [flag.split(" (")[0] for flag in facts.get("flags") or []]
    flags = [flag for flag in flags if re.fullmatch(r"--[\w-]+(?:[ =][\w./:-]+)*", flag)]
    if not systemd and not flags:
        return ""
    rows = [f"Id={_unit(facts['log'])}", f"InvocationID={INVOCATION}"]
    if flags:
        argv = "python3 -m sglang.launch_server --model-path /models/m " + " ".join(flags)
        rest = "ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }"
        rows.append(f"ExecStart={{ path=/opt/sglang/bin/python3 ; argv[]={argv} ; {rest}")
    if systemd.get("result"):
        rows.append(f"Result={systemd['result']}")
    if systemd.get("exec_main_code") is not None:
        rows.append(f"ExecMainCode={_CODES.get(systemd['exec_main_code'], systemd['exec_main_code'])}")
    if systemd.get("exec_main_status") is not None:
        rows.append(f"ExecMainStatus={systemd['exec_main_status']}")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Calibration:
    """Of the answers given one confidence: how many there are, and how many are right."""

    confidence: float
    answers: int
    right: int


def calibration(judged: Iterable[tuple[CorpusCase, Diagnosis]]) -> list[Calibration]:
    """The surest first. An answer that would do as well counts as right."""
    right_by_confidence: dict[float, list[bool]] = {}
    for case, answer in judged:
        right_by_confidence.setdefault(round(answer.confidence, 2), []).append(answer.failure in case.acceptable)
    return [Calibration(sure, len(rights), sum(rights)) for sure, rights in sorted(right_by_confidence.items())[::-1]]


def score() -> int:
    """Prints a line for each case, the sums, and how many answers of each confidence are right. Returns how many are
    wrong or dangerous."""
    exact = accepted = wrong = dangerous = 0
    judged = [(case, case.diagnosis()) for case in everything()]
    for case, answer in judged:
        given = answer.failure.value
        kind = "exact" if given == case.expected else "accepted" if given in case.acceptable else "wrong"
        if kind == "wrong" and given == "unknown":
            kind = "unknown"
        exact, accepted, wrong = exact + (kind == "exact"), accepted + (kind == "accepted"), wrong + (kind == "wrong")
        harm = case.rollback_helps is False and answer.rollback_helps is True
        dangerous += harm
        rollback = f"{case.rollback_helps}/{answer.rollback_helps}"
        note = "" if kind == "exact" else f"  expected {case.expected}"
        print(
            f"{kind:9}{answer.confidence:5.2f} {given:24}{rollback:12}{'DANGEROUS ' if harm else ''}{case.name}{note}"
        )
    for of in calibration(judged):
        print(f"given {of.confidence:.2f}: {of.right} of {of.answers} right")
    print(f"{exact} exact, {accepted} accepted, {wrong} wrong, {dangerous} dangerous")
    return wrong + dangerous


if __name__ == "__main__":
    sys.exit(1 if score() else 0)
