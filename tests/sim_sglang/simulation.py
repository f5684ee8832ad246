"""How to start a simulated server: the command that looks like the real one, and the environment that steers it.

For unit files of the lab, for the demo, and for tests that start one themselves. Nothing here starts anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"


def sweep_flags(steps: int) -> tuple[str, ...]:
    """SGLang's flags for one point of the published sweep: steps 4 serves, steps 10 does not fit."""
    return (
        *("--model-path", "/models/qwen3.5-122b-a10b", "--tp-size", "4"),
        *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)),
    )


SWEEP_FLAGS = sweep_flags(4)


@dataclass(frozen=True)
class Simulation:
    """One way to simulate a server; `environment` goes into the unit, `command` into its ExecStart."""

    release: str = "0.5.9"
    profile: str = "hybrid122b"
    time_scale: float = 0.05
    nvml: Path | None = None
    control: Path | None = None
    faults: str = ""
    driver_lag_s: float = 0.2
    keep_environ: bool = True  # SPT_NOENV: titled workers keep their environment readable

    def environment(self) -> dict[str, str]:
        """Variables to set; none of SGLang's own."""
        found = {
            "PYTHONPATH": str(SITE),
            "SIM_SGLANG_RELEASE": self.release,
            "SIM_SGLANG_PROFILE": self.profile,
            "SIM_SGLANG_TIME_SCALE": str(self.time_scale),
            "SIM_SGLANG_DRIVER_LAG": str(self.driver_lag_s),
            "SIM_SGLANG_FAULT": self.faults,
        }
        if self.nvml:
            found["SIM_NVML_DIR"] = str(self.nvml)
        if self.control:
            found["SIM_SGLANG_CONTROL"] = str(self.control)
        if self.keep_environ:
            found["SPT_NOENV"] = "1"
        return found


def command(*flags: str, python: str = sys.executable, options: Sequence[str] = ()) -> list[str]:
    """The command line, as an operator writes it for the real server."""
    return [python, *options, "-m", "sglang.launch_server", *flags]
