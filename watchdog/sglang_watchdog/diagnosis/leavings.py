"""What of an input could not be used, so that a report can say it."""

from sglang_watchdog.domain.errors import UnusableInput


class Leavings:
    """Counts what is left out of one input. `name` is for messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = self._last = self._lines = 0
        self._first: tuple[int, str] | None = None

    def left_out(self, number: int, reason: str) -> None:
        """A line (of `-o export`, an entry) that is left out: its number from 1 on, and what it is."""
        self._count += 1
        self._last = number
        self._first = self._first or (number, reason)

    def ended(self, lines: int, *, used: bool, wanted: str) -> None:
        """The end of the input. Raises UnusableInput where nothing of it was used."""
        self._lines = lines
        if used:
            return
        if self._first:
            number, reason = self._first
            raise UnusableInput(f"{self.name}, line {number}: {reason}. {wanted}")
        raise UnusableInput(f"{self.name} is empty")

    @property
    def note(self) -> str:
        """One sentence, empty where everything was used. A last line that was cut off is not worth one."""
        if not self._first or (self._count == 1 and self._last == self._lines):
            return ""
        number, reason = self._first
        what = "One line of it" if self._count == 1 else f"{self._count} lines of it"
        return f"{self.name} is damaged: {what} could not be read (line {number} first: {reason}). The rest was used."
