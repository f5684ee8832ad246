"""What a daemon that comes back knows of a launch that an earlier one saw begin."""

import os

import pytest

from sglang_watchdog.domain.container import Container, Engine
from sglang_watchdog.domain.gpu import Gpu, GpuReading, HeldMemory
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.launch import Launch, ProcessId
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import containers, processes
from sglang_watchdog.ledger import Ledger
from sglang_watchdog.observation import LaunchWatch

UNIT = "sglang.service"
HELD = (HeldMemory(0, 40 * 2**30, "process 4711", ours=False),)


def after_a_restart(known: Launch) -> LaunchWatch:
    ledger = Ledger.in_memory()
    ledger.save_launch(known)
    return LaunchWatch(UnitSnapshot(UNIT, invocation="a"), None, frozenset(), ledger.launch("a"))


def test_what_was_on_the_cards_before_the_start_is_still_known() -> None:
    watch = after_a_restart(Launch(UNIT, "a", 1000.0, held_before=HELD))
    assert watch.held_before == watch.record().held_before == HELD


def test_the_models_content_is_that_of_the_start() -> None:
    known = Launch(
        UNIT, "a", 1000.0, argv=("python", "-m", "sglang.launch_server"), model_digest="abc", version="0.5.9"
    )
    watch = after_a_restart(known)
    assert watch.files is not None
    assert (watch.files.model_digest, watch.files.version, watch.files_of) == ("abc", "0.5.9", known.argv)
    assert watch.record().model_digest == "abc"


def test_a_model_that_could_not_be_read_is_asked_again() -> None:
    assert after_a_restart(Launch(UNIT, "a", 1000.0)).files is None


@pytest.mark.parametrize(
    ("flags", "several"),
    [(("--nnodes", "2"), True), (("--nnodes=4", "--node-rank=1"), True), (("--nnodes", "1"), False), ((), False)],
)
def test_a_launch_of_several_nodes_is_known_by_its_command(flags: tuple[str, ...], several: bool) -> None:
    argv = ("python", "-m", "sglang.launch_server", *flags)
    assert after_a_restart(Launch(UNIT, "a", 1000.0, argv=argv)).several_nodes is several


@pytest.mark.parametrize(("nodes", "several"), [(2, True), (1, False)])
def test_behind_a_wrapper_several_nodes_are_known_by_what_the_server_printed(nodes: int, several: bool) -> None:
    watch = after_a_restart(Launch(UNIT, "a", 1000.0, argv=("/opt/serve.sh",)))
    printed = JournalEntry(
        1001.0, f"server_args=ServerArgs(model_path='/m', nnodes={nodes}, node_rank=0)", invocation="a"
    )
    watch._feed(printed)
    assert watch.several_nodes is several


CONTAINER = Container("c3" * 32, Engine.PODMAN)
RUNNING = UnitSnapshot(UNIT, invocation="a", control_group=f"/system.slice/{UNIT}")


def test_a_container_that_it_started_is_recorded_with_who_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client, inside = ProcessId(10, 100), ProcessId(20, 200)
    groups: dict[str, tuple[ProcessId, ...]] = {
        RUNNING.control_group: (client,),
        f"/machine.slice/libpod-{CONTAINER.id}.scope": (inside,),
    }
    monkeypatch.setattr(processes, "cgroup_processes", lambda group: groups.get(group, ()))
    monkeypatch.setattr(containers, "monitored_by", lambda group: [CONTAINER] if client in group else [])
    first = LaunchWatch(RUNNING, None, frozenset(), None)
    assert {process.id for process in first.record().processes} == {client, inside}
    again = after_a_restart(first.record())
    assert again.record().containers == (CONTAINER,)
    groups[RUNNING.control_group] = ()  # client and monitor are gone, what they started is not
    again.see_processes(RUNNING)
    assert {process.id for process in again.record().processes} == {client, inside}


def test_the_cards_that_cuda_shows_to_it_are_known_and_nothing_else_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ("python3", "-m", "sglang.launch_server")
    monkeypatch.setattr(processes, "command_line", lambda _pid: server)
    monkeypatch.setattr(processes, "_text", lambda _pid, _what: "A=1\0CUDA_VISIBLE_DEVICES=1\0SECRET=x\0")
    cards = GpuReading(0.0, "580", tuple(Gpu(i, f"GPU-{i}", "H200", 1, 0) for i in range(2)))
    first = LaunchWatch(UnitSnapshot(UNIT, invocation="a", main_pid=os.getpid()), None, frozenset(), None)
    assert first.record().cuda == {"CUDA_VISIBLE_DEVICES": "1"}
    assert after_a_restart(first.record()).uses(cards) == frozenset({"GPU-1"})
