"""The models that can be simulated, and their figures.

`hybrid122b` follows a published sweep on 4 cards of 96 GB (tensor parallel 4, BF16): 123, 186, 234, 277, 282 tok/s for
steps 1 to 5; 455 357, 377 207, 295 931 tokens and 26, 21, 17 running requests for steps 1 to 3. Its shapes were chosen
as a 122B hybrid model has them (48 layers, 12 of them full attention); SGLang's own formulas (memory.py) then give
the first two pairs exactly, and the third with 37 MiB less free than in the other runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class StateShape:
    """Recurrent state of the linear-attention layers, bytes for one slot over all ranks."""

    conv: int
    ssm: int


@dataclass(frozen=True)
class Profile:
    """Bytes over all ranks unless said otherwise; tok/s and accept length by steps (0 is no speculation)."""

    name: str
    architecture: str
    draft_architecture: str
    context_len: int
    weights: int
    draft_weights: int
    cell: int
    draft_cell: int
    default_steps: int
    mem_fraction: float
    tokens_per_second: Mapping[int, float]
    accept_len: Mapping[int, float]
    graph_base: int  # a rank: what any capture costs
    graph_per_token: int  # a rank: for each draft token at the default batch sizes
    state: StateShape | None = None
    # The free memory of real runs differs by some MiB from one to the next: by draft tokens, bytes a rank.
    run_spread: Mapping[int, int] = field(default_factory=dict)

    def rate(self, steps: int) -> float:
        """Tokens a second of one request."""
        return self.tokens_per_second.get(steps, self.tokens_per_second[max(self.tokens_per_second)])

    def accepted(self, steps: int) -> float:
        """Mean tokens of one verify step; a little short of all drafts, and ever shorter the more there are."""
        return self.accept_len.get(steps, min(steps + 1, 5.5 + 0.2 * (steps - 5)))


HYBRID_122B = Profile(
    name="hybrid122b",
    architecture="Qwen3_5MoeForConditionalGeneration",
    draft_architecture="Qwen3_5ForCausalLMMTP",
    context_len=262_144,
    weights=4 * (63_197 * MIB - 905_216),
    draft_weights=4 * 1_536 * MIB,
    cell=4 * 12_288,  # 1 KV head of 256 a rank, K and V, 12 layers, 2 bytes
    draft_cell=4 * 1_024,
    default_steps=3,
    mem_fraction=0.8,
    tokens_per_second={0: 74.0, 1: 123.0, 2: 186.0, 3: 234.0, 4: 277.0, 5: 282.0},
    accept_len={1: 1.93, 2: 2.84, 3: 3.72, 4: 4.61, 5: 5.50},
    graph_base=600 * MIB,
    graph_per_token=120 * MIB,
    state=StateShape(conv=4 * 663_552, ssm=4 * 37_748_736),
    run_spread={4: -(37_498_880 + 905_216)},
)

DENSE = Profile(
    name="dense",
    architecture="LlamaForCausalLM",
    draft_architecture="LlamaForCausalLMEagle3",
    context_len=131_072,
    weights=4 * 33_690 * MIB,
    draft_weights=4 * 512 * MIB,
    cell=4 * 81_920,
    draft_cell=4 * 1_024,
    default_steps=5,
    mem_fraction=0.9,
    tokens_per_second={0: 44.0, 1: 80.0, 2: 111.0, 3: 135.0, 4: 150.0, 5: 157.0, 6: 155.0},
    accept_len={1: 1.78, 2: 2.41, 3: 2.90, 4: 3.27, 5: 3.55, 6: 3.70, 7: 3.80},
    graph_base=500 * MIB,
    graph_per_token=900 * MIB,
)

TINY = Profile(
    name="tiny",
    architecture="LlamaForCausalLM",
    draft_architecture="LlamaForCausalLMEagle",
    context_len=2_048,
    weights=4 * MIB,
    draft_weights=2 * MIB,
    cell=4_096,
    draft_cell=512,
    default_steps=5,
    mem_fraction=0.5,
    tokens_per_second={0: 330.0},
    accept_len={},
    graph_base=16 * MIB,
    graph_per_token=4 * MIB,
)

PROFILES = {one.name: one for one in (HYBRID_122B, DENSE, TINY)}
