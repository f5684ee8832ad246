"""What is asked of systemd through `systemctl`: calls that may outlast the bound of a call over the bus."""

from sglang_watchdog.domain.errors import BusError
from sglang_watchdog.host import child

RELOAD_DEADLINE_S = 90.0
_LIST_DEADLINE_S = 10.0


async def daemon_reload() -> None:
    """Raises `BusError` with systemctl's words, or `DeadlineExceeded`."""
    await _systemctl("daemon-reload", deadline=RELOAD_DEADLINE_S)


async def awaiting_reload() -> tuple[str, ...]:
    """Loaded services whose files changed since they were loaded: a daemon-reload would load all of them."""
    shown = await _systemctl(
        *("show", "--property=Id,NeedDaemonReload", "--type=service", "*"), deadline=_LIST_DEADLINE_S
    )
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.split("\n\n")]
    return tuple(block["Id"] for block in blocks if block.get("NeedDaemonReload") == "yes")


async def _systemctl(*arguments: str, deadline: float) -> str:
    try:
        ended = await child.run(("systemctl", *arguments), deadline)
    except child.CannotBeRun as error:
        raise BusError(str(error)) from error
    if ended.status:
        raise BusError(f"systemctl {arguments[0]}: {ended.complaint}")
    return ended.printed.decode(errors="replace")
