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
    """One request in the batch, or on its way into it; a retracted one keeps what it has."""

    request: Request
    limit: int
    produced: float = 0.0

    @property
    def done(self) -> bool:
        return self.produced >= self.limit

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + int(self.produced)


@dataclass
class Batch:
    """Requests of one scheduler."""

    max_running: int
    max_tokens: int
    running: dict[str, Live] = field(default_factory=dict)
    waiting: deque[Live] = field(default_factory=deque)
    generated: int = 0
    finished: int = 0
    steps: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that occupy the pool."""
        return sum(one.tokens for one in self.running.values())

    def add(self, request: Request) -> None:
        room = max(1, self.max_tokens - request.prompt_tokens - 6)
        self.waiting.append(Live(request, min(request.max_tokens, room)))

    def drop(self, rid: str) -> None:
        self.running.pop(rid, None)
        self.waiting = deque(one for one in self.waiting if one.request.rid != rid)

    def admit(self) -> list[Live]:
        """Take waiting requests in, as far as slots and tokens reach."""
        taken: list[Live] = []
        held = self.tokens
        while self.waiting and len(self.running) < self.max_running:
            held += self.waiting[0].tokens
            if held > self.max_tokens and self.running:
                break
            one = self.waiting.popleft()
            self.running[one.request.rid] = one
            taken.append(one)
        return taken

    def retract(self) -> list[Live]:
        """Send the newest requests back to wait until the pool holds the rest."""
        back: list[Live] = []
        while len(self.running) > 1 and self.tokens > self.max_tokens:
            _, one = self.running.popitem()
            back.append(one)
        # Behind those that wait already, so that they do not come back at once.
        self.waiting.extend(back)
        return back

    def speed(self, alone: float) -> float:
        """Tokens a second of all together, given one request's."""
        count = len(self.running)
        return alone * count / (1 + SHARING * (count - 1)) if count else 0.0

    def advance(self, seconds: float, alone: float, accepted: float, endless: bool) -> list[tuple[str, int, bool]]:
        """Let time pass; the answer is what each request got and whether it is done.

        With `endless` no client's request is ever done.
        """
        share = self.speed(alone) / max(1, len(self.running)) * seconds
        longest = max((one.limit - one.produced for one in self.running.values()), default=0.0)
        self.steps += (share if endless else min(share, longest)) / accepted
        got = [self._grow(one, share, endless) for one in list(self.running.values())]
        return [one for one in got if one[1] or one[2]]

    def _grow(self, one: Live, share: float, endless: bool) -> tuple[str, int, bool]:
        before = int(one.produced)
        most = max(one.limit, self.max_tokens - one.request.prompt_tokens) if endless else one.limit
        one.produced = min(one.produced + share, most)
        new = int(one.produced) - before
        self.generated += new
        done = one.done and not (endless and one.request.kind is Kind.CLIENT)
        if done:
            del self.running[one.request.rid]
            self.finished += one.request.kind is Kind.CLIENT
        return one.request.rid, new, done
