"""The watchdog is killed at every point of its work, one at a time, and the end is the same each time.

A recovery is run once with its points written down (see `crashing`), then again for each of them with a SIGKILL there.
systemd restarts the watchdog; what counts is what the host looks like in the end. The test suite takes the most telling
points; `make crash-points` takes all of them, and `CRASH_POINTS=NAME` those with a name like that.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.host import CHECKOUT, LabHost
from lab_product import crashing
from lab_product.conftest import GIB, Inference, override, proven
from lab_product.installed import HAND_BACK, PYTHON, SERVICE, STATE, InferenceHost, signalled_strangers
from lab_product.sglang_unit import OVERRIDES, Way
from lab_product.test_crash import DROP_IN
from lab_product.test_operator import ACTING, AT_ONCE, KEPT_S, is_down, let_go, steps_of, wait_step
from sglang_watchdog.domain.incident import Step
from waiting import wait_until

# "all", or a part of a point's name.
CHOSEN = os.environ.get("CRASH_POINTS", "")
pytestmark = [
    pytest.mark.lab,
    pytest.mark.faults,
    pytest.mark.timeout(3600 if CHOSEN == "all" else 900),
]

DRIVER = CHECKOUT / "tests/lab_product/crashing.py"
FAST = replace(AT_ONCE, time_scale=0.01)
# No number of deaths or of rollbacks is too many here.
ENDLESS = {**ACTING, "rollbacks": 1000, "rollbacks_per_day": 1000}
SERVICE_DROP_IN = f"""[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart=
ExecStart={PYTHON} -P {DRIVER} run
RestartSec=100ms
ReadWritePaths={crashing.FOLDER}
"""
DEADLINE_S = 60.0
# One run may cross a point and another not: so often it is tried, and of all points such a share may be missed.
TRIES = 3
MOST_MISSED = 0.2
LAST_POINTS_S = 3.0
ENDED = ("inactive", "failed")
SAVED = "/var/lib/crash-points"
OUTCOMES = "SELECT outcome FROM incidents WHERE opened > (SELECT max(proven) FROM known_good) ORDER BY opened"


@pytest.fixture(autouse=True)
def as_shipped(lab: LabHost) -> Iterator[None]:
    yield
    let_go(lab)
    lab.run("rm", "--recursive", "--force", DROP_IN, SAVED, crashing.FOLDER)


@dataclass(frozen=True)
class Seen:
    """What a host looks like once it is over."""

    sound: bool
    outcomes: list[str]
    override: list[list[str]]
    armed: bool
    signals: list[str]
    files: list[str]

    @classmethod
    def on(cls, host: InferenceHost) -> "Seen":
        return cls(
            sound=host.ledger.rows("PRAGMA integrity_check") == [["ok"]],
            outcomes=[outcome for (outcome,) in host.ledger.rows(OUTCOMES)],
            override=host.ledger.rows("SELECT target FROM overrides"),
            armed=bool(_listed(host, str(crashing.ARMED))),
            signals=lines_of(host, crashing.SIGNALS),
            files=[
                *_listed(host, f"{OVERRIDES}/*", f"{OVERRIDES}/.*.new"),
                *_listed(host, f"{host.sglang.file_path}.d/*", f"{host.sglang.file_path}.d/.*.new"),
            ],
        )


def _listed(host: InferenceHost, *patterns: str) -> list[str]:
    return [f"/{path.relative_to(host.host.root)}" for one in patterns for path in host.host.root.glob(one.lstrip("/"))]


def lines_of(host: InferenceHost, path: Path) -> list[str]:
    """Empty where there is no such file."""
    there = host.host.root / path.relative_to("/")
    return there.read_text().splitlines() if there.exists() else []


class NotReached(Exception):
    """Another run of the same work did not come by that point: how often something is done can be a matter of time."""


@dataclass(frozen=True)
class Trial:
    """One kind of work. `provoke` starts the watchdog and makes it do that; what it does before `arm` was called does
    not count. `over` says when that has come to its end, and `wrong` what is wrong with the end: nothing in a good one.
    """

    provoke: Callable[[InferenceHost, Callable[[], None]], None]
    over: Callable[[InferenceHost, Seen], bool]
    wrong: Callable[[InferenceHost, Seen, float], list[str]]

    def run(self, host: InferenceHost, point: str, crossed: list[str] | None = None) -> list[str]:
        """Returns what went wrong; with an empty point nothing is killed. `crossed` takes the points that were come by
        until the end, without those of the look at it."""
        begun = time.time()
        back_to_the_start(host)
        seen: list[Seen] = []
        came_to_an_end: list[float] = []

        def is_over() -> bool:
            seen[:] = [Seen.on(host)]
            if not self.over(host, seen[0]):
                return False
            came_to_an_end.append(time.monotonic())
            # The last points are crossed behind what shows the end.
            more = seen[0].armed if point else bool(CHOSEN)
            return not more or time.monotonic() > came_to_an_end[0] + LAST_POINTS_S

        try:
            self.provoke(host, lambda: host.host.write(crashing.ARMED, point))
            wait_until(is_over, DEADLINE_S, "the end")
        except AssertionError as in_vain:
            return [f"{in_vain}: {seen}", host.log(30)]
        end = seen[0]
        if crossed is not None:
            crossed += points(host)
        if point and end.armed:
            raise NotReached
        return [*([] if end.sound else ["the ledger is broken"]), *self.wrong(host, end, begun)]


# The ground on which every trial begins


def save(host: InferenceHost) -> None:
    """What the watchdog knows and has put in force now is what every trial begins with."""
    host.host.systemctl("stop", SERVICE)
    script = 'rm -rf "$1"; mkdir "$1" && cp -a "$2" "$1/state"; cp -a "$3.d/90-sglang-watchdog.conf" "$1/" || true'
    host.host.run("sh", "-c", script, "save", SAVED, STATE, host.sglang.file_path)


def back_to_the_start(host: InferenceHost) -> None:
    script = (
        'systemctl stop "$1"; systemctl stop --no-block "$2"; systemctl kill --signal=KILL --kill-whom=all "$2";'
        ' systemctl stop "$2"; systemctl reset-failed "$1" "$2"; rm -rf "$3"/* "$4.d/90-sglang-watchdog.conf" "$6";'
        ' cp -a "$5"/state/. "$3"/; cp -a "$5"/90-sglang-watchdog.conf "$4.d/" 2>/dev/null;'
        ' mkdir -p "$6"; systemctl daemon-reload'
    )
    words = (SERVICE, host.unit, STATE, host.sglang.file_path, SAVED, str(crashing.FOLDER))
    host.host.run("sh", "-c", script, "back", *words, check=False, timeout=60)


def wait_watching(host: InferenceHost) -> None:
    shown = {"SubState": "running"}
    running = lambda: host.host.show(SERVICE, "SubState") == shown  # noqa: E731
    wait_until(running, DEADLINE_S, "the watchdog watches")


def points(host: InferenceHost) -> list[str]:
    """Those of the run that is over, in order."""
    return list(dict.fromkeys(lines_of(host, crashing.CROSSED)))


def chosen(crossed: list[str], telling: Sequence[str]) -> Sequence[str]:
    """Those that are asked for; else the `telling` ones. Of all, a point before an act is left out where
    the one after another act came just before it: nothing happens between the two."""
    if CHOSEN == "all":
        return [now for before, now in pairwise(["", *crossed]) if not (" after#" in before and " before#" in now)]
    if CHOSEN:
        return [point for point in crossed if CHOSEN in point]
    return telling


def kill_at_every_point(host: InferenceHost, trial: Trial, name: str, telling: Sequence[str]) -> None:
    """`telling`: the points that every run of the tests takes, where something was done and is not recorded, or is
    under way. Without them the trial would not be what it is meant to be."""
    crossed: list[str] = []
    assert trial.run(host, "", crossed) == []
    wrong: dict[str, list[str]] = {}
    missed: list[str] = []
    picked = chosen(crossed, telling)
    print(f"{name}: of {len(crossed)} points: {', '.join(crossed)}", file=sys.stderr)
    assert set(telling) <= set(crossed)
    for point in picked:
        begun, words = time.monotonic(), "ends well"
        try:
            if said := tried(host, trial, point):
                wrong[point], words = said, "; ".join(said)
        except NotReached:
            missed.append(point)
            words = "was not reached"
        print(f"{name}: {point}: {words} ({time.monotonic() - begun:.1f} s)", file=sys.stderr)
    killed = len(picked) - len(missed)
    print(f"{name}: killed at {killed} of {len(crossed)} points, {len(wrong)} ended badly", file=sys.stderr)
    assert wrong == {}, "\n".join(f"{point}: {'; '.join(said)}" for point, said in wrong.items())
    assert len(missed) <= len(picked) * MOST_MISSED, missed


def tried(host: InferenceHost, trial: Trial, point: str) -> list[str]:
    for _ in range(TRIES - 1):
        with suppress(NotReached):
            return trial.run(host, point)
    return trial.run(host, point)


def served_configs(host: InferenceHost, since: float) -> list[str]:
    """`--speculative-num-steps` of the launches since then, in order, by what the server printed."""
    lines = host.host.journal(f"_SYSTEMD_UNIT={host.unit}", f"--since=@{since:.6f}")
    said = (str(entry["MESSAGE"]) for entry in lines)
    return [line.partition("speculative_num_steps=")[2].partition(",")[0] for line in said if "server_args=" in line]


# A rollback, by either way of putting a config in force

# What both have in common is taken once.
TELLING_OF_A_ROLLBACK = {
    Way.DROP_IN: (
        *("bus stop after#1", "override rename after#1", "daemon-reload under way#1", "ledger begin(start) after#1"),
        *("bus start after#1", "alert incident_closed() before#1"),
    ),
    Way.ENVIRONMENT_FILE: ("override rename after#1", "bus start after#1"),
}


def start_what_fails(host: InferenceHost) -> None:
    wait_watching(host)
    host.host.systemctl("start", "--no-block", host.unit)


def roll_back(host: InferenceHost, arm: Callable[[], None]) -> None:
    arm()
    host.host.systemctl("start", "--no-block", SERVICE)
    start_what_fails(host)


def contained(host: InferenceHost, seen: Seen) -> bool:
    return seen.outcomes[-1:] == ["contained"] and host.state() == "active/running"


def wrong_after_a_rollback(host: InferenceHost, seen: Seen, begun: float) -> list[str]:
    ran = served_configs(host, begun)
    sent = [line.rpartition(" ")[0] for line in seen.signals if line.endswith(" sent")]
    expected_file = f"{OVERRIDES}/{host.unit}.env" if host.sglang.way is Way.ENVIRONMENT_FILE else ""
    checks = {
        f"steps {steps_of(host)} run": steps_of(host) != "4",
        f"started with {ran}": ran.count("4") != 1 or ran[-1] != "4" or "10" not in ran,
        f"left open: {seen.outcomes}": "open" in seen.outcomes,
        f"contained more than once: {seen.outcomes}": seen.outcomes.count("contained") != 1,
        f"killed more than once: {sent}": len(sent) != len(set(sent)),
        f"a half file: {seen.files}": any(path.endswith(".new") for path in seen.files),
        f"no override: {seen.files}": bool(expected_file) and expected_file not in seen.files,
        "no tokens came": host.tokens(4) != 4,
        "nobody was told": not told(host, begun),
    }
    return [said for said, is_wrong in checks.items() if is_wrong]


def told(host: InferenceHost, since: float) -> bool:
    """The end of the incident reached the journal; once more where the death came before that was written down."""
    try:
        host.wait_alert(since=since, OUTCOME="contained")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("way", Way)
def test_a_rollback_ends_the_same_wherever_the_watchdog_is_killed(inference: Inference, way: Way) -> None:
    with inference(settings=ENDLESS, simulation=FAST, way=way, kill_mode="process", restart_s=1.0) as host:
        proven(host)
        with host.bystander(0, GIB) as bystander:
            save(host)
            host.host.write(DROP_IN, SERVICE_DROP_IN)
            host.change(steps=10)
            trial = Trial(roll_back, contained, wrong_after_a_rollback)
            kill_at_every_point(host, trial, f"rollback by {way}", TELLING_OF_A_ROLLBACK[way])
            assert bystander.alive()


# A left-over that heeds no SIGTERM is in the way of the next launch


def leave_something_behind(host: InferenceHost, arm: Callable[[], None]) -> None:
    host.ask_for("leak_child 1")
    host.host.systemctl("start", "--no-block", SERVICE)
    wait_watching(host)
    host.start()
    host.ask_for()
    arm()
    host.kill()


def recovered(host: InferenceHost, seen: Seen) -> bool:
    return seen.outcomes[-1:] == ["recovered"] and host.state() == "active/running"


def wrong_after_freeing(host: InferenceHost, seen: Seen, begun: float) -> list[str]:
    strangers = signalled_strangers(host.host, begun)
    sent = [line.rpartition(" ")[0] for line in seen.signals if line.endswith(" sent")]
    checks = {
        f"left open: {seen.outcomes}": "open" in seen.outcomes,
        f"strangers were signalled: {strangers}": bool(strangers),
        f"more than one process was signalled: {sent}": len({line.split(" ")[0] for line in sent}) > 1,
        f"killed more than once: {sent}": sum(line.endswith(f" {int(signal.SIGKILL)}") for line in sent) > 1,
        f"an override: {seen.files}": any("watchdog" in path or path.endswith(".env") for path in seen.files),
        "no tokens came": host.tokens(4) != 4,
    }
    return [said for said, is_wrong in checks.items() if is_wrong]


def test_a_left_over_is_ended_once_wherever_the_watchdog_is_killed(inference: Inference) -> None:
    with inference(settings=ENDLESS, simulation=FAST, kill_mode="process", restart_s=1.0) as host:
        proven(host)
        with host.bystander(3, GIB) as bystander:
            save(host)
            host.host.write(DROP_IN, SERVICE_DROP_IN)
            trial = Trial(leave_something_behind, recovered, wrong_after_freeing)
            kill_at_every_point(host, trial, "freeing", ("signal SIGTERM after#1", "signal SIGKILL after#1"))
            assert bystander.alive()
        # Who was signalled was looked at in each trial, while the ledger was there that knows of whom.
        host.host.run("sh", "-c", "journalctl --rotate; journalctl --vacuum-time=1ms")


# The operator changes the flags: the override goes

TELLING_OF_A_WITHDRAWAL = {
    Way.DROP_IN: ("override unlink after#1", "daemon-reload under way#1"),
    Way.ENVIRONMENT_FILE: ("override unlink after#1",),
}


def change_the_flags(host: InferenceHost, arm: Callable[[], None]) -> None:
    host.change(steps=10)
    host.reload()
    host.host.systemctl("start", "--no-block", SERVICE)
    wait_watching(host)
    host.start()
    arm()
    host.change(steps=3)
    host.reload()
    if host.sglang.way is Way.DROP_IN:
        wait_until(lambda: not drop_in_loaded(host), DEADLINE_S, "systemd has forgotten our drop-in")
    host.restart()


def drop_in_loaded(host: InferenceHost) -> bool:
    return "90-sglang-watchdog.conf" in host.show("DropInPaths")["DropInPaths"]


def withdrawn(host: InferenceHost, seen: Seen) -> bool:
    """Where the operator's start came while no watchdog lived, it ran our environment file, which is told."""
    told_as_stale = host.sglang.way is Way.ENVIRONMENT_FILE and "reported" in seen.outcomes
    return not seen.override and "open" not in seen.outcomes and (steps_of(host) == "3" or told_as_stale)


def wrong_after_a_withdrawal(host: InferenceHost, seen: Seen, begun: float) -> list[str]:  # noqa: ARG001
    host.restart()
    checks = {
        f"steps {steps_of(host)} run": steps_of(host) != "3",
        f"an override is left: {seen.files}": any("watchdog" in path or path.endswith(".env") for path in seen.files),
        "no tokens came": host.tokens(4) != 4,
        f"incidents: {seen.outcomes}": bool({"open", "failed", "held"} & set(seen.outcomes)),
    }
    return [said for said, is_wrong in checks.items() if is_wrong]


@pytest.mark.parametrize("way", Way)
def test_an_override_is_withdrawn_wherever_the_watchdog_is_killed(inference: Inference, way: Way) -> None:
    with inference(settings=ENDLESS, simulation=FAST, way=way) as host:
        proven(host)
        host.change(steps=10)
        host.reload()
        host.restart(wait=False)
        host.wait_alert(OUTCOME="contained")
        assert override(host)
        save(host)
        host.host.write(DROP_IN, SERVICE_DROP_IN)
        trial = Trial(change_the_flags, withdrawn, wrong_after_a_withdrawal)
        kill_at_every_point(host, trial, f"withdrawal by {way}", TELLING_OF_A_WITHDRAWAL[way])


# The watchdog is stopped for good while it holds a unit


def stop_while_it_holds(host: InferenceHost, arm: Callable[[], None]) -> None:
    let_go(host.host)
    host.host.systemctl("start", "--no-block", SERVICE)
    start_what_fails(host)
    wait_step(host, Step.FREE)
    arm()
    host.host.systemctl("stop", "--no-block", SERVICE)


def handed_back(host: InferenceHost, seen: Seen) -> bool:
    over = all(host.host.show(unit, "ActiveState")["ActiveState"] in ENDED for unit in (SERVICE, HAND_BACK))
    return over and seen.outcomes[-1:] == ["yielded"]


def wrong_after_a_hand_back(host: InferenceHost, seen: Seen, begun: float) -> list[str]:  # noqa: ARG001
    checks = {
        f"the unit is left {host.state()}": is_down(host),
        f"left open: {seen.outcomes}": "open" in seen.outcomes,
        f"an override is left: {seen.files}": any("watchdog" in path or path.endswith(".env") for path in seen.files),
    }
    return [said for said, is_wrong in checks.items() if is_wrong]


def test_a_held_unit_is_handed_back_wherever_the_watchdog_is_killed_on_its_way_out(inference: Inference) -> None:
    with inference(settings=ENDLESS, simulation=FAST, restart_s=1.0) as host:
        proven(host)
        save(host)
        host.host.write(DROP_IN, SERVICE_DROP_IN)
        host.change(steps=10, simulation=replace(host.sglang.simulation, driver_lag_s=KEPT_S))
        trial = Trial(stop_while_it_holds, handed_back, wrong_after_a_hand_back)
        kill_at_every_point(host, trial, "hand-back", ("bus start after#1", "alert incident_closed() before#1"))
