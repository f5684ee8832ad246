"""Plain logs: what SGLang printed, by itself, through `docker logs` or Kubernetes, or what `journalctl`, syslog and
`dmesg` print for people. Puts each line into a journal entry, as far as the line tells."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sglang_watchdog.diagnosis.clock import first_time, month_time
from sglang_watchdog.diagnosis.entries import clipped
from sglang_watchdog.diagnosis.leavings import Leavings
from sglang_watchdog.diagnosis.lines import parse_line
from sglang_watchdog.diagnosis.server_args import PREFIX as SERVER_ARGS
from sglang_watchdog.diagnosis.structured import read_structured
from sglang_watchdog.domain.journal import JournalEntry

_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
# journalctl's short, short-precise, short-iso, short-full and short-unix; syslog's files.
SYSLOG = re.compile(
    r"(?:(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)?"
    rf"|(?:[A-Z][a-z]{{2}} )?(?P<iso>{_ISO})(?: [A-Z]{{3,5}})?"
    r"|(?P<unix>\d{10}\.\d{6})) \S+ (?P<identifier>[\w.@/:()-]+?)(?:\[(?P<pid>\d+)\])?: (?P<message>.*)",
    re.DOTALL,
)
# The same without a host's name (`--no-hostname`), and with seconds since the boot (`short-monotonic`).
_NO_HOST = re.compile(
    rf"(?:(?P<short>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)?|(?P<iso>{_ISO})|(?P<unix>\d{{10}}\.\d{{6}}))"
    r" (?P<identifier>kernel|[\w.@/()-]+(?=\[\d+\]))(?:\[(?P<pid>\d+)\])?: (?P<message>.*)",
    re.DOTALL,
)
_SINCE_BOOT = re.compile(
    r"\[ *(?P<unix>\d{1,9}\.\d{6})\] [\w.-]+ (?P<identifier>kernel|[\w.@/()-]+(?=\[\d+\]))"
    r"(?:\[(?P<pid>\d+)\])?: (?P<message>.*)",
    re.DOTALL,
)
_JOURNALCTL = re.compile(  # its own words, which are nobody's log
    r"-- (?:Journal begins at|Logs begin at|Boot [0-9a-f]{32}|No entries|Reboot|cursor:).*"
    r"|Hint: You are currently not seeing messages.*| +Users in (?:groups|the) .* can see all messages\.?"
    r"| +Pass -q to turn off this notice\."
)
_MANAGERS = ("systemd", "init.scope")  # the second is what `-o with-unit` writes for it
_TAGGED = re.compile(r"(?P<identifier>systemd|kernel)(?:\[(?P<pid>\d+)\])?: (?P<message>.*)", re.DOTALL)
_DMESG = re.compile(
    r"(?P<identifier>)\[(?: *\d+\.\d{6}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] "
    r"(?P<message>.*)",
    re.DOTALL,
)
# `docker logs -t`, `podman logs -t`, `kubectl logs --timestamps`, and the files of a container runtime (CRI), in which
# `P` marks a part of a line and `F` its end.
_STAMPED = re.compile(
    r"(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) (?:std(?:out|err) (?P<part>[FP]) )?"
    r"(?P<message>.*)",
    re.DOTALL,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COMPOSE = re.compile(r"(?P<container>[\w.-]{1,64}) +\| |\[(?P<pod>pod/[\w./-]{1,200})\] ")
_STARTED = re.compile(r"Start(?:ing|ed) \S+")
_PARTS = 64  # of one line, 16 KiB each
_SOON = 3  # lines; nothing starts a second time so soon after it said its settings


@dataclass(slots=True)
class _Line:
    """What is known of a line by the time it is looked at. `part`: the line goes on in the next one."""

    text: str
    time: float | None = None
    origin: str = ""
    part: bool = False


@dataclass(slots=True)
class _Launches:
    """Tells launches in a log without invocation ids apart, and names them `text-1`, `text-2` and so on.

    A new one begins where systemd reports a start after an end, and where SGLang prints its settings a second time."""

    number: int = 1
    _ended: bool = False
    _settings_at: dict[str, int] = field(default_factory=dict)

    def of(self, entry: JournalEntry, origin: str, line: int) -> str:
        message = entry.message or ""
        if entry.from_manager and message:
            starts = bool(_STARTED.match(message))
            if starts and self._ended:
                self._begin()
            self._ended = not starts and (self._ended or _tells_an_end(message))
        elif SERVER_ARGS in message[:128] and parse_line(message).text.startswith(SERVER_ARGS):
            if line - self._settings_at.get(origin, line) > _SOON:
                self._begin()
            self._settings_at[origin] = line
        return f"text-{self.number}"

    def _begin(self) -> None:
        self.number += 1
        self._settings_at.clear()


def read_text(lines: Iterable[bytes], name: str, leavings: Leavings | None = None) -> Iterator[JournalEntry]:
    """Entries of a plain log, in order. Raises UnusableInput at the end where there was no line at all."""
    leavings = leavings or Leavings(name)
    launches, clock, number, seen = _Launches(), 0.0, 0, False
    for number, line in enumerate(_whole(map(_taken_apart, lines)), start=1):
        seen = seen or bool(line.text.strip())
        if not seen or _JOURNALCTL.fullmatch(line.text):
            continue
        entry = _entry(line, clock)
        clock = entry.time
        yield entry._replace(invocation=launches.of(entry, line.origin, number))
    leavings.ended(number, used=seen, wanted="")


def _taken_apart(raw: bytes) -> _Line:
    """Without what containers put before a line or around it. NUL bytes are holes that a crash left in a file."""
    if b"\x00" in raw:
        raw = raw.replace(b"\x00", b"")
    text = clipped(raw.decode("utf-8", "replace").rstrip("\r\n"))
    if text.startswith('{"log":'):
        return _docker_json(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    origin = ""
    if found := _COMPOSE.match(text):
        origin, text = found["container"] or found["pod"], text[found.end() :]
    if text[:2] == "20" and (found := _STAMPED.fullmatch(text)) and not _is_of_journalctl(text):
        return _Line(found["message"], first_time(found["iso"]), origin, found["part"] == "P")
    return _Line(text, None, origin)


def names_somebody(text: str) -> bool:
    """Whether the line is one of journalctl's forms for people, or of syslog's files."""
    return any(form.fullmatch(text) for form in (_NO_HOST, SYSLOG, _SINCE_BOOT)) or bool(_JOURNALCTL.fullmatch(text))


def _is_of_journalctl(text: str) -> bool:
    """A line of `journalctl -o short-iso`, which begins as one of podman does."""
    found = SYSLOG.fullmatch(text) or _NO_HOST.fullmatch(text)
    return bool(found and (found["pid"] or found["identifier"] == "kernel"))


def _docker_json(text: str) -> _Line:
    """A line of docker's json-file driver, which splits at 16 KiB: only a last part ends in a newline."""
    try:
        fields = json.loads(text)
        log, time = fields["log"], fields.get("time")
    except (ValueError, KeyError, RecursionError):
        return _Line(text)
    if not isinstance(log, str):
        return _Line(text)
    return _Line(log.rstrip("\r\n"), first_time(str(time)), "", not log.endswith("\n"))


def _whole(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Lines with their parts put together; of very many the first ones."""
    parts: list[_Line] = []
    for line in lines:
        if line.part:
            if len(parts) < _PARTS:
                parts.append(line)
        elif parts:
            yield _Line("".join(part.text for part in (*parts, line)), parts[0].time, line.origin)
            parts = []
        else:
            yield line
    if parts:
        yield _Line("".join(part.text for part in parts), parts[0].time, parts[0].origin)


def _tells_an_end(message: str) -> bool:
    return "Failed with result" in message or "Deactivated successfully" in message or "Main process exited" in message


_FORMS = (_NO_HOST, SYSLOG, _TAGGED, _SINCE_BOOT, _DMESG)


def _entry(line: _Line, clock: float) -> JournalEntry:
    text = line.text
    if text.startswith("{") and (found := read_structured(text)):
        return JournalEntry(found.time or line.time or clock, found.text, transport="stdout", pid=found.pid)
    match = next((match for form in _FORMS if (match := form.fullmatch(text))), None)
    if not match:
        # SGLang's own clock carries no zone. It is read as UTC: only differences are used.
        return JournalEntry(line.time or first_time(text[:32]) or clock, text, transport="stdout")
    parts = match.groupdict()
    identifier = parts["identifier"] or "kernel"
    identifier = "systemd" if identifier in _MANAGERS else identifier
    pid = parts.get("pid")
    others = "kernel" if identifier == "kernel" else "journal" if identifier.startswith("systemd") else ""
    return JournalEntry(
        _time(parts, clock),
        parts["message"],
        transport=others or "stdout",
        identifier=identifier,
        comm="systemd" if identifier == "systemd" else "",
        pid=int(pid[:18]) if pid else None,
    )


def _time(parts: dict[str, str | None], clock: float) -> float:
    if parts.get("unix"):
        return float(parts["unix"] or 0)
    written = first_time(parts.get("iso") or "") or first_time((parts["message"] or "")[:32])
    return written or month_time(parts.get("short") or "", clock) or clock
