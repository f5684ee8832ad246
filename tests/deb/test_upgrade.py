"""Another version over the one that runs: what was learned and set stays, and a unit that is held gets its start."""

from pathlib import Path
from typing import Any

import pytest

from deb.package import Package, newer_ledger, other_settings
from deb.system import STATE, Debian
from lab_product.conftest import deploy, override, proven
from lab_product.installed import PYTHON, SERVICE, SETTINGS, InferenceHost, inference_host
from lab_product.test_operator import AT_ONCE, deploy_what_fails, starts
from waiting import wait_until

pytestmark = pytest.mark.lab
ALERT_DEADLINE_S = 60.0
SCHEMA = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('PRAGMA user_version').fetchone()[0])"


@pytest.fixture(scope="session")
def later(package: Package, others: Path) -> Package:
    """The same program, a later number, and another word in its settings."""
    return package.again(f"{package.version}+later1", others, other_settings)


@pytest.fixture(scope="session")
def with_newer_ledger(package: Package, others: Path) -> Package:
    return package.again(f"{package.version}+later2", others, newer_ledger)


def contained(inference: InferenceHost) -> None:
    """Steps 4 are proven, steps 10 were tried, and an override keeps the unit at 4."""
    proven(inference)
    deploy(inference, 10)
    inference.wait_alert(OUTCOME="contained", deadline_s=ALERT_DEADLINE_S)


def learned(inference: InferenceHost) -> dict[str, Any]:
    history, [unit] = inference.history(), inference.status()["units"]
    return {
        "launches": [launch["invocation"] for launch in history["launches"]],
        "incidents": [(incident["id"], incident["outcome"]) for incident in history["incidents"]],
        "proven": {good["id"] for good in unit["proven"]},
        "ceilings": {ceiling["id"] for ceiling in unit["ceilings"]},
        "override": override(inference),
    }


def test_an_upgrade_and_the_way_back_keep_what_was_learned_and_set(
    debian: Debian, package: Package, later: Package
) -> None:
    with inference_host(debian.host, simulation=AT_ONCE) as inference:
        debian.watches(package, inference)
        contained(inference)
        before, settings = learned(inference), debian.host.read(SETTINGS)
        server = inference.show("InvocationID", "MainPID", "NRestarts")
        assert before["override"]
        for other, options in ((later, ()), (package, ("--allow-downgrades",))):
            daemon = debian.host.show(SERVICE, "InvocationID")
            debian.install(other, *options)
            debian.wait_watching()
            assert debian.installed_version() == other.version
            assert debian.host.show(SERVICE, "InvocationID") != daemon
            assert learned(inference) == before
            assert debian.host.read(SETTINGS) == settings
            assert inference.show("InvocationID", "MainPID", "NRestarts") == server
            assert inference.tokens(8) == 8
        assert debian.host.show(SERVICE, "UnitFileState") == {"UnitFileState": "enabled"}
        # And it still acts: the operator's own change takes the override away.
        deploy(inference, 3)
        wait_until(lambda: not override(inference), ALERT_DEADLINE_S, "the override is withdrawn")


@pytest.mark.parametrize("change", ["upgrade", "removal"])
def test_in_the_middle_of_an_incident_the_unit_is_handed_back_first(
    debian: Debian, package: Package, later: Package, change: str
) -> None:
    with inference_host(debian.host, simulation=AT_ONCE) as inference:
        debian.watches(package, inference)
        proven(inference)
        deploy_what_fails(inference)
        before = starts(inference)
        if change == "upgrade":
            debian.install(later)
        else:
            debian.remove()
        assert "anded back" in inference.wait_alert(OUTCOME="yielded", deadline_s=ALERT_DEADLINE_S).message
        wait_until(lambda: starts(inference) > before, 10, "the unit is started")
        if change == "upgrade":
            debian.wait_watching()


def test_the_way_back_from_a_newer_ledger_is_refused_in_words_and_costs_nothing(
    debian: Debian, package: Package, with_newer_ledger: Package
) -> None:
    host = debian.host
    with inference_host(host, simulation=AT_ONCE) as inference:
        debian.watches(package, inference)
        proven(inference)
        schema = int(schema_of(debian))
        debian.install(with_newer_ledger)
        debian.wait_watching()
        assert int(schema_of(debian)) == schema + 1
        before = learned(inference)

        debian.install(package, "--allow-downgrades")
        debian.wait_watching()
        said = host.run("sglang-watchdog", "history", check=False)
        assert f"was written by a newer sglang-watchdog (schema {schema + 1}" in said.stderr
        assert "Install that version again" in said.stderr
        assert any("ledger" in sense for sense in inference.status()["blind"])
        deploy(inference, 10)
        inference.wait_alert(CLASS="kv_cache_oom", deadline_s=ALERT_DEADLINE_S)  # observed, not acted on
        assert override(inference) == ""
        assert int(schema_of(debian)) == schema + 1

        inference.change(steps=4)
        inference.reload()
        inference.restart()
        debian.install(with_newer_ledger)
        debian.wait_watching()
        again = learned(inference)
        assert again["proven"] == before["proven"]
        assert set(before["launches"]) <= set(again["launches"])


def schema_of(debian: Debian) -> str:
    return debian.host.run(PYTHON, "-c", SCHEMA, f"{STATE}/ledger.db").stdout
