"""What can go wrong with the lab itself, as opposed to what a test looks for."""

from collections.abc import Sequence
from pathlib import Path


class LabUnavailable(Exception):
    """This machine cannot boot lab hosts; the message is one line that says why."""


class LabBootFailed(Exception):
    """A host did not come up; the message ends with what its console said."""


class CommandFailed(Exception):
    """A command in a host failed; shows all there is to know about it."""

    def __init__(self, argv: Sequence[str | Path], how: str, stdout: str, stderr: str) -> None:
        command = " ".join(str(word) for word in argv)
        super().__init__(f"{command}: {how}\nstdout: {stdout.strip()}\nstderr: {stderr.strip()}")
        self.stdout = stdout
        self.stderr = stderr
