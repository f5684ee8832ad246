"""What a launch really ran with, and how sure that is: `server_args`, then argv, then what its decode lines imply."""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.server_args import shown
from sglang_watchdog.diagnosis.signatures import Release, ReleaseRange, catalog
from sglang_watchdog.diagnosis.timeline import Decoding, Timeline
from sglang_watchdog.domain.numbers import whole
from sglang_watchdog.domain.speculation import Command, SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot

_LAUNCHERS = ("sglang.launch_server", "sglang", "launch_server.py")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "env"})


@dataclass(frozen=True, slots=True)
class Speculation:
    """`on` is None where nothing tells. `source` says where the figures are from, for people."""

    on: bool | None = None
    steps: int | None = None
    draft_tokens: int | None = None
    algorithm: str = ""
    source: str = ""

    def describe(self) -> str:
        if self.on is False:
            return "no speculation"
        if self.steps is not None:
            return f"steps {self.steps}"
        if self.draft_tokens is not None:
            return f"{self.draft_tokens} draft tokens"
        return "speculation"


def server_args_of(case: Case) -> Mapping[str, object]:
    return case.timeline.server_args or (case.launch.server_args if case.launch else {})


def releases_of(case: Case) -> ReleaseRange:
    """SGLang's release: as recorded, else what the log's wordings leave possible."""
    recorded = Release.parse(case.launch.version) if case.launch else None
    return ReleaseRange(recorded, recorded) if recorded else case.timeline.releases


def wordings_of(case: Case) -> ReleaseRange:
    """The releases whose wordings count: all, where the release is not one of those that were read."""
    ran = releases_of(case)
    return ran if ran.known and ran.overlaps(catalog().known) else ReleaseRange()


def argv_of(case: Case) -> tuple[str, ...]:
    """The command that ran: the ledger's record, else the unit's ExecStart= where it is this launch's and in plain
    words (no variables, no shell)."""
    if case.launch and case.launch.argv:
        return case.launch.argv
    return plain_command(case.unit) if case.unit and is_of(case.unit, case.timeline) else ()


def plain_command(unit: UnitSnapshot) -> tuple[str, ...]:
    """ExecStart= as it will be run, empty where that cannot be told from its words."""
    words = unit.exec_start
    if not words or any("$" in word for word in words) or words[0].rpartition("/")[2] in _SHELLS:
        return ()
    return words if any(word.endswith(_LAUNCHERS) for word in words[:8]) and "--config" not in words else ()


def is_of(unit: UnitSnapshot, timeline: Timeline) -> bool:
    """Whether the snapshot is of the timeline's launch. Where one of the two has no id, it is taken so."""
    return not unit.invocation or not timeline.invocation or unit.invocation == timeline.invocation or _plain(timeline)


def _plain(timeline: Timeline) -> bool:
    return timeline.invocation.startswith("text-")


def effective_settings(case: Case) -> dict[str, object]:
    """The flags that ran, for the report: SGLang's names. From argv where the effective ones were not printed."""
    printed = shown(server_args_of(case))
    if printed:
        return printed
    wanted = ("mem-fraction-static", "max-running-requests", "tp-size", "tp", "context-length", "cuda-graph-max-bs")
    options = Command.parse(argv_of(case)).options
    chosen = [o for o in options if o[0].startswith("--speculative-") or o[0].removeprefix("--") in wanted]
    return {name.removeprefix("--").replace("-", "_"): _value(values) for name, values in chosen}


def _value(values: tuple[str, ...]) -> object:
    text = " ".join(values)
    number = whole(text)
    return number if number is not None else text or True


def speculation_of(case: Case) -> Speculation:
    """The speculation that ran, by the best witness. The unit's own ExecStart= is the last: it is what systemd has
    loaded now, and may have been loaded after the launch began."""
    recorded = case.launch.argv if case.launch else ()
    witnesses = (_printed(server_args_of(case)), _asked(recorded), _implied(case), _asked(argv_of(case)))
    ran = next((witness for witness in witnesses if witness), Speculation())
    if case.timeline.drafts and not ran.on:
        return Speculation(on=True, source="the draft worker's lines")
    return ran


def _printed(server_args: Mapping[str, object]) -> Speculation | None:
    if "speculative_algorithm" not in server_args:
        return None
    algorithm = server_args["speculative_algorithm"]
    return Speculation(
        on=bool(algorithm),
        steps=_int(server_args.get("speculative_num_steps")) if algorithm else None,
        draft_tokens=_int(server_args.get("speculative_num_draft_tokens")) if algorithm else None,
        algorithm=str(algorithm or ""),
        source="server_args",
    )


def _asked(argv: tuple[str, ...]) -> Speculation | None:
    if not argv or "--config" in argv:  # a file of flags
        return None
    config = SpeculationConfig.of(argv)
    return Speculation(
        on=bool(config.flags),
        steps=config.steps,
        draft_tokens=config.draft_tokens,
        algorithm=dict(config.flags).get("--speculative-algorithm", ("",))[0],
        source="the command line",
    )


def _implied(case: Case) -> Speculation | None:
    tokens = implied_draft_tokens(case.timeline, releases_of(case))
    if tokens is None:
        return None
    return Speculation(on=True, steps=tokens - 1, draft_tokens=tokens, source="accept len and accept rate")


def implied_draft_tokens(timeline: Timeline, releases: ReleaseRange) -> int | None:
    """Draft tokens per verify step, from one decode line: accept rate is accept len over draft tokens up to 0.5.10, and
    counts drafts alone from 0.5.11 on. None where the figures allow more than one whole number, or the release is not
    known and the two rules differ."""
    line = timeline.verifying
    if line is None:
        return None
    old = {_solve(line, drafts_alone=False)}
    new = {_solve(line, drafts_alone=True)}
    answers = old if releases.surely_before("0.5.11") else new if releases.surely_from("0.5.11") else old | new
    known = {answer for answer in answers if answer}
    return known.pop() if len(known) == 1 else None


def _solve(line: Decoding, *, drafts_alone: bool) -> int | None:
    """The one whole number of draft tokens that both figures, rounded to two digits, allow."""
    if not line.accept_len or not line.accept_rate:
        return None
    offset = 1 if drafts_alone else 0
    low = (line.accept_len - offset - 0.005) / (line.accept_rate + 0.005) + offset
    high = (line.accept_len - offset + 0.005) / (line.accept_rate - 0.005) + offset if line.accept_rate > 0.01 else 0.0
    whole = [n for n in range(max(2, int(low)), min(int(high) + 1, 65)) if low <= n <= high and line.accept_len <= n]
    return whole[0] if len(whole) == 1 else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
