"""The documentation is held against the code: what it lists exists, what exists is listed, links lead somewhere."""

import re
from pathlib import Path

import pytest

import alert_samples
from sglang_watchdog.domain.failure import Diagnosis, FailureClass
from sglang_watchdog.domain.incident import Outcome, Step
from sglang_watchdog.domain.known_good import KnownGood
from sglang_watchdog.domain.launch import Phase
from sglang_watchdog.domain.speculation import SpeculationConfig
from sglang_watchdog.domain.unit import ActiveState
from sglang_watchdog.recovery.policy import Facts, decide
from sglang_watchdog.reporting.alerts import AlertId
from sglang_watchdog.reporting.metrics import Metrics, reference
from sglang_watchdog.settings import Settings, UnitSettings

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
PAGES = (CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", CHECKOUT / "SECURITY.md", *sorted(DOCS.rglob("*.md")))
CLASSES = DOCS / "classes"
ALERTS_AND_METRICS = DOCS / "alerts-and-metrics.md"
COMMON_FIELDS = {"UNIT"}
BESIDE_STEPS = {"plan", "withdraw", "pause", "resume"}


def rows(page: Path, header: str) -> list[list[str]]:
    """The cells of the table with that header, without it."""
    table = page.read_text().split(f"\n{header}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_within_the_checkout_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    broken = [link for link in links if not link.startswith("http") and not leads_somewhere(page, link)]
    assert broken == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_the_readme_links_every_page() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_every_file_that_a_page_names_exists() -> None:
    named = re.findall(r"\b((?:contrib|packaging|tests|docs)/[\w./-]+\.\w+)", "".join(p.read_text() for p in PAGES))
    assert [path for path in sorted(set(named)) if not (CHECKOUT / path).exists()] == []


# Diagnosis


def test_every_class_has_a_page_and_nothing_else_has() -> None:
    assert sorted(page.stem for page in CLASSES.glob("*.md")) == sorted(FailureClass)


@pytest.mark.parametrize("failure", FailureClass)
def test_the_page_of_a_class_says_what_one_sees_what_proves_it_what_is_done_and_what_to_do(
    failure: FailureClass,
) -> None:
    page = (CLASSES / f"{failure}.md").read_text()
    assert page.startswith(f"# `{failure}`\n")
    parts = re.findall(r"^- \*\*([A-Z]\w+)\*\*: \S", page, flags=re.MULTILINE)
    assert parts[:4] == ["Signs", "Proof", "Watchdog", "You"]
    assert f"(classes/{failure}.md)" in (DOCS / "diagnosis.md").read_text()


@pytest.mark.parametrize("failure", FailureClass)
def test_the_page_says_what_the_policy_does(failure: FailureClass) -> None:
    table = {row[0].strip("`"): row[1] for row in rows(DOCS / "diagnosis.md", "| class | what the watchdog does |")}
    helped, not_helped = _steps(failure, helps=True), _steps(failure, helps=False)
    assert table[failure] == _in_words(helped, not_helped)


def _steps(failure: FailureClass, *, helps: bool) -> tuple[Step, ...]:
    """Of a plan where all else is well."""
    good, bad = (SpeculationConfig.of(("--speculative-algorithm", "EAGLE", "--speculative-num-steps", n)) for n in "49")
    known = KnownGood("sglang.service", "base", good, "a", 0.0)
    facts = Facts(now=1e9, act=True, running=bad, known_good=(known,), left_overs=True)
    return decide(Diagnosis(failure, 0.9, "", Phase.UNKNOWN, rollback_helps=helps), facts).steps


def _in_words(helped: tuple[Step, ...], not_helped: tuple[Step, ...]) -> str:
    if Step.OVERRIDE in not_helped:
        return "rolls back"
    if Step.OVERRIDE in helped:
        return "rolls back if less speculation helps"
    if Step.START in helped:
        return "frees, starts the same config"
    return "frees" if Step.FREE in helped else "reports"


def test_the_readme_tells_the_number_of_classes_and_the_budgets_as_they_are() -> None:
    readme, unit = (CHECKOUT / "README.md").read_text(), UnitSettings()
    assert f"one of {len(FailureClass)} [classes]" in readme
    assert unit.rollback_window == 3600
    assert f"at most {unit.rollbacks} recoveries an hour and {unit.rollbacks_per_day} a day" in readme


# Alerts


def test_every_message_id_is_listed_with_its_own_fields() -> None:
    listed = {
        row[0].strip("`"): (row[1].strip("`"), words(row[4]))
        for row in rows(ALERTS_AND_METRICS, "| `MESSAGE_ID` | name | priority | when | own fields |")
    }
    sent = alert_samples.with_most()
    assert listed == {alert: (alert.name, own_fields(alert) - COMMON_FIELDS) for alert in AlertId}
    assert sorted(sent) == sorted(AlertId)


def own_fields(alert: AlertId) -> set[str]:
    prefix = "SGLANG_WATCHDOG_"
    fields = alert_samples.with_most()[alert].fields()
    return {name.removeprefix(prefix) for name in fields if name.startswith(prefix)}


@pytest.mark.parametrize("alert", AlertId, ids=lambda alert: alert.name)
def test_a_priority_is_the_one_that_is_listed_first(alert: AlertId) -> None:
    table = rows(ALERTS_AND_METRICS, "| `MESSAGE_ID` | name | priority | when | own fields |")
    listed = next(row[2] for row in table if row[0] == f"`{alert}`")
    assert listed.startswith(alert_samples.with_most()[alert].fields()["PRIORITY"])


def test_every_field_is_explained_and_nothing_else_is() -> None:
    explained = {row[0].strip("`") for row in rows(ALERTS_AND_METRICS, "| field | value |")}
    assert explained == set().union(*map(own_fields, AlertId))


def test_the_values_of_closed_fields_are_listed() -> None:
    explained = {row[0].strip("`"): words(row[1]) for row in rows(ALERTS_AND_METRICS, "| field | value |")}
    assert explained["OUTCOME"] == {outcome.value for outcome in Outcome} - {Outcome.OPEN}
    assert explained["PHASE"] == {phase.value for phase in Phase}
    assert explained["ACTION"] == {step.value for step in Step} - {Step.VERIFY} | {
        "plan",
        "withdraw",
        "pause",
        "resume",
    }


# Metrics


def test_the_reference_of_the_metrics_is_written_from_the_code() -> None:
    assert (DOCS / "metrics.md").read_text() == reference()


def test_every_metric_is_described_with_its_type_and_labels() -> None:
    """Of a daemon that has seen a bit of everything."""
    metrics = Metrics(("sglang.service",), "0.1.0")
    metrics.saw_state("sglang.service", ActiveState.ACTIVE)
    metrics.runs("sglang.service", SpeculationConfig())
    metrics.proven("sglang.service", SpeculationConfig())
    metrics.saw_incident(alert_samples.INCIDENT)
    metrics.gpu_used.labels("0").set(0)
    found = {}
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            continue  # prometheus_client's own
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + suffix] = ("gauge" if family.type == "info" else family.type, labels)
    assert {one.name: (one.kind, set(one.labels)) for one in metrics.described} == found


def test_every_alert_of_prometheus_is_listed_with_its_severity() -> None:
    rules = (CHECKOUT / "contrib" / "prometheus" / "sglang-watchdog.rules.yml").read_text()
    shipped = dict(re.findall(r"- alert: (\S+)\n[\s\S]*?severity: (\w+)", rules))
    listed = {row[0].strip("`"): row[1] for row in rows(ALERTS_AND_METRICS, "| alert | severity | it means |")}
    assert listed == shipped


def test_the_address_of_the_metrics_is_the_default() -> None:
    address = f"http://{Settings().metrics.address}:{Settings().metrics.port}/metrics"
    assert address in ALERTS_AND_METRICS.read_text()
    assert address in (CHECKOUT / "README.md").read_text()
