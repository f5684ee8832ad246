"""The daemon's own log: structlog's key=value lines on stderr, which systemd carries to the journal."""

import logging
import sys

import structlog

from sglang_watchdog.domain.secrets import redact_text

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure(level: str, *, to_journal: bool) -> None:
    """`to_journal`: prefix each line with its syslog priority, which systemd takes off again (SyslogLevelPrefix=)."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            _redacted,
            _with_priority if to_journal else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _redacted(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: redact_text(value) if isinstance(value, str) else value for key, value in event.items()}


def _with_priority(logger: object, method: str, event: structlog.typing.EventDict) -> str:
    priority = _PRIORITIES.get(event.pop("level", "info"), 6)
    render = structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)
    return f"<{priority}>{render(logger, method, event)}"
