"""Looks whether one running launch makes progress: what it logs, what it reads, and, while nobody else has tokens of
it, whether it has some for a small request. `recovery.liveness` judges; nothing here touches the launch.

Most looks cost nothing: a sign is noted when it has changed. The bytes that a start moves are read only while its log
is silent, and a request is sent only while no decode line has come for a while.
"""

from dataclasses import replace

from sglang_watchdog.domain.container import places_of
from sglang_watchdog.domain.launch import Phase, ProcessId
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.host import processes
from sglang_watchdog.host.clock import Clock
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.proof import PROBE_DEADLINE_S, Answer, Proof
from sglang_watchdog.recovery.liveness import (
    Budgets,
    Judgement,
    Life,
    Signs,
    Stage,
    is_not_told,
    judge,
    may_be_asked,
    stage_of,
)
from sglang_watchdog.settings import UnitSettings

_ASK_EVERY_S = 60.0
_MOVED_EVERY_S = 10.0
# Fewer bytes between two looks are what logging and heartbeats take.
_MOVED_BYTES = 1 << 20
_OF_A_BUDGET = 4  # so many looks and requests belong to one budget, at least
# Longer than any look takes: the host slept, say, and a launch on it as well.
_GAP_S = 120.0
_SCHEDULER = "sglang::schedul"  # its title, as far as the kernel keeps it


class Liveness:
    """Of one launch. `judgement` and `signs` are of the last look."""

    def __init__(self, settings: UnitSettings, clock: Clock) -> None:
        self._budgets = Budgets(
            settings.loading_budget, settings.capturing_budget, settings.warming_budget, settings.serving_budget
        )
        self._clock = clock
        self.signs = Signs(clock.monotonic(), Phase.UNKNOWN, clock.monotonic())
        self.judgement = Judgement(Life.UNKNOWN, "It was not looked at yet.")
        self._spoke_at = self._decoded_at = self._prefilled_at = 0.0
        self._bytes, self._bytes_at, self._ask_at = 0, 0.0, 0.0
        self._schedulers: set[ProcessId] = set()

    @property
    def every(self) -> float:
        """Seconds between two requests, and two looks at the most."""
        return min(_ASK_EVERY_S, self._budgets.serving / _OF_A_BUDGET) if self._budgets.serving else _ASK_EVERY_S

    def ask_again(self) -> None:
        """At the next look, whether it is due by then or not."""
        self._ask_at = 0.0

    async def look(self, launch: LaunchWatch, snapshot: UnitSnapshot, proof: Proof | None, *, heard: bool) -> Judgement:
        """`heard`: the journal could be read just now."""
        now, stage = self._clock.monotonic(), stage_of(launch.phase)
        if stage is not stage_of(self.signs.phase) or now - self.signs.now > _GAP_S:
            self.signs = Signs(now, launch.phase, since=now)
        self.signs = replace(
            self.signs, now=now, phase=launch.phase, deaf="" if heard else "the journal cannot be read"
        )
        self._note(launch, now)
        if is_on_its_way_down(snapshot):
            self.judgement = Judgement(Life.UNKNOWN, "It is on its way down.")
            return self.judgement
        groups = (snapshot.control_group, *(place for container in launch.containers for place in places_of(container)))
        if stage is Stage.LOADING:
            self._see_bytes(groups, now)
        elif stage is Stage.SERVING and proof is not None and self._budgets.serving:
            await self._see_tokens(launch, snapshot, proof, groups)
        self.judgement = judge(self.signs, self._budgets)
        if self.judgement.life is Life.HUNG and (excuse := _stopped_by_hand(snapshot, groups)):
            self.judgement = replace(self.judgement, life=Life.UNKNOWN, sentence=excuse)
        return self.judgement

    def _note(self, launch: LaunchWatch, now: float) -> None:
        """By the log. Its own times are of a clock that can be set; what is new, is new now."""
        if launch.spoke_at != self._spoke_at:
            self._spoke_at, self.signs = launch.spoke_at, replace(self.signs, line=now)
        if launch.prefilled_at != self._prefilled_at:
            self._prefilled_at, self.signs = launch.prefilled_at, replace(self.signs, prefill=now, unanswered=0)
        if launch.decoded_at != self._decoded_at:
            self._decoded_at = launch.decoded_at
            self._generated(now)

    def _generated(self, now: float) -> None:
        self.signs = replace(self.signs, tokens=now, unanswered=0, mute="")

    def _see_bytes(self, groups: tuple[str, ...], now: float) -> None:
        silent = now - max(self.signs.since, self.signs.line)
        every = min(_MOVED_EVERY_S, self._budgets.loading / _OF_A_BUDGET)
        if not every or silent < every or now < self._bytes_at + every:
            return
        moved = processes.bytes_moved(groups)
        if abs(moved - self._bytes) >= _MOVED_BYTES:  # fewer of them, where one has ended
            self._bytes, self.signs = moved, replace(self.signs, bytes_moved=now)
        self._bytes_at = now

    async def _see_tokens(
        self, launch: LaunchWatch, snapshot: UnitSnapshot, proof: Proof, groups: tuple[str, ...]
    ) -> None:
        if launch.served and not self.signs.served:  # by this daemon just now, or by an earlier one
            self.signs = replace(self.signs, served=True)
            self._generated(self.signs.now)
        quiet = self.signs.now - max(self.signs.since, self.signs.tokens)
        if not self._schedulers:
            self._schedulers = _schedulers(groups)
        if not self.signs.served or quiet < self.every or self.signs.now < self._ask_at:
            return
        self._ask_at = self.signs.now + self.every
        mute = may_be_asked(launch.server_args) or is_not_told(launch.phase, launch.server_args) or proof.roundabout
        if mute:
            self.signs = replace(self.signs, mute=mute)
            return
        answer = await proof.ask(snapshot, launch.containers, min(PROBE_DEADLINE_S, self.every), self._clock.now)
        now = self._clock.monotonic()
        self.signs = replace(self.signs, now=now, dead=self._dead(groups))
        match answer:
            case Answer.TOKENS:
                self._generated(now)
            case Answer.SILENCE:
                self.signs = replace(self.signs, mute="", unanswered=self.signs.unanswered + 1)
            case Answer.NO_TOKENS:
                self.signs = replace(self.signs, mute="it refuses the watchdog's requests")
            case Answer.NOT_OURS:
                self.signs = replace(self.signs, mute="its port is not held by its own processes alone")

    def _dead(self, groups: tuple[str, ...]) -> str:
        gone = len(self._schedulers - _schedulers(groups))
        return f"{gone} of {len(self._schedulers)} {'is' if gone == 1 else 'are'} gone" if gone else ""


def is_on_its_way_down(snapshot: UnitSnapshot) -> bool:
    """Or down. What it does then is no matter of progress."""
    states = (ActiveState.DEACTIVATING, ActiveState.INACTIVE, ActiveState.FAILED)
    return snapshot.in_auto_restart or snapshot.active_state in states or snapshot.job_type in ("stop", "restart")


def _stopped_by_hand(snapshot: UnitSnapshot, groups: tuple[str, ...]) -> str:
    """Why somebody wants it to stand still; empty where nobody does."""
    if snapshot.frozen:
        return "It is frozen (systemctl freeze)."
    alive = (process.pid for group in groups for process in processes.cgroup_processes(group))
    traced = next((pid for pid in alive if processes.is_traced(pid)), None)
    return "" if traced is None else f"A debugger is attached to its process {traced}."


def _schedulers(groups: tuple[str, ...]) -> set[ProcessId]:
    alive = (process for group in groups for process in processes.cgroup_processes(group))
    return {process for process in alive if processes.name(process.pid) == _SCHEDULER}
