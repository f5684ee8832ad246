"""The watchdog's command as tests start it: it ends itself by SIGKILL at the point that a test names.

Every act of the product on the world outside has a point before it and one after it, and a write of a file has one at
each of its system calls. Nothing of this is in the product: its functions are wrapped here. Run as
`python -P crashing.py run` in place of `sglang-watchdog run`; an `armed` file says where to end (`NAME#OCCURRENCE`, or
nothing: then the points are only written down). It is gone once it has been obeyed, so the next daemon lives on.
"""

import functools
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_watchdog.__main__ import main
from sglang_watchdog.domain.incident import Step
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.host import child, override, processes, systemctl
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.processes import SignalOutcome
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.reporting import alerts

FOLDER = Path("/run/crash-points")
ARMED, CROSSED, SIGNALS = FOLDER / "armed", FOLDER / "crossed", FOLDER / "signals"
_LEDGER_WRITES = (
    *("forget_end", "open_incident", "plan_incident", "close_incident", "save_known_good", "demote", "save_ceiling"),
    *("save_override", "forget_override", "save_witness", "forget_witness", "told", "owe_reload", "reloaded", "prune"),
)
_BUS_CALLS = ("ref", "stop", "reset_failed", "start", "kill", "call_witness", "dismiss_witness")
_FILE_CALLS = ("open", "fchmod", "fsync", "rename", "unlink")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_counts: Counter[str] = Counter()
_steps: dict[int, Step] = {}


def crossing(name: str) -> None:
    """Writes the point down, and ends the process if it is the one that was asked for. It is counted from the time on
    at which it was armed: how often a daemon that waits looks is a matter of time."""
    try:
        armed = ARMED.read_text().strip()
    except FileNotFoundError:
        return
    _counts[name] += 1
    point = f"{name}#{_counts[name]}"
    with CROSSED.open("a") as file:
        file.write(point + "\n")
    if armed == point:
        ARMED.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, function: str, name: Callable[..., str]) -> None:
    """A point before and after each call. `name` gets the call's arguments."""
    inner = getattr(owner, function)

    @functools.wraps(inner)
    def crossed(*args: Any, **options: Any) -> Any:
        point = name(*args, **options)
        crossing(f"{point} before")
        result = inner(*args, **options)
        crossing(f"{point} after")
        return result

    setattr(owner, function, crossed)


def around_file_calls(files: SimpleNamespace) -> None:
    """Opening a file or a folder to read it is no act."""
    for function in _FILE_CALLS:
        around(files, function, lambda *_, _name=function, **__: f"override {_name}")
    acting, plain = files.open, os.open

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        return int((acting if flags & _WRITES else plain)(path, flags, *rest, **options))

    files.open = opened


def around_saved_launches() -> None:
    """How often a launch is saved while its cards are read is a matter of time: each kind counts once."""
    inner = Ledger.save_launch
    seen: set[str] = set()

    def save_launch(self: Ledger, launch: Any, *rest: Any) -> None:
        kind = f"ledger save_launch({'runs' if launch.ended is None else 'ended'})"
        first = kind not in seen
        seen.add(kind)
        if first:
            crossing(f"{kind} before")
        inner(self, launch, *rest)
        if first:
            crossing(f"{kind} after")

    setattr(Ledger, "save_launch", save_launch)  # noqa: B010 (mypy wants the exact signature)


def around_intents() -> None:
    begin, finish = Ledger.begin, Ledger.finish

    def begun(self: Ledger, incident: str, step: Step) -> int:
        crossing(f"ledger begin({step}) before")
        intent = begin(self, incident, step)
        _steps[intent] = step
        crossing(f"ledger begin({step}) after")
        return intent

    def finished(self: Ledger, intent: int, outcome: str) -> None:
        crossing(f"ledger finish({_steps[intent]}) before")
        finish(self, intent, outcome)
        crossing(f"ledger finish({_steps[intent]}) after")

    Ledger.begin, Ledger.finish = begun, finished  # type: ignore[method-assign]


def around_signals() -> None:
    """Writes down who was hit as well: pid, start and signal."""
    inner = processes.signal_process

    def signalled(process: ProcessId, number: int, proof: Callable[[], bool]) -> SignalOutcome:
        crossing(f"signal {signal.Signals(number).name} before")
        outcome = inner(process, number, proof)
        with SIGNALS.open("a") as file:
            file.write(f"{process.pid} {process.start_ticks} {number} {outcome}\n")
        crossing(f"signal {signal.Signals(number).name} after")
        return outcome

    processes.signal_process = signalled


def around_reload() -> None:
    """Also a point in the middle: systemctl has been started, and has not ended."""
    reload, start = systemctl.daemon_reload, child.start

    async def reloaded() -> None:
        crossing("daemon-reload before")
        await reload()
        crossing("daemon-reload after")

    async def under_way(argv: Sequence[str], **more: Any) -> Any:
        process = await start(argv, **more)
        if argv == ("systemctl", "daemon-reload"):
            crossing("daemon-reload under way")
        return process

    systemctl.daemon_reload, child.start = reloaded, under_way


def wrap() -> None:
    for function in _LEDGER_WRITES:
        around(Ledger, function, lambda *_, _name=function, **__: f"ledger {_name}")
    around_saved_launches()
    around_intents()
    for function in _BUS_CALLS:
        around(Systemd, function, lambda *_, _name=function, **__: f"bus {_name}")
    files = SimpleNamespace(**vars(os))
    around_file_calls(files)
    vars(override)["os"] = files
    around_signals()
    around_reload()
    around(alerts, "send", lambda alert: f"alert {alert.id.name.lower()}({alert.action})")


if __name__ == "__main__":
    wrap()
    main()
