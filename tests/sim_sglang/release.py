"""What differs between SGLang releases, as questions a release answers.

Owns the version ranges and nothing else; where each was read or measured is said beside it. "Old" formulas and lines
are those up to 0.5.12, which the order of a start changed after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[1] / "corpus" / "startup"


@dataclass(frozen=True, order=True)
class Release:
    """One SGLang release; a post release counts as the release it mends."""

    number: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Release:
        found = re.match(r"\d+(?:\.\d+)*", text)
        if not found:
            raise ValueError(f"not an SGLang release: {text!r}")
        return cls(tuple(int(part) for part in found.group().split(".")))

    def __str__(self) -> str:
        return ".".join(map(str, self.number))

    def at_least(self, text: str) -> bool:
        return self >= Release.parse(text)

    # -- start

    @property
    def sizes_pools_last(self) -> bool:
        """Draft weights before the target's pools, then all graph captures; new wording of the capture lines."""
        return self.at_least("0.5.14")

    @property
    def degrades_hybrid(self) -> bool:
        """More draft tokens lower the state slots, and so the running requests, where older releases ran out."""
        return self.at_least("0.5.14")

    @property
    def init_line(self) -> str:
        return "Init parallel" if self.at_least("0.5.23") else "Init torch distributed"

    @property
    def prints_timings(self) -> bool:
        return self.at_least("0.5.18")

    @property
    def freezes_gc(self) -> bool:
        return self.at_least("0.5.18")

    # -- serving

    @property
    def prefill_graph_last(self) -> bool:
        return not self.at_least("0.5.10")

    @property
    def counts_pending_tokens(self) -> bool:
        return self.at_least("0.5.12")

    def accept_rate(self, accept_len: float, draft_tokens: int) -> float:
        """The fraction that this release prints beside `accept len`."""
        if self.at_least("0.5.11"):
            return (accept_len - 1) / max(1, draft_tokens - 1)
        return accept_len / draft_tokens

    # -- ends

    @property
    def watches_children(self) -> bool:
        """A child killed by a signal brings the server down; before, the main process stayed."""
        return self.at_least("0.5.10")

    @property
    def runs_crash_diagnostics(self) -> bool:
        return self.at_least("0.5.14")

    @property
    def logs_tree_kill(self) -> bool:
        return self.at_least("0.5.14")

    @property
    def asks_schedulers_to_end(self) -> bool:
        return self.at_least("0.5.14")

    @property
    def drained_exit_is_clean(self) -> bool:
        return self.at_least("0.5.20")

    @property
    def bind_failure_status(self) -> int:
        """uvicorn's exit status for an address in use (3 from uvicorn 0.51 on)."""
        return 3 if self.at_least("0.5.20") else 1

    @property
    def warms_up_against_a_stranger(self) -> bool:
        """The warm-up thread talks to whoever has the port, and says `fired up` although binding it failed."""
        return not self.at_least("0.5.17")

    # -- names

    @property
    def program(self) -> str:
        return "sglang serve" if self.at_least("0.5.16") else "launch_server.py"

    def has_path(self, path: str) -> bool:
        """Is this HTTP path there in this release?"""
        match path:
            case "/get_load":
                return not self.at_least("0.5.23")
            case "/ready":
                return self.at_least("0.5.20")
            case "/model_info" | "/server_info" | "/v1/loads":
                return self.at_least("0.5.9")
            case "/freeze_gc":
                return self.freezes_gc
        return True

    def template(self) -> Path:
        """The recorded start-up log of the newest release that is not newer than this one (else the oldest)."""
        recorded = sorted(
            (Release.parse(path.name.removeprefix("sglang-")), path) for path in TEMPLATES.glob("sglang-*.log")
        )
        fitting = [path for release, path in recorded if release <= self]
        return fitting[-1] if fitting else recorded[0][1]
