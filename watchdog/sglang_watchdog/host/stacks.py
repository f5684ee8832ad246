"""What the processes of a hanging launch are doing, looked at while they still live. Touches none of them."""

from collections.abc import Iterable

from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.host import processes

_MOST_PROCESSES = 24


def states(control_groups: Iterable[str], now: float) -> tuple[Evidence, ...]:
    """What the kernel says of each process: its state, and what it waits in."""
    found = [process.pid for group in control_groups for process in processes.cgroup_processes(group)]
    words = (processes.doing(pid) for pid in found[:_MOST_PROCESSES])
    return tuple(Evidence(Source.PROCESS, text, now) for text in words if text)
