"""What the host's own daemons do to a recovery, and a ledger that is broken: no second start, no harm."""

from collections.abc import Iterator

import pytest

from lab.host import LabHost
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import INSTALLED, SERVICE, STATE
from lab_product.test_operator import ACTING, AT_ONCE, deploy_what_fails, let_go, starts, steps_of
from sglang_watchdog.reporting.alerts import AlertId

pytestmark = [pytest.mark.lab, pytest.mark.faults]
NONSENSE = "this is no database\n" * 300


@pytest.fixture(autouse=True)
def clean_cards(lab: LabHost) -> Iterator[None]:
    yield
    let_go(lab)


@pytest.mark.parametrize("what", ["daemon-reexec", "restart systemd-journald.service"])
def test_systemd_or_the_journal_started_anew_in_the_middle_costs_no_second_start(
    inference: Inference, what: str
) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE) as host:
        proven(host)
        deploy_what_fails(host)
        before = starts(host)
        host.host.systemctl(*what.split())
        let_go(host.host)
        host.wait_alert(OUTCOME="contained")
        assert steps_of(host) == "4"
        assert starts(host) == before + 1
        assert host.tokens(4) == 4


def test_a_broken_ledger_is_kept_aside_and_nothing_is_acted_on_until_a_person_says_so(inference: Inference) -> None:
    with inference(settings=ACTING, simulation=AT_ONCE, restart="no") as host:
        proven(host)
        host.host.systemctl("stop", SERVICE)
        host.host.run("sh", "-c", f"rm {STATE}/ledger.db*")
        host.host.write(f"{STATE}/ledger.db", NONSENSE)
        host.host.systemctl("start", SERVICE)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom")
        assert host.alerts(ACTION="hold") == []
        assert override(host) == ""
        assert host.metric("sglang_watchdog_ledger_writable") == 0
        assert host.host.run("sh", "-c", f"cat {STATE}/ledger.db.broken-*").stdout == NONSENSE
        assert "broken" in host.status()["units"][0]["paused"]
        assert "broken" in host.host.run("journalctl", f"MESSAGE_ID={AlertId.BLIND}", "--output=cat").stdout
        host.host.run(INSTALLED, "resume", host.unit)
        assert (host.status()["units"][0]["act"], host.metric("sglang_watchdog_ledger_writable")) == (True, 1)
