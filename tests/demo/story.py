"""The story of one bad deploy: what the operator does, hour by hour, and what must have come of it in the end.

An operator sweeps --speculative-num-steps. Steps 4 and 5 serve, steps 10 cannot fit. A stop that is cut off, a unit
file that was not reloaded and a process that was left over make every failure look the same to them. The demo shows
it live, a test plays the same; neither adds anything to it.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lab.host import LabHost
from lab_product.installed import Bystander, InferenceHost, inference_host
from lab_product.sglang_unit import Way
from sim_nvml import MIB
from sim_sglang.simulation import Simulation
from waiting import wait_until

GOOD, BETTER, TOO_MANY = 4, 5, 10
REQUESTS, TOKENS_EACH = 16, 15_000
TIMEOUT_STOP_S = 4.0
# Longer than the operator ever lets steps 5 run, so that steps 4 is what there is to go back to.
SOAK_S = 10.0
BYSTANDER_BYTES = 64 * MIB
SECRET = "sk-night-shift-5f1d0c7e2b9a"
FAILURE_DEADLINE_S = 60.0
UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"
PROCESS_EXIT = "98e322203f7a4ed290d09fe03c09fe15"

# Class and outcome of every incident, oldest first.
EXPECTED = (
    ("requested_stop", "reported"),
    ("stop_timeout_sigkill", "reported"),
    ("stale_unit_file", "reported"),
    ("requested_stop", "reported"),
    ("gpu_memory_held", "failed"),
    ("kv_cache_oom", "contained"),
)
# What each launch ran, as its own command has it.
EXPECTED_STEPS = (GOOD, BETTER, BETTER, TOO_MANY, TOO_MANY, GOOD)


class Line(StrEnum):
    """What a line of the story is."""

    CHAPTER = "chapter"
    COMMAND = "command"  # the operator types it
    OPERATOR = "operator"  # what they see or believe


Say = Callable[[Line, str], None]


@dataclass(frozen=True)
class Ending:
    """What there is to see once the story is over. Incidents and launches are the ledger's, oldest first."""

    incidents: list[dict[str, Any]]
    launches: list[dict[str, Any]]
    state: str
    argv: list[str]
    tokens: int
    bystanders_alive: bool
    exit_to_start_s: float

    @property
    def classes(self) -> tuple[tuple[str, str], ...]:
        return tuple((incident["class"], incident["outcome"]) for incident in self.incidents)

    @property
    def steps(self) -> int:
        """Of the server that runs in the end, from its command."""
        return steps_of(self.argv)

    @property
    def launch_steps(self) -> tuple[int, ...]:
        return tuple(steps_of(launch["argv"]) for launch in self.launches)

    def problems(self) -> list[str]:
        """What is not as it ought to be, a sentence each."""
        checks = {
            f"the incidents are {self.classes}, not {EXPECTED}": self.classes != EXPECTED,
            f"the launches are recorded with steps {self.launch_steps}, not {EXPECTED_STEPS}": (
                self.launch_steps != EXPECTED_STEPS
            ),
            f"the unit is {self.state} in the end": self.state != "active/running",
            f"steps {self.steps} run in the end, not {GOOD}": self.steps != GOOD,
            "the server generates no tokens": self.tokens <= 0,
            "a bystander on the cards was ended": not self.bystanders_alive,
        }
        return [problem for problem, wrong in checks.items() if wrong]


def steps_of(argv: list[str]) -> int:
    """The last --speculative-num-steps of a command, which is the one that counts; 0 without."""
    values = [value for flag, value in itertools.pairwise(argv) if flag == "--speculative-num-steps"]
    return int(values[-1]) if values else 0


@contextmanager
def stage(
    host: LabHost, way: Way = Way.DROP_IN, *, name: str = "sglang.service", driver_lag_s: float = 0.2
) -> Iterator[InferenceHost]:
    """The host as the operator has it that evening: steps 4, the watchdog installed and allowed to act.

    The unit's KillMode=process leaves children to themselves, which is how one is left over.
    """
    with inference_host(
        host,
        name=name,
        way=way,
        steps=GOOD,
        simulation=Simulation(driver_lag_s=driver_lag_s),
        settings={"act": True, "soak": SOAK_S},
        api_key=SECRET,
        kill_mode="process",
        timeout_stop_s=TIMEOUT_STOP_S,
        restart_s=1.0,
    ) as inference:
        yield inference


def play(inference: InferenceHost, say: Say) -> Ending:
    """Plays it from the first start to the end."""
    with ExitStack() as stack:
        bystanders = [stack.enter_context(inference.bystander(1, BYSTANDER_BYTES))]
        _steps_4_become_known_good(inference, say)
        _steps_5_are_deployed(inference, say)
        _a_stop_is_cut_off(inference, say)
        bystanders.append(stack.enter_context(_the_old_definition_starts(inference, say)))
        _steps_10_are_tried(inference, say)
        return _ending(inference, bystanders)


def _steps_4_become_known_good(inference: InferenceHost, say: Say) -> None:
    say(Line.CHAPTER, "Steps 4 serve")
    _type(say, "systemctl start sglang")
    inference.start()
    say(Line.OPERATOR, f"{inference.tokens(64)} tokens generated with steps {GOOD}")
    inference.wait_known_good()


def _steps_5_are_deployed(inference: InferenceHost, say: Say) -> None:
    say(Line.CHAPTER, "Steps 5 are deployed, as one does it")
    _type(say, f"sed -i 's/num-steps {GOOD}/num-steps {BETTER}/' sglang.service")
    _write(inference, BETTER, faults="leak_child")
    _type(say, "systemctl daemon-reload; systemctl restart sglang")
    inference.reload()
    inference.restart()
    say(Line.OPERATOR, f"{inference.tokens(64)} tokens generated with steps {BETTER}")


def _a_stop_is_cut_off(inference: InferenceHost, say: Say) -> None:
    say(Line.CHAPTER, "Steps 10: written, not reloaded; the stop has requests to wait for")
    _type(say, f"sed -i 's/num-steps {BETTER}/num-steps {TOO_MANY}/' sglang.service")
    _write(inference, TOO_MANY)
    inference.load(REQUESTS, TOKENS_EACH)
    _type(say, f"systemctl stop sglang      # {REQUESTS} requests are running")
    inference.stop()
    inference.wait_alert(CLASS="stop_timeout_sigkill")
    _wait_closed(inference, "stop_timeout_sigkill")


@contextmanager
def _the_old_definition_starts(inference: InferenceHost, say: Say) -> Iterator[Bystander]:
    """Beside it a stranger starts that carries the launch's id in its environment, as what is started from a shell of
    the unit does."""
    say(Line.CHAPTER, "The start that seems to serve with steps 10")
    _type(say, "systemctl start sglang")
    inference.start(wait=False)
    with inference.bystander(3, BYSTANDER_BYTES, INVOCATION_ID=inference.invocation()) as heir:
        inference.wait_ready()
        say(Line.OPERATOR, f'{inference.tokens(64)} tokens generated: "steps {TOO_MANY} work!"')
        inference.wait_alert(CLASS="stale_unit_file")
        yield heir


def _steps_10_are_tried(inference: InferenceHost, say: Say) -> None:
    say(Line.CHAPTER, "Steps 10 for real, beside a process that the last launch left over")
    _type(say, "systemctl daemon-reload; systemctl restart sglang")
    began = time.time()
    inference.reload()
    inference.restart(wait=False)
    inference.wait_alert(FAILURE_DEADLINE_S, since=began, CLASS="gpu_memory_held")
    say(Line.OPERATOR, "goes to get a coffee, and touches nothing")
    inference.wait_alert(FAILURE_DEADLINE_S, since=began, CLASS="kv_cache_oom")
    _wait_closed(inference, "kv_cache_oom")
    inference.wait_ready()
    say(Line.OPERATOR, f"{inference.tokens(64)} tokens generated")


def _ending(inference: InferenceHost, bystanders: list[Bystander]) -> Ending:
    history = inference.history()
    incidents, launches = history["incidents"][::-1], history["launches"][::-1]
    return Ending(
        incidents,
        launches,
        inference.state(),
        inference.argv(),
        inference.tokens(64),
        all(bystander.alive() for bystander in bystanders),
        _exit_to_start_s(inference, incidents[-1]["invocation"]) if incidents else 0.0,
    )


def _type(say: Say, command: str) -> None:
    say(Line.COMMAND, command)


def _write(inference: InferenceHost, steps: int, faults: str = "") -> None:
    """The unit file with other steps. What a launch leaves over belongs to its definition, so that it is sure which
    one does."""
    inference.change(steps=steps, simulation=dataclasses.replace(inference.sglang.simulation, faults=faults))


def _wait_closed(inference: InferenceHost, failure: str) -> None:
    def closed() -> bool:
        incidents = inference.history()["incidents"]
        return any(one["class"] == failure and one["closed"] is not None for one in incidents)

    wait_until(closed, FAILURE_DEADLINE_S, f"the incident of {failure} is closed\n{inference.log()}")


def _exit_to_start_s(inference: InferenceHost, invocation: str) -> float:
    """From PID 1's word that the main process of that launch exited to its word that the next one is started."""
    told = inference.host.journal("_PID=1", f"UNIT={inference.unit}")
    exits = [_time(one) for one in told if one.get("MESSAGE_ID") == PROCESS_EXIT and one["INVOCATION_ID"] == invocation]
    starts = [_time(one) for one in told if one.get("MESSAGE_ID") == UNIT_STARTED]
    return min(start for start in starts if start > exits[-1]) - exits[-1]


def _time(entry: dict[str, Any]) -> float:
    return int(entry["__REALTIME_TIMESTAMP"]) / 1e6
