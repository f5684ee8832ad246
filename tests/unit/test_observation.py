"""What a daemon that comes back knows of a launch that an earlier one saw begin."""

import pytest

from sglang_watchdog.domain.gpu import HeldMemory
from sglang_watchdog.domain.journal import JournalEntry
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.unit import UnitSnapshot
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
