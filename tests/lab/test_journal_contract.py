"""The project's contract with the journal: the ids, fields and words by which the product tells ends apart.

Message ids are matched before any English; where only words exist, the words are held here, on both versions.
"""

from typing import Any

import pytest

from lab.service import IDLE, READY, Service
from waiting import wait_until

pytestmark = pytest.mark.lab

NOTIFY = ("Type=notify", "NotifyAccess=all")
DIES = "kill -9 $$\n"

STARTED = "39f53479d3a045ac8e11786248231fbf"
STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
STOPPED = "9d1aaa27d60140bd96365438aad20286"
PROCESS_EXIT = "98e322203f7a4ed290d09fe03c09fe15"
UNIT_FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
RESTART_SCHEDULED = "5eb03494b6584870a536b337290809b3"


def _ids(entries: list[dict[str, Any]]) -> list[str]:
    known = {STARTED, STOPPING, STOPPED, PROCESS_EXIT, UNIT_FAILED, RESTART_SCHEDULED}
    return [entry["MESSAGE_ID"] for entry in entries if entry.get("MESSAGE_ID") in known]


class TestEnds:
    def test_a_death_nobody_asked_for_has_nothing_before_it(self, service: Service) -> None:
        service.define(READY + IDLE, *NOTIFY)
        service.start()
        service.host.systemctl("kill", "--signal=KILL", service.name)
        service.wait_for("failed/failed")
        assert _ids(service.told()) == [STARTED, PROCESS_EXIT, UNIT_FAILED]

    def test_a_requested_stop_is_announced_before_main_ends(self, service: Service) -> None:
        service.define(f"trap 'kill -9 $$' TERM\n{READY}{IDLE}", *NOTIFY)
        service.start()
        service.stop()
        assert _ids(service.told()) == [STARTED, STOPPING, PROCESS_EXIT, UNIT_FAILED, STOPPED]

    def test_a_stop_that_timed_out_is_announced_and_says_so(self, service: Service) -> None:
        service.define(f"trap '' TERM\n{READY}exec sleep 600\n", *NOTIFY, "TimeoutStopSec=200ms")
        service.start()
        (pid,) = service.show("MainPID")
        service.stop()
        told = service.messages()
        name = service.name
        assert f"{name}: State 'stop-sigterm' timed out. Killing." in told
        assert f"{name}: Killing process {pid} (sleep) with signal SIGKILL." in told
        assert f"{name}: Failed with result 'timeout'." in told
        assert _ids(service.told())[:3] == [STARTED, STOPPING, PROCESS_EXIT]

    def test_a_crash_with_a_stuck_child_says_the_same_words_but_is_not_announced(self, service: Service) -> None:
        service.define(f"trap '' TERM\nsleep 600 &\n{DIES}", "TimeoutStopSec=200ms")
        service.start()
        service.wait_for("failed/failed")
        assert f"{service.name}: State 'stop-sigterm' timed out. Killing." in service.messages()
        assert STOPPING not in _ids(service.told())

    def test_a_start_that_timed_out_says_so(self, service: Service) -> None:
        service.define(IDLE, *NOTIFY, "TimeoutStartSec=200ms")
        service.start(check=False)
        assert f"{service.name}: start operation timed out. Terminating." in service.messages()

    def test_a_missing_environment_file_says_so(self, service: Service) -> None:
        service.define(IDLE, "EnvironmentFile=/no/such/file")
        service.start(check=False)
        told = service.messages()
        assert f"{service.name}: Failed with result 'resources'." in told
        words = ("Failed to load environment files: No such file", "Failed to run 'start' task: No such file")
        # 257 spawns main another way and has words of its own for the second.
        for word in words if service.host.systemd_version < 257 else words[:1]:
            assert any(word in message for message in told)

    def test_too_many_starts_say_so(self, service: Service) -> None:
        limit = ("StartLimitIntervalSec=600", "StartLimitBurst=1")
        service.define("exit 0\n", "Type=oneshot", unit=limit)
        with service.reference():  # without it the unit is unloaded after each run, and its count with it
            service.start()
            service.start(check=False)
        assert f"{service.name}: Start request repeated too quickly." in service.messages()


class TestFields:
    def test_the_end_of_a_launch_is_found_by_its_invocation_though_the_bus_shows_a_newer_one(
        self, service: Service
    ) -> None:
        service.define(READY + IDLE, *NOTIFY, "Restart=always", "RestartSec=100ms")
        service.start()
        (first,) = service.show("InvocationID")
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        assert service.show("InvocationID", "Result") != (first, "signal")
        (failed,) = service.told(f"INVOCATION_ID={first}", f"MESSAGE_ID={UNIT_FAILED}")
        (exited,) = service.told(f"INVOCATION_ID={first}", f"MESSAGE_ID={PROCESS_EXIT}")
        assert failed["UNIT_RESULT"] == "signal"
        assert (exited["EXIT_CODE"], exited["EXIT_STATUS"], exited["COMMAND"]) == ("killed", "9", "ExecStart")

    @pytest.mark.parametrize(("script", "code", "status"), [(DIES, "killed", "9"), ("exit 3\n", "exited", "3")])
    def test_exit_code_and_status_are_a_word_and_a_number(
        self, service: Service, script: str, code: str, status: str
    ) -> None:
        service.define(script)
        service.start()
        service.wait_for("failed/failed")
        (exited,) = service.told(f"MESSAGE_ID={PROCESS_EXIT}")
        assert (exited["EXIT_CODE"], exited["EXIT_STATUS"]) == (code, status)

    def test_the_units_own_lines_carry_unit_and_invocation_of_their_own(self, service: Service) -> None:
        service.define(f"echo hello\n{READY}{IDLE}", *NOTIFY)
        service.start()
        (line,) = service.host.journal(f"_SYSTEMD_UNIT={service.name}", "_TRANSPORT=stdout")
        assert line["_SYSTEMD_INVOCATION_ID"] == service.show("InvocationID")[0]
        assert "UNIT" not in line

    def test_a_restart_is_scheduled_under_its_own_id(self, service: Service) -> None:
        service.define(DIES, "Restart=always", "RestartSec=600")
        service.start()
        service.wait_for("activating/auto-restart")
        assert RESTART_SCHEDULED not in _ids(service.told())  # it is logged when the time has come, not before
        service.define(
            DIES, "Restart=always", "RestartSec=50ms", unit=("StartLimitIntervalSec=600", "StartLimitBurst=2")
        )
        service.start(check=False)
        service.wait_for("failed/failed")
        scheduled = service.told(f"MESSAGE_ID={RESTART_SCHEDULED}")
        assert scheduled[0]["N_RESTARTS"].isdigit()

    def test_stopped_is_logged_on_an_auto_restart_on_252_but_not_on_257(self, service: Service) -> None:
        service.define(READY + IDLE, *NOTIFY, "Restart=always", "RestartSec=100ms")
        service.start()
        service.host.systemctl("kill", "--signal=KILL", service.name)
        wait_until(lambda: service.show("NRestarts", "SubState") == ("1", "running"), 10, "restarted")
        stopped = [entry["JOB_TYPE"] for entry in service.told(f"MESSAGE_ID={STOPPED}")]
        assert stopped == (["restart"] if service.host.systemd_version < 257 else [])


class TestJournald:
    def test_a_long_field_is_null_without_all(self, service: Service) -> None:
        service.define(f"head -c 5000 /dev/zero | tr '\\0' x; echo; {READY}{IDLE}", *NOTIFY)
        service.start()
        (whole,) = service.host.journal(f"_SYSTEMD_UNIT={service.name}", "_TRANSPORT=stdout")
        assert whole["MESSAGE"] == "x" * 5000
        short = service.host.run("journalctl", "-o", "json", f"_SYSTEMD_UNIT={service.name}", "_TRANSPORT=stdout")
        assert '"MESSAGE":null' in short.stdout.replace(" ", "")

    def test_a_line_over_48_kib_is_split(self, service: Service) -> None:
        service.define(f"head -c 50000 /dev/zero | tr '\\0' x; echo; {READY}{IDLE}", *NOTIFY)
        service.start()
        assert [len(line) for line in service.said()] == [48 * 1024, 50000 - 48 * 1024]

    def test_bytes_that_are_no_text_come_as_numbers(self, service: Service) -> None:
        service.define(f"printf 'a\\377b\\n'; {READY}{IDLE}", *NOTIFY)
        service.start()
        (line,) = service.host.journal(f"_SYSTEMD_UNIT={service.name}", "_TRANSPORT=stdout")
        assert line["MESSAGE"] == [97, 255, 98]

    def test_a_field_given_twice_comes_as_a_list(self, service: Service) -> None:
        fields = f"MESSAGE=twice\\nFOR={service.name}\\nTAG=a\\nTAG=b\\n"
        service.host.run("sh", "-c", f"printf '{fields}' | logger --journald")
        (entry,) = service.host.journal(f"FOR={service.name}")
        assert sorted(entry["TAG"]) == ["a", "b"]

    def test_a_storm_over_the_limit_leaves_a_word_of_what_was_suppressed(self, service: Service) -> None:
        limit = ("LogRateLimitIntervalSec=300ms", "LogRateLimitBurst=10")
        service.define(f"seq 100; sleep 0.5; echo after; {READY}{IDLE}", *NOTIFY, *limit)
        service.start()
        suppressed = service.host.journal("_SYSTEMD_UNIT=systemd-journald.service")
        assert any(
            entry["MESSAGE"].startswith("Suppressed ") and service.name in entry["MESSAGE"] for entry in suppressed
        )
        assert service.said()[-1] == "after"
