"""The story that `make demo` shows, as a test: from the first bad deploy to tokens again, without a human."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.story import EXPECTED, EXPECTED_STEPS, GOOD, SECRET, TOO_MANY, Ending, Line, play, stage, steps_of
from lab.host import LabHost
from lab_product.installed import SERVICE, STATE, InferenceHost, SeenAlert
from lab_product.sglang_unit import Way
from sglang_watchdog.host.unit_files import DROP_IN_NAME

# The story takes most of a minute on an idle machine, and other tests run beside it.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Played:
    """What is left to look at after the story. `published` is every text that leaves the watchdog, by its name."""

    way: Way
    ending: Ending
    alerts: list[SeenAlert]
    rollbacks: float | None
    published: dict[str, str]
    drop_in_mode: str

    def incident(self, failure: str) -> dict[str, object]:
        return next(incident for incident in self.ending.incidents if incident["class"] == failure)


@pytest.fixture(scope="module", params=list(Way), ids=str)
def played(request: pytest.FixtureRequest, lab: LabHost) -> Iterator[Played]:
    way: Way = request.param
    with stage(lab, way, name=f"story-{way.replace('_', '-')}.service", driver_lag_s=0.0) as inference:
        ending = play(inference, _say)
        yield Played(
            way,
            ending,
            inference.alerts(),
            inference.metric("sglang_watchdog_rollbacks_total", unit=inference.unit),
            _published(inference),
            lab.run("stat", "--format=%a", f"{inference.sglang.file_path}.d/{DROP_IN_NAME}", check=False).stdout,
        )


def _say(line: Line, text: str) -> None:
    print(f"{line}: {text}")


def _published(inference: InferenceHost) -> dict[str, str]:
    host = inference.host
    entries = host.journal(f"_SYSTEMD_UNIT={SERVICE}", "+", f"SGLANG_WATCHDOG_UNIT={inference.unit}")
    # An environment file of ours holds speculation flags alone, so it is no exception.
    return {
        "journal": str(entries),
        "state folder": host.run("sh", "-c", f"cd {STATE} && find . -type f -exec cat {{}} +").stdout,
        "metrics": inference.metrics(),
        "history": str(inference.history()),
        "status": str(inference.status()),
    }


def test_each_end_gets_its_class_and_its_outcome(played: Played) -> None:
    assert played.ending.classes == EXPECTED


def test_each_launch_is_recorded_with_the_steps_that_it_ran(played: Played) -> None:
    assert played.ending.launch_steps == EXPECTED_STEPS


def test_the_unit_serves_tokens_with_the_known_good_steps(played: Played) -> None:
    assert played.ending.problems() == []
    assert (played.ending.state, played.ending.steps) == ("active/running", GOOD)


def test_the_launch_that_seemed_to_serve_with_the_new_steps_is_named_by_those_that_ran(played: Played) -> None:
    [alert] = [alert for alert in played.alerts if alert.get("CLASS") == "stale_unit_file"]
    assert "steps 5" in alert.message
    assert f"steps {TOO_MANY}" in alert.message


def test_the_config_is_rolled_back_exactly_once(played: Played) -> None:
    assert [incident["class"] for incident in played.ending.incidents if incident["target"]] == ["kv_cache_oom"]
    assert played.rollbacks == 1


def test_no_launch_repeats_the_config_after_it_failed_on_clean_cards(played: Played) -> None:
    opened = played.incident("kv_cache_oom")["opened"]
    assert [steps_of(one["argv"]) for one in played.ending.launches if one["started"] > opened] == [GOOD]


def test_the_same_config_is_tried_once_more_after_the_cards_were_freed(played: Played) -> None:
    tried = [launch for launch in played.ending.launches if steps_of(launch["argv"]) == TOO_MANY]
    assert [launch["class"] for launch in tried] == ["gpu_memory_held", "kv_cache_oom"]


def test_strangers_on_the_cards_live_also_one_that_inherited_the_invocation_id(played: Played) -> None:
    assert played.ending.bystanders_alive


def test_known_good_is_started_within_two_seconds_of_the_exit(played: Played) -> None:
    print(f"from the main process's exit to the next start: {played.ending.exit_to_start_s:.3f} s ({played.way})")
    assert played.ending.exit_to_start_s <= 2.0


def test_no_secret_of_the_command_line_is_published(played: Played) -> None:
    assert [name for name, text in played.published.items() if SECRET in text] == []
    assert all(played.published.values())


def test_the_drop_in_is_no_more_readable_than_the_unit_file(played: Played) -> None:
    assert played.drop_in_mode.strip() == ("640" if played.way is Way.DROP_IN else "")
