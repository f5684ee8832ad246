"""Commands that the sandbox of our own service has no room for: systemd runs each in a transient unit of its own, so
that the sandbox stays as it is, and what hangs is systemd's to end.
"""

from collections.abc import Sequence

from sglang_watchdog.domain.errors import DeadlineExceeded
from sglang_watchdog.host import child
from sglang_watchdog.host.child import Ended


async def run(*words: str, deadline: float, description: str, properties: Sequence[str] = ()) -> Ended:
    """`deadline` in seconds. Raises `CannotBeRun`, of systemd-run itself, or `DeadlineExceeded`."""
    command = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"]
    command += [f"--description={description}", f"--property=RuntimeMaxSec={max(1, round(deadline))}"]
    command += [f"--property={one}" for one in properties]
    try:
        return await child.run([*command, "--", *words], deadline)
    except DeadlineExceeded:
        raise DeadlineExceeded(f"{words[0]} does not answer within {deadline:.0f} s") from None
