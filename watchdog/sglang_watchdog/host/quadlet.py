"""Units that podman generates of `.container` files (Quadlet). The operator edits that file, and systemd has to be
reloaded before the generated unit follows it, so what a start will run then is told from both.

The generated unit has the whole `[Container]` section of its time as `[X-Container]`, and its command ends with the
words of `Exec=` (podman 5.4.2).
"""

from collections.abc import Sequence

from sglang_watchdog.host.unit_syntax import assignments, split_words

SUFFIX = ".container"
Section = Sequence[tuple[str, str]]


def changed_words(generated: str, source: str) -> tuple[list[str], list[str]] | None:
    """The words that the command of the unit that was `generated` ends with, and those that podman would put there of
    `source` now (both are texts of files, specifiers not resolved). None where more has changed than `Exec=`. Raises
    `BadSyntax`."""
    before, now = list(assignments(generated, "X-Container")), list(assignments(source, "Container"))
    if _without_exec(before) != _without_exec(now):
        return None
    return _exec(before), _exec(now)


def _without_exec(section: Section) -> Section:
    return [(key, value) for key, value in section if key != "Exec"]


def _exec(section: Section) -> list[str]:
    """The last one counts."""
    values = [value for key, value in section if key == "Exec"]
    return split_words(values[-1]) if values else []
