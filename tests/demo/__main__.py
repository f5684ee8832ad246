"""`make demo`: a host, an operator, a bad deploy, and a watchdog. Exit status 0 if all of it came out right."""

import os
import sys

from demo import offline
from demo.screen import Screen
from demo.story import Ending, play, stage
from demo.timeline import Timeline
from lab.host import LabHost, lab_problem


def main() -> int:
    if problem := lab_problem():
        print(f"demo: no lab host can boot here ({problem}), so the live story is left out; a recorded run instead.")
        status = offline.show()
        return status or bool(os.environ.get("CI"))
    screen = Screen()
    ending = _live(screen)
    screen.ending(ending)
    return bool(ending.problems())


def _live(screen: Screen) -> Ending:
    screen.console.print("Booting a host with a systemd of its own and four simulated cards …")
    with LabHost.boot("demo") as host, stage(host) as inference:
        screen.heading()
        timeline = Timeline(inference, screen.show)
        with screen.live(timeline), timeline.running():
            return play(inference, timeline.say)


if __name__ == "__main__":
    sys.exit(main())
