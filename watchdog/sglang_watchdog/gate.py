"""The start gate of one unit, asked by its `ExecCondition=` before each start (contrib/systemd).

Whatever it cannot see, it lets pass: a start that ends badly is diagnosed and recovered as ever.
"""

from collections.abc import Callable

import structlog

from sglang_watchdog.cards import Cards
from sglang_watchdog.domain.known_good import Ceiling
from sglang_watchdog.domain.launch import Launch
from sglang_watchdog.domain.secrets import redact_argv
from sglang_watchdog.domain.speculation import Command, SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import processes, unit_files
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.gate import GateAnswer, GateMove, decide

log = structlog.get_logger()


class Gate:
    """Of one unit. `may_act` tells whether the watchdog may keep a start back at all: never of several nodes."""

    def __init__(self, unit: str, parts: Parts, cards: Cards, inquest: Inquest, may_act: Callable[[], bool]) -> None:
        self._unit = unit
        self._parts = parts
        self._cards = cards
        self._inquest = inquest
        self._may_act = may_act

    async def answer(self) -> GateAnswer:
        snapshot = self._parts.systemd.snapshot(self._unit)
        argv = unit_files.planned_argv(snapshot)
        if not self._may_act() or Command.parse(argv).several_nodes:
            return decide(may_act=False, ceiling=None, held=())
        held = await self._cards.held(snapshot)
        ceiling = await self._ceiling(argv) if argv else None
        answer = decide(may_act=True, ceiling=ceiling, held=held)
        if answer.reason:
            log.info("start gate", unit=self._unit, move=str(answer.move), why=answer.reason)
        if answer.move is GateMove.REFUSE and snapshot.in_condition:  # and not only asked by a person
            self._record(snapshot, argv)
        return answer

    def _record(self, snapshot: UnitSnapshot, argv: tuple[str, ...]) -> None:
        """By its record a start that we refused is told from one that a condition of the operator's own did. Raises
        `LedgerError`, which lets the start pass."""
        launch = Launch(
            self._unit,
            snapshot.invocation,
            self._parts.clock.now(),
            boot_id=processes.boot_id(),
            argv=redact_argv(argv),
        )
        self._parts.ledger.save_launch(launch)

    async def _ceiling(self, argv: tuple[str, ...]) -> Ceiling | None:
        if not self._cards.uuids:
            return None  # part of what a proof holds for
        base = self._inquest.base_of(redact_argv(argv), await self._parts.files.read(argv))
        config = SpeculationConfig.of(argv, self._inquest.managed)
        ceilings = self._parts.ledger.ceilings(self._unit, base)
        return next((ceiling for ceiling in ceilings if ceiling.config.same_as(config)), None)
