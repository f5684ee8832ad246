"""What the files of a unit say, and how a config is put in force and taken back."""

import asyncio
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_watchdog.domain.errors import DeadlineExceeded, UnusableInput
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import UnitSnapshot
from sglang_watchdog.host import override, unit_files
from sglang_watchdog.host.override import OverrideKind, override_kind, override_obstacle, put_in_force, render, withdraw
from sglang_watchdog.host.unit_files import (
    definition,
    definition_on_disk,
    drop_in_of,
    environment_file_of,
    intended_config,
    on_disk,
    operator_config,
    shadowed_config,
)
from sglang_watchdog.host.unit_syntax import expand
from waiting import wait_until

UNIT = "sglang-big.service"
SERVER = "/opt/venv/bin/python -m sglang.launch_server --model-path /m --tp 4"
STEPS_10 = "--speculative-algorithm EAGLE --speculative-num-steps 10 --speculative-eagle-topk 1"
STEPS_4 = SpeculationConfig.of(STEPS_10.replace("10", "4").split())
MANAGED = frozenset({"--mem-fraction-static"})
NONE_MANAGED: frozenset[str] = frozenset()


class Host:
    """Folders that stand for systemd's, and the unit as systemd would show it after a reload."""

    def __init__(self, root: Path) -> None:
        self.etc, self.lib, self.overrides = root / "etc", root / "lib", root / "state" / "overrides"
        for folder in (self.etc, self.lib):
            folder.mkdir()

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def unit(self, exec_start: str, more: str = "", mode: int = 0o644) -> UnitSnapshot:
        self.write(self.etc / UNIT, f"[Service]\n{more}ExecStart={exec_start}\n", mode)
        return self.loaded()

    def loaded(self) -> UnitSnapshot:
        disk = on_disk(UnitSnapshot(UNIT))
        return UnitSnapshot(
            UNIT,
            fragment=disk.fragment,
            drop_ins=disk.drop_ins,
            exec_start=disk.command.argv if disk.command else (),
            exec_start_count=len(disk.commands or ()),
            environment_files=(*disk.environment_files,),
        )

    @property
    def ours(self) -> str:
        return str(environment_file_of(UNIT, self.overrides))

    def reads_ours(self) -> str:
        return f"EnvironmentFile=-{self.ours}\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setattr(unit_files, "UNIT_PATHS", (made.etc, made.lib))
    monkeypatch.setattr(unit_files, "_DROP_IN_FOLDER", made.etc)
    return made


def executed() -> list[str]:
    """The argv that a start would give after a reload."""
    disk = on_disk(UnitSnapshot(UNIT))
    assert disk.command is not None
    return list(expand(disk.command, disk.environment))


class TestDefinition:
    def test_drop_ins_that_systemd_has_not_loaded_yet_are_found(self, host: Host) -> None:
        loaded = host.unit(SERVER)
        before = definition(loaded)
        fresh = [
            host.write(host.etc / folder / name, "[Service]\n")
            for folder, name in [
                ("service.d", "10-all.conf"),
                ("sglang-.service.d", "20-prefix.conf"),
                (f"{UNIT}.d", "30-own.conf"),
            ]
        ]
        host.write(host.lib / f"{UNIT}.d" / "30-own.conf", "[Service]\nExecStart=\n")  # shadowed by the one in etc
        host.write(host.etc / f"{UNIT}.d" / "40-not-a-drop-in.txt", "")
        host.write(host.etc / f"{UNIT}.d" / ".50-hidden.conf", "")
        (host.etc / f"{UNIT}.d" / "60-masked.conf").symlink_to("/dev/null")
        assert before.differs_from(definition_on_disk(loaded)) == tuple(sorted(map(str, fresh)))

    def test_the_template_and_its_drop_ins_make_up_an_instance(self, host: Host) -> None:
        fragment = host.write(host.lib / "sglang@.service", f"[Service]\nExecStart={SERVER} --served-model-name %i\n")
        drop_in = host.write(host.etc / "sglang@.service.d" / "a.conf", "[Service]\nEnvironment=A=%I\n")
        disk = on_disk(UnitSnapshot("sglang@a-b.service"))
        assert (disk.fragment, disk.drop_ins) == (str(fragment), (str(drop_in),))
        assert disk.command is not None
        assert disk.command.argv[-1] == "a-b"
        assert disk.environment == {"A": "a/b"}

    def test_identical_bytes_written_again_are_no_difference(self, host: Host) -> None:
        loaded = host.unit(SERVER)
        before = definition(loaded)
        host.unit(SERVER)
        os.utime(host.etc / UNIT, (0, 0))
        assert before.differs_from(definition_on_disk(loaded)) == ()

    def test_a_file_that_was_changed_before_a_reload_is_not_taken_for_the_loaded_one(self, host: Host) -> None:
        in_sync = definition(host.unit(f"{SERVER} --speculative-num-steps 5"))
        loaded = UnitSnapshot(UNIT, fragment=str(host.etc / UNIT), need_daemon_reload=True)
        host.unit(f"{SERVER} --speculative-num-steps 10")
        assert definition(loaded, in_sync).digests == in_sync.digests
        assert definition(loaded, in_sync).differs_from(definition_on_disk(loaded)) == (str(host.etc / UNIT),)
        assert set(definition(loaded).digests.values()) == {""}

    def test_a_unit_file_that_took_another_ones_place_is_the_one_on_disk(self, host: Host) -> None:
        host.write(host.lib / UNIT, f"[Service]\nExecStart={SERVER}\n")
        loaded = host.loaded()
        shadow = host.write(host.etc / UNIT, f"[Service]\nExecStart={SERVER} --tp 8\n")
        assert definition_on_disk(loaded).fragment == str(shadow)

    def test_a_definition_holds_no_secret(self, host: Host) -> None:
        loaded = host.unit(f"{SERVER} --api-key q7secret")
        assert "q7secret" not in repr((definition(loaded), definition_on_disk(loaded)))

    def test_a_deleted_unit_file_differs(self, host: Host) -> None:
        loaded = host.unit(SERVER)
        before = definition(loaded)
        (host.etc / UNIT).unlink()
        assert before.differs_from(definition_on_disk(loaded)) == (str(host.etc / UNIT),)


class TestConfig:
    def test_what_the_files_ask_for_is_read_with_its_variables(self, host: Host) -> None:
        defaults = host.write(host.etc / "default", f"ARGS='{STEPS_10}'\n")
        more = f"Environment=ARGS=--speculative-num-steps\\s1 STEPS=7\nEnvironmentFile=-{defaults}\n"
        assert intended_config(host.unit(f"{SERVER} $ARGS", more), NONE_MANAGED) == SpeculationConfig.of(
            STEPS_10.split()
        )
        numbered = intended_config(host.unit(f"{SERVER} --speculative-num-steps ${{STEPS}}", more), NONE_MANAGED)
        assert numbered is not None
        assert numbered.steps == 7

    def test_what_the_operator_asks_for_is_told_from_our_override(self, host: Host) -> None:
        unit = host.unit(f"{SERVER} {STEPS_10}")
        put_in_force(render(unit, STEPS_4, overrides=host.overrides))
        assert intended_config(host.loaded(), NONE_MANAGED) == STEPS_4
        assert operator_config(host.loaded()) == SpeculationConfig.of(STEPS_10.split())

    def test_a_drop_in_that_sets_the_command_shadows_a_unit_file_that_was_changed_later(self, host: Host) -> None:
        drop_in = host.etc / f"{UNIT}.d" / "10-tuned.conf"
        host.unit(f"{SERVER} {STEPS_10}")
        host.write(drop_in, f"[Service]\nExecStart=\nExecStart={SERVER} {STEPS_10.replace('10', '4')}\n")
        assert shadowed_config(host.loaded(), NONE_MANAGED) is None  # the drop-in is the last word

        def changed_later() -> bool:
            host.unit(f"{SERVER} {STEPS_10}")
            return os.stat(host.etc / UNIT).st_ctime > os.stat(drop_in).st_ctime

        wait_until(changed_later, 30, "the file's change time is newer than the drop-in's")
        found = shadowed_config(host.loaded(), NONE_MANAGED)
        assert found is not None
        assert (found.drop_in, found.asked.steps) == (str(drop_in), 10)
        host.write(drop_in, "[Service]\nNice=5\n")
        assert shadowed_config(host.loaded(), NONE_MANAGED) is None

    def test_a_command_that_only_systemd_can_resolve_is_not_guessed(self, host: Host) -> None:
        host.write(host.etc / UNIT, f"[Service]\nExecStart={SERVER} --log %d/log\n")
        assert intended_config(UnitSnapshot(UNIT), NONE_MANAGED) is None

    def test_a_drop_in_that_clears_the_command_counts(self, host: Host) -> None:
        host.unit(f"{SERVER} {STEPS_10}")
        host.write(host.etc / f"{UNIT}.d" / "a.conf", f"[Service]\nExecStart=\nExecStart={SERVER}\n")
        config = intended_config(UnitSnapshot(UNIT), NONE_MANAGED)
        assert config is not None
        assert not config.speculates


class TestKind:
    def test_a_plain_command_takes_a_drop_in(self, host: Host) -> None:
        assert override_kind(host.unit(f"{SERVER} {STEPS_10}")) is OverrideKind.DROP_IN

    def test_a_unit_that_expands_the_variable_and_reads_our_file_last_takes_that_file(self, host: Host) -> None:
        unit = host.unit(f"{SERVER} $SGLANG_SPECULATION_ARGS")
        assert kind_of(unit, host, host.ours) is OverrideKind.ENVIRONMENT_FILE
        assert kind_of(unit, host, "/etc/default/sglang", host.ours) is OverrideKind.ENVIRONMENT_FILE
        assert kind_of(unit, host, host.ours, "/etc/default/sglang") is OverrideKind.DROP_IN
        assert kind_of(unit, host) is OverrideKind.DROP_IN

    def test_managed_flags_beside_the_variable_need_a_drop_in(self, host: Host) -> None:
        fixed = host.unit(f"{SERVER} --speculative-num-steps 3 $SGLANG_SPECULATION_ARGS")
        assert kind_of(fixed, host, host.ours) is OverrideKind.DROP_IN
        memory = host.unit(f"{SERVER} --mem-fraction-static=0.9 $SGLANG_SPECULATION_ARGS")
        assert kind_of(memory, host, host.ours) is OverrideKind.ENVIRONMENT_FILE
        assert kind_of(memory, host, host.ours, managed=MANAGED) is OverrideKind.DROP_IN

    @pytest.mark.parametrize(
        ("command", "why"),
        [
            ("/bin/bash -c 'python -m sglang.launch_server --model-path /m'", "starts a shell"),
            ("/opt/start-server.sh", "no SGLang command is to be seen"),
            ("/usr/bin/python -m http.server", "no SGLang command is to be seen"),
            (f"{SERVER}\nExecStart={SERVER}", "has 2 ExecStart= commands"),
        ],
    )
    def test_a_command_whose_flags_cannot_be_seen_is_an_obstacle(self, host: Host, command: str, why: str) -> None:
        unit = host.unit(command)
        assert why in override_obstacle(unit)
        assert override_kind(unit) is OverrideKind.NOT_POSSIBLE
        with pytest.raises(UnusableInput, match=why):
            render(unit, STEPS_4)

    def test_a_container_or_a_wrapper_in_front_is_no_obstacle(self, host: Host) -> None:
        assert not override_obstacle(host.unit(f"/usr/bin/numactl -m 0 {SERVER}"))
        assert not override_obstacle(host.unit("/usr/bin/docker run --rm image sglang serve --model-path /m"))


def kind_of(unit: UnitSnapshot, host: Host, *files: str, managed: frozenset[str] = frozenset()) -> OverrideKind:
    return override_kind(replace(unit, environment_files=files), managed, host.overrides)


class TestDropIn:
    def test_only_managed_flags_are_changed(self, host: Host) -> None:
        unit = host.unit(
            f"{SERVER} {STEPS_10} --mem-fraction-static=0.9 --served-model-name 'a  \"b\"' --json={{}} -x=1"
        )
        target = SpeculationConfig.of([*STEPS_4.words(), "--mem-fraction-static", "0.8"], MANAGED)
        assert put_in_force(render(unit, target, MANAGED, host.overrides))
        rest = [*SERVER.split(), "--served-model-name", 'a  "b"', "--json={}", "-x=1"]
        assert executed() == [*rest, *target.words()]

    def test_no_speculation_takes_all_its_flags_away(self, host: Host) -> None:
        unit = host.unit(f"{SERVER} {STEPS_10} --port 1")
        put_in_force(render(unit, SpeculationConfig(), overrides=host.overrides))
        assert executed() == [*SERVER.split(), "--port", "1"]

    def test_a_variable_that_holds_managed_flags_is_replaced_by_what_else_it_holds(self, host: Host) -> None:
        more = f"Environment='ARGS={STEPS_10} --port 1' STEPS=3 'NONE='\n"
        unit = host.unit(f"{SERVER} --speculative-num-steps $STEPS $ARGS $NONE $OTHER ${{STEPS}}", more)
        text = render(unit, STEPS_4, overrides=host.overrides).text
        assert f"ExecStart={SERVER} --port 1 $NONE $OTHER ${{STEPS}} --speculative-algorithm EAGLE" in text

    def test_a_variable_behind_a_flag_without_a_value_stays(self, host: Host) -> None:
        more = "Environment='MORE=--port 1'\n"
        unit = host.unit(f"{SERVER} --speculative-num-steps 3 $MORE", more)
        assert f"ExecStart={SERVER} $MORE --spec" in render(unit, STEPS_4, overrides=host.overrides).text

    def test_a_dollar_in_a_proven_value_stays_a_dollar(self, host: Host) -> None:
        unit = host.unit(SERVER)
        config = SpeculationConfig.of(["--speculative-draft-model-path", "/m/$x ${y} %n; \\"])
        put_in_force(render(unit, config, overrides=host.overrides))
        assert executed()[-1] == "/m/$x ${y} %n; \\"
        literal = host.unit(f":{SERVER}")
        put_in_force(render(literal, config, overrides=host.overrides))
        assert executed()[-1] == "/m/$x ${y} %n; \\"

    def test_it_is_rendered_from_the_operators_command_when_ours_is_loaded(self, host: Host) -> None:
        put_in_force(render(host.unit(f"{SERVER} {STEPS_10}"), STEPS_4, overrides=host.overrides))
        host.unit(f"{SERVER} --port 2 {STEPS_10}")
        assert put_in_force(render(host.loaded(), STEPS_4, overrides=host.overrides))
        assert executed() == [*SERVER.split(), "--port", "2", *STEPS_4.words()]

    def test_what_runs_can_tell_whose_it_is(self, host: Host) -> None:
        assert "Environment=SPT_NOENV=1\n" in render(host.unit(SERVER), STEPS_4).text


class TestEnvironmentFile:
    def test_it_holds_the_config_alone(self, host: Host) -> None:
        unit = host.unit(f"{SERVER} $SGLANG_SPECULATION_ARGS", host.reads_ours())
        unit = replace(unit, environment_files=(host.ours,))
        made = render(unit, STEPS_4, overrides=host.overrides)
        assert made.kind is OverrideKind.ENVIRONMENT_FILE
        assert not put_in_force(made), "no reload is needed"
        assert executed() == [*SERVER.split(), *STEPS_4.words()]
        assert operator_config(unit, overrides=host.overrides) == SpeculationConfig()
        assert not withdraw(UNIT, host.overrides)
        assert executed() == SERVER.split()

    def test_a_drop_in_of_earlier_goes_away(self, host: Host) -> None:
        put_in_force(render(host.unit(f"{SERVER} {STEPS_10}"), STEPS_4, overrides=host.overrides))
        host.unit(f"{SERVER} $SGLANG_SPECULATION_ARGS", host.reads_ours())
        unit = replace(host.loaded(), environment_files=(host.ours,))
        assert put_in_force(render(unit, STEPS_4, overrides=host.overrides)), (
            "a reload is needed, to forget the drop-in"
        )
        assert not drop_in_of(UNIT).exists()


class TestWriting:
    def test_a_file_that_is_there_already_is_not_written_again(self, host: Host) -> None:
        made = render(host.unit(SERVER), STEPS_4, overrides=host.overrides)
        put_in_force(made)
        os.utime(made.path, (0, 0))
        assert put_in_force(made), "it was not loaded yet"
        assert not put_in_force(render(host.loaded(), STEPS_4, overrides=host.overrides))
        assert made.path.stat().st_mtime == 0

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666])
    def test_it_is_no_wider_than_the_unit_file(self, host: Host, mode: int) -> None:
        made = render(host.unit(f"{SERVER} --api-key q7secret", mode=mode), STEPS_4, overrides=host.overrides)
        put_in_force(made)
        status = made.path.stat()
        assert stat.S_IMODE(status.st_mode) == mode & 0o644
        assert (status.st_uid, status.st_gid) == (0, 0)

    def test_a_folder_that_is_a_link_is_refused(self, host: Host, tmp_path: Path) -> None:
        made = render(host.unit(SERVER), STEPS_4, overrides=host.overrides)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        made.path.parent.symlink_to(elsewhere)
        with pytest.raises(UnusableInput, match="symbolic link"):
            put_in_force(made)
        with pytest.raises(UnusableInput, match="symbolic link"):
            withdraw(UNIT, host.overrides)
        assert list(elsewhere.iterdir()) == []

    def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(self, host: Host, tmp_path: Path) -> None:
        made = render(host.unit(SERVER), STEPS_4, overrides=host.overrides)
        victim = host.write(tmp_path / "victim", "mine")
        made.path.parent.mkdir()
        made.path.symlink_to(victim)
        put_in_force(made)
        assert victim.read_text() == "mine"
        assert not made.path.is_symlink()

    def test_what_a_cut_off_write_left_is_no_obstacle_and_goes_away(self, host: Host) -> None:
        made = render(host.unit(SERVER), STEPS_4, overrides=host.overrides)
        host.write(made.path.with_name(f".{made.path.name}.new"), "half")
        put_in_force(made)
        assert [path.name for path in made.path.parent.iterdir()] == [made.path.name]
        assert made.path.read_text() == made.text

    def test_a_write_that_fails_leaves_the_old_file(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        made = render(host.unit(SERVER), STEPS_4, overrides=host.overrides)
        put_in_force(made)
        later = render(host.unit(SERVER), SpeculationConfig(), overrides=host.overrides)

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UnusableInput, match="No space left"):
            put_in_force(later)
        assert made.path.read_text() == made.text

    def test_withdrawing_twice_is_harmless(self, host: Host) -> None:
        put_in_force(render(host.unit(SERVER), STEPS_4, overrides=host.overrides))
        assert withdraw(UNIT, host.overrides)
        assert not withdraw(UNIT, host.overrides)


class TestVerify:
    @pytest.fixture
    def tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """In place of systemd-analyze; no file yet."""
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "systemd-analyze"

    def test_a_tool_that_hangs_is_given_up(self, tool: Path) -> None:
        tool.write_text(f"#!{sys.executable}\nimport time; time.sleep(60)")
        tool.chmod(0o755)
        with pytest.raises(DeadlineExceeded, match="did not end"):
            asyncio.run(override.verify(UNIT, 0.2))

    def test_a_tool_that_is_missing_is_named(self, tool: Path) -> None:
        assert not tool.exists()
        with pytest.raises(UnusableInput, match="cannot be run: No such file"):
            asyncio.run(override.verify(UNIT))

    def test_what_it_says_is_an_objection_only_where_it_ends_so(self, tool: Path) -> None:
        for status, objection in ((0, ""), (1, "words\nothers"), (3, "words\nothers")):
            tool.write_text(f"#!/bin/sh\necho words; echo others >&2; exit {status}")
            tool.chmod(0o755)
            assert asyncio.run(override.verify(UNIT)) == objection


def quadlet(host: Host, words: str, *, image: str = "lmsysorg/sglang") -> UnitSnapshot:
    """A unit as podman 5.4.2 generates it, of a file that asks for the same."""
    section = f"Image={image}\nExec={words}\n"
    source = host.write(host.etc / "sglang-big.container", f"[Container]\n{section}")
    client = f"/usr/bin/podman run --name systemd-%N --rm -d {image}"
    host.write(host.lib / UNIT, f"[X-Container]\n{section}\n[Service]\nExecStart={client} {words}\n")
    return replace(host.loaded(), source=str(source))


INSIDE = "python3 -m sglang.launch_server --model-path /models/%N"


def test_of_a_generated_unit_the_file_that_it_is_generated_of_tells_what_a_start_will_run(host: Host) -> None:
    unit = quadlet(host, f"{INSIDE} {STEPS_10}")
    loaded = definition(unit)
    before = intended_config(unit, NONE_MANAGED)
    assert before is not None
    assert before.steps == 10
    host.write(Path(unit.source), Path(unit.source).read_text().replace("steps 10", "steps 2"))
    edited = replace(unit, need_daemon_reload=True)
    intended = intended_config(edited, NONE_MANAGED)
    assert intended is not None
    assert intended.steps == 2
    command = on_disk(edited).command
    assert command is not None
    assert command.words[:4] == ("/usr/bin/podman", "run", "--name", "systemd-sglang-big")
    assert loaded.differs_from(definition_on_disk(edited)) == (unit.source,)


@pytest.mark.parametrize(
    "edit", [("lmsysorg/sglang", "lmsysorg/sglang:dev"), ("Exec=", "Exec='")], ids=["image", "quote"]
)
def test_what_else_podman_would_generate_is_not_guessed(host: Host, edit: tuple[str, str]) -> None:
    unit = quadlet(host, f"{INSIDE} {STEPS_10}")
    host.write(Path(unit.source), Path(unit.source).read_text().replace(*edit))
    assert intended_config(replace(unit, need_daemon_reload=True), NONE_MANAGED) is None


def test_a_generated_unit_whose_file_is_gone_will_run_nothing_that_is_known(host: Host) -> None:
    unit = quadlet(host, f"{INSIDE} {STEPS_10}")
    Path(unit.source).unlink()
    assert intended_config(unit, NONE_MANAGED) is None
