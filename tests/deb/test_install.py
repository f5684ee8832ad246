"""From the bare system on: what an installation does, what it leaves alone, and a recovery by the installed service."""

import json

import pytest

from deb.package import NAME, Package
from deb.roots import RELEASES
from deb.system import Debian
from lab_product.conftest import deploy, proven
from lab_product.installed import SERVICE, inference_host
from lab_product.test_operator import AT_ONCE, steps_of
from waiting import wait_until

pytestmark = pytest.mark.lab
ALERT_DEADLINE_S = 60.0
# As exposure in tenths; the unit file promises it, this is what systemd says of what is installed.
EXPOSURE = 25
FAILS = "failing.service"
# A server that is killed, by the command that names it; a shell, because Debian 13 has no Python for the simulated one.
FAILING = """[Unit]
OnFailure=sglang-failed@%n.service
[Service]
Type=exec
ExecStart=/usr/bin/env sh -c 'sleep 600' sglang serve --model-path /m
"""


def test_a_bare_system_becomes_one_whose_server_is_brought_back(debian: Debian, package: Package) -> None:
    host = debian.host
    assert [name for name in ("gcc", "cc", "pip", "pip3", "pkg-config", NAME) if debian.has(name)] == []
    with inference_host(host, simulation=AT_ONCE) as inference:
        debian.show_simulated_cards()
        debian.install(package)
        assert debian.installed_version() == package.version
        assert "sglang.service  " in host.run(NAME, "setup").stdout
        debian.acts_on(inference)
        host.systemctl("enable", "--now", SERVICE)
        proven(inference)
        deploy(inference, 10)
        closed = inference.wait_alert(OUTCOME="contained", deadline_s=ALERT_DEADLINE_S)
        assert steps_of(inference) == "4"
        assert inference.tokens(8) == 8
        explained = host.run("journalctl", "-x", f"SGLANG_WATCHDOG_INCIDENT={closed.get('INCIDENT')}").stdout
        assert "Subject: A launch of sglang.service ended: kv_cache_oom" in explained
        host.run("systemd-analyze", "security", f"--threshold={EXPOSURE}", SERVICE)
        assert debian.failed() == ""


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.codename)
def test_installed_nothing_is_enabled_or_started_and_removed_nothing_is_left(debian: Debian, package: Package) -> None:
    host = debian.host
    host.unit(FAILS, FAILING)
    host.systemctl("start", FAILS)
    before = (debian.enabled(), debian.running(), host.show(FAILS, "MainPID", "InvocationID"))
    files = installed_files(debian)
    said = debian.install(package)
    assert (debian.enabled(), debian.running(), host.show(FAILS, "MainPID", "InvocationID")) == before, said
    assert host.show(SERVICE, "LoadState", "UnitFileState") == {"LoadState": "loaded", "UnitFileState": "disabled"}
    # systemd reads its units as they are meant, and has nothing to say against them.
    assert host.run("systemd-analyze", "verify", "--man=no", SERVICE, "sglang-failed@a.service").stderr == ""
    backoff = "sglang-watchdog.service.d/backoff.conf" in host.show(SERVICE, "DropInPaths")["DropInPaths"]
    assert backoff is (host.systemd_version >= 254)

    # It works: the commands, the daemon, and the unit that says why another one failed.
    host.run(NAME, "setup", FAILS)
    host.systemctl("start", SERVICE)
    assert json.loads(host.run(NAME, "status", "--json").stdout)["version"] == package.version
    host.systemctl("kill", "--signal=KILL", FAILS)
    wait_until(lambda: "external_kill failing.service" in why(debian), 60, "the diagnosis of a unit that failed")
    wait_until(lambda: '"ended": ' in host.run(NAME, "history", "--json").stdout, 30, "the daemon saw it")

    debian.purge()
    host.systemctl("reset-failed", FAILS, check=False)
    assert installed_files(debian) == files
    assert (debian.enabled(), debian.failed()) == (before[0], "")


def why(debian: Debian) -> str:
    return debian.host.run("journalctl", f"--unit=sglang-failed@{FAILS}.service", "--output=cat").stdout


def installed_files(debian: Debian) -> set[str]:
    """All paths that the package could have made, wherever they lie."""
    places = ("/usr/bin", "/usr/lib", "/usr/share", "/etc", "/var/lib", "/run")
    found = debian.host.run("find", *places, "-xdev", "-path", f"*{NAME}*").stdout.split()
    return {path for path in found if not path.startswith("/var/lib/dpkg")}
