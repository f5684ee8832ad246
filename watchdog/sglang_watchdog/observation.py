"""One launch while it runs: what it said, which processes it had, and what was on the cards before it.

It only looks. Everything that a diagnosis needs later is gathered while it can still be seen: an ended process has no
command line, and a dead child no place in the cgroup.
"""

import re
from collections.abc import Mapping, Sequence

from sglang_watchdog.diagnosis.timeline import Timeline, TimelineReader
from sglang_watchdog.domain import visible
from sglang_watchdog.domain.container import Container, run_command
from sglang_watchdog.domain.gpu import GpuReading, HeldMemory
from sglang_watchdog.domain.journal import JournalEntry, MessageId
from sglang_watchdog.domain.launch import Definition, Launch, Phase, RecordedProcess
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.domain.speculation import Command, SpeculationConfig, more_than_one
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import containers, processes
from sglang_watchdog.host.journal import Journal
from sglang_watchdog.host.server_files import ServerFiles
from sglang_watchdog.host.unit_files import loaded_argv

# Before it executes the command, the main process is systemd's own: under the command's name in parentheses (252), or
# as systemd-executor (from 255 on).
_NOT_YET_EXECUTED = re.compile(r"\(.*\)|.*/systemd-executor")
# Children that come and go (compilers, say) are dropped again beyond this many.
_MOST_PROCESSES = 512
# The launch's first journal entry (`Starting …`) is written a moment before the process is started.
_BEFORE_START_S = 5.0


class LaunchWatch:
    """Gathers one launch. `raw_argv` holds secrets and never leaves this object but for probes of the server."""

    def __init__(
        self, snapshot: UnitSnapshot, definition: Definition | None, managed: frozenset[str], known: Launch | None
    ) -> None:
        self.unit = snapshot.name
        self.invocation = snapshot.invocation
        self.restarts = snapshot.restarts  # systemd's count of automatic restarts, of which this launch may be one
        self.started = snapshot.inactive_exit or snapshot.exec_main_started
        self.definition = known.definition if known else definition
        self._runs(known.argv if known else ())
        self.files = _files_of(known)  # of model and release, once they were read (see Inquest.identify)
        self.files_of: tuple[str, ...] = known.argv if known else ()  # the command that they were read for
        self.holds_bytes = 0  # GPU memory of its own, when the cards were last read
        self.gpu_before: GpuReading | None = known.gpu_before if known else None
        self.held_before: tuple[HeldMemory, ...] = known.held_before if known else ()
        self.cuda = known.cuda if known else None
        self.served = known is not None and known.served
        self.ask_engine_at = 0.0  # Unix seconds
        self.ended: float | None = None
        self.surprise_told = False
        self.ceiling_told = known is not None or snapshot.restarts > 0  # systemd's repetitions are no news
        self._managed = managed
        self._reader = TimelineReader(snapshot.name, snapshot.invocation)
        self._cursor = ""
        self._main_exit_seen = False
        self._processes = {process.id: process for process in known.processes} if known else {}
        self._containers = {container.id: container for container in known.containers} if known else {}
        self.see_processes(snapshot)

    @property
    def timeline(self) -> Timeline:
        return self._reader.timeline()

    @property
    def phase(self) -> Phase:
        return self._reader.phase

    @property
    def config(self) -> SpeculationConfig:
        """The speculation config that really ran: from the argv of the main process, or, where that is a wrapper whose
        flags cannot be seen, from what SGLang printed of its settings."""
        if any("sglang" in word for word in self.raw_argv):
            return SpeculationConfig.of(self.raw_argv, self._managed)
        return SpeculationConfig.of_settings(self._reader.server_args)

    @property
    def decoded_at(self) -> float:
        """When it last logged a decode batch, which our probes are too short for. Unix seconds; 0 for never."""
        return self._reader.decoded_at

    @property
    def prefilled_at(self) -> float:
        """When it last logged a prefill batch that is larger than a probe. Unix seconds; 0 for never."""
        return self._reader.prefilled_at

    @property
    def spoke_at(self) -> float:
        """When it last logged anything but an answer to a client. Unix seconds; 0 for never."""
        return self._reader.spoke_at

    @property
    def server_args(self) -> Mapping[str, object]:
        """What SGLang printed of its settings; empty until then."""
        return self._reader.server_args

    @property
    def base_unknown(self) -> str:
        """What cannot be read, so that it cannot be told what a proof by this launch would hold for; or empty. The
        command is gone where the launch had ended before it was looked at."""
        if not self.raw_argv:
            return "The command"
        return "The model's files" if self.files is None or self.files.unknown else ""

    @property
    def several_nodes(self) -> bool:
        """By the command, or, where that is a wrapper whose flags cannot be seen, by what SGLang printed."""
        printed = more_than_one(self._reader.server_args.get("nnodes"))
        return printed or Command.parse(self.raw_argv).several_nodes

    def uses(self, reading: GpuReading) -> frozenset[str] | None:
        """UUIDs of the cards that it uses; None where that cannot be told."""
        return visible.cards_of(self.raw_argv, self._reader.server_args, self.cuda, reading.gpus)

    @property
    def containers(self) -> tuple[Container, ...]:
        """That it has started, as far as they are known."""
        return tuple(self._containers.values())

    @property
    def journal_complete(self) -> bool:
        """PID 1 has logged the end of the main process, so the journal holds all that this launch will ever say."""
        return self._main_exit_seen

    async def pull(self, journal: Journal) -> None:
        await journal.pull(self.invocation, self._feed, since=self.started - _BEFORE_START_S, cursor=self._cursor)

    def see_container(self, container: Container) -> None:
        self._containers.setdefault(container.id, container)

    def see_processes(self, snapshot: UnitSnapshot) -> None:
        """Records who is in the unit's cgroup now and in those of its containers, and the main process's command once
        it is executed."""
        if snapshot.invocation != self.invocation:
            return
        if snapshot.main_pid:
            self._see_main(snapshot)
        if not snapshot.control_group:
            return
        phase = self._reader.phase
        group = processes.cgroup_processes(snapshot.control_group)
        for container in containers.monitored_by(group):
            self.see_container(container)
        command = run_command(snapshot.exec_start)
        if command and (written := containers.written_down(command, self.started)):
            self.see_container(written)
        inside = (process for container in self.containers for process in containers.inhabitants(container))
        for process in (*group, *inside):
            if process not in self._processes:
                self._processes[process] = RecordedProcess(process, processes.name(process.pid), phase)
        if len(self._processes) > _MOST_PROCESSES:
            self._processes = {one: seen for one, seen in self._processes.items() if processes.lives(one)}

    def _see_main(self, snapshot: UnitSnapshot) -> None:
        if containers.is_monitor(snapshot.main_pid):
            if not self.raw_argv:
                self._runs(_begun_by(snapshot))
            return
        argv = processes.command_line(snapshot.main_pid)
        if is_executed(argv) and (self.cuda is None or argv != self.raw_argv):
            self.cuda = processes.variables(snapshot.main_pid, visible.VARIABLES)
            self._runs(argv)

    def record(self) -> Launch:
        """The launch as the ledger keeps it, secrets removed."""
        timeline = self.timeline
        return Launch(
            self.unit,
            self.invocation,
            self.started,
            boot_id=processes.boot_id(),
            argv=self.argv,
            server_args=timeline.server_args,
            version=self.files.version if self.files else "",
            model_digest=self.files.model_digest if self.files else None,
            definition=self.definition,
            phases=timeline.phases,
            memory=timeline.memory,
            processes=tuple(self._processes.values()),
            containers=self.containers,
            cuda=self.cuda,
            gpu_before=self.gpu_before,
            held_before=self.held_before,
            served=self.served,
            ended=self.ended,
        )

    def _runs(self, argv: tuple[str, ...]) -> None:
        """The command that really runs. `argv` is asked for at every look, so its secrets are removed once."""
        self.raw_argv, self.argv = argv, redact_argv(argv)

    def _feed(self, entry: JournalEntry) -> None:
        self._cursor = entry.cursor or self._cursor  # kept here: a pull that is cut off goes on from where it was
        if entry.invocation == self.invocation and entry.message_id == MessageId.PROCESS_EXIT:
            self._main_exit_seen = True
        self._reader.feed(entry)


def _files_of(known: Launch | None) -> ServerFiles | None:
    if known is None or known.model_digest is None:
        return None
    return ServerFiles(known.model_digest, known.version)


def _begun_by(snapshot: UnitSnapshot) -> tuple[str, ...]:
    """The command of a client that started a container and left its monitor behind as the main process, as Quadlet has
    it. It lives for a fifth of a second. Where it was not seen, it is the command that systemd has loaded, if that is
    what runs in the container; else empty."""
    loaded, inside = loaded_argv(snapshot), containers.first_command(snapshot.main_pid)
    return loaded if inside and loaded[-len(inside) :] == inside else ()


def is_executed(argv: Sequence[str]) -> bool:
    """Whether a main process runs its own command by now."""
    return bool(argv) and not _NOT_YET_EXECUTED.fullmatch(argv[0])
