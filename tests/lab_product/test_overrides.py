"""Overrides against a real systemd: what is rendered is what gets executed, and when it takes effect."""

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.host import LabHost
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.host.override import VARIABLE, render_drop_in, render_environment_file
from sglang_watchdog.host.unit_files import drop_in_of, environment_file_of, resolve_specifiers
from sglang_watchdog.host.unit_syntax import ExecLine, assignments, expand, parse_environment, parse_exec, render_exec
from waiting import wait_until

pytestmark = pytest.mark.lab

SERVER = "/opt/lab/sglang"
PRINTS_ITS_ARGV = """#!/bin/sh
printf '%s\\0' "$0" "$@" >"/run/argv.new" && mv /run/argv.new "/run/argv.$UNIT"
"""
STEPS = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "4", "--speculative-eagle-topk", "1"]
CONFIG = SpeculationConfig.of(STEPS)
# Everything that systemd's grammar has a meaning for, and some that it has none for.
NASTY_WORDS = [
    *("", " ", "a b", "  two  blanks ", "\ttab", "new\nline", "é ü 漢字 🙂", "\u00a0", "\x01"),
    *("'single'", '"double"', "it's", 'say "hi"', "mixed'\"", "\\", "\\\\", "\\n", "\\x41", "end\\", "C:\\dir\\"),
    *("%", "%%", "%n", "100%", "%i%t", "$", "$$", "$$$", "$A", "${A}", "$A$B", "x${A}y", "a$$b", "${A", "$5", "$A-"),
    *(";", ";;", "a;b", "; ", "\\;", "#", "# no comment", "-", "--", "@", "+x", "!x", ":x", "-x", "~", "*", "&&", "|"),
    *("=", "a=b", '{"json": [1, "two"]}', "[Service]", "ExecStart="),
]
words = st.one_of(
    st.sampled_from(NASTY_WORDS),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    st.text("$%;\\\"' {}AB\t=", max_size=8),
)
# What str.isprintable() lets through: an environment file has one line for a value.
printable = st.one_of(
    st.sampled_from([word for word in NASTY_WORDS if word.isprintable()]),
    st.text(st.just(" ") | st.characters(exclude_categories=["C", "Z"]), max_size=20),
    st.text("$%;\\\"' {}AB=", max_size=8),
)
ONCE = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nType=oneshot\nRemainAfterExit=yes\nEnvironment=UNIT=%n\n"
ENVIRONMENT = {"A": "one 'two three' f\\our", "B": ""}


@pytest.fixture
def server(systemd_host: LabHost) -> LabHost:
    """A host with a "server" that says what it was executed with."""
    systemd_host.write(SERVER, PRINTS_ITS_ARGV, 0o755)
    return systemd_host


@dataclass(frozen=True)
class Service:
    host: LabHost
    name: str

    def define(self, exec_start: str, more: str = "") -> None:
        variables = "".join(f'Environment="{name}={_escaped(value)}"\n' for name, value in ENVIRONMENT.items())
        self.host.unit(self.name, f"{ONCE}{variables}{more}ExecStart={exec_start}\n")

    def put_in_force(self, drop_in: str) -> None:
        self.host.write(drop_in_of(self.name), drop_in)
        self.host.systemctl("daemon-reload")

    def forget_override(self) -> None:
        self.host.run("rm", "-f", drop_in_of(self.name))

    def read_by_systemd(self) -> list[str]:
        """The argv that systemd parsed, variables not expanded."""
        manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
        path = json.loads(self.host.run("busctl", "--json=short", "call", *manager, "LoadUnit", "s", self.name).stdout)
        interface = "org.freedesktop.systemd1.Service"
        got = self.host.run(
            *("busctl", "--json=short", "get-property", manager[0], path["data"][0], interface, "ExecStart")
        )
        argv: list[str] = json.loads(got.stdout)["data"][0][1]
        return argv

    def read_by_us(self) -> list[str]:
        text = self.host.read(f"/etc/systemd/system/{self.name}")
        (value,) = (value for key, value in assignments(text, "Service") if key == "ExecStart")
        (line,) = parse_exec(value.replace("%H", self.host.run("hostname").stdout.strip()))
        return [resolve_specifiers(word, self.name) for word in line.argv]

    def executed(self) -> list[str]:
        """Starts it anew, and returns the argv that the process got. It stays loaded: a unit that is down and unloaded
        is read from disk at its next start, reload or not."""
        self.host.systemctl("restart", self.name)
        return self.said()

    def said(self) -> list[str]:
        # By way of base64, since the pipe of a command in text mode makes one line end of all.
        encoded = self.host.run("base64", f"/run/argv.{self.name}").stdout
        return base64.b64decode(encoded).decode("utf-8", "surrogateescape").split("\0")[:-1]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


@pytest.fixture
def service(server: LabHost, unit_name: str) -> Service:
    return Service(server, unit_name)


def literal(argv: Sequence[str]) -> list[str]:
    return [word.replace("$", "$$") for word in argv]


def test_every_nasty_word_is_executed_as_it_was_rendered(service: Service) -> None:
    service.define(render_exec(ExecLine("", (SERVER, *literal(NASTY_WORDS)))))
    assert service.executed() == [SERVER, *NASTY_WORDS]


def test_variables_are_expanded_as_we_expand_them(service: Service) -> None:
    line = ExecLine("", (SERVER, *NASTY_WORDS))
    service.define(render_exec(line))
    assert service.executed() == list(expand(line, {**ENVIRONMENT, "UNIT": service.name}))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(words, min_size=30, max_size=60))
def test_any_argv_is_executed_as_it_was_rendered(service: Service, argv: list[str]) -> None:
    service.define(render_exec(ExecLine("", (SERVER, *literal(argv)))))
    assert service.executed() == [SERVER, *argv]


@pytest.mark.parametrize(
    "written",
    [
        "a  'b c' \"d e\" f'g h'i \\x41\\u00e9 \\101 \\s \\q \\\\ ';' \\; a;b \"\" '' $A ${A} \"$A\" '${A} x' $$A x$A",
        "%n %% %t 100% %p \\\n   # a comment between\n   continued \\\n  twice",
        '--json \'{"a": "b\\nc"}\' --path C:\\\\dir --speculative-num-steps 10 --host=%H',
    ],
)
def test_what_an_operator_wrote_is_read_as_systemd_reads_it_and_survives_a_drop_in(
    service: Service, written: str
) -> None:
    service.define(f"{SERVER} --model-path /m {written}")
    before = service.executed()
    assert service.read_by_us() == service.read_by_systemd()
    service.put_in_force(render_drop_in(ExecLine("", tuple(service.read_by_systemd())), CONFIG))
    without = [word for word in before if word not in ("--speculative-num-steps", "10")]
    assert service.executed() == [*without, *CONFIG.words()]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(words, min_size=10, max_size=40))
def test_any_command_survives_a_drop_in(service: Service, argv: list[str]) -> None:
    """From D-Bus's argv, as the watchdog has it."""
    service.forget_override()
    service.define(render_exec(ExecLine("", (SERVER, *argv))))
    before = service.executed()
    service.put_in_force(render_drop_in(ExecLine("", tuple(service.read_by_systemd())), CONFIG))
    assert service.executed() == [*before, *CONFIG.words()]


def test_marks_before_the_path_survive_a_drop_in(service: Service) -> None:
    service.define(f":-{SERVER} $A --model-path /m")
    service.put_in_force(render_drop_in(ExecLine(":-", (SERVER, "$A", "--model-path", "/m")), CONFIG))
    assert service.executed() == [SERVER, "$A", "--model-path", "/m", *CONFIG.words()]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(printable, min_size=10, max_size=40))
def test_any_flag_value_survives_an_environment_file(service: Service, values: list[str]) -> None:
    flags = [word for i, value in enumerate(values) for word in (f"--speculative-{i:02}", value)]
    config = SpeculationConfig.of([f"--speculative-{i:02}={value}" for i, value in enumerate(values)])
    assert list(config.words()) == flags
    ours = environment_file_of(service.name)
    service.host.write(ours, render_environment_file(config))
    service.define(f"{SERVER} ${VARIABLE}", f"EnvironmentFile=-{ours}\n")
    assert service.executed() == [SERVER, *flags]


@pytest.mark.parametrize(
    "text",
    [
        'A=plain words  \nB=\'si"ng\\le\'\nC="dou\\"ble \\n \\$x"\nD=jo\\\nined\nnonsense\nE=\n  F = spaced\n',
        '; no\n# no\nA=\'a\'"b"c\'d\'\nB="two\nlines"\nC=end\\ \nD=a\\ b\nE="x" y\nF=last',
        'A=a=b#c ; d\nB = " sp " \n# cut\nC=off\nD=\'open\nE=in it\n',
    ],
)
def test_an_operators_environment_file_is_read_as_systemd_reads_it(service: Service, text: str) -> None:
    path = f"/etc/{service.name}.env"
    service.host.write(path, text)
    names = "ABCDEF"
    service.define(f"{SERVER} {' '.join(f'${{{name}}} ${name}' for name in names)}", f"EnvironmentFile={path}\n")
    line = ExecLine("", (SERVER, *(word for name in names for word in (f"${{{name}}}", f"${name}"))))
    assert service.executed() == list(expand(line, {**ENVIRONMENT, **parse_environment(text)}))


def test_an_environment_file_takes_effect_at_each_start_without_a_reload(service: Service) -> None:
    ours = environment_file_of(service.name)
    service.define(f"{SERVER} ${VARIABLE} --port 1", f"EnvironmentFile=-{ours}\n")
    assert service.executed() == [SERVER, "--port", "1"]
    service.host.write(ours, render_environment_file(CONFIG))
    assert service.executed() == [SERVER, *CONFIG.words(), "--port", "1"]
    service.host.run("rm", ours)
    assert service.executed() == [SERVER, "--port", "1"]
    assert service.host.show(service.name, "NeedDaemonReload") == {"NeedDaemonReload": "no"}


def test_an_environment_file_takes_effect_at_an_automatic_restart(service: Service) -> None:
    ours = environment_file_of(service.name)
    more = f"EnvironmentFile=-{ours}\nRestart=always\nRestartSec=50ms\n"
    text = f"[Unit]\nStartLimitIntervalSec=0\n[Service]\nEnvironment=UNIT=%n\n{more}ExecStart={SERVER} ${VARIABLE}\n"
    service.host.unit(service.name, text)
    service.host.systemctl("start", service.name)
    service.host.write(ours, render_environment_file(CONFIG))
    expected = [SERVER, *CONFIG.words()]
    wait_until(lambda: service.said() == expected, 20, "an automatic restart with the new config")
    service.host.systemctl("stop", service.name)


# What the daemon does with its own parts, run where it would run: beside the unit. Prints what came of it.
PRODUCT = """
import asyncio, json, sys
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.host import override, unit_files
from sglang_watchdog.host.bus import Systemd
unit, verb, *words = json.load(sys.stdin)
systemd = Systemd()
systemd.open()
snapshot = systemd.snapshot(unit)
answer = {}
if verb == "put":
    made = override.render(snapshot, SpeculationConfig.of(words))
    answer = {"kind": made.kind, "reload": override.put_in_force(made)}
elif verb == "withdraw":
    answer = {"reload": override.withdraw(unit)}
intended = unit_files.intended_config(snapshot, frozenset())
theirs = unit_files.operator_config(snapshot)
loaded, disk = unit_files.definition(snapshot), unit_files.definition_on_disk(snapshot)
answer |= {
    "intended": intended.words(),
    "operator": theirs.words(),
    "differs": loaded.differs_from(disk),
    "same_argv": loaded.exec_start == disk.exec_start,
    "problems": asyncio.run(override.verify(unit)),
}
print(json.dumps(answer))
"""


@pytest.fixture
def watched(lab: LabHost, unit_name: str) -> Service:
    """A service on the host that can run the product itself."""
    lab.write(SERVER, PRINTS_ITS_ARGV, 0o755)
    return Service(lab, unit_name)


def product(service: Service, verb: str, *words: str) -> dict[str, Any]:
    done = service.host.run(sys.executable, "-c", PRODUCT, input=json.dumps([service.name, verb, *words]))
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_drop_in_goes_in_force_with_a_reload_and_is_taken_back(watched: Service) -> None:
    theirs = ["--speculative-num-steps", "10"]
    watched.define(f"{SERVER} --model-path '/m m' {' '.join(theirs)} --port 1")
    assert watched.executed()[-3:] == ["10", "--port", "1"]
    assert product(watched, "look")["differs"] == []
    put = product(watched, "put", *STEPS)
    assert (put["kind"], put["reload"], put["problems"]) == ("drop_in", True, "")
    assert (put["intended"], put["operator"]) == (list(CONFIG.words()), theirs)
    assert put["differs"] == [str(drop_in_of(watched.name))], "systemd has not loaded it yet"
    assert watched.executed()[-3:] == ["10", "--port", "1"]
    watched.host.systemctl("daemon-reload")
    assert watched.executed() == [SERVER, "--model-path", "/m m", "--port", "1", *CONFIG.words()]
    again = product(watched, "put", *STEPS)
    assert (again["reload"], again["differs"], again["same_argv"]) == (False, [], True)
    assert product(watched, "withdraw")["reload"]
    watched.host.systemctl("daemon-reload")
    assert watched.executed() == [SERVER, "--model-path", "/m m", *theirs, "--port", "1"]


def test_an_environment_file_goes_in_force_and_is_taken_back_without_a_reload(watched: Service) -> None:
    ours = environment_file_of(watched.name)
    watched.define(f"{SERVER} --model-path /m ${VARIABLE}", f"EnvironmentFile=-{ours}\n")
    put = product(watched, "put", *STEPS)
    assert (put["kind"], put["reload"], put["differs"], put["operator"]) == ("environment_file", False, [], [])
    assert watched.executed() == [SERVER, "--model-path", "/m", *CONFIG.words()]
    assert product(watched, "withdraw")["reload"] is False
    assert watched.executed() == [SERVER, "--model-path", "/m"]


def test_an_override_is_rendered_onto_an_edit_that_is_not_loaded_yet(watched: Service) -> None:
    watched.define(f"{SERVER} --model-path /m --port 1 --speculative-num-steps 5")
    edited = f"{ONCE}ExecStart={SERVER} --model-path /m --port 2\n"
    watched.host.write(f"/etc/systemd/system/{watched.name}", edited)
    product(watched, "put", *STEPS)
    watched.host.systemctl("daemon-reload")
    assert watched.executed() == [SERVER, "--model-path", "/m", "--port", "2", *CONFIG.words()]


def test_a_unit_that_systemd_would_not_load_is_told_before_a_reload(watched: Service) -> None:
    watched.define(f"{SERVER} --model-path /m")
    watched.host.write(f"/etc/systemd/system/{watched.name}.d/x.conf", "[Service]\nExecStart=\nExecStart=/nowhere/x\n")
    assert "/nowhere/x" in product(watched, "look")["problems"]
