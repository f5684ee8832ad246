"""What `sglang-watchdog diagnose` answers, whatever it was asked from."""

from dataclasses import dataclass

from sglang_watchdog.domain.failure import Diagnosis


@dataclass(frozen=True, slots=True)
class Answer:
    """A diagnosis, and of what."""

    diagnosis: Diagnosis
    unit: str
    invocation: str
