"""What systemd says about a unit: message ids before English, which differs between versions.

The words are those of systemd 252 to 257 (measured); a message without an id is told by its words alone.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from sglang_watchdog.domain.journal import JournalEntry, MessageId


class Word(StrEnum):
    """One thing that systemd said."""

    STARTING = "starting"
    STARTED = "started"
    STOPPING = "stopping"
    STOPPED = "stopped"
    MAIN_EXIT = "main_exit"  # detail: code/status
    CONTROL_EXIT = "control_exit"  # a command beside the main one (ExecStartPre=, ExecStop=)
    FAILED = "failed"  # detail: the unit's Result
    SUCCEEDED = "succeeded"
    STATE_TIMED_OUT = "state_timed_out"  # detail: the state
    KILLING = "killing"
    START_TIMED_OUT = "start_timed_out"
    RUNTIME_LIMIT = "runtime_limit"
    START_LIMIT = "start_limit"
    RESOURCES = "resources"  # systemd could not set the process up
    DEPENDENCY = "dependency"  # another unit that this one needs did not come up
    BAD_UNIT = "bad_unit"  # systemd refuses the unit file
    CLIENT_KILL = "client_kill"  # detail: the signal
    OUT_OF_MEMORY = "out_of_memory"
    OOMD = "oomd"
    WATCHDOG = "watchdog"  # WatchdogSec= of the unit
    LEFT_OVER = "left_over"
    RESTART_SCHEDULED = "restart_scheduled"


@dataclass(frozen=True, slots=True)
class Said:
    """`order` counts the launch's lines of every source; `count` is how often the same was said in a row."""

    word: Word
    order: int
    time: float
    text: str
    detail: str = ""
    count: int = 1


_IDS = {
    MessageId.UNIT_STARTING: Word.STARTING,
    MessageId.UNIT_STARTED: Word.STARTED,
    MessageId.UNIT_STOPPING: Word.STOPPING,
    MessageId.UNIT_STOPPED: Word.STOPPED,
    MessageId.UNIT_FAILED: Word.FAILED,
    MessageId.UNIT_SUCCESS: Word.SUCCEEDED,
    MessageId.OUT_OF_MEMORY: Word.OUT_OF_MEMORY,
    MessageId.OOMD_KILL: Word.OOMD,
    MessageId.RESTART_SCHEDULED: Word.RESTART_SCHEDULED,
}
_LONGEST = 4096  # PID 1 says nothing longer, whoever else writes in its name may
_ENGLISH: tuple[tuple[Word, re.Pattern[str]], ...] = (
    (Word.STARTING, re.compile(r"Starting \S")),
    (Word.STARTED, re.compile(r"Started \S")),
    (Word.STOPPING, re.compile(r"Stopping \S")),
    (Word.STOPPED, re.compile(r"Stopped \S")),
    (Word.MAIN_EXIT, re.compile(r".*[Mm]ain process exited, code=(\w+), status=(\d{1,18})")),
    (Word.CONTROL_EXIT, re.compile(r".*Control process exited, code=(\w+), status=(\d{1,18})")),
    (Word.FAILED, re.compile(r".*Failed with result '([\w-]+)'")),
    (Word.SUCCEEDED, re.compile(r".*: (?:Deactivated successfully|Succeeded)\.")),
    (Word.START_TIMED_OUT, re.compile(r".*[Ss]tart(?:-pre|-post)? operation timed out")),
    (Word.STATE_TIMED_OUT, re.compile(r".*(?:State '|: )([\w-]+)'? timed out\. ")),
    (Word.KILLING, re.compile(r".*: Killing process (\d{1,18}) \(.*\) with signal SIGKILL")),
    (Word.RUNTIME_LIMIT, re.compile(r".*reached runtime time limit")),
    (Word.START_LIMIT, re.compile(r".*Start request repeated too quickly")),
    (Word.RESOURCES, re.compile(r".*(?:Failed to load environment files|Failed to run '\S+' task): (.*)")),
    (Word.DEPENDENCY, re.compile(r"Dependency failed for \S|.*failed with result 'dependency'")),
    (Word.BAD_UNIT, re.compile(r".*: .*Refusing\.$|.*bad unit file setting|.*Unit configuration has fatal error")),
    (Word.CLIENT_KILL, re.compile(r".*Sent signal (SIG\w+) to .* on client request")),
    (Word.OUT_OF_MEMORY, re.compile(r".*killed by the OOM killer")),
    (Word.OOMD, re.compile(r".*systemd-oomd killed|Killed /\S+ due to ")),
    (Word.WATCHDOG, re.compile(r".*: Watchdog timeout \(limit")),
    (Word.LEFT_OVER, re.compile(r".*Found left-over process (\d{1,18}) ")),
    (Word.RESTART_SCHEDULED, re.compile(r".*Scheduled restart job")),
)


def read(entry: JournalEntry, order: int) -> Said | None:
    """What the manager's entry says, None where it is nothing of interest."""
    text = (entry.message or "")[:_LONGEST]
    if entry.message_id == MessageId.PROCESS_EXIT:
        word = Word.CONTROL_EXIT if "Control process" in text else Word.MAIN_EXIT
        return Said(word, order, entry.time, text, f"{entry.exit_code}/{entry.exit_status}")
    named = _IDS.get(MessageId(entry.message_id)) if entry.message_id in _KNOWN_IDS else None
    if named:
        return Said(named, order, entry.time, text, entry.unit_result or _detail(named, text))
    for word, pattern in _ENGLISH:
        if pattern.match(text):
            return Said(word, order, entry.time, text, _detail(word, text))
    return None


_KNOWN_IDS = frozenset(MessageId)
_PATTERNS = dict(_ENGLISH)


def _detail(word: Word, text: str) -> str:
    found = _PATTERNS[word].match(text)
    return "/".join(found.groups()) if found else ""
