"""What commands may ask of one unit. Each answers in one sentence, or raises `WatchdogError` with one.

A command that acts does so between two turns of the unit's watcher, so that it never meets a recovery in the middle.
"""

from sglang_watchdog.domain.errors import UnusableInput, WatchdogError
from sglang_watchdog.domain.known_good import Ceiling, KnownGood
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.parts import Parts
from sglang_watchdog.reporting import alerts
from sglang_watchdog.watcher import UnitWatcher, state_in_words

LONGEST_PAUSE_S = 7 * 86400.0


class ByHand:
    """Of one unit."""

    def __init__(self, watcher: UnitWatcher, parts: Parts) -> None:
        self._watcher = watcher
        self._parts = parts
        self._unit = watcher.unit

    def pause(self, seconds: float) -> str:
        """Keeps the watchdog away from now on, in the middle of a recovery too: what it holds is started first."""
        if not 0 < seconds <= LONGEST_PAUSE_S:
            raise UnusableInput("a pause lasts a week at most, and more than 0 seconds; for longer, set act = false")
        pausing = self._watcher.pausing
        pausing.begin(seconds)
        said = f"{pausing.in_words()}: it is watched, and nothing of it is touched"
        alerts.send(alerts.pause(self._unit, "pause", said))
        return f"{self._unit} is {said}."

    async def resume(self) -> str:
        async with self._watcher.between_turns():
            ended = self._watcher.end_pause(self._parts.systemd.snapshot(self._unit))
        return f"{self._unit} is no longer paused." if ended else f"{self._unit} was not paused."

    async def roll_back(self, name: str) -> str:
        """Puts the known-good config of that id in force, or the best one (`name` empty), and restarts the unit."""
        async with self._watcher.between_turns():
            self._refuse_unless_it_may_act()
            snapshot = self._parts.systemd.snapshot(self._unit)
            launch = self._known(snapshot)
            target = self._target(launch, name).config
            incident = await self._watcher.incidents.roll_back_by_hand(launch, target)
        if self._watcher.incidents.verifying is None:
            raise WatchdogError(f"it came to nothing: sglang-watchdog history {self._unit} says why ({incident})")
        return f"{self._unit} is restarted with {target.describe()}; tokens are waited for (incident {incident})."

    async def mark_good(self) -> str:
        async with self._watcher.between_turns():
            launch, proof = self._watcher.launch, self._watcher.proof
            if launch is None or launch.ended is not None or proof is None or not proof.serving:
                raise WatchdogError(f"{self._unit} does not serve now, so there is nothing to call good")
            self._watcher.good_by_hand(launch, proof)
        return f"{launch.config.describe()} is known-good for {self._unit}, by your word."

    def forget(self, name: str) -> str:
        match self._parts.ledger.forget(self._unit, name):
            case KnownGood(config=config):
                return f"That {config.describe()} is known-good for {self._unit} is forgotten."
            case Ceiling(config=config):
                return f"That {config.describe()} does not fit {self._unit} is forgotten: it may be tried again."
        raise UnusableInput(f"{name} names no known-good and no ceiling of {self._unit}; `status` lists them")

    async def free(self, *, dry_run: bool) -> dict[str, object]:
        """Frees what is proven this unit's, or says what that would be. Raises `WatchdogError` where the unit is not
        plainly down: what runs, or is about to, is not to be disturbed."""
        if dry_run:
            return await self._freed(dry_run=True)
        async with self._watcher.between_turns():
            self._refuse_unless_down()
            return await self._freed(dry_run=False)

    async def _freed(self, *, dry_run: bool) -> dict[str, object]:
        cards, launch = self._watcher.cards, self._watcher.launch
        plan = await cards.plan()
        if isinstance(plan, str):
            raise WatchdogError(f"the cards could not be read: {plan}")
        baseline = launch.gpu_before if launch else None
        return {
            "ended": [{"pid": e.process.pid, "bytes": e.bytes, "why": e.reason} for e in plan.end],
            "spared": [{"pid": s.pid, "bytes": s.bytes, "why": s.reason, "by_hand": s.by_hand} for s in plan.spared],
            "summary": "Nothing was touched." if dry_run else await cards.free(baseline),
        }

    def _refuse_unless_down(self) -> None:
        snapshot = self._parts.systemd.snapshot(self._unit)
        verifying = self._watcher.incidents.verifying is not None
        if not snapshot.ended or snapshot.in_auto_restart or snapshot.job or verifying:
            raise WatchdogError(f"{self._unit} is {state_in_words(snapshot)}: stop it before its left-overs are ended")

    def _refuse_unless_it_may_act(self) -> None:
        if self._watcher.pausing.active:
            raise WatchdogError(f"{self._unit} is {self._watcher.pausing.in_words()}: `resume` it first")
        if not self._watcher.may_act:
            raise WatchdogError(f"{self._unit} is observed only: nothing of it is changed without act = true")

    def _known(self, snapshot: UnitSnapshot) -> LaunchWatch:
        if snapshot.job:
            raise WatchdogError(f"a {snapshot.job_type} job of {self._unit} is queued: wait for it, or cancel it")
        launch = self._watcher.known(snapshot)
        if launch is None or not launch.argv:
            raise WatchdogError(f"no launch of {self._unit} is known, and so not what its configs were proven for")
        return launch

    def _target(self, launch: LaunchWatch, name: str) -> KnownGood:
        proven = self._parts.ledger.known_good(self._unit, self._watcher.inquest.base(launch))
        if name:
            named = next((good for good in proven if good.id == name), None)
            if named is None:
                raise UnusableInput(f"{name} is no known-good of what {self._unit} runs; `status` lists them")
            return named
        other = next((good for good in proven if not good.config.same_as(launch.config)), None)
        if other is None:
            raise WatchdogError(f"{self._unit} has no other known-good to go back to; `status` lists what is proven")
        return other
