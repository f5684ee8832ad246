"""systemd's text formats, both ways: unit files, command lines and environment files. Pure: text in, values out.

Follows what systemd's own parser does (`config_parse`, `extract_first_word`, `parse_env_file`, `replace_env_argv`),
which is wider than its manual pages: a quote may open inside a word, for one. The lab tests hold it against systemd.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_BLANKS = " \t\n\r"
_EXEC_PREFIXES = "-@:+!"
_SIMPLE_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}
_NUMBER_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})")
_BARE_WORD = re.compile(r"[A-Za-z0-9_@+=:,./${}-]+")
_ESCAPED_WORD = {"%": "%%", "\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_SPLIT_AS_IT_IS = re.compile(r"[A-Za-z0-9_@%+=:,./{}$-]+")
_IN_DOUBLE_QUOTES, _BACKSLASHED = re.compile(r"([\"\\$`])"), r"\\\1"
_IN_WORD = re.compile(r"\$\$|\$\{([^}]*)\}")


class BadSyntax(ValueError):
    """systemd ignores such a line, and says so in the journal."""


@dataclass(frozen=True, slots=True)
class ExecLine:
    """One command of ExecStart=. `prefix` holds systemd's marks (`-@:+!`); with `@` the first word is the path and
    the second is argv[0]. Specifiers are resolved, variables are not expanded."""

    prefix: str
    words: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """As D-Bus shows it."""
        return self.words[1:] if "@" in self.prefix else self.words

    @property
    def expands(self) -> bool:
        return ":" not in self.prefix


def assignments(text: str, section: str) -> Iterator[tuple[str, str]]:
    """Key and value of each line in a section of a unit file, in order."""
    inside = False
    for line in _logical_lines(text):
        if line.startswith("["):
            inside = line == f"[{section}]"
        elif inside and "=" in line:
            key, _, value = line.partition("=")
            yield key.strip(_BLANKS), value.strip(_BLANKS)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with their continuations, a backslash at the end of which stands for a blank. A comment between them is
    passed over."""
    begun = ""
    for line in text.split("\n"):
        if line.lstrip(_BLANKS).startswith(("#", ";")):
            continue
        if (len(line) - len(line.rstrip("\\"))) % 2:
            begun += line[:-1] + " "
            continue
        yield (begun + line).strip(_BLANKS)
        begun = ""
    if begun:
        yield begun.strip(_BLANKS)


def split_words(text: str) -> list[str]:
    """Words as systemd splits Environment= and the like: quotes removed, escapes resolved. Raises `BadSyntax`."""
    words = []
    at = _skip_blanks(text, 0)
    while at < len(text):
        word, at = _word(text, at)
        words.append(word)
    return words


def parse_exec(value: str) -> list[ExecLine]:
    """The commands of one ExecStart= line, specifiers not resolved. Raises `BadSyntax`."""
    lines: list[ExecLine] = []
    prefix, words = "", list[str]()
    at = _skip_blanks(value, 0)
    while at < len(value):
        separator = value[at] == ";" and value[at + 1 : at + 2] in ("", *_BLANKS)
        if separator:
            if words:
                lines.append(ExecLine(prefix, tuple(words)))
            prefix, words = "", []
            at = _skip_blanks(value, at + 1)
        elif value[at : at + 2] == "\\;" and value[at + 2 : at + 3] in ("", *_BLANKS):
            words.append(";")
            at = _skip_blanks(value, at + 2)
        else:
            word, at = _word(value, at)
            if not words:
                path = word.lstrip(_EXEC_PREFIXES)
                prefix, word = word[: len(word) - len(path)], path
            words.append(word)
    return [*lines, ExecLine(prefix, tuple(words))] if words else lines


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _word(text: str, at: int) -> tuple[str, int]:
    """The word that begins at `at`, and where the next one begins."""
    word = bytearray()
    quote = ""
    while at < len(text) and (quote or text[at] not in _BLANKS):
        char = text[at]
        if char == "\\":
            piece, at = _escape(text, at + 1)
            word += piece
            continue
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        else:
            word += _bytes(char)
        at += 1
    if quote:
        raise BadSyntax(f"a quote is not closed in: {text}")
    return word.decode("utf-8", "surrogateescape"), _skip_blanks(text, at)


def _escape(text: str, at: int) -> tuple[bytes, int]:
    """What the escape after a backslash stands for. An unknown one stays as it is, as systemd has it."""
    if at >= len(text):
        raise BadSyntax(f"a lone backslash ends: {text}")
    if text[at] in _SIMPLE_ESCAPES:
        return bytes([_SIMPLE_ESCAPES[text[at]]]), at + 1
    number = _NUMBER_ESCAPE.match(text, at)
    if number is None:
        return b"\\" + _bytes(text[at]), at + 1
    byte, short, long, octal = number.groups()
    if byte or octal:
        return bytes([int(byte, 16) if byte else int(octal, 8) & 0xFF]), number.end()
    return chr(int(short or long, 16)).encode(), number.end()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def render_word(word: str) -> str:
    """The word so that systemd reads it back as it is, variables still to be expanded: `$` is never touched."""
    if _BARE_WORD.fullmatch(word):
        return word
    return f'"{"".join(_rendered_char(char) for char in word)}"'


def _rendered_char(char: str) -> str:
    if char in _ESCAPED_WORD:
        return _ESCAPED_WORD[char]
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in _bytes(char))


def render_exec(line: ExecLine) -> str:
    """The value of ExecStart= for a command whose specifiers are resolved."""
    path, *rest = line.words
    return " ".join([line.prefix + render_word(path), *map(render_word, rest)])


def expand(line: ExecLine, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The argv that the process gets. A variable that is not set stands for nothing."""
    if not line.expands:
        return line.argv
    return tuple(word for each in line.argv for word in expand_word(each, environment))


def expand_word(word: str, environment: Mapping[str, str]) -> list[str]:
    """`$NAME` as a word of its own gives any number of words, `${NAME}` is replaced in place, `$$` is a dollar."""
    name = variable_of(word)
    if name is not None:
        return _split_relaxed(environment.get(name, ""))
    return [_IN_WORD.sub(lambda match: environment.get(match[1], "") if match[1] is not None else "$", word)]


def variable_of(word: str) -> str | None:
    """The name in `$NAME`. Whatever follows the dollar counts, so `$5` is a variable too, which is never set."""
    return word[1:] if word.startswith("$") and word[1:2] not in ("{", "$") else None


def _split_relaxed(text: str) -> list[str]:
    """Splits a variable's value: quotes are removed, a backslash only takes the next character as it is."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    chars = iter(text)
    for char in chars:
        if char == "\\":
            word = (word or "") + next(chars, "")
        elif quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote, word = char, word or ""
        elif not quote and char in _BLANKS:
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + char
    return words if word is None else [*words, word]


def render_variable(words: Sequence[str]) -> str:
    """A variable's value that `$NAME` splits into exactly these words. Raises `BadSyntax` for a control character."""
    return " ".join(_rendered_for_splitting(word) for word in words)


def _rendered_for_splitting(word: str) -> str:
    if not word.isprintable():
        raise BadSyntax(f"a control character cannot be passed through an environment file: {word!r}")
    if _SPLIT_AS_IT_IS.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def render_environment(variables: Mapping[str, str]) -> str:
    """An environment file. Inside double quotes systemd takes the shell's four escapes."""
    return "".join(f'{name}="{_IN_DOUBLE_QUOTES.sub(_BACKSLASHED, value)}"\n' for name, value in variables.items())


def parse_environment(text: str) -> dict[str, str]:
    """The variables of an environment file. A comment ends with its line, as in 257; in 252 a backslash at its end
    made the next line a part of it."""
    found: dict[str, str] = {}
    at = 0
    while (at := _skip_blanks(text, at)) < len(text):
        if text[at] in "#;":
            at = _end_of_line(text, at)
            continue
        end = _end_of_line(text, at)
        equals = text.find("=", at, end)
        if equals < 0:
            at = end
            continue
        value, after = _environment_value(text, equals + 1)
        found[text[at:equals].strip(_BLANKS)] = value
        at = after
    return found


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return end if end >= 0 else len(text)


_PIECE = re.compile(
    r"[ \t\r]*+(?:'(?P<single>[^']*)(?:'|\Z)|\"(?P<double>(?:[^\"\\]|\\.)*)(?:\"|\\?\Z)"
    r"|(?P<plain>(?:[^\s'\"\\]|\\.|\\\Z)(?:[^\n\\]|\\.|\\\Z)*))",
    re.DOTALL,
)


def _environment_value(text: str, at: int) -> tuple[str, int]:
    """The value from behind the `=`, and where it ends. Quoted pieces and a plain rest follow one another."""
    value = ""
    while piece := _PIECE.match(text, at):
        at = piece.end()
        if piece["plain"] is not None:
            return value + _plain_value(piece["plain"]), at
        value += piece["single"] if piece["single"] is not None else _double_quoted(piece["double"])
    return value, _end_of_line(text, at)


def _double_quoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _in_double_quotes(match[1]), text, flags=re.DOTALL)


def _in_double_quotes(char: str) -> str:
    if char == "\n":
        return ""
    return char if char in '"\\`$' else f"\\{char}"


def _plain_value(text: str) -> str:
    """Blanks at the end go, unless they are escaped; a backslash at the end of a line joins the next one."""
    kept = re.fullmatch(r"((?:\\.|[^\\])*?)[ \t\r]*\\?", text, re.DOTALL)
    return re.sub(
        r"\\(.)", lambda match: "" if match[1] == "\n" else match[1], kept[1] if kept else text, flags=re.DOTALL
    )
