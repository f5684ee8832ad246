"""What a purge may take away: never an override that keeps a unit from a config that is known not to fit."""

from pathlib import Path

import pytest

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.host.unit_files import OVERRIDES
from sglang_watchdog.leaving import removable
from sglang_watchdog.ledger import Ledger


def steps(count: int) -> SpeculationConfig:
    return SpeculationConfig.of(("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(count)))


@pytest.mark.parametrize(
    ("replaced", "goes"),
    [(steps(10), False), (steps(5), True), (None, False)],
    ids=["a known ceiling", "nothing that is known not to fit", "what cannot be known"],
)
def test_an_override_goes_only_where_that_exposes_no_ceiling(
    tmp_path: Path, replaced: SpeculationConfig | None, goes: bool
) -> None:
    path = tmp_path / OVERRIDES.name / "sglang.service.env"
    path.parent.mkdir()
    path.write_text("x")
    ledger = Ledger.open(tmp_path / "ledger.db")
    ledger.save_ceiling(Ceiling("sglang.service", "another base", steps(10), FailureClass.KV_CACHE_OOM, "a", 0.0))
    ledger.save_override("sglang.service", replaced, steps(4))
    assert removable(ledger, tmp_path) == ([path] if goes else [])
    ledger.close()
