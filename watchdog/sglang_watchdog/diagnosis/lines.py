"""Takes one line of a log apart: which rank wrote it, and what it says.

SGLang's root logger writes `[2026-03-09 22:35:06 DP0 TP3] message`, without a level; only the first line of a traceback
has the prefix. Containers and other engines put their own prefix before it.
"""

import re
from typing import NamedTuple

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"\[(?=[\dTDPEAMCg])(?:[\d-]{5,10}[ T])?(?:\d\d:\d\d:\d\d(?:[.,]\d+)?)?(?: [A-Za-z][\w.]*){0,3}?"
    r"(?P<rank>(?: ?(?:(?:ATTN|MOE)_)?D?(?:DP|PP|CP|TP|EP)\d+)+| ?gpu_id=\d+)?\] ?"
)
# The form that nearly every line of a server has, at half the cost of the pattern above.
_USUAL = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: ([DPTE]P\d+))?\] ")
_LEVEL = "(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# What stands before SGLang's own prefix, or before another engine's message. Nothing here tells where a message begins:
# some of these are written before every line of a traceback.
_BEFORE = re.compile(
    r"\d{4}-\d\d-\d\dT\S+ (?:stdout|stderr) [FP] "  # a container's log as containerd keeps it
    r"|(?:\d{1,4}\|)?[\w.-]{1,64} +\| "  # docker compose, pm2
    r"|\[pod/\S{1,256}\] "  # kubectl logs --prefix
    r"|\[(?:rank|default)\d+\]:?(?!:?\[) ?"  # torchrun
    r"|\d{1,4}: +(?=\[\d{4}-)"  # srun --label
    r"|\([\w.<>:-]{1,64}(?: [\w.-]{1,64})? pid=\d+(?:, ip=[\w.:]+)?\) "  # Ray, vLLM
    rf"|{_LEVEL} \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] ?"  # vLLM
    rf"| ?{_LEVEL} (?=[\w\[(])(?!    )(?:(?:[a-z_]\w*\.)+[a-z_]\w*: )?"
    rf"|{_LEVEL}:[\w.]+:"  # Python's logging by default
    rf"|\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ |,:-]+\[?{_LEVEL}\]?[ |:-]+"
    r"(?:[\w.]+(?::[\w.<>]+)*(?::\d+)? [-|:] ?|(?:[a-z_]\w*\.)+[a-z_]\w*: |\d+ \[[\w ]*\.py:\d+\] )?"
    # loguru, logging with a time, Dynamo, and logging with process and file
)
_MOST_BEFORE = 4


class Line(NamedTuple):
    """`rank` as printed (`DP0 TP3`), empty without one. `prefixed`: the start of a message, no continuation."""

    text: str
    rank: str = ""
    prefixed: bool = False


def parse_line(text: str) -> Line:
    """Of a progress bar, which rewrites its line by carriage returns, the last state counts."""
    if (usual := _USUAL.match(text)) and "\x1b" not in text and "\r" not in text:
        return Line(text[usual.end() :], usual[1] or "", True)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = text.rstrip("\r").rpartition("\r")[2]
    for _ in range(_MOST_BEFORE):
        if text.startswith("[") and (found := _PREFIX.match(text)):
            return Line(text[found.end() :], (found["rank"] or "").strip(), prefixed=True)
        before = _BEFORE.match(text)
        if not before:
            break
        text = text[before.end() :]
    return Line(text)
