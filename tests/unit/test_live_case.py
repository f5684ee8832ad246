"""What `diagnose UNIT` makes of the files of a unit; systemctl and journalctl are stand-ins, the files are real."""

import json
import os
from pathlib import Path

import pytest

from sglang_watchdog.cli.live import live_case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.host import unit_files
from sglang_watchdog.settings import Settings
from waiting import wait_until

UNIT = "sglang.service"
SERVER = "/usr/bin/python3 -m sglang.launch_server --model-path /m --speculative-algorithm EAGLE"
RAN = f"{SERVER} --speculative-num-steps 4 --mem-fraction-static 0.8"
INVOCATION = "0123456789abcdef0123456789abcdef"


class Host:
    """One unit in `etc`; `ran` is the command that systemd has loaded and started."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etc, self.bin, self.state = root / "etc", root / "bin", root / "state"
        for folder in (self.etc, self.bin, self.state):
            folder.mkdir()
        self.file, self.drop_in = self.etc / UNIT, self.etc / f"{UNIT}.d" / "10-tuned.conf"
        self.drop_in.parent.mkdir()
        monkeypatch.setattr(unit_files, "UNIT_PATHS", (self.etc,))
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")

    def settings(self, **unit: object) -> Settings:
        return Settings.model_validate({"state_dir": str(self.state), "units": {UNIT: unit}})

    def asks(self, command: str) -> None:
        self.file.write_text(f"[Service]\nExecStart={command}\n")

    def has_ended(self, ran: str, drop_in: bool = False) -> None:
        line = f"server_args=ServerArgs(model_path='/m', speculative_num_steps={ran.split('steps ')[1].split()[0]})"
        entries = [
            {"MESSAGE": line, "_SYSTEMD_INVOCATION_ID": INVOCATION, "_SYSTEMD_UNIT": UNIT, "_PID": "7"},
            {"MESSAGE": "Not enough memory. Please try to increase --mem-fraction-static.", "_PID": "7"}
            | {"_SYSTEMD_INVOCATION_ID": INVOCATION, "_SYSTEMD_UNIT": UNIT},
        ]
        stamped = (entry | {"__REALTIME_TIMESTAMP": str(4_000_000_000_000_000 + n)} for n, entry in enumerate(entries))
        self._stands_in("journalctl", "\n".join(json.dumps(entry) for entry in stamped))
        shown = [
            *(f"Id={UNIT}", "LoadState=loaded", "ActiveState=failed", "SubState=failed", f"FragmentPath={self.file}"),
            *("Result=exit-code", "ExecMainCode=1", "ExecMainStatus=1", f"InvocationID={INVOCATION}"),
            f"ExecStart={{ path=/usr/bin/python3 ; argv[]={ran} ; ignore_errors=no ; pid=7 ; code=exited ; status=1 }}",
            *((f"DropInPaths={self.drop_in}",) if drop_in else ()),
        ]
        self._stands_in("systemctl", "\n".join(shown))

    def _stands_in(self, name: str, says: str) -> None:
        (self.bin / f"{name}.says").write_text(says + "\n")
        (self.bin / name).write_text(f"#!/bin/sh\nexec cat {self.bin / name}.says\n")
        (self.bin / name).chmod(0o755)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_flags_that_the_settings_manage_belong_to_what_the_files_ask_for(host: Host) -> None:
    host.asks(RAN.replace("0.8", "0.7"))
    host.has_ended(RAN)
    managed = live_case(UNIT, "", host.settings(managed_flags=["--mem-fraction-static"])).intended
    assert managed is not None
    assert ("--mem-fraction-static", ("0.7",)) in managed.flags
    plain = live_case(UNIT, "", host.settings()).intended
    assert plain is not None
    assert plain.steps == 4
    assert ("--mem-fraction-static", ("0.7",)) not in plain.flags


def test_a_drop_in_that_shadows_the_unit_file_is_known_as_the_daemon_knows_it(host: Host) -> None:
    host.drop_in.write_text(f"[Service]\nExecStart=\nExecStart={RAN}\n")
    host.has_ended(RAN, drop_in=True)

    def edited_later() -> bool:
        host.asks(RAN.replace("steps 4", "steps 2"))
        return os.stat(host.file).st_ctime > os.stat(host.drop_in).st_ctime

    wait_until(edited_later, 30, "the unit file's change is newer than the drop-in's")
    case = live_case(UNIT, "", host.settings())
    assert case.shadowed is not None
    assert (case.shadowed.drop_in, case.shadowed.asked.steps) == (str(host.drop_in), 2)
    assert case.on_disk is not None
    verdict = diagnose(case)
    assert verdict.failure is FailureClass.STALE_UNIT_FILE
    assert str(host.drop_in) in " ".join(verdict.advice)
