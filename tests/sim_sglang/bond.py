"""How a child process begins. A module of its own, since the detokenizer needs nothing of a scheduler's."""

from __future__ import annotations

import ctypes
import signal

from sim_sglang.settings import Settings

PR_SET_PDEATHSIG = 1
IMPORT_S = 6.0


def enter(title: str, settings: Settings, follow_parent: bool = True) -> None:
    """A child's first seconds: imports under the spawn command line, then its title, then its bond to the parent.

    Whoever kills the parent before this is over leaves an orphan, as with the real server.
    """
    settings.rest(IMPORT_S)
    from setproctitle import setproctitle  # as late as in the real server: the title comes after the imports

    setproctitle(title)
    if follow_parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
