"""How the simulation itself is steered: by environment variables, never by SGLang's flags.

SIM_SGLANG_RELEASE     the release to simulate (0.5.9)
SIM_SGLANG_PROFILE     the model: hybrid122b, dense or tiny (hybrid122b)
SIM_SGLANG_TIME_SCALE  simulated seconds are multiplied by this (0.05)
SIM_SGLANG_DRIVER_LAG  real seconds until the driver gives a dead scheduler's memory back (0.2)
SIM_SGLANG_CONTROL     a file of faults that is read anew at each decision (none)
SIM_SGLANG_FAULT       faults from the start on, separated by commas (none)
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from sim_sglang.release import Release


@dataclass(frozen=True)
class Settings:
    """What one simulated server was told."""

    release: Release
    profile: str
    time_scale: float
    driver_lag_s: float
    control: str | None
    faults: str

    @classmethod
    def from_environment(cls) -> Settings:
        get = os.environ.get
        return cls(
            release=Release.parse(get("SIM_SGLANG_RELEASE", "0.5.9")),
            profile=get("SIM_SGLANG_PROFILE", "hybrid122b"),
            time_scale=float(get("SIM_SGLANG_TIME_SCALE", "0.05")),
            driver_lag_s=float(get("SIM_SGLANG_DRIVER_LAG", "0.2")),
            control=get("SIM_SGLANG_CONTROL"),
            faults=get("SIM_SGLANG_FAULT", ""),
        )

    def rest(self, seconds: float) -> None:
        """Let so many of the real server's seconds pass."""
        time.sleep(seconds * self.time_scale)
