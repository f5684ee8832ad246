"""What `sglang-watchdog setup` does: finds the SGLang units of this host, has them observed, and says what would serve
them better. It changes no unit, and no settings that are there already."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sglang_watchdog.domain.errors import UnusableInput, WatchdogError
from sglang_watchdog.host import survey
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.settings import Settings, load, template
from sglang_watchdog.survey import Advice, Found, Launcher, advice

SERVICE = "sglang-watchdog.service"
_WIDTH = 100
_HOW = {
    Launcher.DIRECT: "",
    Launcher.SCRIPT: "  (a script starts the server)",
    Launcher.CONTAINER: "  (the server runs in a container)",
    None: "  (no SGLang command is to be seen in it)",
}


def set_up(unit: str | None, config: Path, *, dry_run: bool) -> None:
    """Prints what was found. `unit`: only this one."""
    if not dry_run and os.geteuid() != 0:
        raise WatchdogError("setup writes settings, which are root's alone: run this as root, or with --dry-run")
    settings = load(config) if config.exists() else Settings()
    found = _found(unit)
    if not found:
        raise WatchdogError(
            "no unit of this host starts SGLang, as far as ExecStart= tells; name one: sglang-watchdog setup UNIT"
        )
    for one in found:
        for line in report(one, _watched(one.unit, settings, config, dry_run=dry_run)):
            print(line)
    if not dry_run:
        load(config)  # what was written is read back before anybody relies on it
    print("\n".join(_next(dry_run=dry_run)))


def _found(unit: str | None) -> list[Found]:
    systemd = Systemd()
    systemd.open()
    try:
        return [survey.look(systemd, _service(unit))] if unit else survey.sglang_units(systemd)
    finally:
        systemd.close()


def _service(unit: str) -> str:
    return unit if "." in unit else f"{unit}.service"


# The settings


def _watched(unit: str, settings: Settings, config: Path, *, dry_run: bool) -> str:
    """Whether the unit is watched, in words; has it observed if it is not watched yet."""
    known = settings.units.get(unit)
    if known is not None:
        return f"already, {'observed and acted on (act = true)' if known.act else 'observed only'}"
    path = config.parent / "config.d" / f"{unit}.toml"
    if path.exists():
        return f"not, though {path} is there: it names another unit, and is left alone"
    if dry_run:
        return f"not yet; without --dry-run {path} is written, which only observes"
    try:
        if not config.exists():
            _write(config, template())
        _write(path, settings_for(unit))
    except OSError as error:
        raise UnusableInput(f"{error.filename or path} cannot be written: {error.strerror}") from error
    return f"observed only, by {path} (new)"


def settings_for(unit: str) -> str:
    """The file in config.d/ that has a unit observed."""
    name = unit.replace("\\", "\\\\")
    return (
        "# Written once by `sglang-watchdog setup`, and yours from then on. All settings: sglang-watchdog.toml(5).\n"
        f'[units."{name}"]\n'
        "# Observed only. With act = true the watchdog frees GPU memory, rolls back and starts this unit by itself.\n"
        "# act = true\n"
    )


def _write(path: Path, text: str) -> None:
    """A new file, whole and on disk. Raises OSError, also where there is one already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# What is said


def report(found: Found, watched: str) -> Iterator[str]:
    """What was found of one unit and what is recommended, in lines."""
    yield f"{found.unit}  {found.state}{_HOW[found.launcher]}"
    yield f"    command   {found.command or 'none'}"
    if found.config:
        yield f"    flags     {found.config}{', ' + found.given if found.given else ''}"
    yield f"    rollback  {found.rollback}"
    yield f"    restart   Restart={found.restart}{_after(found)}"
    yield f"    stop      KillMode={found.kill_mode}, TimeoutStopSec={_seconds(found.stop_timeout)}"
    yield f"    drains    {_drains(found)}"
    if found.launcher is Launcher.DIRECT:
        yield f"    workers   SPT_NOENV=1 is {'set' if found.keeps_environ else 'not set'}"
    yield f"    watched   {watched}"
    yield ""
    recommended = advice(found)
    if recommended:
        yield f"    Recommended, by `systemctl edit {found.unit}`, in force from its next start on:"
        yield "        [Service]"
        for one in recommended:
            yield from _lines(one)
    else:
        yield "    Nothing to recommend."
    yield ""


def _lines(one: Advice) -> Iterator[str]:
    yield from textwrap.wrap(one.why, _WIDTH, initial_indent=" " * 8 + "# ", subsequent_indent=" " * 8 + "# ")
    if any("REDACTED" in line for line in one.lines):
        yield "        # REDACTED stands for what is not shown here: put your own value in its place."
    yield from (f"        {line}" for line in one.lines)


def _after(found: Found) -> str:
    return f", after {found.restart_delay:g} s" if found.restart not in ("no", "") and found.restart_delay else ""


def _seconds(value: float | None) -> str:
    return "infinity" if value is None else f"{value:g} s"


def _drains(found: Found) -> str:
    seen = found.drains
    if not seen.stops:
        return "the journal knows of no stop"
    longest = f"; the longest drain took {seen.longest_s:.0f} s" if seen.timed_out < seen.stops else ""
    return f"{seen.timed_out} of {seen.stops} stops in the journal timed out{longest}"


def _next(*, dry_run: bool) -> Iterator[str]:
    if dry_run:
        yield "Nothing was written."
        return
    yield "No unit was changed. Nothing is acted on before `act = true` is set for a unit."
    yield "    sglang-watchdog check-config"
    yield f"    systemctl enable {SERVICE} && systemctl restart {SERVICE}"
