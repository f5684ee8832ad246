"""Our override of one unit: put in force in an incident, and withdrawn as soon as the operator changes the flags."""

from collections.abc import Callable
from pathlib import Path

from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.domain.secrets import redact_text
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import override, systemctl
from sglang_watchdog.host.bus import Systemd
from sglang_watchdog.host.override import OverrideKind
from sglang_watchdog.host.unit_files import drop_in_of, operator_config
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.executor import StepFailed
from sglang_watchdog.settings import UnitSettings


class Overriding:
    """The edge between a plan's target config and the files that make it so."""

    def __init__(self, unit: str, settings: UnitSettings, parts: Parts) -> None:
        self._unit = unit
        self._managed = frozenset[str](settings.managed_flags)
        self._parts = parts
        self._folder = parts.state_dir / override.FOLDER
        self._reload_due = False

    def obstacle(self, snapshot: UnitSnapshot) -> str:
        """Why no config can be put in force, for a person; empty where it can."""
        return override.override_obstacle(snapshot, self._folder)

    @property
    def in_force(self) -> bool:
        """Whether a config of ours stands in place of the operator's."""
        return self._parts.ledger.override(self._unit) is not None

    def change_since(self, before: UnitSnapshot) -> Callable[[UnitSnapshot], str]:
        """Tells what the operator did to the definition after `before`: other speculation flags in their files, or the
        unit disabled. That is theirs to try, or not to."""
        flags = self._operators(before)

        def changed(now: UnitSnapshot) -> str:
            if now.unit_file_state != before.unit_file_state and now.unit_file_state == "disabled":
                return "the unit was disabled"
            theirs = self._operators(now)
            if flags is None or theirs is None or theirs.same_as(flags):
                return ""
            return f"the operator's flags were changed to {theirs.describe()}"

        return changed

    async def put_in_force(self, config: SpeculationConfig) -> str:
        """Writes the override. Raises `StepFailed`, with nothing left behind, where systemd would not load it."""
        snapshot = self._parts.systemd.snapshot(self._unit)
        try:
            written = override.render(snapshot, config, self._managed, self._folder)
            self._parts.ledger.save_override(self._unit, self._operators(snapshot), config)
            self._reload_due = override.put_in_force(written)
            if written.kind is OverrideKind.DROP_IN:
                await self._refuse_broken()
        except WatchdogError:
            self._withdraw()
            raise
        return f"{config.describe()} is put in force by {written.path}"

    async def _refuse_broken(self) -> None:
        if problem := await override.verify(self._unit):
            raise StepFailed(f"systemd-analyze verify refuses the unit with our override: {redact_text(problem)}")

    async def reload(self) -> str:
        """daemon-reload, only where our own file needs it: it loads every half-edited unit of the host as well, so
        those are named."""
        if not self._reload_due:
            return ""
        others = [unit for unit in await systemctl.awaiting_reload() if unit != self._unit]
        await systemctl.daemon_reload()
        self._reload_due = False
        return "systemd was reloaded" + (f"; that loaded edits of {', '.join(others)} as well" if others else "")

    def undo_unloaded(self) -> None:
        """Takes away what was written and is not in force, where a recovery ends before its reload."""
        undo_unloaded(self._parts.systemd, self._parts.ledger, self._unit, self._folder)

    async def follow_operator(self, snapshot: UnitSnapshot) -> str:
        """What the operator changed since our override was written, followed, in one sentence; empty where nothing was.

        Changed speculation flags win: the override goes, and theirs is a candidate again. An override that they took
        away (`systemctl revert`, rm) stays away. Where only something else changed, a drop-in is written anew onto the
        new command, once the operator has reloaded it. The reload after that is part of their deploy, which has just
        loaded everything else.

        An edit that is seen before the operator's reload costs none of ours: our drop-in is gone when theirs comes. Of
        one that is seen after it, a start between the two reloads still runs our override, and is told as stale.
        """
        if self._parts.ledger.reload_owed(self._unit):
            return await self._finish_reload(snapshot)
        ours = self._parts.ledger.override(self._unit)
        if ours is None:
            return ""
        replaced, target = ours
        theirs = self._operators(snapshot)
        if theirs is not None and replaced is not None and not theirs.same_as(replaced):
            by_file = not drop_in_of(self._unit).exists() and override.lies_there(self._unit, self._folder)
            if snapshot.need_daemon_reload and by_file:
                return ""  # what is loaded still has the flags that failed: our file goes when theirs are loaded
            if snapshot.need_daemon_reload:
                self._withdraw()
            else:
                await self._reloaded_after(self._withdraw)
            due = "; a daemon-reload puts them in force" if snapshot.need_daemon_reload else ""
            return (
                f"the operator's flags are now {theirs.describe()}: the override {target.describe()} is withdrawn{due}"
            )
        if not override.lies_there(self._unit, self._folder):
            self._parts.ledger.forget_override(self._unit)
            return f"the override {target.describe()} was taken away by hand"
        if snapshot.need_daemon_reload or self.obstacle(snapshot):
            return ""
        return await self._write_anew(snapshot, target)

    async def _write_anew(self, snapshot: UnitSnapshot, target: SpeculationConfig) -> str:
        written = override.render(snapshot, target, self._managed, self._folder)
        if override.is_in_force(written):
            return ""
        await self._reloaded_after(lambda: override.put_in_force(written))
        return f"the operator's command changed: the override {target.describe()} was written anew onto it"

    async def _reloaded_after(self, change: Callable[[], bool]) -> None:
        """Changes a file of ours, and has systemd reload where that is due: also by the next daemon, should this one
        end in between. The host's other edits are loaded by then."""
        self._parts.ledger.owe_reload(self._unit)
        if change():
            await systemctl.daemon_reload()
        self._parts.ledger.reloaded(self._unit)

    async def _finish_reload(self, snapshot: UnitSnapshot) -> str:
        if snapshot.need_daemon_reload:
            await systemctl.daemon_reload()
        self._parts.ledger.reloaded(self._unit)
        return "systemd was reloaded after a change of the override" if snapshot.need_daemon_reload else ""

    def _withdraw(self) -> bool:
        due = override.withdraw(self._unit, self._folder)
        self._parts.ledger.forget_override(self._unit)
        return due

    def _operators(self, snapshot: UnitSnapshot) -> SpeculationConfig | None:
        return operator_config(snapshot, self._managed, self._folder)


def undo_unloaded(systemd: Systemd, ledger: Ledger, unit: str, folder: Path) -> None:
    """A drop-in of ours that systemd has not loaded would make every later start look like a stale definition."""
    drop_in = drop_in_of(unit)
    if drop_in.exists() and str(drop_in) not in systemd.snapshot(unit).drop_ins:
        override.withdraw(unit, folder)
        ledger.forget_override(unit)
