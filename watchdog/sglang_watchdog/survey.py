"""What `setup` makes of a unit: how it starts SGLang, and which lines of its definition would serve it better. Pure.

The reading of unit files, bus and journal is `host.survey`'s; what is said of it, and where, is `cli.setting_up`'s.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath

from sglang_watchdog.domain.journal import JournalEntry, MessageId

_ENGINES = frozenset({"docker", "podman", "nerdctl", "docker-compose", "podman-compose", "apptainer", "singularity"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_MODULES = frozenset({"sglang.launch_server", "launch_server.py"})
_IN_TEXT = re.compile(r"(?<![\w.-])sglang(?:\.|/(?:\S*/)?)launch_server|(?<![\w.-])sglang\s+serve\b|lmsysorg/sglang")
# A server of 0.5.14 or newer that hangs takes 80 s to go, and answers need time beyond the longest drain that was seen.
_LEAST_STOP_S = 90.0
_BEYOND_LONGEST_S = 20.0
_ROUND_UP_TO_S = 30
_DRAIN_ENDS = frozenset({MessageId.PROCESS_EXIT, MessageId.UNIT_FAILED, MessageId.UNIT_SUCCESS, MessageId.UNIT_STOPPED})


class Launcher(StrEnum):
    """Who starts the server."""

    DIRECT = "direct"
    SCRIPT = "script"
    CONTAINER = "container"


def launcher_of(argv: Sequence[str], scripts: Iterable[str] = ()) -> Launcher | None:
    """How this command starts SGLang; None where it does not. `scripts` are the texts of what argv names."""
    name = PurePath(argv[0]).name if argv else ""
    line = " ".join(argv)
    if name in _ENGINES:
        return Launcher.CONTAINER if "sglang" in line.lower() else None
    if name not in _SHELLS and _is_server(argv):
        return Launcher.DIRECT
    return Launcher.SCRIPT if any(_IN_TEXT.search(text) for text in (line, *scripts)) else None


def _is_server(argv: Sequence[str]) -> bool:
    names = [PurePath(word).name for word in argv]
    served = any(pair == ("sglang", "serve") for pair in zip(names, argv[1:], strict=False))
    return served or not _MODULES.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Drains:
    """Stops of the unit that the journal still knows. `longest_s` is of those that ended in time, `given_up_s` the
    longest after which systemd killed what had not drained."""

    stops: int = 0
    timed_out: int = 0
    longest_s: float = 0.0
    given_up_s: float = 0.0


def drains_of(entries: Iterable[JournalEntry]) -> Drains:
    """From PID 1's entries about the unit, in order."""
    begun: dict[str, float] = {}
    took: dict[str, float] = {}
    timed_out: set[str] = set()
    for entry in entries:
        launch = entry.invocation
        if entry.message_id == MessageId.UNIT_STOPPING:
            begun.setdefault(launch, entry.time)
        elif entry.message_id in _DRAIN_ENDS and launch in begun:
            took.setdefault(launch, entry.time - begun[launch])
            if entry.unit_result == "timeout":
                timed_out.add(launch)
    in_time = [seconds for launch, seconds in took.items() if launch not in timed_out]
    given_up = [took[launch] for launch in timed_out]
    return Drains(len(took), len(timed_out), max(in_time, default=0.0), max(given_up, default=0.0))


@dataclass(frozen=True, slots=True)
class Found:
    """One unit as it was found. Seconds; `stop_timeout` None is infinity. Texts hold no secret."""

    unit: str
    state: str
    launcher: Launcher | None
    command: str
    config: str  # the speculation config in words; empty where it cannot be seen
    given: str  # where the speculation flags come from, in words
    rollback: str  # how a rollback would put a config in force, or why it cannot
    service_type: str
    restart: str
    restart_delay: float | None
    kill_mode: str
    stop_timeout: float | None
    keeps_environ: bool  # SPT_NOENV=1
    drains: Drains = Drains()
    by_variable: tuple[str, ...] = ()  # lines that would have the flags come from a variable; empty: no need, or no way


@dataclass(frozen=True, slots=True)
class Advice:
    """Lines for [Service] of the unit, and why."""

    why: str
    lines: tuple[str, ...]


def advice(found: Found) -> tuple[Advice, ...]:
    """What would serve the unit better, the most important first. Empty where nothing would."""
    return tuple(filter(None, (rule(found) for rule in _RULES)))


def _type(found: Found) -> Advice | None:
    if found.service_type not in ("notify", "notify-reload") or found.launcher is Launcher.CONTAINER:
        return None  # podman notifies for what it starts
    return Advice("SGLang never notifies systemd, so every start with Type=notify times out.", ("Type=exec",))


def _kill_mode(found: Found) -> Advice | None:
    if found.kill_mode == "mixed" or found.launcher is Launcher.CONTAINER:
        return None
    why = {
        "control-group": "A stop sends SIGTERM to the workers too, so they are gone before the server has drained.",
        "process": "A stop ends the main process alone: its workers stay behind and hold GPU memory.",
        "none": "A stop ends nobody: the server stays behind and holds GPU memory.",
    }.get(found.kill_mode, "With mixed the main process drains, and what is left after it is ended.")
    return Advice(why, ("KillMode=mixed",))


def _stop_timeout(found: Found) -> Advice | None:
    wanted = needed_stop_timeout(found.drains)
    if found.stop_timeout is None or found.stop_timeout >= wanted:
        return None
    line = f"TimeoutStopSec={wanted}"
    seen = found.drains
    if seen.timed_out:
        return Advice(
            f"{seen.timed_out} of {seen.stops} stops did not drain within {seen.given_up_s:.0f} s: requests were lost. "
            "How long they would have taken is not known.",
            (line,),
        )
    longest = f"The longest of {seen.stops} drains took {seen.longest_s:.0f} s. " if seen.stops else ""
    return Advice(
        f"{longest}A server that hangs takes 80 s to go, and what is not drained by then is lost.",
        (line,),
    )


def _stop_by_engine(found: Found) -> Advice | None:
    """Of a container that its client leaves behind, as Quadlet has it: the engine stops it, by a time of its own."""
    words = found.command.split()
    detached = found.launcher is Launcher.CONTAINER and not {"-d", "--detach"}.isdisjoint(words)
    if not detached or any(word.startswith("--stop-timeout") for word in words):
        return None
    wanted = needed_stop_timeout(found.drains)
    return Advice(
        f"The engine ends the server 10 s after it was asked to stop, whatever TimeoutStopSec= is: give `podman run` "
        f"--stop-timeout={wanted} (PodmanArgs= in a .container file).",
        (),
    )


def needed_stop_timeout(drains: Drains) -> int:
    """Whole seconds, rounded up: the longest drain and then some, twice what was not enough."""
    wanted = max(_LEAST_STOP_S, drains.longest_s + _BEYOND_LONGEST_S, 2 * drains.given_up_s)
    return math.ceil(wanted / _ROUND_UP_TO_S) * _ROUND_UP_TO_S


def _restart(found: Found) -> Advice | None:
    if found.restart not in ("no", ""):
        return None
    return Advice(
        "Nothing restarts the server after an end that the watchdog only reports.",
        ("Restart=on-failure", "RestartSec=10"),
    )


def _environ(found: Found) -> Advice | None:
    if found.keeps_environ or found.launcher is not Launcher.DIRECT:
        return None
    why = "SGLang titles its workers over their environment, which is one proof of whose a left-over process is."
    return Advice(why, ("Environment=SPT_NOENV=1",))


def _by_variable(found: Found) -> Advice | None:
    if not found.by_variable:
        return None
    why = "With the flags in a variable a proven config is put back without a daemon-reload."
    return Advice(why, found.by_variable)


_RULES = (_type, _kill_mode, _stop_timeout, _stop_by_engine, _restart, _environ, _by_variable)


def source_of(variable: str, files: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> str:
    """Where a variable's value comes from: the last file that has it, else Environment=, else nowhere."""
    having = [path for path, values in files.items() if variable in values]
    if having:
        return having[-1]
    return "Environment=" if variable in environment else ""
