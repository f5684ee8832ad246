"""Takes secrets out of command lines, text and settings before they are recorded, logged or shown.

A name gives a secret away (`--api-key`, `HF_TOKEN=`, `"password":`), or the value's own form (`hf_…`, `sk-…`, a Bearer
header). In doubt the value goes: a line that lost a word can still be read, a key in a log has to be replaced. What the
diagnosis lives on must stay, so token *counts* (`#new-token: 8192`, `--max-total-tokens`) are told from tokens.
"""

import re
from collections.abc import Mapping, Sequence

REDACTED = "REDACTED"

_SECRET_WORDS = frozenset(
    {"key", "keys", "apikey", "token", "password", "passwd", "passphrase", "secret", "secrets", "credential"}
    | {"credentials", "authorization"}
)
# argparse takes any unambiguous beginning of an option for the option.
_SECRET_OPTIONS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SHORTEST_ABBREVIATION = len("--api")
# In these a token is a piece of text and a key an index, not a credential.
_HARMLESS = re.compile(
    r"(?:^|_)(?:(?:new|max|min|num|per|cached|pending|full|swa|inter|first|to|next|eos|bos|pad|unk|stop|mask|draft)_token"
    r"|token_(?:map|ratio|usage|id|ids|type|pool|latency|distribution|capacity|count|limit|num|per|to|bitmask)"
    r"|key_(?:value|cache|error)|(?:routing|cache|primary|public|missing|unexpected)_key)(?:_|$)"
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

# A name is matched from its first character on only, so that a line of 48 KiB without blanks costs one pass.
_NAME = re.compile(r"(?<![\w.-])[\w.-]++")
_ASSIGNS = re.compile(r"(\\*[\"'])?[ \t]*[:=][ \t]*(?:(?:Bearer|Basic|Token)[ \t]+)?", re.IGNORECASE)
_TAKES = re.compile(r"(?:\\*[\"'])?(?:\s*[=,]\s*|(?:\s|\\\n)+)(?!--)")
_QUOTED = re.compile(
    r"(?P<quote>\\*[\"'])(?:(?:\\.|[^\\])*?(?P<end>(?P=quote))|.*)(?:\"[^\"]*\"|'[^']*'|\\.|[^\s,;)}\]\"'\\])*",
    re.DOTALL,
)
_BARE = re.compile(r"\S+")
_NOTHING = re.compile(r"(?:None|null|true|false)(?=[\s,;)}\]]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"[\d.]+(?=[\s,;)}\]]|$)")

# Secrets that need no name.
_FORMS = (
    (re.compile(r"\b(bearer\s+)\S+", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"(?<![A-Za-z0-9])(?:hf|gh[opsu])_[A-Za-z0-9]{16,}(?![A-Za-z0-9_])"), REDACTED),
    (re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)"), rf"\1{REDACTED}"),
)


def names_secret(name: str) -> bool:
    """Whether what is called so (an option, a variable, a field) holds a secret."""
    if any(option.startswith(name) for option in _SECRET_OPTIONS) and len(name) >= _SHORTEST_ABBREVIATION:
        return not "--ssl-keyfile".startswith(name)
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if plain.startswith("speculative_") or _HARMLESS.search(plain):
        return False
    return bool(_SECRET_WORDS.intersection(plain.split("_"))) or _CAMEL.split(name)[-1].lower() in _SECRET_WORDS


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The same words, with the values of secrets replaced. Keeps the number of words."""
    redacted: list[str] = []
    value_follows = False
    for word in argv:
        if value_follows and not word.startswith("--"):
            redacted.append(REDACTED)
            value_follows = False
            continue
        redacted.append(_redact_word(word))
        value_follows = word.startswith("-") and "=" not in word and names_secret(word)
    return tuple(redacted)


def redact_text(text: str) -> str:
    """The same text, with everything that looks like a secret replaced. For journal lines, messages and shell lines."""
    parts: list[str] = []
    done = 0
    for begin, end, replacement in _named_secrets(text):
        parts += [text[done:begin], replacement]
        done = end
    named = "".join([*parts, text[done:]])
    for pattern, replacement in _FORMS:
        named = pattern.sub(replacement, named)
    return named


def redact_mapping(values: Mapping[str, object]) -> dict[str, object]:
    """The same settings (SGLang's `server_args`, parsed JSON), with the values of secrets replaced at any depth."""
    return {name: _redact_value(value, names_secret(name)) for name, value in values.items()}


def _redact_value(value: object, secret: bool) -> object:
    match value:
        case None | bool() | "":
            return value
        case Mapping():
            return redact_mapping({str(name): inner for name, inner in value.items()})
        case _ if secret:
            return REDACTED
        case str():
            return redact_text(value)
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return list(redact_argv(value))
        case list() | tuple():
            return [_redact_value(item, secret=False) for item in value]
        case _:
            return value


def _redact_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and _NAME.fullmatch(name) and names_secret(name):
        return f"{name}={REDACTED}"
    return redact_text(word)


def _named_secrets(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and replacement of each value whose name says that it is a secret."""
    found: list[tuple[int, int, str]] = []
    at = 0
    while name := _NAME.search(text, at):
        at = name.end()
        begin = _value_begins(text, name)
        if begin is not None and (value := _value(text, begin)):
            found.append((begin, *value))
            at = value[0]
    return found


def _value_begins(text: str, name: re.Match[str]) -> int | None:
    word = name.group()
    if not names_secret(word):
        return None
    assigns = _ASSIGNS.match(text, name.end())
    takes = _TAKES.match(text, name.end()) if word.startswith("-") else None
    separator = takes or assigns
    if separator is None or _is_prose(word, text, separator):
        return None
    return None if _NOTHING.match(text, separator.end()) else separator.end()


def _is_prose(word: str, text: str, separator: re.Match[str]) -> bool:
    """`Unexpected token: }`, `#token: 8192` and `missing key: x` are no secrets; `"token": "x"` in JSON is one."""
    if separator.re is not _ASSIGNS or word.lower() not in ("key", "token"):
        return False
    if ":" in separator.group():
        return not separator.group(1)
    return bool(_NUMBER.match(text, separator.end()))


def _value(text: str, begin: int) -> tuple[int, str] | None:
    quoted = _QUOTED.match(text, begin)
    if quoted:
        end = quoted["end"] or ""
        empty = quoted.group() == quoted["quote"] + end
        return None if empty else (quoted.end(), f"{quoted['quote']}{REDACTED}{end}")
    bare = _BARE.match(text, begin)
    return (bare.end(), REDACTED) if bare else None
