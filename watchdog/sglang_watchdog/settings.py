"""The settings: what they are and what they may hold. docs/settings.md is written from this page.

Files are TOML (`settings_files.py` reads them). All errors of all files are told at once.
"""

import difflib
import ipaddress
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sglang_watchdog.domain.errors import UnusableInput
from sglang_watchdog.domain.secrets import names_secret
from sglang_watchdog.settings_files import DEFAULT_PATH, DEFAULT_RUNTIME_DIR, Json, Key, read_files

_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]+)?\.service")
_UNIT_NAME_ALLOWED = 'the full name of one service, as in "sglang.service" or "sglang@qwen.service"'
_URL = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?")


def _unit_name(name: str) -> str:
    if not _UNIT_NAME.fullmatch(name) or len(name) > 255:
        raise ValueError
    return name


def _url(url: str) -> str:
    if not _URL.fullmatch(url):
        raise ValueError
    return url.rstrip("/")


def _address(address: str) -> str:
    ipaddress.ip_address(address)
    return address


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    if words and not words[0].startswith("/"):
        raise ValueError
    return words


def _receiver(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.fragment:
        raise ValueError
    return url


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute), Field(strict=False)]
Address = Annotated[str, AfterValidator(_address)]
Url = Annotated[str, AfterValidator(_url)]
UnitName = Annotated[str, AfterValidator(_unit_name)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, le=7 * 86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1000)]
LogLevel = Literal["debug", "info", "warning", "error"]
ManagedFlag = Literal[
    "--mem-fraction-static",
    "--max-total-tokens",
    "--cuda-graph-max-bs",
    "--cuda-graph-max-bs-decode",
    "--max-running-requests",
]

_TRUE_OR_FALSE = "true or false"
_SECONDS = "a number of seconds above 0, a week at most"
_SECONDS_OR_NONE = "a number of seconds, 0 or more, a week at most"
_A_COUNT = "a whole number from 0 to 1000"
_A_PATH = "an absolute path in quotes"


def _setting(default: object, reason: str, allowed: str, unit: str = "") -> Any:
    """A field with all that the reference page and an error tell of it."""
    return Field(default=default, description=reason, json_schema_extra={"allowed": allowed, "unit": unit})


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Metrics(_Table):
    """Where Prometheus finds the metrics."""

    address: Address = _setting(
        "127.0.0.1",
        "Loopback, because the metrics name units and configs and have no authentication. Any other address needs "
        "IPAddressAllow= in a drop-in of sglang-watchdog.service as well.",
        "an IP address in quotes",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = _setting(
        9877, "0 serves no metrics.", "a whole number from 0 to 65535"
    )
    certificate: AbsolutePath | None = _setting(
        None,
        "Serves TLS with this certificate (PEM), together with `key`. Passwords are a proxy's job.",
        _A_PATH,
    )
    key: AbsolutePath | None = _setting(None, "The certificate's private key (PEM), readable by root alone.", _A_PATH)
    client_ca: AbsolutePath | None = _setting(
        None,
        "Answers only clients that show a certificate of this authority (PEM). Needs `certificate`.",
        _A_PATH,
    )

    @model_validator(mode="after")
    def _whole(self) -> "Metrics":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key")
        return self


class HookSettings(_Table):
    """Told of each incident, beside journal and metrics: when a recovery begins, and when it is closed."""

    command: Annotated[tuple[str, ...], AfterValidator(_command), Field(strict=False)] = _setting(
        (),
        "Gets the incident as JSON on its standard input, and in short in `SGLANG_WATCHDOG_*` variables. Runs in the "
        "sandbox of the service, without network but loopback.",
        "a list of words, the first an absolute path",
    )
    webhook: Annotated[str, AfterValidator(_receiver)] | None = _setting(
        None,
        "Gets the same JSON by POST. Is never logged whole. sglang-watchdog.service allows loopback only: another "
        "address needs IPAddressAllow= in a drop-in.",
        "http://HOST[:PORT]/PATH or https://…, without user and password",
    )
    webhook_token_file: AbsolutePath | None = _setting(
        None, "File with a token for `Authorization: Bearer`, read for each delivery.", _A_PATH
    )
    timeout: Seconds = _setting(10.0, "For one try; what is not done by then is ended.", _SECONDS, "seconds")
    retries: Annotated[int, Field(ge=0, le=10)] = _setting(
        3, "After 1 s, 2 s, 4 s and so on. Then the incident is given up for this hook.", "a whole number from 0 to 10"
    )


class UnitSettings(_Table):
    """One watched unit."""

    act: bool = _setting(False, "Without it the unit is observed, with the same reports.", _TRUE_OR_FALSE)
    several_nodes: bool = _setting(
        False,
        "It serves together with other nodes or units, in a way that its command does not show (`--nnodes` does): then "
        "it is diagnosed and reported, and never acted on alone.",
        _TRUE_OR_FALSE,
    )
    url: Url | None = _setting(
        None,
        "Where to probe the server. By default what `--host` and `--port` of the command say, a wildcard host by "
        "loopback. sglang-watchdog.service allows loopback only: another address needs IPAddressAllow= in a drop-in.",
        'http://HOST:PORT or https://HOST:PORT in quotes, as in "http://127.0.0.1:30000"',
    )
    api_key_file: AbsolutePath | None = _setting(
        None,
        "File that holds the key for probes and nothing else. Never the key itself: settings are shown in reports. By "
        "default probes carry the `--api-key` of the server's own command.",
        _A_PATH,
    )
    soak: SecondsOrNone = _setting(
        600.0,
        "How long a config has to serve without a failure before it counts as known-good.",
        _SECONDS_OR_NONE,
        "seconds",
    )
    managed_flags: Annotated[frozenset[ManagedFlag], Field(strict=False)] = _setting(
        frozenset(),
        "Flags that a rollback may change beside `--speculative-*`: they are proven and put back together.",
        "a list of " + ", ".join(ManagedFlag.__args__),  # type: ignore[attr-defined]
    )
    allow_no_speculation: bool = _setting(
        False,
        "Last step of the ladder: start without speculation, which is slower but needs least memory.",
        _TRUE_OR_FALSE,
    )
    start_deadline: Seconds = _setting(
        1800.0,
        "From the start job to readiness; large weights from a cold disk take many minutes.",
        _SECONDS,
        "seconds",
    )
    free_deadline: Seconds = _setting(
        60.0,
        "From the last kill until NVML shows the bytes back; the driver releases later than the process ends.",
        _SECONDS,
        "seconds",
    )
    verify_deadline: Seconds = _setting(
        120.0, "From readiness until the server has generated tokens for a probe.", _SECONDS, "seconds"
    )
    rollbacks: Count = _setting(
        3,
        "In one `rollback_window`, then the unit is held. The ladder has three rungs: known-good, a smaller one, no "
        "speculation.",
        _A_COUNT,
    )
    rollback_window: Seconds = _setting(
        3600.0,
        "Rollbacks older than this no longer count, nor those from before a config was last proven.",
        _SECONDS,
        "seconds",
    )
    rollbacks_per_day: Count = _setting(
        6, "Is not forgotten after a healthy hour: a unit that fails daily needs a human.", _A_COUNT
    )
    cool_down: SecondsOrNone = _setting(
        0.0,
        "Least time between two rollbacks. 0 lets the ladder go on at once when a known-good config fails too.",
        _SECONDS_OR_NONE,
        "seconds",
    )
    loading_budget: SecondsOrNone = _setting(
        1800.0,
        "A start hangs once it has logged nothing, and read and written next to nothing, for so long. 0: not judged.",
        _SECONDS_OR_NONE,
        "seconds",
    )
    capturing_budget: SecondsOrNone = _setting(
        1800.0,
        "The same while it captures graphs, by its log alone: kernels may be compiled.",
        _SECONDS_OR_NONE,
        "seconds",
    )
    warming_budget: SecondsOrNone = _setting(
        900.0, "The same while it warms up. SGLang itself gives up after 600 s.", _SECONDS_OR_NONE, "seconds"
    )
    serving_budget: SecondsOrNone = _setting(
        300.0,
        "A server hangs once it has generated nothing for so long, though asked. While it logs no decode line it is "
        "asked for four tokens, once a minute. 0: neither judged nor asked.",
        _SECONDS_OR_NONE,
        "seconds",
    )
    restart_unresponsive: bool = _setting(
        False,
        "With `act = true`: what hangs is killed and started again with the same config, within the budgets of "
        "rollbacks. A server only once SGLang's own watchdog has had its time.",
        _TRUE_OR_FALSE,
    )


class Settings(_Table):
    """The whole of it. `units` is keyed by the unit's full name."""

    state_dir: AbsolutePath = _setting(
        Path("/var/lib/sglang-watchdog"),
        "Ledger and environment files of overrides. Must survive a reboot. StateDirectory= of the service makes it.",
        _A_PATH,
    )
    runtime_dir: AbsolutePath = _setting(
        DEFAULT_RUNTIME_DIR, "Control socket. RuntimeDirectory= of the service makes it.", _A_PATH
    )
    log_level: LogLevel = _setting(
        "info",
        "What the daemon logs of itself. Alerts are not filtered by it.",
        'one of "debug", "info", "warning", "error"',
    )
    metrics: Metrics = Metrics()
    hooks: HookSettings = HookSettings()
    units: dict[UnitName, UnitSettings] = Field(default_factory=dict)


_SECTIONS: tuple[tuple[str, type[_Table]], ...] = (
    ("", Settings),
    ("[metrics]", Metrics),
    ("[hooks]", HookSettings),
    ('[units."NAME.service"]', UnitSettings),
)


def load(path: Path = DEFAULT_PATH) -> Settings:
    """Reads `path` and `config.d/*.toml` beside it. Raises `UnusableInput` with one line for each error."""
    read = read_files(path)
    errors = [*read.errors]
    try:
        settings = Settings.model_validate(read.merged)
    except ValidationError as error:
        errors += _sentences(error.errors(), read.origins)
    if errors:
        raise UnusableInput("\n".join(dict.fromkeys(errors)))
    return settings


def _sentences(errors: list[ErrorDetails], origins: Mapping[Key, Path]) -> Iterator[str]:
    for error in errors:
        key = tuple(str(part) for part in error["loc"])
        # Of a list the element is named by its position, and of a bad table name pydantic adds "[key]".
        known = next(key[:length] for length in range(len(key), 0, -1) if key[:length] in origins)
        yield f"{origins[known]}: {dotted(known)}: {_complaint(error, known)}"


def _complaint(error: ErrorDetails, key: Key) -> str:
    if error["type"] == "extra_forbidden":
        return _unknown(key)
    if error["loc"][-1] == "[key]":
        return f"found the name {_shown(key[-1])}; allowed is {_UNIT_NAME_ALLOWED}."
    field = _field_at(key)
    if field is None and error["type"] == "value_error":
        return f"{error['ctx']['error']}."  # of keys that do not go together
    allowed = _allowed(field) if field else "a table"
    found = "a value that is not shown" if key[-1] == "webhook" or names_secret(key[-1]) else _shown(error["input"])
    return f"found {found}; allowed is {allowed}."


def _unknown(key: Key) -> str:
    names = list(_model_at(key[:-1]).model_fields)
    close = difflib.get_close_matches(key[-1], names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"is no setting; {hint}Allowed here are {', '.join(names)}."


def _model_at(key: Key) -> type[_Table]:
    match key:
        case ("metrics",):
            return Metrics
        case ("hooks",):
            return HookSettings
        case ("units", _):
            return UnitSettings
        case _:
            return Settings


def _field_at(key: Key) -> FieldInfo | None:
    field = _model_at(key[:-1]).model_fields.get(key[-1])
    return field if field and field.json_schema_extra else None


def _allowed(field: FieldInfo) -> str:
    return str(_extra(field)["allowed"])


def _extra(field: FieldInfo) -> Json:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def dotted(key: Key) -> str:
    """A key path as TOML writes it: `units."sglang.service".soak`."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _shown(part) for part in key)


def reference() -> str:
    """The reference page: every setting with its default, its unit and the reason, in Markdown."""
    intro = (
        "# Settings\n\n<!-- Written by `python -m sglang_watchdog.settings`: edit the descriptions there. -->\n\n"
        f"`{DEFAULT_PATH}`, then `config.d/*.toml` beside it in the order of their names; a later file wins, key by "
        "key.\nAll of it is TOML. `sglang-watchdog check-config` says what is wrong with it, file by file and key by "
        "key.\nThe smallest file that is of use:\n\n```toml\n"
        '[units."sglang.service"]\nact = true   # without it the unit is only observed\n```\n'
    )
    return "\n".join([intro, *(_section(heading, model) for heading, model in _SECTIONS)])


def template() -> str:
    """config.toml as it is installed: nothing is watched, and every setting of a unit stands there as a comment."""
    unit = '[units."sglang.service"]'
    return "\n".join(
        [
            "# Settings of sglang-watchdog, see sglang-watchdog.toml(5). All are comments here, with their defaults.",
            "# `sglang-watchdog setup` finds the SGLang units of this host and has them observed (config.d/).",
            "# After a change: sglang-watchdog check-config && systemctl restart sglang-watchdog",
            "",
            *_commented(Settings, ""),
            *_commented(Metrics, "[metrics]"),
            *_commented(UnitSettings, unit),
        ]
    )


def _commented(model: type[_Table], heading: str) -> Iterator[str]:
    if heading:
        yield f"# {heading}"
    for name, field in model.model_fields.items():
        if _extra(field):
            yield from textwrap.wrap(
                _said(field), 110, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False
            )
            yield f"# {name} = {_example(field)}"
    yield ""


def _said(field: FieldInfo) -> str:
    unit = _extra(field)["unit"]
    return f"{field.description}{f' In {unit}.' if unit else ''} Allowed: {_allowed(field)}."


def _example(field: FieldInfo) -> str:
    return '""' if field.default is None else _shown(_plain(field))


def _section(heading: str, model: type[_Table]) -> str:
    title = f"## `{heading}`" if heading else "## Top level"
    rows = [_row(name, field) for name, field in model.model_fields.items() if _extra(field)]
    head = ["| key | default | allowed | why |", "|--|--|--|--|"]
    return "\n".join([title, "", (model.__doc__ or "").strip(), "", *head, *rows, ""])


def _row(name: str, field: FieldInfo) -> str:
    default = "none" if field.default is None else f"`{_shown(_plain(field))}`"
    return f"| `{name}` | {default} {_extra(field)['unit']} | {_allowed(field)} | {field.description} |"


def _plain(field: FieldInfo) -> object:
    value = TypeAdapter(Any).dump_python(field.default, mode="json")
    return int(value) if isinstance(value, float) and value.is_integer() else value


if __name__ == "__main__":
    print(reference(), end="")
