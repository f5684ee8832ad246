"""What the package installs beside the program, made from the program: `python packaging/manual.py TREE` writes the
manual pages, the shells' completions and the commented config.toml below TREE."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from sglang_watchdog.cli.app import COMPLETE_VARIABLE, NAME, app
from sglang_watchdog.settings import reference, template

COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/sglang-watchdog",
    "zsh": "usr/share/zsh/vendor-completions/_sglang-watchdog",
    "fish": "usr/share/fish/vendor_completions.d/sglang-watchdog.fish",
}


def main(tree: Path) -> None:
    _write(tree / "etc/sglang-watchdog/config.toml", template())
    _write(tree / "usr/share/man/man1/sglang-watchdog.1", command_page())
    _write(tree / "usr/share/man/man5/sglang-watchdog.toml.5", settings_page())
    for shell, path in COMPLETIONS.items():
        completion = get_completion_class(shell)
        assert completion, f"click knows no completion of {shell}"
        _write(tree / path, completion(app, {}, NAME, COMPLETE_VARIABLE).source())


def command_page() -> str:
    """sglang-watchdog(1), from the commands themselves."""
    lines = [
        '.TH SGLANG-WATCHDOG 1 "" "sglang-watchdog" "System administration"',
        ".SH NAME",
        "sglang-watchdog \\- says why an SGLang launch under systemd ended, and brings the server back",
        ".SH SYNOPSIS",
        ".B sglang-watchdog",
        ".I COMMAND",
        "[\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...",
        ".SH OPTIONS",
    ]
    lines += [*_parameters(app), ".SH COMMANDS"]
    for name, command in sorted(app.commands.items()):
        lines += [f".SS {_roff(name)}", *_paragraph(command.help or ""), *_parameters(command)]
    lines += [
        ".SH EXIT STATUS",
        "0 on success, 2 for input that cannot be used, 1 for any other failure.",
        ".SH FILES",
        ".TP\n.I /etc/sglang-watchdog/config.toml\nSettings; also config.d/*.toml beside it.",
        ".TP\n.I /var/lib/sglang-watchdog\nLedger, and environment files of overrides.",
        ".SH SEE ALSO",
        ".BR sglang-watchdog.toml (5),\n.BR journalctl (1),\n.BR systemd.service (5)",
    ]
    return "\n".join([*lines, ""])


def _parameters(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        names = ", ".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.human_readable_name
        yield from (".TP", f".B {_roff(names)}", *_paragraph(parameter.help or ""))


def settings_page() -> str:
    """sglang-watchdog.toml(5), from the same reference as docs/settings.md."""
    return "\n".join(
        [
            '.TH SGLANG-WATCHDOG.TOML 5 "" "sglang-watchdog" "File formats"',
            ".SH NAME",
            "sglang-watchdog.toml \\- settings of sglang-watchdog",
            ".SH DESCRIPTION",
            *_converted(reference()),
            ".SH SEE ALSO",
            ".BR sglang-watchdog (1)",
            "",
        ]
    )


def _converted(markdown: str) -> Iterator[str]:
    code = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            code = not code
            yield ".nf" if code else ".fi"
        elif code:
            yield _roff(line)
        elif line.startswith("## "):
            yield f".SH {_roff(line.removeprefix('## ')).upper() if '[' not in line else _roff(line[3:])}"
        elif cells := re.fullmatch(r"\| `(\w+)` \| (.*?) \| (.*) \| (.*) \|", line):
            name, default, allowed, why = cells.groups()
            yield from (".TP", f".B {_roff(name)}", _roff(f"{why} Default: {default.strip()}. Allowed: {allowed}."))
        elif not line:
            yield ".PP"
        elif not line.startswith(("# ", "|", "<!--")):
            yield _roff(line)


def _paragraph(text: str) -> list[str]:
    return [_roff(" ".join(text.split()))]


def _roff(text: str) -> str:
    plain = text.replace("`", "").replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
