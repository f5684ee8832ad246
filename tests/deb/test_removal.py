"""The package goes: the unit runs on, and what keeps it from a config that does not fit stays."""

import json

import pytest

from deb.package import NAME, Package
from deb.system import STATE, Debian
from lab_product.conftest import deploy, override, proven
from lab_product.installed import INSTALLED, SERVICE, SETTINGS, inference_host
from lab_product.sglang_unit import Way
from lab_product.test_operator import AT_ONCE, steps_of
from waiting import wait_until

pytestmark = pytest.mark.lab
ALERT_DEADLINE_S = 60.0


def test_removed_the_unit_runs_on_and_purged_it_keeps_the_override_that_it_needs(
    debian: Debian, package: Package
) -> None:
    host = debian.host
    with inference_host(host, simulation=AT_ONCE) as inference:
        debian.watches(package, inference)
        proven(inference)
        deploy(inference, 10)
        inference.wait_alert(OUTCOME="contained", deadline_s=ALERT_DEADLINE_S)
        server, in_force = inference.show("InvocationID", "MainPID", "NRestarts"), override(inference)
        path = f"{inference.sglang.file_path}.d/90-{NAME}.conf"
        assert debian.there(path) == [path]

        debian.remove()
        assert not debian.has(NAME)
        assert debian.there(SETTINGS, f"{STATE}/ledger.db") == [SETTINGS, f"{STATE}/ledger.db"]
        assert host.show(SERVICE, "ActiveState") == {"ActiveState": "inactive"}
        assert inference.show("InvocationID", "MainPID", "NRestarts") == server
        assert override(inference) == in_force
        assert inference.tokens(8) == 8

        said = debian.purge()
        assert f"kept {path}: without it the unit would start with a config that is not known to fit" in said
        assert debian.there(path, STATE, "/etc/sglang-watchdog") == [path]
        assert inference.show("InvocationID", "MainPID", "NRestarts") == server
        inference.reload()
        inference.restart()
        assert steps_of(inference) == "4"
        assert debian.failed() == ""


@pytest.mark.parametrize("way", list(Way))
def test_purged_an_override_that_hides_no_ceiling_goes(debian: Debian, package: Package, way: Way) -> None:
    with inference_host(debian.host, simulation=AT_ONCE, way=way) as inference:
        debian.watches(package, inference)
        proven(inference)
        first = inference.status()["units"][0]["proven"][0]["id"]
        deploy(inference, 3)
        inference.wait_known_good()
        debian.host.run(INSTALLED, "rollback", inference.unit, "--to", first, timeout=60)
        wait_until(lambda: steps_of(inference) == "4", ALERT_DEADLINE_S, "steps 4 again")
        inference.wait_ready()
        server = inference.show("InvocationID", "MainPID")
        [path] = paths_of_override(debian)
        said = debian.purge()
        assert f"removed {path}" in said
        assert paths_of_override(debian) == []
        assert debian.there(STATE, "/etc/sglang-watchdog") == []
        assert inference.show("InvocationID", "MainPID") == server
        inference.reload()
        inference.restart()
        assert steps_of(inference) == "3", json.dumps(inference.argv())


def paths_of_override(debian: Debian) -> list[str]:
    return debian.host.run(
        "sh", "-c", f"ls {STATE}/overrides/*.env /etc/systemd/system/*.d/90-{NAME}.conf 2>/dev/null", check=False
    ).stdout.split()
