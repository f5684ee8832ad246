"""Containers that a unit starts: which traces name one, and which only seem to."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_watchdog.domain.container import (
    Container,
    Engine,
    Inspected,
    RunCommand,
    is_started_by,
    monitored,
    named_by,
    run_command,
)
from sglang_watchdog.domain.launch import ProcessId
from sglang_watchdog.host import containers, processes

ID, OTHER = "a1" * 32, "b2" * 32
IMAGE = "docker.io/lmsysorg/sglang:latest"
RUN = ("/usr/bin/docker", "run", "--rm", "--name", "sgl", "--gpus=all", IMAGE, "sglang", "serve", "--name=not-this")
STARTED = 1_000_000.0


def command(*argv: str) -> RunCommand:
    found = run_command(argv)
    assert found is not None
    return found


# The command


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (RUN, (Engine.DOCKER, "", "sgl")),
        (("podman", "run", "--cidfile=/run/x.cid", "-d", IMAGE), (Engine.PODMAN, "/run/x.cid", "")),
        (("/usr/bin/podman", "--log-level=debug", "run", "--cidfile", "/run/x", IMAGE), (Engine.PODMAN, "/run/x", "")),
        (("podman", "container", "run", IMAGE), (Engine.PODMAN, "", "")),
        (("docker", "run", "--name=--all", IMAGE), (Engine.DOCKER, "", "")),  # no name that an engine takes
    ],
)
def test_a_run_command_tells_engine_file_and_name(argv: tuple[str, ...], expected: tuple[Engine, str, str]) -> None:
    found = command(*argv)
    assert (found.engine, found.cidfile, found.name) == expected


@pytest.mark.parametrize(
    "argv",
    [(), ("/usr/bin/python3", "-m", "sglang.launch_server"), ("podman", "start", "-a", "sgl"), ("nerdctl", "run", "x")],
)
def test_other_commands_start_no_container_by_themselves(argv: tuple[str, ...]) -> None:
    assert run_command(argv) is None


def test_the_container_of_the_name_is_the_launchs_only_where_it_was_made_by_it() -> None:
    docker = command(*RUN)
    assert is_started_by(docker, Inspected(ID, STARTED + 1, IMAGE), STARTED)
    older = Inspected(ID, STARTED - 60, IMAGE)
    other_image = Inspected(ID, STARTED + 1, "docker.io/library/postgres:17")
    no_id = Inspected("sgl", STARTED + 1, IMAGE)
    assert not any(is_started_by(docker, seen, STARTED) for seen in (older, other_image, no_id))
    # A name behind the image is the server's own flag, and the image does not come after that.
    bare = command("docker", "run", IMAGE, "serve", "--name=postgres")
    assert not is_started_by(bare, Inspected(ID, STARTED + 1, IMAGE), STARTED)


# The monitor


CONMON = (
    "/usr/bin/conmon",
    "--api-version",
    "1",
    "-c",
    ID,
    "-u",
    ID,
    "-r",
    "/usr/bin/crun",
    "-n",
    "sgl",
    "-l",
    "journald",
)


def test_a_monitor_names_the_container_that_it_started() -> None:
    assert monitored(CONMON) == ID


@pytest.mark.parametrize(
    "argv",
    [
        ("conmon", "-c", ID, "-u", OTHER, "-e", "--exec-attach"),  # `podman exec` into a container
        ("conmon", "-c", ID, "-u", ID, "-e"),
        ("conmon", "-c", ID),
        ("conmon", "-c", "sgl", "-u", "sgl"),
        (),
    ],
)
def test_the_monitor_of_anything_else_names_none(argv: tuple[str, ...]) -> None:
    assert monitored(argv) == ""


@pytest.mark.parametrize(("uid", "expected"), [(0, [Container(ID, Engine.PODMAN)]), (1000, [])])
def test_a_monitor_counts_where_it_is_roots(
    uid: int, expected: list[Container], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = processes.facts(os.getpid())
    assert own is not None
    facts = own.__class__(own.id, 0.0, "conmon", "S", uid, "/system.slice/sglang.service")
    monkeypatch.setattr(processes, "name", lambda _pid: "conmon")
    monkeypatch.setattr(processes, "command_line", lambda _pid: CONMON)
    monkeypatch.setattr(processes, "facts", lambda _pid: facts)
    assert list(containers.monitored_by([own.id])) == expected
    assert list(containers.monitored_by([ProcessId(own.id.pid, own.id.start_ticks + 1)])) == []  # the pid changed hands


# The cgroup


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"machine.slice/libpod-{ID}.scope/container", ID),
        (f"system.slice/docker-{ID}.scope", ID),
        (f"docker/{ID}", ID),
        (f"libpod_parent/libpod-{ID}", ID),
        (f"system.slice/docker-{ID}.scope/docker/{OTHER}", ID),  # the outer one: its engine is this host's
        (f"machine.slice/libpod-conmon-{ID}.scope", ""),
        ("system.slice/sglang.service", ""),
        (f"kubepods.slice/cri-containerd-{ID}.scope", ""),
    ],
)
def test_a_cgroup_names_the_outermost_container(path: str, expected: str) -> None:
    assert named_by(path.split("/")) == expected


# The file


@pytest.fixture
def cidfile(tmp_path: Path) -> Path:
    file = tmp_path / "sgl.cid"
    file.write_text(ID)
    file.chmod(0o644)
    return file


def written(file: Path, since: float = 0.0) -> Container | None:
    return containers.written_down(command("podman", "run", f"--cidfile={file}", IMAGE), since)


@pytest.mark.skipif(os.geteuid() != 0, reason="the file has to be root's")
def test_the_file_that_the_engine_wrote_names_the_container(cidfile: Path) -> None:
    assert written(cidfile, cidfile.stat().st_mtime) == Container(ID, Engine.PODMAN)


def _of_another_user(file: Path) -> None:
    os.chown(file, 1000, 1000)


def _link(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to(file.with_name("real"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the file has to be another user's")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: os.utime(file, (1.0, STARTED - 60)),
        _of_another_user,
        lambda file: file.chmod(0o666),
        _link,
        lambda file: file.write_text("sgl"),
        lambda file: file.unlink(),
    ],
    ids=["older than the launch", "another user's", "anybody's to write", "a link", "no id", "none"],
)
def test_a_file_that_others_could_have_written_names_none(cidfile: Path, spoil: Callable[[Path], object]) -> None:
    os.utime(cidfile, (STARTED + 1, STARTED + 1))
    assert written(cidfile, STARTED) is not None
    spoil(cidfile)
    assert written(cidfile, STARTED) is None


# The engine


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`engine(code)`: what the engine's command does; the words that it was given are in the file returned."""
    folder, said = tmp_path / "bin", tmp_path / "words"
    folder.mkdir()
    run = folder / "systemd-run"
    run.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def made(code: str) -> Path:
        for name in Engine:
            command = folder / name
            command.write_text(f'#!/bin/sh\necho "$@" >>{said}\n{code}\n')
            command.chmod(0o755)
        run.chmod(0o755)
        return said

    return made


def test_an_engine_is_asked_for_the_container_of_the_name(engine: Callable[[str], Path]) -> None:
    engine(f"echo {ID}; echo 2026-11-29T21:35:43.921479006Z; echo {IMAGE}")
    assert asyncio.run(containers.named(command(*RUN), 1795988000.0)) == Container(ID, Engine.DOCKER)
    assert asyncio.run(containers.named(command(*RUN), 1795989000.0)) is None  # it is older than that launch


def test_an_engine_that_knows_no_such_container_says_why(engine: Callable[[str], Path]) -> None:
    engine("echo Error: no such container >&2; exit 125")
    container = Container(ID, Engine.PODMAN)
    assert asyncio.run(containers.silence(container)) == "podman answers: Error: no such container"
    assert "no such container" in asyncio.run(containers.kill(container, signal.SIGTERM))
    assert asyncio.run(containers.named(command(*RUN), 0.0)) is None


def test_an_engine_that_is_asked_answers_for_that_very_container(engine: Callable[[str], Path]) -> None:
    engine(f"echo {ID}")
    assert asyncio.run(containers.silence(Container(ID, Engine.PODMAN))) == ""
    assert "another container" in asyncio.run(containers.silence(Container(OTHER, Engine.PODMAN)))


def test_an_engine_is_told_which_signal(engine: Callable[[str], Path]) -> None:
    said = engine("exit 0")
    assert asyncio.run(containers.kill(Container(ID, Engine.DOCKER), signal.SIGTERM)) == ""
    assert said.read_text() == f"kill --signal=TERM {ID}\n"


def test_an_engine_that_hangs_is_given_up(engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_DEADLINE_S", 0.2)
    engine(f"exec {sys.executable} -c 'import signal; signal.pause()'")
    assert "does not answer" in asyncio.run(containers.silence(Container(ID, Engine.PODMAN)))
