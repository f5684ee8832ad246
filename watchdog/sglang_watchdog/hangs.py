"""What comes of a running launch that makes no progress: what can still be seen of it is kept, and it is an incident.

Once in each hang. It is over when there is progress again, or when the launch ends.
"""

import structlog

from sglang_watchdog.domain.container import places_of
from sglang_watchdog.domain.evidence import Evidence
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import stacks
from sglang_watchdog.incidents import Incidents
from sglang_watchdog.inquest import Inquest
from sglang_watchdog.liveness import Liveness, is_on_its_way_down
from sglang_watchdog.observation import LaunchWatch
from sglang_watchdog.parts import Parts
from sglang_watchdog.recovery.liveness import Life, hang, own_watchdog_is_due
from sglang_watchdog.reporting import alerts

log = structlog.get_logger()


class Hangs:
    """Of one unit."""

    def __init__(self, unit: str, parts: Parts, inquest: Inquest, incidents: Incidents) -> None:
        self._unit = unit
        self._parts = parts
        self._inquest = inquest
        self._incidents = incidents
        self._told = False

    async def see(self, launch: LaunchWatch, snapshot: UnitSnapshot, liveness: Liveness) -> None:
        """After each look at a launch that runs."""
        judgement = liveness.judgement
        if judgement.life is Life.LIVE and self._told:
            alerts.send(alerts.responsive_again(self._unit, launch.invocation, "it makes progress again"))
            self.over("It makes progress again.")
        if judgement.life is not Life.HUNG:
            return
        own_watchdog = own_watchdog_is_due(judgement, liveness.signs, launch.server_args)
        liveness.ask_again()  # before anything is done about it
        if self._told:
            await self._incidents.still_hangs(launch, own_watchdog=own_watchdog)
            return
        log.warning("a launch hangs", unit=self._unit, invocation=launch.invocation, why=judgement.sentence)
        seen = await self._look_closer(launch, snapshot)
        snapshot = self._parts.systemd.snapshot(self._unit)  # all of that may have taken a minute
        if snapshot.invocation != launch.invocation or is_on_its_way_down(snapshot):
            return
        self._told = True
        self._parts.metrics.unresponsive.labels(self._unit).set(1)
        diagnosis = hang(judgement, liveness.signs, seen, self._inquest.diagnose(launch, snapshot))
        self._incidents.hung(launch, snapshot, diagnosis, own_watchdog=own_watchdog)

    async def _look_closer(self, launch: LaunchWatch, snapshot: UnitSnapshot) -> tuple[Evidence, ...]:
        now = self._parts.clock.now()
        groups = (snapshot.control_group, *(p for container in launch.containers for p in places_of(container)))
        python = launch.raw_argv[0] if launch.raw_argv else ""
        name = f"{self._unit}-{launch.invocation[:12]}-{now:.0f}.txt"
        stacked = await stacks.save(groups, python, self._parts.state_dir / stacks.FOLDER, name, now)
        return (*stacks.states(groups, now), *stacked)

    def over(self, how: str) -> None:
        """What is reported anew, should it hang again."""
        self._told = False
        self._parts.metrics.unresponsive.labels(self._unit).set(0)
        self._incidents.hang_is_over(how)
