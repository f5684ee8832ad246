"""What is proven of one running launch: that it serves, and that it held for the soak time.

"Serves" is said after real tokens came from a server whose listening socket is held by a process of the unit's own
cgroup: another server on the same port can answer as well. A degraded start is reported and is never proven.

A soak ends in one of three ways. Good: it held while others than our probes had tokens of it. Bad: it ended, is
degraded, or had no tokens for the probe at the soak's end. Inconclusive: it held, and only our probes asked. Pools and
graphs are made at the start, so that is known-good as well, but of a lesser kind: it is gone back to only where
nothing was proven under traffic, and traffic for another soak time makes a full one of it.
"""

import math
from collections.abc import Callable, Iterable
from enum import StrEnum
from urllib.parse import urlsplit

import structlog

from sglang_watchdog.domain.container import Container, places_of
from sglang_watchdog.domain.speculation import Command
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import containers, processes
from sglang_watchdog.host.server import HealthState, Server, address_of
from sglang_watchdog.settings import UnitSettings

PROBE_DEADLINE_S = 30.0
# A decode line is logged a moment after the token that it counts.
_LOGGED_AFTER_S = 1.0
_RETRY_S = 60.0  # between two probes that generate on a server that serves
log = structlog.get_logger()


class Standing(StrEnum):
    """How far the proof has come."""

    NOT_READY = "not_ready"
    SERVING = "serving"
    IDLE = "idle"  # it held for the soak time, and nobody but our probes asked it
    PROVEN = "proven"
    REFUSED = "refused"  # it serves, but is not to be called known-good (a degraded start)


class Answer(StrEnum):
    """What came of a request for a few tokens."""

    TOKENS = "tokens"
    SILENCE = "silence"  # the unit's own process took it, and nothing came
    NO_TOKENS = "no_tokens"  # refused, or broken off: that says nothing of the scheduler
    NOT_OURS = "not_ours"  # the port is not the unit's alone, so that whoever answered may be somebody else


class Proof:
    """Of one launch. `now` is monotonic seconds everywhere: a clock that is set makes no soak shorter or longer."""

    def __init__(self, argv: tuple[str, ...], settings: UnitSettings) -> None:
        host, port = address_of(argv)
        self._port = port
        self._server = Server(settings.url or f"http://{host}:{port}", _api_key(argv, settings))
        self.roundabout = _roundabout(settings.url, port)
        self._soak = settings.soak
        self.standing = Standing.NOT_READY
        self._serving_since = 0.0
        self._served_at = 0.0
        self._next_probe = 0.0
        self._traffic_since = math.inf
        self._asked = (0.0, 0.0)  # from when until when the last request of `ask` was under way, in Unix seconds

    @property
    def serving(self) -> bool:
        return self.standing is not Standing.NOT_READY

    @property
    def settled(self) -> bool:
        return self.standing in (Standing.IDLE, Standing.PROVEN, Standing.REFUSED)

    def due(self, now: float) -> bool:
        """Whether a probe is to be sent: until it serves, and once more when it has soaked."""
        soaked = self.standing is Standing.SERVING and now - self._serving_since >= self._soak
        return now >= self._next_probe and (soaked or self.standing is Standing.NOT_READY)

    async def generates(self, snapshot: UnitSnapshot, started: Iterable[Container], now: float) -> bool:
        """Whether tokens came from the unit's own process, just now, or from one in a container that the launch has
        started. One that serves is not asked again at once."""
        self._next_probe = now + (_RETRY_S if self.serving else 0.0)
        in_unit = processes.cgroup_listens(snapshot.control_group, self._port)
        if not in_unit and not any(containers.listens(container, self._port) for container in started):
            return False
        if await self._server.health(PROBE_DEADLINE_S) is not HealthState.UP:
            return False
        return (await self._server.generate(PROBE_DEADLINE_S)).tokens > 0

    async def ask(
        self, snapshot: UnitSnapshot, started: Iterable[Container], deadline: float, clock: Callable[[], float]
    ) -> Answer:
        """Whether it generates now. `clock` gives Unix seconds."""
        groups = (snapshot.control_group, *(place for container in started for place in places_of(container)))
        if not processes.has_to_itself(groups, self._port):
            return Answer.NOT_OURS
        begun = clock()
        generated = await self._server.generate(deadline)
        self._asked = (begun, clock() + _LOGGED_AFTER_S)
        if generated.tokens:
            return Answer.TOKENS
        return Answer.SILENCE if generated.silent else Answer.NO_TOKENS

    def served(self, now: float, at: float) -> None:
        """`at` is the same moment in Unix seconds, as the journal has them."""
        self.standing = Standing.SERVING
        self._serving_since, self._served_at = now, at

    def refuse(self) -> None:
        """It serves, but soaking proves nothing of it (a degraded start)."""
        self.standing = Standing.REFUSED

    def saw(self, decoded_at: float, now: float) -> None:
        """`decoded_at`: when the server last logged a decode batch, in Unix seconds, 0 for never. SGLang counts the
        steps of all requests for it, so that one can be due with a request of ours."""
        began, ended = self._asked
        if self.serving and decoded_at > self._served_at and not began <= decoded_at <= ended:
            self._traffic_since = min(self._traffic_since, now)

    @property
    def traffic(self) -> bool:
        """Whether others than our probes had tokens of it since it serves."""
        return self._traffic_since < math.inf

    def outgrew_idle(self, now: float) -> bool:
        """It soaked idle, and has had traffic for a soak time since."""
        return self.standing is Standing.IDLE and now - self._traffic_since >= self._soak

    def vouched(self) -> None:
        """A person says that it holds, under traffic."""
        self._traffic_since = min(self._traffic_since, self._serving_since)

    def proven(self) -> None:
        self.standing = Standing.PROVEN if self.traffic else Standing.IDLE


def _roundabout(url: str | None, port: int) -> str:
    """Why its silence would not be the unit's own; empty where it is asked directly."""
    direct = url is None or urlsplit(url).port == port
    return "" if direct else "it is asked through something else, which may be what is silent (url)"


def _api_key(argv: tuple[str, ...], settings: UnitSettings) -> str:
    """The key that probes need: from the operator's file, else the one that the server itself was started with."""
    if settings.api_key_file:
        try:
            return settings.api_key_file.read_text().strip()
        except OSError as error:
            log.error("the key for probes cannot be read", file=str(settings.api_key_file), error=error.strerror)
    return Command.parse(argv).value("--api-key") or ""
