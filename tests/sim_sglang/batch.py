"""The running batch of a scheduler: who runs, who waits, and how many tokens so much time brings.

Pure but for the state it keeps; time is the real server's seconds, handed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sim_sglang.messages import Kind, Request

# A second request costs the first a little of its speed: sixteen together do about nine times the work of one.
SHARING = 0.05


@dataclass
class Live:
    """One request in the batch."""

    request: Request
    produced: float = 0.0

    @property
    def done(self) -> bool:
        return self.produced >= self.request.max_tokens


@dataclass
class Batch:
    """Requests of one scheduler."""

    max_running: int
    max_tokens: int
    running: dict[str, Live] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    generated: int = 0
    finished: int = 0
    steps: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that occupy the pool."""
        return sum(one.request.prompt_tokens + int(one.produced) for one in self.running.values())

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def drop(self, rid: str) -> None:
        self.running.pop(rid, None)
        self.waiting = deque(one for one in self.waiting if one.rid != rid)

    def admit(self) -> list[Request]:
        """Take waiting requests in, as far as slots and tokens reach."""
        taken: list[Request] = []
        held = self.tokens
        while self.waiting and len(self.running) < self.max_running:
            held += self.waiting[0].prompt_tokens
            if held > self.max_tokens and self.running:
                break
            request = self.waiting.popleft()
            self.running[request.rid] = Live(request)
            taken.append(request)
        return taken

    def speed(self, alone: float) -> float:
        """Tokens a second of all together, given one request's."""
        count = len(self.running)
        return alone * count / (1 + SHARING * (count - 1)) if count else 0.0

    def advance(self, seconds: float, alone: float, accepted: float, endless: bool) -> list[tuple[str, int, bool]]:
        """Let time pass; the answer is what each request got and whether it is done."""
        share = self.speed(alone) / max(1, len(self.running)) * seconds
        longest = max((one.request.max_tokens - one.produced for one in self.running.values()), default=0.0)
        self.steps += (share if endless else min(share, longest)) / accepted
        got = [self._grow(one, share, endless) for one in list(self.running.values())]
        return [one for one in got if one[1] or one[2]]

    def _grow(self, one: Live, share: float, endless: bool) -> tuple[str, int, bool]:
        before = int(one.produced)
        grown = one.produced + share
        one.produced = grown if endless else min(grown, one.request.max_tokens)
        new = int(one.produced) - before
        self.generated += new
        done = one.done and not (endless and one.request.kind is Kind.CLIENT)
        if done:
            del self.running[one.request.rid]
            self.finished += one.request.kind is Kind.CLIENT
        return one.request.rid, new, done
