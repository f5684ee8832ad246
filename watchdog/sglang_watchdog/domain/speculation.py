"""The speculation config: the flags of a command that the watchdog may change, and nothing else of it.

`--speculative-num-steps` (steps) is what counts: with topk 1 SGLang itself makes the draft tokens steps + 1
(`_handle_speculative_decoding`), so a draft-token count that says so is no difference between two configs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_watchdog.domain.numbers import whole

SPECULATIVE_PREFIX = "--speculative-"
_ALIASES = {"--speculative-draft-model": "--speculative-draft-model-path"}

Flag = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Command:
    """An argv taken apart: `head` is what comes before the first option of SGLang, `options` the options in order."""

    head: tuple[str, ...]
    options: tuple[Flag, ...]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "Command":
        first = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
        options: list[Flag] = []
        for word in argv[first:]:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                options.append((name, (value,) if equals else ()))
            elif options:
                name, values = options[-1]
                options[-1] = (name, (*values, word))
        return cls(tuple(argv[:first]), tuple(options))

    def argv(self) -> tuple[str, ...]:
        return (*self.head, *_words(self.options))

    def value(self, name: str) -> str | None:
        """The last value given for an option, as argparse takes it."""
        found = [values for option, values in self.options if option == name]
        return found[-1][0] if found and found[-1] else None

    @property
    def several_nodes(self) -> bool:
        return more_than_one(self.value("--nnodes"))

    def without(self, managed: frozenset[str]) -> "Command":
        return Command(self.head, tuple(o for o in self.options if not is_managed(o[0], managed)))


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The managed flags of one command, sorted by name. Empty: no speculation."""

    flags: tuple[Flag, ...] = ()

    @classmethod
    def of(cls, argv: Sequence[str], managed: frozenset[str] = frozenset()) -> "SpeculationConfig":
        """`managed` names flags beside `--speculative-*` that the operator lets the watchdog change."""
        chosen = {
            _ALIASES.get(name, name): values
            for name, values in Command.parse(argv).options
            if is_managed(name, managed)
        }
        return cls(tuple(sorted(chosen.items())))

    @classmethod
    def of_settings(cls, server_args: Mapping[str, object]) -> "SpeculationConfig":
        """From SGLang's effective settings, by the three that decide; the managed flags beside them are not told from
        defaults there."""
        if not server_args.get("speculative_algorithm"):
            return cls()
        names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
        values = {name: server_args.get(f"speculative_{name}") for name in names}
        given = ((f"--speculative-{name.replace('_', '-')}", (str(v),)) for name, v in values.items() if v is not None)
        return cls(tuple(sorted(given)))

    @property
    def steps(self) -> int | None:
        return self._number("--speculative-num-steps")

    @property
    def draft_tokens(self) -> int | None:
        """What SGLang will use: steps + 1 when topk is 1, whatever was asked for."""
        if self.steps is not None and self._number("--speculative-eagle-topk") == 1:
            return self.steps + 1
        return self._number("--speculative-num-draft-tokens")

    @property
    def speculates(self) -> bool:
        return any(name == "--speculative-algorithm" for name, _ in self.flags)

    def words(self) -> tuple[str, ...]:
        return _words(self.flags)

    def same_as(self, other: "SpeculationConfig") -> bool:
        """Equal in effect: a draft-token count that follows from the steps does not count."""
        return self._effective() == other._effective()

    def needs_more_than(self, other: "SpeculationConfig") -> bool | None:
        """Whether it takes more memory, by its draft tokens; None where the two differ in more than their number."""
        if self._kind() == other._kind() and self.draft_tokens is not None and other.draft_tokens is not None:
            return self.draft_tokens > other.draft_tokens
        if self.without_speculation() == other.without_speculation() and self.speculates is not other.speculates:
            return self.speculates
        return None

    def without_speculation(self) -> "SpeculationConfig":
        """The other managed flags alone."""
        return SpeculationConfig(tuple(flag for flag in self.flags if not flag[0].startswith(SPECULATIVE_PREFIX)))

    def describe(self) -> str:
        """A few words for a person: `steps 4`, `no speculation`, and the other managed flags."""
        kind = (
            f"steps {self.steps}" if self.steps is not None else "speculation" if self.speculates else "no speculation"
        )
        others = [" ".join((name, *values)) for name, values in self.flags if not name.startswith(SPECULATIVE_PREFIX)]
        return ", ".join([kind, *others])

    def _kind(self) -> tuple[Flag, ...]:
        """All but how many tokens are drafted."""
        numbers = ("--speculative-num-steps", "--speculative-num-draft-tokens")
        return tuple(flag for flag in self.flags if flag[0] not in numbers)

    def _effective(self) -> tuple[Flag, ...]:
        name = "--speculative-num-draft-tokens"
        rest = [flag for flag in self.flags if flag[0] != name]
        tokens = self.draft_tokens
        return tuple(sorted([*rest, (name, (str(tokens),))] if tokens is not None else rest))

    def _number(self, name: str) -> int | None:
        values = dict(self.flags).get(name, ())
        return whole(values[0]) if values else None


def is_managed(name: str, managed: frozenset[str]) -> bool:
    return name.startswith(SPECULATIVE_PREFIX) or name in managed


def _words(flags: Iterable[Flag]) -> tuple[str, ...]:
    return tuple(word for name, values in flags for word in (name, *values))


def more_than_one(nodes: object) -> bool:
    """Of what was said of `--nnodes`, by a command line or by SGLang itself; None where nothing was."""
    return (whole(str(nodes)) or 0) > 1
