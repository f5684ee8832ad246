"""Whose is a process: every proof and every reason to spare, and that nothing else ever makes it ours."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_watchdog.domain.container import Container, Engine
from sglang_watchdog.domain.launch import Launch, Phase, ProcessId, RecordedProcess
from sglang_watchdog.domain.ownership import Ancestor, Owner, ProcessFacts, Proof
from sglang_watchdog.domain.unit import ActiveState, UnitSnapshot
from sglang_watchdog.recovery.ownership import of_this_boot, verdict

UNIT = "sglang.service"
GROUP = f"/system.slice/{UNIT}"
PYTHON = ("python3", "-m", "sglang.launch_server", "--model-path", "/models/big")
TITLE = ("sglang::scheduler_TP0",)

WORKER = ProcessId(4242, 900_100)
MAIN = ProcessId(4200, 900_000)
NEW_MAIN = ProcessId(5000, 990_000)
ORPHAN = ProcessId(777, 950_000)
INIT = Ancestor(ProcessId(1, 5), "systemd")

ENDED = Launch(
    UNIT,
    "a" * 32,
    started=9000.0,
    processes=tuple(RecordedProcess(process, "python3", Phase.SERVING) for process in (MAIN, WORKER)),
    ended=9500.0,
)
RUNNING = Launch(
    UNIT, "b" * 32, started=9900.0, processes=(RecordedProcess(NEW_MAIN, "python3", Phase.LOADING_WEIGHTS),)
)
DOWN = UnitSnapshot(UNIT, active_state=ActiveState.FAILED, invocation=ENDED.invocation, control_group=GROUP)
UP = UnitSnapshot(
    UNIT,
    active_state=ActiveState.ACTIVE,
    invocation=RUNNING.invocation,
    control_group=GROUP,
    main_pid=NEW_MAIN.pid,
)
LEDGER = (ENDED, RUNNING)


def process(
    pid: ProcessId = ORPHAN,
    cgroup: str | None = "/system.slice",
    invocation: str | None = None,
    argv: tuple[str, ...] | None = TITLE,
    started: float = 9100.0,
    ancestors: tuple[Ancestor, ...] = (INIT,),
    name: str = "python3",
    terminal: bool = False,
) -> ProcessFacts:
    return ProcessFacts(pid, started, name, "S", 0, cgroup, ancestors, argv, invocation, terminal)


# The proofs


def test_a_process_recorded_while_the_ended_launch_ran_is_ours_wherever_it_moved_itself() -> None:
    for cgroup in ("/", "/moved", "/system.slice/other.service", "/user.slice/user-0.slice/session-1.scope"):
        found = verdict(process(WORKER, cgroup), DOWN, LEDGER)
        assert (found.owner, found.proof, found.process) == (Owner.OURS, Proof.RECORDED_PROCESS, WORKER)
        assert not found.in_unit_cgroup


def test_a_recycled_pid_is_a_strangers() -> None:
    assert verdict(process(replace(WORKER, start_ticks=WORKER.start_ticks + 1)), DOWN, LEDGER).owner is Owner.STRANGER


def test_a_descendant_of_a_recorded_process_is_ours() -> None:
    child = process(ancestors=(Ancestor(ProcessId(4300, 900_200), "sh"), Ancestor(MAIN, "python3"), INIT))
    assert verdict(child, DOWN, LEDGER).proof is Proof.DESCENDANT


def test_a_descendant_of_a_recycled_pid_is_a_strangers() -> None:
    child = process(ancestors=(Ancestor(replace(MAIN, start_ticks=999_999), "python3"), INIT))
    assert verdict(child, DOWN, LEDGER).owner is Owner.STRANGER


def test_an_orphan_with_the_id_of_an_ended_launch_is_ours() -> None:
    assert verdict(process(invocation=ENDED.invocation), DOWN, LEDGER).proof is Proof.INVOCATION


def test_what_is_in_the_cgroup_of_a_unit_that_is_down_is_ours_and_for_systemd_to_end() -> None:
    for cgroup in (GROUP, f"{GROUP}/payload"):
        found = verdict(process(cgroup=cgroup), DOWN, LEDGER)
        assert (found.proof, found.in_unit_cgroup) == (Proof.CGROUP, True)


def test_a_left_over_of_an_ended_launch_is_ours_beside_a_launch_that_runs() -> None:
    """systemd starts beside left-overs, and they are then recorded for the new launch as well."""
    beside = replace(RUNNING, processes=(*RUNNING.processes, *ENDED.processes))
    assert verdict(process(WORKER, GROUP), UP, (ENDED, beside)).proof is Proof.RECORDED_PROCESS


# Strangers


@pytest.mark.parametrize(
    "cgroup",
    [
        "/user.slice/user-1000.slice/session-4.scope",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/tmux-spawn-1.scope",
        f"/user.slice/user-1000.slice/user@1000.service/app.slice/{UNIT}",
        "/system.slice/other.service",
        "/system.slice/run-r1234.scope",
        "/system.slice/docker-0123abcd.scope",
        "/docker/0123abcd",
        "/machine.slice/libpod-0123abcd.scope/container",
        "/kubepods.slice/kubepods-burstable.slice/cri-containerd-0123.scope",
        "/lxc.payload.tenant/system.slice",
        "/../tenant",
    ],
)
def test_a_bystander_with_our_invocation_id_in_another_units_group_is_a_stranger(cgroup: str) -> None:
    assert verdict(process(cgroup=cgroup, invocation=ENDED.invocation), DOWN, LEDGER).owner is Owner.STRANGER


def test_a_container_below_a_recorded_process_is_a_stranger() -> None:
    child = process(cgroup="/system.slice/docker-0123abcd.scope", ancestors=(Ancestor(MAIN, "docker"), INIT))
    assert verdict(child, DOWN, LEDGER).owner is Owner.STRANGER


def test_a_unit_in_a_container_of_its_own_has_left_overs_all_the_same() -> None:
    inside = replace(DOWN, control_group=f"/lxc.payload.gpu{GROUP}")
    mine = process(cgroup="/lxc.payload.gpu/system.slice", invocation=ENDED.invocation)
    assert verdict(mine, inside, LEDGER).owner is Owner.OURS


def test_a_process_older_than_the_launch_whose_id_it_has_is_a_stranger() -> None:
    """Nobody can have the id before the launch has, so somebody put it there."""
    assert verdict(process(invocation=ENDED.invocation, started=8000.0), DOWN, LEDGER).owner is Owner.STRANGER


def test_what_a_person_replays_with_the_id_in_a_shell_is_a_stranger_where_no_cgroup_tells_of_a_login() -> None:
    """`pct enter`, `docker exec` and nsenter leave a shell in a group that says nothing, below nobody's sshd."""
    for cgroup in ("/", "/system.slice"):
        replayed = process(cgroup=cgroup, invocation=ENDED.invocation, terminal=True)
        assert verdict(replayed, DOWN, LEDGER).owner is Owner.STRANGER
        assert verdict(replace(replayed, terminal=False), DOWN, LEDGER).owner is Owner.OURS


def test_what_is_started_with_the_id_after_the_launch_ended_is_a_stranger() -> None:
    assert ENDED.ended is not None
    late = process(invocation=ENDED.invocation, started=ENDED.ended + 5)
    assert verdict(late, DOWN, LEDGER).owner is Owner.STRANGER
    unknown_end = replace(ENDED, ended=None)
    assert verdict(late, DOWN, (unknown_end,)).owner is Owner.OURS


def test_a_holder_that_a_recorded_left_over_starts_again_is_ours_however_late() -> None:
    again = process(started=99_999.0, ancestors=(Ancestor(MAIN, "supervise"), INIT), invocation=ENDED.invocation)
    assert verdict(again, DOWN, LEDGER).proof is Proof.DESCENDANT


def test_a_titled_orphan_without_record_or_readable_environment_is_a_stranger() -> None:
    """setproctitle has overwritten its environment, and it was born and orphaned between two looks."""
    assert verdict(process(argv=TITLE, name="sglang::schedul"), DOWN, LEDGER).owner is Owner.STRANGER


def test_another_tenants_server_with_the_same_command_and_title_is_a_stranger_in_every_state() -> None:
    tenant = process(
        argv=TITLE,
        name="sglang::schedul",
        cgroup="/system.slice/tenant.service",
        invocation="f" * 32,
        ancestors=(Ancestor(ProcessId(8000, 940_000), "python3"), INIT),
    )
    for unit in (DOWN, UP, replace(DOWN, active_state=ActiveState.ACTIVATING, sub_state="auto-restart")):
        assert verdict(tenant, unit, LEDGER).owner is Owner.STRANGER


def test_a_zombie_that_was_recorded_is_ours_and_one_that_was_not_is_a_strangers() -> None:
    """Its command line and environment are empty, and its cgroup is the root's."""
    for pid, owner in ((WORKER, Owner.OURS), (ORPHAN, Owner.STRANGER)):
        zombie = replace(process(pid, cgroup="/", argv=()), state="Z")
        assert verdict(zombie, DOWN, LEDGER).owner is owner


def test_the_id_of_another_units_launch_proves_nothing() -> None:
    other = replace(ENDED, unit="other.service")
    assert verdict(process(invocation=other.invocation), DOWN, (other,)).owner is Owner.STRANGER
    assert verdict(process(WORKER), DOWN, (other,)).owner is Owner.STRANGER


def test_name_title_and_model_path_prove_nothing() -> None:
    for argv in (TITLE, PYTHON, ("python3",), ()):
        assert verdict(process(argv=argv, name="sglang::schedul"), DOWN, LEDGER).owner is Owner.STRANGER


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("python", "-m", "sglang.srt.weight_cache.daemon"), "python"),
        (("ray::SchedulerActor.run",), "ray::SchedulerA"),
        (("/opt/ray/core/src/ray/raylet/raylet", "--node"), "raylet"),
        (("nvidia-cuda-mps-server",), "nvidia-cuda-mps"),
        (("tmux", "new", "-d"), "tmux: server"),
    ],
)
def test_what_outlives_an_engine_by_design_is_spared_even_with_a_proof(argv: tuple[str, ...], name: str) -> None:
    for facts in (
        process(WORKER, argv=argv, name=name),
        process(argv=argv, name=name, ancestors=(Ancestor(MAIN, "python3"), INIT)),
        process(argv=argv, name=name, invocation=ENDED.invocation),
    ):
        assert verdict(facts, DOWN, LEDGER).owner is Owner.STRANGER


def test_a_persons_work_in_a_multiplexer_that_the_unit_started_is_spared() -> None:
    tmux = Ancestor(ProcessId(4201, 900_001), "tmux: server")
    job = process(cgroup=GROUP, invocation=ENDED.invocation, ancestors=(tmux, Ancestor(MAIN, "bash"), INIT))
    assert verdict(job, DOWN, LEDGER).owner is Owner.STRANGER


# The launch that runs now


def test_nothing_of_the_launch_that_runs_is_ours_to_end() -> None:
    for facts in (
        process(NEW_MAIN, GROUP),
        process(cgroup=GROUP),
        process(cgroup="/moved", invocation=RUNNING.invocation),
        process(cgroup="/moved", ancestors=(Ancestor(NEW_MAIN, "python3"), INIT)),
    ):
        assert verdict(facts, UP, LEDGER).owner is Owner.CURRENT_LAUNCH


@pytest.mark.parametrize("state", [s for s in ActiveState if s not in (ActiveState.INACTIVE, ActiveState.FAILED)])
def test_a_launch_that_still_drains_or_starts_is_running(state: ActiveState) -> None:
    unit = replace(DOWN, active_state=state)
    assert verdict(process(WORKER, GROUP), unit, (ENDED,)).owner is Owner.CURRENT_LAUNCH


def test_in_auto_restart_the_last_launch_has_ended() -> None:
    unit = replace(DOWN, active_state=ActiveState.ACTIVATING, sub_state="auto-restart")
    assert verdict(process(WORKER), unit, LEDGER).owner is Owner.OURS


# What cannot be known


def test_what_cannot_be_seen_is_unknown() -> None:
    assert verdict(None, DOWN, LEDGER).owner is Owner.UNKNOWN
    assert verdict(process(WORKER, cgroup=None), DOWN, LEDGER).owner is Owner.UNKNOWN
    assert verdict(process(WORKER, argv=None), DOWN, LEDGER).owner is Owner.UNKNOWN
    assert verdict(process(WORKER), replace(DOWN, active_state=None), LEDGER).owner is Owner.UNKNOWN


def test_records_of_another_boot_are_left_out() -> None:
    by_id = replace(ENDED, boot_id="c" * 32)
    assert of_this_boot((by_id,), "d" * 32, 0.0) == ()
    assert of_this_boot((by_id,), "c" * 32, 10_000.0) == (by_id,)
    assert of_this_boot((ENDED,), "c" * 32, ENDED.started + 60) == ()
    assert of_this_boot((ENDED,), "c" * 32, ENDED.started - 60) == (ENDED,)


# Properties

PIDS = st.builds(ProcessId, st.integers(1, 6), st.integers(1, 3))
INVOCATIONS = st.sampled_from(["a", "b", "c"])
SESSION = "/user.slice/user-0.slice/session-1.scope"
NEUTRAL = ("/", "/system.slice", f"{GROUP}x")
FOREIGN = ("/system.slice/other.service", "/docker/1", SESSION)
CGROUPS = st.sampled_from((*NEUTRAL, GROUP, f"{GROUP}/sub", *FOREIGN))
LAUNCHES = st.builds(
    Launch,
    st.sampled_from([UNIT, "other.service"]),
    INVOCATIONS,
    st.floats(0, 100),
    processes=st.lists(st.builds(RecordedProcess, PIDS, st.just(""), st.just(Phase.UNKNOWN)), max_size=3).map(tuple),
)
UNITS = st.builds(
    UnitSnapshot,
    st.just(UNIT),
    active_state=st.none() | st.sampled_from(ActiveState),
    sub_state=st.sampled_from(["", "auto-restart"]),
    invocation=st.sampled_from(["", "a", "b", "c"]),
    control_group=st.sampled_from(["", GROUP]),
    main_pid=st.integers(0, 6),
)
NAMES = st.sampled_from(["python3", "raylet", "sh", "tmux: server"])
HARMLESS_ARGV = st.sampled_from([(), TITLE, PYTHON, ("sleep", "1")])
FACTS = st.builds(
    ProcessFacts,
    PIDS,
    st.floats(0, 100),
    NAMES,
    st.just("S"),
    st.just(0),
    CGROUPS,
    st.lists(st.builds(Ancestor, PIDS, NAMES), max_size=3).map(tuple),
    HARMLESS_ARGV,
    st.none() | INVOCATIONS,
    st.booleans(),
)


def in_group(cgroup: str | None, group: str) -> bool:
    return bool(group) and (cgroup == group or (cgroup or "").startswith(group + "/"))


@given(FACTS, UNITS, st.lists(LAUNCHES, max_size=4))
def test_nothing_is_ours_without_a_proof(facts: ProcessFacts, unit: UnitSnapshot, launches: list[Launch]) -> None:
    """The rule written down a second time, from the facts alone."""
    found = verdict(facts, unit, launches)
    if found.owner is not Owner.OURS:
        return
    running = "" if unit.ended else unit.invocation
    ended = [one for one in launches if one.unit == UNIT and one.invocation != running]
    recorded = {p.id for one in ended for p in one.processes}
    match found.proof:
        case Proof.RECORDED_PROCESS:
            assert facts.id in recorded
        case Proof.DESCENDANT:
            assert recorded & {ancestor.id for ancestor in facts.ancestors if ancestor.id.pid > 1}
        case Proof.INVOCATION:
            assert any(one.invocation == facts.invocation and facts.started >= one.started - 1 for one in ended)
            assert not facts.terminal
        case Proof.CGROUP:
            assert unit.ended
            assert in_group(facts.cgroup, unit.control_group)
    assert found.process == facts.id
    assert facts.id.pid > 1
    assert not {"raylet", "tmux: server"} & {facts.name, *(ancestor.name for ancestor in facts.ancestors)}
    if found.proof is not Proof.RECORDED_PROCESS:
        assert facts.cgroup in (*NEUTRAL, GROUP, f"{GROUP}/sub")
        assert unit.ended or not in_group(facts.cgroup, unit.control_group)


@given(FACTS, UNITS, st.lists(LAUNCHES, max_size=4), HARMLESS_ARGV)
def test_a_command_line_can_spare_a_process_but_never_condemn_it(
    facts: ProcessFacts, unit: UnitSnapshot, launches: list[Launch], argv: tuple[str, ...]
) -> None:
    assert verdict(facts, unit, launches).owner is verdict(replace(facts, argv=argv), unit, launches).owner


@given(FACTS, UNITS)
def test_without_a_ledger_only_the_cgroup_of_a_unit_that_is_down_proves_anything(
    facts: ProcessFacts, unit: UnitSnapshot
) -> None:
    assert verdict(facts, unit, ()).proof in (None, Proof.CGROUP)


# Containers


CONTAINER = Container("c3" * 32, Engine.PODMAN)
SCOPE = f"/machine.slice/libpod-{CONTAINER.id}.scope/container"
INSIDE = ProcessId(4250, 900_200)
IN_CONTAINER = replace(ENDED, processes=(RecordedProcess(INSIDE, "python3", Phase.SERVING),), containers=(CONTAINER,))


def test_a_process_recorded_in_a_container_of_the_ended_launch_is_ours_with_the_container() -> None:
    found = verdict(process(INSIDE, SCOPE), DOWN, (IN_CONTAINER,))
    assert (found.owner, found.proof, found.container) == (Owner.OURS, Proof.CONTAINER, CONTAINER)


def test_a_child_that_came_after_the_launch_had_ended_is_ours_by_its_parent() -> None:
    child = process(ORPHAN, SCOPE, started=99_999.0, ancestors=(Ancestor(INSIDE, "python3"), INIT))
    assert verdict(child, DOWN, (IN_CONTAINER,)).proof is Proof.CONTAINER


def test_a_later_run_of_the_same_container_is_somebodys() -> None:
    again = process(
        ORPHAN, SCOPE, invocation=ENDED.invocation, ancestors=(Ancestor(ProcessId(4400, 960_000), "conmon"),)
    )
    found = verdict(again, DOWN, (IN_CONTAINER,))
    assert (found.owner, found.container) == (Owner.STRANGER, CONTAINER)


def test_a_container_of_the_launch_that_runs_is_of_that_launch() -> None:
    running = replace(RUNNING, containers=(CONTAINER,))
    assert verdict(process(INSIDE, SCOPE), UP, (IN_CONTAINER, running)).owner is Owner.CURRENT_LAUNCH


def test_a_container_that_no_launch_started_is_a_strangers_whatever_is_recorded() -> None:
    bare = replace(IN_CONTAINER, containers=())
    assert verdict(process(INSIDE, SCOPE), DOWN, (bare,)).owner is Owner.STRANGER
    others = SCOPE.replace("c3", "d4")
    assert verdict(process(INSIDE, others), DOWN, (IN_CONTAINER,)).owner is Owner.STRANGER


def test_a_container_of_another_unit_is_a_strangers() -> None:
    theirs = replace(IN_CONTAINER, unit="other.service")
    assert verdict(process(INSIDE, SCOPE), DOWN, (theirs,)).owner is Owner.STRANGER


def test_what_is_spared_is_spared_in_a_container_too() -> None:
    cache = process(INSIDE, SCOPE, argv=("python3", "-m", "sglang.srt.weight_cache.daemon"))
    found = verdict(cache, DOWN, (IN_CONTAINER,))
    assert (found.owner, found.container) == (Owner.STRANGER, CONTAINER)
