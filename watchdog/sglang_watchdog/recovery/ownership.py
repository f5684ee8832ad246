"""Whose is a process that holds GPU memory? Pure, and on the side of doubt: without a proof it is a stranger's.

Three proofs count: the process itself was recorded (pid and start time) in the unit's cgroup while a launch ran that
has ended, or it descends from such a one; or its environment has the INVOCATION_ID of such a launch; or it is in the
unit's cgroup while the unit is down. Names, titles and model paths prove nothing: they can only spare a process.

In a container only the first counts, and only in one that such a launch has started: an id can be used again (`podman
start`), the processes of that run cannot.
"""

import re
from collections.abc import Iterable, Sequence

from sglang_watchdog.domain.container import Container, named_by
from sglang_watchdog.domain.launch import Launch, ProcessId
from sglang_watchdog.domain.ownership import Owner, Ownership, ProcessFacts, Proof
from sglang_watchdog.domain.unit import UnitSnapshot

# Start times have the resolution of a clock tick, and systemd takes the launch's own a moment before it forks. An
# invocation's id cannot be in an environment before the launch, so that more is no risk either.
_START_SLACK_S = 1.0

# Daemons that outlive an engine by design, and shells of people: what runs below them is not the unit's. By comm.
_SPARED_NAMES = {
    "nvidia-cuda-mps": "the CUDA MPS control daemon or server, which others share",
    "raylet": "Ray's",
    "gcs_server": "Ray's",
    "tmux: server": "a terminal multiplexer, in which people work",
    "screen": "a terminal multiplexer, in which people work",
    "zellij": "a terminal multiplexer, in which people work",
    "sshd": "a login",
    "sshd-session": "a login",
}
_RAY_TITLE = "ray::"
_WEIGHT_CACHE = "sglang.srt.weight_cache"

_UNIT_SUFFIXES = (".service", ".scope", ".mount", ".socket", ".swap")
_LOGIN = re.compile(r"session-.*\.scope|user@.*\.service|user(-\d+)?\.slice")
# `..` is a group outside of our cgroup namespace.
_CONTAINER = re.compile(
    r"\.\.|(?!.*\.service$)(\.?lxc|lxd|incus|docker|libpod|podman|kubepods?|containerd|crio|cri|buildkit)([-._:].*)?"
    r"|machine\.slice|machine-.*\.scope|systemd-nspawn@.*\.service"
)


def of_this_boot(launches: Iterable[Launch], boot_id: str, boot_time: float) -> tuple[Launch, ...]:
    """Without launches of an earlier boot: their pids and start times (ticks since *their* boot) may come again.

    `boot_time` (Unix seconds) decides where a launch has no boot id.
    """
    return tuple(
        launch
        for launch in launches
        if (launch.boot_id == boot_id if launch.boot_id else launch.started > boot_time - _START_SLACK_S)
    )


def verdict(facts: ProcessFacts | None, unit: UnitSnapshot, launches: Iterable[Launch]) -> Ownership:
    """The one place that says OURS. `launches` are the ledger's of this boot; `facts` None where NVML names a process
    that is not to be seen from here."""
    if facts is None:
        return Ownership(Owner.UNKNOWN, "NVML names a process that cannot be seen from here")
    return _Question(facts, unit, launches).answer()


class _Question:
    def __init__(self, facts: ProcessFacts, unit: UnitSnapshot, launches: Iterable[Launch]) -> None:
        self._facts = facts
        self._unit = unit
        own = [launch for launch in launches if launch.unit == unit.name]
        self._running = [launch for launch in own if self._runs(launch.invocation)]
        self._ended = [launch for launch in own if not self._runs(launch.invocation)]
        self._in_unit = _within(facts.cgroup or "", unit.control_group)
        self._container = self._container_of(own)

    def _runs(self, invocation: str) -> bool:
        return not self._unit.ended and invocation == self._unit.invocation

    def answer(self) -> Ownership:
        return (
            self._unseen()
            or self._spared()
            or self._contained()
            or self._recorded()
            or self._of_current_launch()
            or self._elsewhere()
            or self._descends()
            or self._inherited()
            or self._in_cgroup_of_unit()
            or self._says(Owner.STRANGER, f"nothing proves that it is of a launch of {self._unit.name}")
        )

    def _unseen(self) -> Ownership | None:
        if self._unit.active_state is None:
            return self._says(Owner.UNKNOWN, f"the state of {self._unit.name} is not known")
        if self._facts.cgroup is None:
            return self._says(Owner.UNKNOWN, "its cgroup cannot be read")
        if self._facts.argv is None:
            return self._says(Owner.UNKNOWN, "its command line cannot be read: what must be spared cannot be told")
        return None

    def _spared(self) -> Ownership | None:
        if self._facts.id.pid <= 1:
            return self._says(Owner.STRANGER, "it is no process that anybody started")
        argv = self._facts.argv or ()
        if any(word.startswith(_WEIGHT_CACHE) for word in argv):
            return self._says(Owner.STRANGER, "SGLang's weight-cache daemon outlives an engine by design")
        if argv and argv[0].startswith(_RAY_TITLE):
            return self._says(Owner.STRANGER, "it is Ray's")
        if why := _SPARED_NAMES.get(self._facts.name):
            return self._says(Owner.STRANGER, f"it is {why}")
        for ancestor in self._facts.ancestors:
            if why := _SPARED_NAMES.get(ancestor.name):
                return self._says(Owner.STRANGER, f"it runs below pid {ancestor.id.pid}, which is {why}")
        return None

    def _container_of(self, launches: Iterable[Launch]) -> Container | None:
        """The container that it lives in, where a launch of the unit started it."""
        found = "" if self._in_unit else named_by(self._parts_beyond_unit())
        started = (container for launch in launches for container in launch.containers)
        return next((container for container in started if container.id == found), None)

    def _contained(self) -> Ownership | None:
        """Of a container that the unit started. One that was stopped and started again is another's doing."""
        if self._container is None:
            return None
        named = f"container {self._container.short}"
        if any(self._container in launch.containers for launch in self._running):
            return self._says(
                Owner.CURRENT_LAUNCH, f"it is in {named} of the launch of {self._unit.name} that runs now"
            )
        chain = (self._facts.id, *(ancestor.id for ancestor in self._facts.ancestors if ancestor.id.pid > 1))
        starters = [launch for launch in self._ended if self._container in launch.containers]
        launch = next((launch for process in chain if (launch := _recording(process, starters))), None)
        if launch is None:
            return self._says(
                Owner.STRANGER, f"nothing proves that it is of the run of {named} that {self._unit.name} began"
            )
        return self._ours(Proof.CONTAINER, f"it was recorded in {named} of launch {launch.invocation}")

    def _recorded(self) -> Ownership | None:
        """Of an ended launch. Seen in the running one's group as well: systemd starts beside what is left."""
        launch = _recording(self._facts.id, self._ended)
        if launch is None or self._in_container():
            return None
        reason = f"it was recorded in the cgroup of {self._unit.name} during launch {launch.invocation}"
        return self._ours(Proof.RECORDED_PROCESS, reason)

    def _of_current_launch(self) -> Ownership | None:
        if self._unit.ended:
            return None
        chain = [self._facts.id, *(ancestor.id for ancestor in self._facts.ancestors)]
        if (
            self._in_unit
            or (self._facts.invocation and self._facts.invocation == self._unit.invocation)
            or any(process.pid == self._unit.main_pid or _recording(process, self._running) for process in chain)
        ):
            return self._says(Owner.CURRENT_LAUNCH, f"it is of the launch of {self._unit.name} that runs now")
        return None

    def _elsewhere(self) -> Ownership | None:
        """What lives in a session, a container or another unit is theirs, whatever it inherited."""
        if self._in_unit:
            return None
        group = self._facts.cgroup or ""
        if self._in_container():
            return self._says(Owner.STRANGER, f"it lives in a container ({group}), whose engine alone may end it")
        for part in self._parts_beyond_unit():
            if _LOGIN.fullmatch(part):
                return self._says(Owner.STRANGER, f"it lives in a login session ({group})")
            if part.endswith(_UNIT_SUFFIXES) and part != self._unit.name:
                return self._says(Owner.STRANGER, f"it lives in {part}")
        return None

    def _descends(self) -> Ownership | None:
        for ancestor in self._facts.ancestors:
            if ancestor.id.pid > 1 and (launch := _recording(ancestor.id, self._ended)):
                reason = f"it descends from pid {ancestor.id.pid}, recorded during launch {launch.invocation}"
                return self._ours(Proof.DESCENDANT, reason)
        return None

    def _inherited(self) -> Ownership | None:
        for launch in self._ended:
            if launch.invocation and launch.invocation == self._facts.invocation:
                if doubt := self._replayed(launch):
                    return self._says(Owner.STRANGER, doubt)
                return self._ours(Proof.INVOCATION, f"its environment has the id of launch {launch.invocation}")
        return None

    def _replayed(self, launch: Launch) -> str:
        """Why the launch's id can have come into the environment by somebody's hand; empty where it was inherited."""
        if self._facts.started < launch.started - _START_SLACK_S:
            return f"it is older than launch {launch.invocation}, whose id it has"
        if launch.ended is not None and self._facts.started > launch.ended + _START_SLACK_S:
            return f"it was started after launch {launch.invocation} had ended, whose id it has"
        if self._facts.terminal:
            return f"it has a terminal, so a person has started it with the id of launch {launch.invocation}"
        return ""

    def _in_cgroup_of_unit(self) -> Ownership | None:
        if not (self._unit.ended and self._in_unit):
            return None
        return self._ours(Proof.CGROUP, f"it is in the cgroup of {self._unit.name}, which is down")

    def _in_container(self) -> bool:
        """Not for what is in the unit's own cgroup: that is systemd's to end, a container or not."""
        return not self._in_unit and any(_CONTAINER.fullmatch(part) for part in self._parts_beyond_unit())

    def _parts_beyond_unit(self) -> Sequence[str]:
        """The folders in which it lives and the unit does not: a unit may itself be in a container or a session."""
        theirs, own = _parts(self._facts.cgroup or ""), _parts(self._unit.control_group)
        common = 0
        while common < min(len(theirs), len(own)) and theirs[common] == own[common]:
            common += 1
        return theirs[common:]

    def _says(self, owner: Owner, reason: str) -> Ownership:
        return Ownership(owner, reason, self._facts.id, in_unit_cgroup=self._in_unit, container=self._container)

    def _ours(self, proof: Proof, reason: str) -> Ownership:
        return Ownership(Owner.OURS, reason, self._facts.id, proof, self._in_unit, self._container)


def _recording(process: ProcessId, launches: Iterable[Launch]) -> Launch | None:
    """The launch in whose record this very process is."""
    return next((launch for launch in launches if any(p.id == process for p in launch.processes)), None)


def _within(cgroup: str, control_group: str) -> bool:
    return bool(_parts(control_group)) and f"{cgroup}/".startswith(f"{control_group}/")


def _parts(path: str) -> list[str]:
    return path.strip("/").split("/") if path.strip("/") else []
