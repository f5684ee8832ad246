"""The project's contract with systemd: what the design relies on, held against the real thing, on both versions.

When a new systemd breaks one of these, the product has to change where it relied on it. Where versions differ, each
version's behaviour is asserted. What is read out of the journal is in `test_journal_contract`.
"""

import sys
from dataclasses import dataclass

import pytest

from lab.host import LabHost
from lab.service import IDLE, READY, Service
from waiting import wait_until

pytestmark = pytest.mark.lab

NOTIFY = ("Type=notify", "NotifyAccess=all")
DRAINS_FOR_EVER = f"trap '' TERM\n{READY}exec sleep 600\n"
DIES = "kill -9 $$\n"
STAYS_IN_AUTO_RESTART = ("Restart=always", "RestartSec=600")


def left_in_auto_restart(service: Service) -> str:
    """Its launch has died, and the next one does not come by itself. Returns the invocation of the one that died."""
    service.define(DIES, *STAYS_IN_AUTO_RESTART)
    service.start()
    service.wait_for("activating/auto-restart")
    (invocation,) = service.show("InvocationID")
    return invocation


@dataclass(frozen=True)
class End:
    """One kind of death: how it is brought about, and what systemd then says of it."""

    name: str
    result: str
    code: str
    status: str
    script: str = READY + IDLE
    lines: tuple[str, ...] = NOTIFY
    how: tuple[str, ...] = ()
    """The systemctl command that ends it, if it does not end by itself."""


ENDS = (
    End("its own tree killed by it", "signal", "2", "9", script=DIES, lines=()),
    End("killed by somebody", "signal", "2", "9", how=("kill", "--signal=KILL")),
    End("exit 1", "exit-code", "1", "1", script="exit 1\n", lines=()),
    End("unasked exit 0", "success", "1", "0", script="exit 0\n", lines=()),
    End("stop, drained", "success", "1", "0", script=f"trap 'exit 0' TERM\n{READY}{IDLE}", how=("stop",)),
    End("stop, by default action", "success", "2", "15", script=f"{READY}exec sleep 600\n", how=("stop",)),
    End("stop, exit 1", "exit-code", "1", "1", script=f"trap 'exit 1' TERM\n{READY}{IDLE}", how=("stop",)),
    *(
        End(
            f"stop, its own tree killed by it, {mode}",
            "signal",
            "2",
            "9",
            script=f"trap 'kill -9 $$' TERM\n{READY}{IDLE}",
            lines=(*NOTIFY, f"KillMode={mode}"),
            how=("stop",),
        )
        for mode in ("control-group", "mixed")
    ),
    End("stop, too slow", "timeout", "2", "9", DRAINS_FOR_EVER, (*NOTIFY, "TimeoutStopSec=200ms"), how=("stop",)),
    End("start, too slow", "timeout", "2", "15", "exec sleep 600\n", (*NOTIFY, "TimeoutStartSec=200ms")),
    End(
        "start, too slow and deaf",
        "timeout",
        "2",
        "9",
        "trap '' TERM\nexec sleep 600\n",
        (*NOTIFY, "TimeoutStartSec=200ms", "TimeoutStopSec=200ms"),
    ),
    End("ran too long", "timeout", "2", "15", f"{READY}exec sleep 600\n", (*NOTIFY, "RuntimeMaxSec=200ms")),
    End("silent to WatchdogSec", "watchdog", "2", "6", f"{READY}exec sleep 600\n", (*NOTIFY, "WatchdogSec=200ms")),
    End("no such program", "exit-code", "1", "203", lines=("ExecStart=", "ExecStart=/no/such/program")),
    End("no environment file", "resources", "0", "0", lines=("EnvironmentFile=/no/such/file",)),
    End(
        "crash whose child is stuck",
        "signal",
        "2",
        "9",
        f"trap '' TERM\nsleep 600 &\n{DIES}",
        ("TimeoutStopSec=200ms",),
    ),
)


@pytest.mark.parametrize("end", ENDS, ids=[end.name for end in ENDS])
def test_each_kind_of_end_has_its_result(service: Service, end: End) -> None:
    service.define(end.script, *end.lines)
    with service.reference():  # without it a unit that ended well is unloaded at once
        service.start(check=False)
        if end.how:
            service.host.systemctl(*end.how, service.name)
        service.wait_for_end()
        assert service.end() == (end.result, end.code, end.status)


def _drains_until_told(service: Service) -> str:
    return f"trap 'until test -e /run/{service.name}.drained; do sleep 0.02; done; exit 0' TERM\n{READY}{IDLE}"


def _tell_that_it_has_drained(service: Service) -> None:
    service.host.write(f"/run/{service.name}.drained", "")


class TestStop:
    def test_a_second_stop_is_the_same_job_so_an_operators_stop_during_ours_is_invisible(
        self, service: Service
    ) -> None:
        service.define(DRAINS_FOR_EVER, *NOTIFY, "TimeoutStopSec=600")
        service.start()
        first = service.call("StopUnit", "ss", service.name, "fail")
        assert first.startswith('o "/org/freedesktop/systemd1/job/')
        assert service.call("StopUnit", "ss", service.name, "fail") == first

    def test_start_in_mode_fail_is_refused_while_a_stop_is_queued(self, service: Service) -> None:
        service.define(DRAINS_FOR_EVER, *NOTIFY, "TimeoutStopSec=600")
        service.start()
        service.stop("--no-block")
        refused = service.call("StartUnit", "ss", service.name, "fail", check=False)
        assert "conflicting with existing job" in refused or "is destructive" in refused
        assert service.state() == "deactivating/stop-sigterm"

    def test_start_in_mode_replace_overrides_a_queued_stop(self, service: Service) -> None:
        service.define(_drains_until_told(service), *NOTIFY)
        service.start()
        service.stop("--no-block")
        service.call("StartUnit", "ss", service.name, "replace")
        _tell_that_it_has_drained(service)
        service.wait_for("active/running")

    def test_after_a_stop_that_timed_out_there_is_no_auto_restart(self, service: Service) -> None:
        service.define(DRAINS_FOR_EVER, *NOTIFY, "TimeoutStopSec=200ms", "Restart=always", "RestartSec=100ms")
        service.start()
        service.stop()
        assert service.state() == "failed/failed"  # a death nobody asked for goes to auto-restart instead
        assert service.show("Result", "NRestarts", "Job") == ("timeout", "0", "")

    def test_a_start_given_while_a_stop_drains_runs_the_definition_that_is_loaded(self, service: Service) -> None:
        service.define("echo old\n" + _drains_until_told(service), *NOTIFY)
        service.start()
        service.stop("--no-block")
        service.write_unit(*NOTIFY, "ExecStart=/bin/sh -c 'echo new; systemd-notify --ready; sleep 600'")
        service.start("--no-block")
        _tell_that_it_has_drained(service)
        service.wait_for("active/running")
        # The shell may tell of the sleep that the stop ended as well.
        assert [line for line in service.said() if line != "Terminated"] == ["old", "old"]
        assert service.show("NeedDaemonReload") == ("yes",)

    def test_a_unit_killed_by_the_manager_is_restarted_as_after_any_death(self, service: Service) -> None:
        service.define(READY + IDLE, *NOTIFY, *STAYS_IN_AUTO_RESTART)
        service.start()
        service.call("KillUnit", "ssi", service.name, "all", "9")
        service.wait_for("activating/auto-restart")
        assert service.end() == ("signal", "2", "9")


class TestAutoRestart:
    def test_it_is_a_state_without_a_job(self, service: Service) -> None:
        service.define(DIES, *STAYS_IN_AUTO_RESTART)
        service.start()
        service.wait_for("activating/auto-restart")
        assert service.show("Result", "Job", "MainPID") == ("signal", "", "0")

    def test_start_waits_out_restart_sec_on_252_and_is_done_at_once_on_257(self, service: Service) -> None:
        died = f"/run/{service.name}.died"
        once = f"test -e {died} || {{ : >{died}; kill -9 $$; }}\n"
        waits_s = 1 if service.host.systemd_version < 257 else 0
        service.define(f"{once}{READY}{IDLE}", *NOTIFY, "Restart=always", f"RestartSec={waits_s or 600}")
        service.start("--no-block")
        service.wait_for("activating/auto-restart")
        (death,) = service.show("ExecMainExitTimestampMonotonic")
        service.start()
        (start,) = service.show("ExecMainStartTimestampMonotonic")
        assert (int(start) - int(death)) / 1e6 >= waits_s

    def test_a_stop_cancels_it_and_the_unit_is_unloaded_with_all_it_knew(self, service: Service) -> None:
        service.define(DIES, *STAYS_IN_AUTO_RESTART)
        service.start()
        service.wait_for("activating/auto-restart")
        assert service.show("InvocationID") != ("",)
        service.stop()
        assert service.show("ActiveState", "Result", "InvocationID") == ("inactive", "success", "")

    def test_a_stop_of_a_referenced_unit_keeps_result_and_invocation(self, service: Service) -> None:
        invocation = left_in_auto_restart(service)
        with service.reference():
            service.stop()
            assert service.show("Result", "InvocationID") == ("signal", invocation)
        wait_until(lambda: service.show("InvocationID") == ("",), 10, "without the reference it is unloaded")

    def test_it_runs_the_definition_that_is_loaded_not_the_one_on_disk(self, service: Service) -> None:
        service.define(f"echo old\n{READY}exec sleep 600\n", *NOTIFY, "Restart=always", "RestartSec=100ms")
        service.start()
        service.write_unit(*NOTIFY, "ExecStart=/bin/sh -c 'echo new; systemd-notify --ready; exec sleep 600'")
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        assert service.said() == ["old", "old"]

    def test_each_launch_has_its_own_invocation_and_counts(self, service: Service) -> None:
        service.define(READY + IDLE, *NOTIFY, "Restart=always", "RestartSec=100ms")
        service.start()
        first = service.show("InvocationID")
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        assert service.show("InvocationID") != first

    def test_an_attempt_shows_in_inactive_exit_while_active_enter_stays_as_it_was(self, service: Service) -> None:
        service.define("exit 1\n", *NOTIFY, *STAYS_IN_AUTO_RESTART)
        service.start(check=False)
        attempt, active = service.show("InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic")
        assert int(attempt) > 0
        assert int(active) == 0

    def test_on_failure_is_not_called_before_an_auto_restart_on_252_but_is_on_257(self, service: Service) -> None:
        helper = Service(service.host, service.name.replace(".service", "-helper.service"))
        helper.define("echo called\n", "Type=oneshot")
        service.define(DIES, *STAYS_IN_AUTO_RESTART, unit=(f"OnFailure={helper.name}",))
        service.start()
        service.wait_for("activating/auto-restart")
        if service.host.systemd_version < 257:
            service.stop()  # a job of its own: one for the helper, queued before it, would have run
            assert helper.said() == []
        else:
            wait_until(lambda: helper.said() == ["called"], 10, "OnFailure= is called")


class TestPartOf:
    """A unit that is `PartOf=` another one and active: the memory that a stop was asked for."""

    WITNESS = "contract_witness.slice"

    def witness(self, service: Service) -> None:
        """A transient slice: without a process, active from this call on."""
        parts = ("PartOf", "as", "1", service.name)
        service.call("StartTransientUnit", "ssa(sv)a(sa(sv))", self.WITNESS, "fail", "1", *parts, "0")
        self.wait(service, "active")

    def wait(self, service: Service, state: str) -> None:
        shown = {"ActiveState": state}
        wait_until(lambda: service.host.show(self.WITNESS, "ActiveState") == shown, 10, f"the witness is {state}")

    @pytest.mark.parametrize("down", ["failed", "inactive"])
    def test_a_stop_of_what_is_down_ends_it_and_leaves_no_other_trace(self, service: Service, down: str) -> None:
        service.define(DIES)
        service.start()
        service.wait_for("failed/failed")
        with service.reference():
            if down == "inactive":
                service.host.systemctl("reset-failed", service.name)
            self.witness(service)
            before, said = service.host.show(service.name), service.messages()
            service.stop()
            self.wait(service, "inactive")
            assert service.show("ActiveState", "StateChangeTimestamp", "InactiveEnterTimestamp") == (
                down,
                before["StateChangeTimestamp"],
                before["InactiveEnterTimestamp"],
            )
            assert service.messages() == said

    def test_no_end_and_no_automatic_restart_ends_it_and_neither_does_a_start_or_restart_by_hand(
        self, service: Service
    ) -> None:
        service.define(READY + IDLE, *NOTIFY, "Restart=always", "RestartSec=100ms")
        service.start()
        self.witness(service)
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        service.host.systemctl("restart", service.name)
        service.start()
        service.host.systemctl("daemon-reload")
        assert service.host.show(self.WITNESS, "ActiveState") == {"ActiveState": "active"}
        service.stop()
        self.wait(service, "inactive")

    def test_it_keeps_what_is_down_loaded_with_all_it_knew(self, service: Service) -> None:
        invocation = left_in_auto_restart(service)
        with service.reference():
            service.stop()
            self.witness(service)
        assert service.show("Result", "InvocationID") == ("signal", invocation)
        service.host.systemctl("stop", self.WITNESS)
        wait_until(lambda: service.show("InvocationID") == ("",), 10, "without the witness it is unloaded")


class TestStartLimit:
    LIMIT = ("StartLimitIntervalSec=600", "StartLimitBurst=2")

    def test_after_too_many_starts_only_reset_failed_lets_it_start_again(self, service: Service) -> None:
        service.define(DIES, unit=self.LIMIT)
        for _ in range(2):
            service.start(check=False)
            service.wait_for_end()
        service.start(check=False)
        assert service.messages()[-1].startswith(("Start request repeated too quickly", "Failed to start"))
        service.host.write(service.script_path, IDLE)
        service.start(check=False)
        assert service.state() == "failed/failed"
        service.host.systemctl("reset-failed", service.name)
        service.start()
        assert service.state() == "active/running"

    def test_a_daemon_reload_forgets_the_count_on_252_but_not_on_257(self, service: Service) -> None:
        service.define(DIES, unit=self.LIMIT)
        for _ in range(3):
            service.start(check=False)
            service.wait_for_end()
        service.host.write(service.script_path, IDLE)
        service.host.systemctl("daemon-reload")
        service.start(check=False)
        assert service.state() == ("active/running" if service.host.systemd_version < 257 else "failed/failed")

    def test_reached_by_auto_restarts_it_shows_the_last_real_result(self, service: Service) -> None:
        service.define(DIES, "Restart=always", "RestartSec=50ms", unit=self.LIMIT)
        service.start()
        service.wait_for("failed/failed")
        assert service.end() == ("signal", "2", "9")

    def test_reached_by_hand_it_shows_start_limit_hit(self, service: Service) -> None:
        service.define("exit 0\n", "Type=oneshot", unit=self.LIMIT)
        with service.reference():
            for _ in range(3):
                service.start(check=False)
            assert service.show("Result") == ("start-limit-hit",)

    def test_an_exec_start_pre_that_refuses_burns_it(self, service: Service) -> None:
        service.define(IDLE, "ExecStartPre=/bin/false", "Restart=always", "RestartSec=50ms", unit=self.LIMIT)
        service.start(check=False)
        service.wait_for("failed/failed")
        assert service.show("NRestarts") == ("2",)

    def test_an_exec_condition_that_refuses_skips_the_start_without_a_restart(self, service: Service) -> None:
        service.define(IDLE, "ExecCondition=/bin/false", "Restart=always", "RestartSec=50ms", unit=self.LIMIT)
        with service.reference():
            service.start()
            assert service.state() == "inactive/dead"
            assert service.show("Result", "NRestarts", "Job") == ("exec-condition", "0", "")


class TestEnvironmentFile:
    def test_it_is_read_before_every_start_without_a_reload(self, service: Service) -> None:
        file = f"/etc/{service.name}.env"
        service.host.write(file, 'ARGS="--steps 4"\n')
        service.define("echo $ARGS\n" + READY + IDLE, *NOTIFY, f"EnvironmentFile=-{file}")
        service.start()
        service.host.write(file, 'ARGS="--steps 3"\n')
        service.host.systemctl("restart", service.name)
        assert service.said() == ["--steps 4", "--steps 3"]

    def test_it_is_read_before_an_auto_restart_too(self, service: Service) -> None:
        file = f"/etc/{service.name}.env"
        service.host.write(file, "ARGS=before\n")
        service.define("echo $ARGS\n" + READY + IDLE, *NOTIFY, f"EnvironmentFile=-{file}", "Restart=always")
        service.start()
        service.host.write(file, "ARGS=after\n")
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        assert service.said() == ["before", "after"]

    def test_a_missing_one_stops_the_start_unless_it_has_a_dash(self, service: Service) -> None:
        service.define(READY + IDLE, *NOTIFY, "EnvironmentFile=/no/such/file")
        service.start(check=False)
        assert service.state() == "failed/failed"
        service.define(READY + IDLE, *NOTIFY, "EnvironmentFile=-/no/such/file")
        service.start()
        assert service.state() == "active/running"

    def test_the_one_listed_last_wins(self, service: Service) -> None:
        for order, value in enumerate(("operator", "watchdog")):
            service.host.write(f"/etc/{service.name}.{order}", f"ARGS={value}\n")
        files = [f"EnvironmentFile=-/etc/{service.name}.{order}" for order in (0, 1)]
        service.define("echo $ARGS\n" + READY + IDLE, *NOTIFY, *files)
        service.start()
        assert service.said() == ["watchdog"]

    def test_a_bare_variable_is_split_into_words_and_an_unset_one_is_none(self, service: Service) -> None:
        service.host.write(f"/etc/{service.name}.env", 'ARGS="--steps 4"\n')
        count = "/bin/sh -c 'echo \"$$#: $$*\"' sh"
        service.write_unit(
            "Type=oneshot", f"EnvironmentFile=/etc/{service.name}.env", f"ExecStart={count} $ARGS $NONE x"
        )
        service.host.systemctl("daemon-reload")
        service.start()
        assert service.said() == ["3: --steps 4 x"]


class TestDefinition:
    def test_a_drop_in_clears_exec_start_and_sets_it_anew(self, service: Service) -> None:
        service.define("echo unit file\n", "Type=oneshot")
        drop_in = "[Service]\nExecStart=\nExecStart=/bin/echo drop-in\n"
        service.host.write(f"{service.file_path}.d/90-test.conf", drop_in)
        service.host.systemctl("daemon-reload")
        service.start()
        assert service.said() == ["drop-in"]

    def test_the_bus_has_the_command_split_with_variables_kept_and_specifiers_and_quotes_gone(
        self, service: Service
    ) -> None:
        service.write_unit("ExecStart=/bin/echo $A ${B} $$C %N 100%% \"two words\" \\x41 ';'")
        service.host.systemctl("daemon-reload")
        interface = "org.freedesktop.systemd1.Service"
        shown = service.host.run(
            "busctl", "get-property", "org.freedesktop.systemd1", service.object_path, interface, "ExecStart"
        ).stdout
        name = service.name.removesuffix(".service")
        assert f'9 "/bin/echo" "$A" "${{B}}" "$$C" "{name}" "100%" "two words" "A" ";" false' in shown

    def test_need_daemon_reload_goes_by_the_time_of_the_file_not_by_what_is_in_it(self, service: Service) -> None:
        service.define(IDLE)
        service.start()
        assert service.show("NeedDaemonReload") == ("no",)
        service.host.write(service.file_path, service.host.read(service.file_path))
        assert service.show("NeedDaemonReload") == ("yes",)

    def test_a_change_that_keeps_the_time_of_the_file_is_not_seen(self, service: Service) -> None:
        service.define(IDLE)
        service.start()
        script = 'touch -r "$1" /run/t; echo "Environment=A=b" >>"$1"; touch -r /run/t "$1"'
        service.host.run("sh", "-c", script, "sh", service.file_path)
        assert service.show("NeedDaemonReload") == ("no",)

    def test_a_drop_in_in_a_new_folder_is_seen_on_257_but_not_on_252(self, service: Service) -> None:
        service.define(IDLE)
        service.start()
        service.host.write(f"{service.file_path}.d/90-test.conf", "[Service]\nEnvironment=A=b\n")
        assert service.show("NeedDaemonReload") == ("no" if service.host.systemd_version < 257 else "yes",)

    def test_a_drop_in_beside_another_needs_a_reload(self, service: Service) -> None:
        service.host.write(f"{service.file_path}.d/10-first.conf", "[Service]\nEnvironment=A=a\n")
        service.define(IDLE)
        service.start()
        service.host.write(f"{service.file_path}.d/90-test.conf", "[Service]\nEnvironment=A=b\n")
        assert service.show("NeedDaemonReload") == ("yes",)

    def test_reading_a_property_of_an_unloaded_unit_loads_it(self, service: Service) -> None:
        service.define(IDLE)
        assert "not loaded" in service.call("GetUnit", "s", service.name, check=False)
        interface = "org.freedesktop.systemd1.Unit"
        read = ("busctl", "get-property", "org.freedesktop.systemd1", service.object_path, interface, "LoadState")
        assert service.host.run(*read).stdout == 's "loaded"\n'


class TestProcesses:
    def test_children_inherit_the_invocation_id_also_outside_the_units_cgroup(self, service: Service) -> None:
        leave = "mkdir -p /sys/fs/cgroup/left && echo 0 >/sys/fs/cgroup/left/cgroup.procs"
        script = f"sh -c '{leave}; exec sleep 600' &\necho $! >/run/{service.name}.pid\n{READY}wait\n"
        service.define(script, *NOTIFY)
        service.start()
        pid = service.host.read(f"/run/{service.name}.pid").strip()
        wait_until(
            lambda: service.host.read(f"/proc/{pid}/cgroup").endswith("0::/left\n"), 10, "it has left the cgroup"
        )
        environment = service.host.read(f"/proc/{pid}/environ").split("\0")
        assert f"INVOCATION_ID={service.show('InvocationID')[0]}" in environment
        service.host.run("sh", "-c", f"kill {pid}")

    def test_a_left_over_process_does_not_keep_a_unit_from_starting(self, service: Service) -> None:
        service.define(f"sleep 600 &\n{READY}wait\n", *NOTIFY, "KillMode=process")
        service.start()
        service.stop()
        service.start()
        assert service.state() == "active/running"
        left_over = [text for text in service.messages() if "left-over process" in text]
        assert any("(sleep) in control group while starting unit. Ignoring." in text for text in left_over)


@pytest.mark.parametrize("keep", [False, True], ids=["default", "SPT_NOENV=1"])
def test_a_title_wipes_the_environment_unless_spt_noenv_is_set(lab: LabHost, unit_name: str, keep: bool) -> None:
    title = "from setproctitle import setproctitle as title; title('sglang::scheduler_TP0'); print('titled')"
    service = Service(lab, unit_name)
    environment = ["Environment=SPT_NOENV=1"] if keep else []
    service.write_unit(*environment, f'ExecStart={sys.executable} -u -c "{title}; import time; time.sleep(600)"')
    lab.systemctl("daemon-reload")
    service.start()
    wait_until(lambda: service.said() == ["titled"], 20, "it has its title")
    pid, invocation = service.show("MainPID", "InvocationID")
    assert lab.read(f"/proc/{pid}/cmdline").startswith("sglang::scheduler_TP0")
    assert (f"INVOCATION_ID={invocation}" in lab.read(f"/proc/{pid}/environ").split("\0")) is keep
    service.remove()
