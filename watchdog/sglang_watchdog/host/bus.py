"""systemd by D-Bus: two connections, one that only listens and one that only asks.

pystemd keeps Python's global lock while it waits for a reply, so a worker thread would freeze with the loop all the
same. Calls are therefore made in place and bounded by sd-bus itself (`SYSTEMD_BUS_TIMEOUT`), and what can take longer
than that (daemon-reload) goes through `systemctl` in a process of its own. The listening connection is never used for
calls: a reply would leave signals in sd-bus's queue, where no readable file descriptor announces them.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pystemd.dbusexc import DBusBaseError
from pystemd.dbuslib import DBus, apply_signature, path_decode, path_encode
from pystemd.systemd1.unit_signatures import signature_array

from sglang_watchdog.domain.errors import BusError, BusLost, JobRefused
from sglang_watchdog.domain.unit import ActiveState, ExitCode, ServiceResult, UnitSnapshot

CALL_TIMEOUT_S = 5
# Read by libsystemd when a connection is opened; its own default of 25 s would outlast our WatchdogSec=.
os.environ.setdefault("SYSTEMD_BUS_TIMEOUT", f"{CALL_TIMEOUT_S}s")

_SYSTEMD = b"org.freedesktop.systemd1"
_ROOT = b"/org/freedesktop/systemd1"
_MANAGER = b"org.freedesktop.systemd1.Manager"
_UNIT = b"org.freedesktop.systemd1.Unit"
_SERVICE = b"org.freedesktop.systemd1.Service"
_PROPERTIES = b"org.freedesktop.DBus.Properties"
_UNIT_PREFIX = b"/org/freedesktop/systemd1/unit"
_INFINITY = 2**64 - 1
# A slice without a dash in its name lies below no other one.
_WITNESS = "sglang_watchdog_witness_"
_SNAPSHOT_TRIES = 4
# What sd-bus answers where the connection is gone or systemd did not answer in time.
_CONNECTION_LOST = frozenset({errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT, errno.ESTALE})

Properties = Mapping[bytes, Any]


class HintKind(StrEnum):
    """Why to look again. A signal is a hint, never a fact: the state is re-read."""

    CHANGED = "changed"
    JOB_NEW = "job_new"
    JOB_REMOVED = "job_removed"
    RELOADING = "reloading"
    RELOADED = "reloaded"


@dataclass(frozen=True, slots=True)
class Hint:
    """`unit` is empty where the hint concerns all units (a reload of the manager)."""

    kind: HintKind
    unit: str = ""
    job: int = 0
    job_result: str = ""


class Systemd:
    """The asking connection. Each method is one bounded round trip, or raises `BusError`."""

    def __init__(self) -> None:
        self._bus: DBus | None = None

    def open(self) -> None:
        self._bus = _opened()

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def snapshot(self, unit: str) -> UnitSnapshot:
        """One consistent reading: one GetAll for the unit, one for the service. A restart may fall between the two, so
        they are taken again until both are of one launch."""
        path = self._path(unit)
        general = self._all(path, _UNIT)
        for _ in range(_SNAPSHOT_TRIES):
            service, before = self._all(path, _SERVICE), general
            general = self._all(path, _UNIT)
            if general.get(b"InvocationID") == before.get(b"InvocationID"):
                break
        job_id, job_path = general.get(b"Job", (0, b"/"))
        return _snapshot(unit, general, service, self._job_type(job_path) if job_id else "")

    def services(self) -> tuple[str, ...]:
        """Names of all services that systemd knows, loaded or lying on disk; no templates, no aliases."""
        files = (path.rsplit(b"/", 1)[-1] for path, state in self._manager(b"ListUnitFiles", b"") if state != b"alias")
        loaded = (row[0] for row in self._manager(b"ListUnits", b""))
        names = {name.decode(errors="surrogateescape") for name in (*files, *loaded)}
        return tuple(sorted(name for name in names if name.endswith(".service") and "@." not in name))

    def ref(self, unit: str) -> None:
        """Keeps the unit loaded as long as this connection lives, so that Result and InvocationID of a stopped,
        not enabled unit are not forgotten."""
        self._unit_call(unit, b"Ref")

    def start(self, unit: str) -> int:
        """Queues a start in mode `fail` and returns the job id. Raises `JobRefused` where another job is queued."""
        return self._job(b"StartUnit", unit)

    def restart(self, unit: str) -> int:
        """As `start`, of a unit that runs or not; the job stops it first, as its definition says."""
        return self._job(b"RestartUnit", unit)

    def stop(self, unit: str) -> int:
        """Queues a stop in mode `fail` and returns the job id; the id of a queued stop, whoever asked for that."""
        return self._job(b"StopUnit", unit)

    def reset_failed(self, unit: str) -> None:
        self._manager(b"ResetFailedUnit", b"s", unit)

    def kill(self, unit: str, signal: int, *, whole_group: bool = True) -> None:
        """Sends a signal to every process of the unit's cgroup, or to the main process alone: systemd does it, so no
        pid can be mistaken."""
        self._manager(b"KillUnit", b"ssi", unit, "all" if whole_group else "main", signal)

    def witness_stands(self, unit: str) -> bool:
        """Whether nobody has asked for a stop of the unit since its witness was called: systemd stops a unit that is
        `PartOf=` another one together with it, also where the other one is down already."""
        general = self._all(self._path(_witness(unit)), _UNIT)
        job_id, job_path = general.get(b"Job", (0, b"/"))
        if job_id:
            return self._job_type(job_path) != "stop"  # each restart of the unit restarts it as well
        return _text(general, b"ActiveState") == ActiveState.ACTIVE

    def call_witness(self, unit: str) -> None:
        """Raises `BusError` where one stands, or where the last one has not left yet."""
        properties = {b"PartOf": [unit.encode()], b"Description": f"Remembers a stop of {unit}".encode()}
        words = apply_signature(b"ss", [_witness(unit).encode(), b"fail"])
        no_more_units = [(ord("a"), b"(sa(sv))"), (-1, None)]
        self._method(_ROOT, _MANAGER, b"StartTransientUnit", [*words, *signature_array(properties), *no_more_units])

    def dismiss_witness(self, unit: str) -> None:
        """Nothing where there is none."""
        if self.witness_stands(unit):
            self._job(b"StopUnit", _witness(unit))

    def _path(self, unit: str) -> bytes:
        path: bytes = self._manager(b"LoadUnit", b"s", unit)
        return path

    def _all(self, path: bytes, interface: bytes) -> Properties:
        properties: Properties = self._call(path, _PROPERTIES, b"GetAll", b"s", interface)
        return properties

    def _unit_call(self, unit: str, method: bytes) -> None:
        self._call(self._path(unit), _UNIT, method, b"")

    def _job(self, method: bytes, unit: str) -> int:
        path: bytes = self._manager(method, b"ss", unit, "fail")
        return int(path.rsplit(b"/", 1)[-1])

    def _job_type(self, path: bytes) -> str:
        try:
            kind: bytes = self._call(path, _PROPERTIES, b"Get", b"ss", b"org.freedesktop.systemd1.Job", b"JobType")
        except BusError:
            return ""  # the job ended between the two reads
        return kind.decode()

    def _manager(self, method: bytes, signature: bytes, *args: object) -> Any:
        return self._call(_ROOT, _MANAGER, method, signature, *args)

    def _call(self, path: bytes, interface: bytes, method: bytes, signature: bytes, *args: object) -> Any:
        words = [word.encode() if isinstance(word, str) else word for word in args]
        return self._method(path, interface, method, apply_signature(signature, words))

    def _method(self, path: bytes, interface: bytes, method: bytes, arguments: list[Any]) -> Any:
        if self._bus is None:
            raise BusLost("the system bus is not connected")
        try:
            return self._bus.call_method(_SYSTEMD, path, interface, method, arguments).body
        except DBusBaseError as error:
            raise _translated(error, method.decode()) from error


class SignalFeed:
    """The listening connection. Watch `fileno()` for reading, then take what `drain()` gives."""

    def __init__(self, units: tuple[str, ...]) -> None:
        self._units = units
        self._bus: DBus | None = None

    def open(self) -> None:
        bus = _opened()
        try:
            for unit in self._units:
                path = path_encode(_UNIT_PREFIX, unit.encode())
                bus.match_signal(_SYSTEMD, path, _PROPERTIES, b"PropertiesChanged", _on_signal)
            for member in (b"JobNew", b"JobRemoved", b"Reloading"):
                bus.match_signal(_SYSTEMD, _ROOT, _MANAGER, member, _on_signal)
            bus.call_method(_SYSTEMD, _ROOT, _MANAGER, b"Subscribe", [])
        except DBusBaseError as error:
            bus.close()
            raise _translated(error, "subscribing to signals") from error
        self._bus = bus

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def fileno(self) -> int:
        if self._bus is None:
            raise BusLost("the system bus is not connected")
        return int(self._bus.get_fd())

    def drain(self) -> list[Hint]:
        """Handles every queued message (process() takes one at a time). Raises `BusError` once the bus is gone.

        The end of the bus looks like an empty queue: sd-bus closes the connection by itself, and epoll then forgets its
        file descriptor, so that nobody would ever be told again."""
        if self._bus is None:
            raise BusLost("the system bus is not connected")
        with _collected() as hints:
            try:
                while not self._bus.process().is_empty():
                    pass
            except DBusBaseError as error:
                raise _translated(error, "reading signals") from error
        if self.fileno() < 0:
            raise BusLost("systemd: reading signals: the bus closed the connection")
        return [hint for hint in hints if not hint.unit or hint.unit in self._units]


# match_signal keeps a bare pointer to its callback and takes no reference: a module-level function lives for ever.
_collector: list[Hint] | None = None


@contextlib.contextmanager
def _collected() -> Iterator[list[Hint]]:
    global _collector
    _collector = []
    try:
        yield _collector
    finally:
        _collector = None


def _on_signal(message: Any, error: object = None, userdata: object = None) -> None:  # noqa: ARG001 (pystemd's call)
    message.process_reply(True)
    hint = _hint(message.headers["Member"], message.headers["Path"], message.body)
    if hint is not None and _collector is not None:
        _collector.append(hint)


def _hint(member: bytes, path: bytes, body: Any) -> Hint | None:
    match member:
        case b"PropertiesChanged":
            return Hint(HintKind.CHANGED, path_decode(path, _UNIT_PREFIX).decode())
        case b"JobNew":
            return Hint(HintKind.JOB_NEW, body[2].decode(), job=body[0])
        case b"JobRemoved":
            return Hint(HintKind.JOB_REMOVED, body[2].decode(), job=body[0], job_result=body[3].decode())
        case b"Reloading":
            return Hint(HintKind.RELOADING if body else HintKind.RELOADED)
        case _:
            return None


def _witness(unit: str) -> str:
    escaped = "".join(c if c.isascii() and (c.isalnum() or c in "._:") else _escaped(c) for c in unit)
    return f"{_WITNESS}{escaped}.slice"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _opened() -> DBus:
    bus = DBus()
    try:
        bus.open()
    except DBusBaseError as error:
        raise BusLost("the system bus cannot be reached: is systemd PID 1 here, and dbus running?") from error
    return bus


def _translated(error: DBusBaseError, what: str) -> BusError:
    # pystemd knows some errors by class and passes the others on by their D-Bus name.
    name = _plain(error.err_name) or type(error).__name__
    text = f"systemd: {what}: {_plain(error.err_message) or os.strerror(abs(error.errno))}"
    if name.endswith(".TransactionIsDestructive"):
        return JobRefused(text, name)
    return BusLost(text, name) if abs(error.errno) in _CONNECTION_LOST else BusError(text, name)


def _plain(word: bytes | str) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else word


def _snapshot(unit: str, general: Properties, service: Properties, job_type: str) -> UnitSnapshot:
    commands = service.get(b"ExecStart") or []
    return UnitSnapshot(
        name=unit,
        load_state=_text(general, b"LoadState"),
        active_state=ActiveState(_text(general, b"ActiveState")),
        sub_state=_text(general, b"SubState"),
        unit_file_state=_text(general, b"UnitFileState"),
        invocation=bytes(general.get(b"InvocationID") or ()).hex(),
        result=_result(_text(service, b"Result")),
        exec_main_code=ExitCode(service.get(b"ExecMainCode", 0)),
        exec_main_status=service.get(b"ExecMainStatus", 0),
        exec_main_pid=service.get(b"ExecMainPID", 0),
        main_pid=service.get(b"MainPID", 0),
        exec_main_started=service.get(b"ExecMainStartTimestamp", 0) / 1e6,
        exec_main_exited=service.get(b"ExecMainExitTimestamp", 0) / 1e6,
        inactive_exit=general.get(b"InactiveExitTimestamp", 0) / 1e6,
        restarts=service.get(b"NRestarts", 0),
        job=general.get(b"Job", (0, b""))[0],
        job_type=job_type,
        fragment=_text(general, b"FragmentPath"),
        source=_text(general, b"SourcePath"),
        drop_ins=tuple(path.decode() for path in general.get(b"DropInPaths") or ()),
        environment_files=tuple(row[0].decode() for row in service.get(b"EnvironmentFiles") or ()),
        need_daemon_reload=bool(general.get(b"NeedDaemonReload")),
        exec_start=tuple(word.decode(errors="surrogateescape") for word in commands[0][1]) if commands else (),
        exec_start_count=len(commands),
        control_group=_text(service, b"ControlGroup"),
        kill_mode=_text(service, b"KillMode"),
        restart=_text(service, b"Restart"),
        restart_delay=_seconds(service.get(b"RestartUSec")),
        stop_timeout=_seconds(service.get(b"TimeoutStopUSec")),
        frozen=_text(general, b"FreezerState") not in ("", "running"),
        service_type=_text(service, b"Type"),
        known=frozenset(key.decode() for key in (*general, *service)),
    )


def _text(properties: Properties, key: bytes) -> str:
    value: bytes = properties.get(key) or b""
    return value.decode(errors="surrogateescape")


def _result(text: str) -> ServiceResult:
    try:
        return ServiceResult(text)
    except ValueError:  # a newer systemd's word
        return ServiceResult.UNKNOWN


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None or microseconds == _INFINITY else microseconds / 1e6
