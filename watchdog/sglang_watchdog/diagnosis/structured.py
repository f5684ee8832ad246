"""JSON log lines, put back into the form in which SGLang prints a line by itself.

SGLang has no JSON format of its own for its log: `SGLANG_LOGGING_CONFIG_PATH` names a configuration of Python's
logging, and formatters (python-json-logger and its like) differ in their keys. Its request log
(`--log-requests-format json`) names an `event` and carries what users wrote, which is evidence of nothing: of it the
event alone is kept.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.diagnosis.clock import first_time

_MESSAGE = ("message", "msg", "event", "text")
_TIME = ("asctime", "timestamp", "@timestamp", "time", "ts", "created")
_TRACEBACK = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "error.stack")
_PROCESS = ("process", "pid", "process_id")
_LOGGER = ("name", "logger")
_RANK = (("dp_rank", "DP"), ("pp_rank", "PP"), ("tp_rank", "TP"), ("ep_rank", "EP"))
_RANK_WORDS = re.compile(r"(?:DP|PP|TP|EP)\d+(?: (?:DP|PP|TP|EP)\d+)*")
# A line that was cut off at its length limit, and was JSON: nothing of it can be told from what a user wrote.
_CUT = re.compile(r'\{"[\w.@]+": ?["\d{]')
_LONG = 16 * 1024


@dataclass(frozen=True, slots=True)
class Structured:
    """`text` is what SGLang's own format would have printed, of several lines where there is a traceback.
    `time` is in Unix seconds, None where the line has none; so is `pid`."""

    text: str
    time: float | None = None
    pid: int | None = None


def read_structured(text: str) -> Structured | None:
    """The log line in a JSON object, None where the text is none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return Structured("(a JSON log line, cut off)") if len(text) > _LONG and _CUT.match(text) else None
    if not isinstance(fields, dict):
        return None
    message = _first_text(fields, _MESSAGE)
    if message is None:
        return None
    return Structured(_as_printed(fields, message), _time(fields), _pid(fields))


def _as_printed(fields: Mapping[str, object], message: str) -> str:
    rank = _rank(fields)
    uvicorn = (_first_text(fields, _LOGGER) or "").startswith("uvicorn") and not message.startswith("INFO: ")
    lines = [f"[00:00:00{' ' if rank else ''}{rank}] {'INFO:     ' if uvicorn else ''}{message}"]
    trace = _first_text(fields, _TRACEBACK)
    return "\n".join([*lines, trace] if trace and trace != "None" else lines)


def _first_text(fields: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    found = (fields[name] for name in names if name in fields)
    return next((value for value in found if isinstance(value, str)), None)


def _time(fields: Mapping[str, object]) -> float | None:
    for name in _TIME:
        value = fields.get(name)
        if isinstance(value, str) and (written := first_time(value)):
            return written
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return _seconds(value)
    return None


def _seconds(value: float) -> float | None:
    """Loggers write Unix time in seconds, milli-, micro- or nanoseconds."""
    fitting = (value / unit for unit in (1, 10**3, 10**6, 10**9) if value <= 1e11 * unit)
    return next(fitting, None)


def _pid(fields: Mapping[str, object]) -> int | None:
    found = (fields[name] for name in _PROCESS if name in fields)
    return next((pid for pid in found if isinstance(pid, int) and not isinstance(pid, bool)), None)


def _rank(fields: Mapping[str, object]) -> str:
    words = fields.get("rank")
    if isinstance(words, str) and _RANK_WORDS.fullmatch(words.strip()):
        return words.strip()
    ranks = ((short, fields.get(name)) for name, short in _RANK)
    return " ".join(f"{short}{number}" for short, number in ranks if isinstance(number, int))
