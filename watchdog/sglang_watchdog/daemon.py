"""The daemon: puts the parts together and keeps them running. The one place that knows everything."""

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import AsyncIterator
from importlib.metadata import version

import pystemd.daemon
import structlog

from sglang_watchdog import broken_ledger, witness
from sglang_watchdog.by_hand import ByHand
from sglang_watchdog.control import ControlServer, Json
from sglang_watchdog.diagnosis.entries import entry_or_none
from sglang_watchdog.domain.errors import BusError, BusLost, LedgerError, UnusableInput, WatchdogError
from sglang_watchdog.domain.gpu import Gpu, GpuHolder, GpuReading
from sglang_watchdog.domain.ownership import Owner, Ownership
from sglang_watchdog.hand_back import hand_back
from sglang_watchdog.host.bus import HintKind, SignalFeed, Systemd
from sglang_watchdog.host.clock import SystemClock
from sglang_watchdog.host.gpu import ProbeWorker
from sglang_watchdog.host.journal import Journal
from sglang_watchdog.host.lock import only_one
from sglang_watchdog.host.server_files import ServerFilesReader
from sglang_watchdog.ledger import LEDGER_NAME, Ledger
from sglang_watchdog.parts import Parts
from sglang_watchdog.reporting import alerts
from sglang_watchdog.reporting.hooks import Event, Hooks
from sglang_watchdog.reporting.metrics import Metrics, Sense, Tls
from sglang_watchdog.settings import Metrics as MetricsSettings
from sglang_watchdog.settings import Settings
from sglang_watchdog.watcher import UnitWatcher

# A turn may hold still for one bus call and one abandoned NVML call; more is a hang that systemd should end.
_LONGEST_TURN_S = 120.0
_RECONNECT_S = 2.0
_IN_WORDS = {
    Sense.BUS: "systemd, whose bus does not answer",
    Sense.NVML: "the cards, since NVML does not answer",
    Sense.LEDGER: "a ledger that it can go by, so that it only observes",
    Sense.JOURNAL: "the journal",
    Sense.MODEL: "the model's files, so that what was proven cannot be compared",
}
log = structlog.get_logger()


class Daemon:
    """Runs until SIGTERM or SIGINT, then hands back what it holds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._version = version("sglang-watchdog")
        self._metrics = Metrics(tuple(sorted(settings.units)), self._version, _tell_blind)
        self._hooks = Hooks(settings.hooks, self._metrics)
        self._systemd = Systemd()
        self._probe = ProbeWorker()
        self._watchers: dict[str, UnitWatcher] = {}
        self._turns: dict[str, float] = {}
        self._bus_lost = asyncio.Event()
        self._parts: Parts | None = None

    async def run(self) -> None:
        with only_one(self._settings.state_dir):
            await self._run()

    async def _run(self) -> None:
        ledger, may_act = self._open_ledger()
        parts = self._parts = Parts(
            self._systemd,
            Journal(entry_or_none),
            self._probe,
            ServerFilesReader(),
            SystemClock(),
            ledger,
            self._metrics,
            self._hooks,
            self._settings.state_dir,
            may_act,
        )
        self._serve_metrics()
        control = ControlServer(self, self._settings.runtime_dir)
        await control.start()
        self._hooks.start()
        stop = _stop_requested()
        feeding = asyncio.create_task(self._feed_systemd())
        try:
            while not stop.is_set():
                await self._watch_until_lost(parts, stop)
        finally:
            feeding.cancel()
            pystemd.daemon.notify(False, stopping=1)
            self._hand_back_all(ledger)
            await self._hooks.close()
            await control.stop()
            await self._probe.close()
            ledger.close()

    def _open_ledger(self) -> tuple[Ledger, bool]:
        """A ledger that cannot be written leaves the daemon observing: without intents nothing is done."""
        path = self._settings.state_dir / LEDGER_NAME
        try:
            ledger = broken_ledger.open_sound(path)
        except LedgerError as error:
            log.error("observing only", error=str(error))
            self._metrics.sees(Sense.LEDGER, well=False)
            return Ledger.in_memory(), False
        self._metrics.sees(Sense.LEDGER, well=not ledger.unacknowledged)
        if words := broken_ledger.in_words(ledger):
            alerts.send(alerts.blind(f"what it knew: every unit is {words}. One that it held is down: start it."))
        return ledger, True

    def _serve_metrics(self) -> None:
        """A port that is taken, or a certificate of no use, costs the metrics, not the watching."""
        address, port = self._settings.metrics.address, self._settings.metrics.port
        try:
            if port:
                self._metrics.serve(address, port, _tls(self._settings.metrics))
        except OSError as error:
            why = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            log.error("no metrics", address=address, port=port, error=why)
            alerts.send(alerts.blind(f"nothing: Prometheus sees no metrics, since {address}:{port}: {why}."))

    async def _watch_until_lost(self, parts: Parts, stop: asyncio.Event) -> None:
        """Watches all units over one bus connection. Returns when asked to stop, or when the bus was lost and a pause
        has passed."""
        try:
            self._systemd.open()
            feed = SignalFeed(tuple(self._settings.units))
            feed.open()
        except BusError as error:
            await self._bus_away(error, stop)
            return
        self._metrics.sees(Sense.BUS, well=True)
        self._bus_lost.clear()
        self._watchers = {
            unit: UnitWatcher(unit, settings, parts, lambda unit=unit: self._turn_done(unit))  # type: ignore[misc]
            for unit, settings in sorted(self._settings.units.items())
        }
        try:
            async with _reading(feed.fileno(), lambda: self._drain(feed)), asyncio.TaskGroup() as group:
                self._drain(feed)  # what came while it was opened is queued already, and announces itself no more
                tasks = [group.create_task(watcher.run()) for watcher in self._watchers.values()]
                pystemd.daemon.notify(False, ready=1, status=f"watching {len(tasks)} units")
                await _first_of(stop, self._bus_lost)
                for task in tasks:
                    task.cancel()
        except* BusLost as group_error:
            await self._bus_away(group_error.exceptions[0], stop)
        finally:
            feed.close()
            if not stop.is_set():
                self._systemd.close()

    def _drain(self, feed: SignalFeed) -> None:
        try:
            hints = feed.drain()
        except BusError as error:
            log.warning("the bus was lost", error=str(error))
            self._bus_lost.set()
            return
        for hint in hints:
            if hint.kind is HintKind.RELOADING:
                continue  # signals are not reliable until it is over; RELOADED looks again
            for watcher in [self._watchers[hint.unit]] if hint.unit else list(self._watchers.values()):
                watcher.hint(hint)

    async def _bus_away(self, error: Exception, stop: asyncio.Event) -> None:
        self._metrics.sees(Sense.BUS, well=False)
        self._turns.clear()  # nobody takes turns without a bus
        log.error("systemd cannot be reached", error=str(error))
        pystemd.daemon.notify(False, status=f"systemd cannot be reached: {error}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RECONNECT_S):
                await stop.wait()

    def _turn_done(self, unit: str) -> None:
        self._turns[unit] = time.monotonic()

    async def _feed_systemd(self) -> None:
        """Pings systemd's WatchdogSec= as long as every unit's turns come to their end."""
        limit = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
        while limit:
            now = time.monotonic()
            if all(now - turn < _LONGEST_TURN_S for turn in self._turns.values()):
                pystemd.daemon.notify(False, watchdog=1)
            await asyncio.sleep(limit / 3)

    def _hand_back_all(self, ledger: Ledger) -> None:
        """On our way out: what is held is started, over a new connection where the old one is gone."""
        incidents, witnessed = ledger.open_incidents(), set(ledger.witnessed())
        if not incidents and not witnessed:
            return
        systemd = Systemd()
        tell = functools.partial(self._hooks.tell, Event.CLOSED)
        try:
            systemd.open()
            for incident in incidents:
                watcher = self._watchers.get(incident.unit)
                if watcher is not None and watcher.incidents.is_over(incident.id):
                    witnessed.discard(incident.unit)  # the next daemon has to see what came after it
                    continue
                theirs = watcher is not None and bool(watcher.incidents.jobs.foreign)
                sentence = hand_back(incident, ledger, systemd, theirs=theirs, tell=tell)
                log.info("handing back", sentence=sentence)
            for unit in witnessed:
                witness.dismiss(systemd, ledger, unit)
        except WatchdogError as error:
            # OnFailure= runs hand-back, which tries again.
            raise SystemExit(f"could not hand back: {error}") from error
        finally:
            systemd.close()

    # What commands may ask for

    async def status(self) -> Json:
        return {
            "version": self._version,
            "units": [watcher.status() for watcher in self._watchers.values()],
            "blind": [_IN_WORDS[sense] for sense in self._metrics.blind],
        }

    async def gpus(self) -> Json:
        answer = await self._probe.read_gpus()
        self._metrics.saw_gpus(answer)
        if not isinstance(answer, GpuReading):
            return {"unknown": answer.reason}
        whose = {unit: await watcher.cards.verdicts(answer) for unit, watcher in self._watchers.items()}
        return {"driver": answer.driver, "gpus": [_gpu_json(gpu, whose) for gpu in answer.gpus]}

    async def may_start(self, unit: str) -> Json:
        answer = await self._watched(unit).gate.answer()
        return {"move": answer.move, "reason": answer.reason}

    async def free(self, unit: str, *, dry_run: bool) -> Json:
        return await self._by_hand(unit).free(dry_run=dry_run)

    async def pause(self, unit: str, seconds: float) -> Json:
        return {"summary": self._by_hand(unit).pause(seconds)}

    async def resume(self, unit: str) -> Json:
        return {"summary": await self._by_hand(unit).resume()}

    async def roll_back(self, unit: str, to: str) -> Json:
        return {"summary": await self._by_hand(unit).roll_back(to)}

    async def mark_good(self, unit: str) -> Json:
        return {"summary": await self._by_hand(unit).mark_good()}

    async def forget(self, unit: str, name: str) -> Json:
        return {"summary": self._by_hand(unit).forget(name)}

    def _by_hand(self, unit: str) -> ByHand:
        watcher = self._watched(unit)
        assert self._parts is not None
        return ByHand(watcher, self._parts)

    def _watched(self, unit: str) -> UnitWatcher:
        watcher = self._watchers.get(unit)
        if watcher is None:
            raise UnusableInput(f"{unit} is not watched; watched are {', '.join(self._watchers) or 'no units'}")
        return watcher


def _tls(settings: MetricsSettings) -> Tls | None:
    if settings.certificate is None or settings.key is None:
        return None
    return Tls(settings.certificate, settings.key, settings.client_ca)


def _tell_blind(sense: Sense) -> None:
    alerts.send(alerts.blind(_IN_WORDS[sense]))


def _stop_requested() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def _reading(fd: int, callback: object) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, callback)  # type: ignore[arg-type]
    try:
        yield
    finally:
        loop.remove_reader(fd)


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _gpu_json(gpu: Gpu, whose: dict[str, dict[int, Ownership]]) -> Json:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "used_bytes": gpu.used_bytes,
        "holders": [_holder_json(holder, whose) for holder in gpu.holders],
    }


def _holder_json(holder: GpuHolder, whose: dict[str, dict[int, Ownership]]) -> Json:
    """Of several units the one that knows the process speaks; a stranger to all is a stranger."""
    says = [(unit, verdicts[holder.pid]) for unit, verdicts in whose.items() if holder.pid in verdicts]
    known = [(unit, verdict) for unit, verdict in says if verdict.owner in (Owner.OURS, Owner.CURRENT_LAUNCH)]
    if not says:
        return _holder(holder, Owner.UNKNOWN, "NVML cannot name the process")
    unit, verdict = (known or says)[0]
    return _holder(holder, f"{unit}: {verdict.owner}" if known else verdict.owner, verdict.reason)


def _holder(holder: GpuHolder, whose: str, why: str) -> Json:
    return {"pid": holder.pid, "used_bytes": holder.used_bytes, "whose": whose, "why": why}
