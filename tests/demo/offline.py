"""What the demo can still show where no lab host boots: the diagnosis of a recorded run of a real server."""

import subprocess
import sys
from pathlib import Path

from lab.host import CHECKOUT

CASE = CHECKOUT / "tests" / "corpus" / "recorded_gpu" / "story_steps10_fail"
DEADLINE_S = 60.0


def show() -> int:
    """Prints `sglang-watchdog diagnose` of the case and returns its exit status."""
    files = ["--journal", str(CASE / "journal.jsonl"), "--show", str(CASE / "show.txt")]
    command = [str(Path(sys.executable).with_name("sglang-watchdog")), "diagnose", *files]
    print(f"$ sglang-watchdog diagnose --journal {CASE.name}/journal.jsonl --show {CASE.name}/show.txt", flush=True)
    return subprocess.run(command, check=False, timeout=DEADLINE_S).returncode
