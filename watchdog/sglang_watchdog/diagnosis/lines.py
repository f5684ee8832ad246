"""Takes one line of a log apart: which rank wrote it, and what it says.

SGLang's root logger writes `[2026-03-09 22:35:06 DP0 TP3] message`, without a level; only the first line of a traceback
has the prefix. Containers and other engines put their own prefix before it.
"""

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTAINER = re.compile(r"[\w.-]{1,64} +\| ")
_OTHER_ENGINE = re.compile(
    r"(?:\(\w+ pid=\d+\) )?(?:ERROR|CRITICAL|WARNING|INFO) (?:\d\d-\d\d \d\d:\d\d:\d\d \[[\w.]+:\d+\] ?)?(?!    )"
    r"|\(\w+ pid=\d+\) "
)
_PREFIX = re.compile(
    r"\[(?=[\dTDPEAMg])(?:[\d-]{5,10} )?(?:\d\d:\d\d:\d\d(?:[.,]\d+)?)?"
    r"(?P<rank>(?: ?(?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)+| ?gpu_id=\d+)?\] ?"
)


@dataclass(frozen=True, slots=True)
class Line:
    """`rank` as printed (`DP0 TP3`), empty without one. `prefixed`: the start of a message, no continuation."""

    text: str
    rank: str = ""
    prefixed: bool = False


def parse_line(text: str) -> Line:
    """Of a progress bar, which rewrites its line by carriage returns, the last state counts."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = text.rstrip("\r").rpartition("\r")[2]
    if text.startswith("["):
        found = _PREFIX.match(text)
        return Line(text[found.end() :], (found["rank"] or "").strip(), prefixed=True) if found else Line(text)
    return _foreign(text)


def _foreign(text: str) -> Line:
    container = _CONTAINER.match(text)
    if container:
        return parse_line(text[container.end() :])
    other = _OTHER_ENGINE.match(text)
    return Line(text[other.end() :], prefixed=False) if other and other.end() else Line(text)
