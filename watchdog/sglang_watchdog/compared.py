"""What a launch is compared with: the proof that the ledger has for the same base. One place for the daemon and for
`diagnose`, so that both come to the same answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import MemoryFigures
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Compared:
    """`known_good` has what is best to go back to first. `held` is what everybody held when the first of them was
    started, in bytes by card index, and `memory` what SGLang printed then; None where that is not recorded."""

    known_good: tuple[KnownGood, ...] = ()
    held: Mapping[int, int] | None = None
    memory: MemoryFigures | None = None

    @property
    def config(self) -> SpeculationConfig | None:
        return self.known_good[0].config if self.known_good else None


def compared_with(ledger: Ledger, unit: str, base: str) -> Compared:
    """Raises `LedgerError`."""
    known_good = tuple(ledger.known_good(unit, base))
    proof = ledger.launch(known_good[0].invocation) if known_good else None
    if proof is None:
        return Compared(known_good)
    before = proof.gpu_before
    held = {gpu.index: sum(holder.used_bytes for holder in gpu.holders) for gpu in before.gpus} if before else None
    return Compared(known_good, held, proof.memory)
