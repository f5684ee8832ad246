"""A lab host as an inference host: four simulated cards, an SGLang unit, and the watchdog as its shipped service.

`inference_host` makes one of a running `LabHost`; what it hands out is what an operator and an observer can do there.
Waiting is always for a condition with a deadline. Nothing here knows what the watchdog ought to do.
"""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import sim_nvml.build
from lab.host import CHECKOUT, LabHost, free_port
from lab_product.client import Client, Load
from lab_product.ledger_reader import LedgerReader
from lab_product.sglang_unit import MODEL, SglangUnit, Way
from sim_nvml import SimNvml
from sim_sglang.simulation import Simulation
from waiting import wait_until

SERVICE = "sglang-watchdog.service"
HAND_BACK = "sglang-watchdog-hand-back.service"
SETTINGS = "/etc/sglang-watchdog/config.toml"
STATE = "/var/lib/sglang-watchdog"
COMMAND = Path(sys.prefix) / "bin/sglang-watchdog"
INSTALLED = "/usr/bin/sglang-watchdog"
PYTHON = Path(sys.executable)
CARDS = Path("/run/sim-nvml")
CONTROL = Path("/run/sim-sglang.control")
CARD_COUNT = 4
SHIPPED = CHECKOUT / "contrib" / "systemd"
START_DEADLINE_S = 30.0
ALERT_DEADLINE_S = 20.0
_FIELD = "SGLANG_WATCHDOG_"


@dataclass(frozen=True)
class SeenAlert:
    """One alert of the journal; `fields` are its SGLANG_WATCHDOG_* fields without that prefix. `time` in Unix s."""

    time: float
    message_id: str
    message: str
    fields: Mapping[str, str]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "SeenAlert":
        fields = {name.removeprefix(_FIELD): value for name, value in entry.items() if name.startswith(_FIELD)}
        when = int(entry.get("_SOURCE_REALTIME_TIMESTAMP", entry["__REALTIME_TIMESTAMP"])) / 1e6
        return cls(when, entry.get("MESSAGE_ID", ""), entry["MESSAGE"], fields)

    def get(self, name: str) -> str:
        """Empty where the alert has no such field."""
        return self.fields.get(name, "")

    def matches(self, wanted: Mapping[str, str]) -> bool:
        return all(self.get(name) == value for name, value in wanted.items())


@dataclass
class Followed:
    """Journal entries as they come: PID 1's about the unit, and the watchdog's. Half a second behind."""

    unit: str
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def by(cls, host: LabHost, unit: str) -> "Iterator[Followed]":
        command = ("journalctl", "--follow", "--no-tail", "--output=json", "--all", "--quiet")
        matches = ("_PID=1", f"UNIT={unit}", "+", "SYSLOG_IDENTIFIER=sglang-watchdog")
        followed = cls(unit)
        with host.popen(*command, *matches, stdout=subprocess.PIPE) as journalctl:
            reader = threading.Thread(target=followed._read, args=(journalctl,), daemon=True)
            reader.start()
            try:
                yield followed
            finally:
                journalctl.kill()
                reader.join()

    def _read(self, journalctl: "subprocess.Popen[str]") -> None:
        assert journalctl.stdout is not None
        for line in journalctl.stdout:
            if line.endswith("\n"):  # the last one may be cut off by the end of journalctl
                self.entries.append(json.loads(line))

    def alerts(self) -> list[SeenAlert]:
        """Of the unit alone: a host that is shared has seen others."""
        return [SeenAlert.of(entry) for entry in list(self.entries) if entry.get(f"{_FIELD}UNIT") == self.unit]


@dataclass
class InferenceHost:
    """`sglang` is the definition that was written last; whether systemd has loaded it is the operator's matter."""

    host: LabHost
    sglang: SglangUnit
    metrics_port: int
    followed: Followed

    # -- the operator

    @property
    def unit(self) -> str:
        return self.sglang.name

    def write_unit(self, sglang: SglangUnit) -> None:
        """Writes the unit file (and what steers the simulation) without a reload."""
        self.sglang = sglang
        self.host.write(sglang.simulation_path, sglang.simulation_text())
        self.host.write(sglang.file_path, sglang.text(), mode=0o640)

    def change(self, **changes: Any) -> None:
        """As `write_unit`, for some fields of the definition."""
        self.write_unit(dataclasses.replace(self.sglang, **changes))

    def reload(self) -> None:
        self.host.systemctl("daemon-reload")

    def start(self, *, wait: bool = True) -> None:
        self.host.systemctl("start", self.unit)
        if wait:
            self.wait_ready()

    def stop(self) -> None:
        """Returns when it is over, however it went."""
        self.host.systemctl("stop", self.unit, timeout=self.sglang.timeout_stop_s + 30, check=False)

    def restart(self, *, wait: bool = True) -> None:
        """Queues it; with `wait` returns once a new launch serves."""
        before = self.invocation()
        self.host.systemctl("restart", "--no-block", self.unit)
        if wait:
            wait_until(lambda: self.invocation() not in ("", before), START_DEADLINE_S, "a new launch")
            self.wait_ready()

    def kill(self, signal: str = "KILL", whom: str = "main") -> None:
        """`systemctl kill`."""
        self.host.systemctl("kill", f"--signal={signal}", f"--kill-whom={whom}", self.unit)

    def ask_for(self, *faults: str) -> None:
        """Faults of the simulated server, from now on; none takes them back."""
        self.host.write(CONTROL, "\n".join(faults))

    # -- clients

    @property
    def client(self) -> Client:
        return Client(self.sglang.port, self.sglang.api_key)

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        try:
            wait_until(
                lambda: self.state() == "active/running" and self.client.healthy(), deadline_s, "a healthy server"
            )
        except AssertionError as in_vain:
            raise AssertionError(f"{in_vain}; the unit is {self.state()}\n{self.log(200)}") from None

    def tokens(self, count: int) -> int:
        """Tokens of a real request; raises OSError where nobody answers."""
        return self.client.generate(count)

    def load(self, requests: int, tokens: int, deadline_s: float = ALERT_DEADLINE_S) -> Load:
        """Sends them all in the background and returns once the server works on them."""
        load = Load(self.client, requests, tokens).start()
        wait_until(lambda: self.client.running() >= requests, deadline_s, f"{requests} requests at the server")
        return load

    # -- strangers on the cards

    @contextmanager
    def bystander(self, gpu: int, size: int, **environment: str) -> "Iterator[Bystander]":
        """A process in a unit of its own that holds `size` bytes of a card, with more variables in its environment."""
        bystander = Bystander(self.host, f"bystander-{gpu}-{len(environment)}.service")
        variables = {"PYTHONPATH": str(CHECKOUT / "tests"), "SIM_NVML_DIR": str(CARDS), **environment}
        # By env(1), since systemd gives every unit an INVOCATION_ID of its own.
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += [str(PYTHON), "-m", "sim_nvml", "hold", f"--gpu={gpu}", f"--bytes={size}"]
        self.host.run("systemd-run", f"--unit={bystander.unit}", "--collect", *words)
        wait_until(lambda: "holding" in bystander.said(), START_DEADLINE_S, f"{bystander.unit} holds its memory")
        try:
            yield bystander
        finally:
            self.host.systemctl("stop", bystander.unit, check=False)

    # -- what an observer sees

    def state(self) -> str:
        """Such as `active/running`."""
        shown = self.show("ActiveState", "SubState")
        return f"{shown['ActiveState']}/{shown['SubState']}"

    def show(self, *properties: str) -> dict[str, str]:
        return self.host.show(self.unit, *properties)

    def invocation(self) -> str:
        return self.show("InvocationID").get("InvocationID", "")

    def argv(self) -> list[str]:
        """The command of the running main process, as the kernel has it; empty where none runs."""
        pid = self.show("MainPID")["MainPID"]
        text = self.host.run("cat", f"/proc/{pid}/cmdline", check=False).stdout
        return text.split("\0")[:-1]

    def gpu_used(self) -> list[int]:
        """Bytes used of each card."""
        code = "from sim_nvml import SimNvml; s = SimNvml(); print(*(s.used(c.index) for c in s.cards()))"
        environment = {"PYTHONPATH": str(CHECKOUT / "tests"), "SIM_NVML_DIR": str(CARDS)}
        return [int(used) for used in self.host.run(PYTHON, "-c", code, env=environment).stdout.split()]

    # -- what the watchdog says

    def alerts(self, **match: str) -> list[SeenAlert]:
        """Those whose fields SGLANG_WATCHDOG_NAME= have these values, in order, everything logged so far included."""
        seen = map(SeenAlert.of, self.host.journal(f"{_FIELD}UNIT={self.unit}"))
        return [alert for alert in seen if alert.matches(match)]

    def wait_alert(self, deadline_s: float = ALERT_DEADLINE_S, since: float = 0.0, **match: str) -> SeenAlert:
        """The first one, past ones included, that came after `since` (Unix seconds)."""

        def found() -> SeenAlert | None:
            fitting = (alert for alert in self.followed.alerts() if alert.time > since and alert.matches(match))
            return next(fitting, None)

        def seen() -> str:
            return "\n".join(alert.message for alert in self.followed.alerts())

        try:
            alert = wait_until(found, deadline_s, f"an alert with {match}")
        except AssertionError as in_vain:
            raise AssertionError(f"{in_vain}; alerts were:\n{seen()}\n{self.log()}") from None
        assert alert is not None
        return alert

    def wait_known_good(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until what runs now is known-good."""
        name, labels = "sglang_watchdog_known_good_speculative_num_steps", {"unit": self.unit}
        steps = self.sglang.steps or 0
        try:
            wait_until(lambda: self.metric(name, **labels) == steps, deadline_s, f"steps {steps} is known-good")
        except AssertionError as in_vain:
            server = self.host.run("journalctl", "--unit", self.unit, "--output=short-precise", "--lines=40").stdout
            shown = f"{self._asked('status', '--json')}\n{self.log()}\n{server}"
            raise AssertionError(f"{in_vain}; {shown}") from None

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample; None where there is none with these labels."""
        samples = (sample for family in text_string_to_metric_families(self.metrics()) for sample in family.samples)
        fitting = (one.value for one in samples if one.name == name and labels.items() <= one.labels.items())
        return next(fitting, None)

    def metrics(self) -> str:
        """As Prometheus would scrape them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def history(self) -> dict[str, list[dict[str, Any]]]:
        """`launches` and `incidents`, newest first."""
        answer: dict[str, list[dict[str, Any]]] = self._asked("history", "--json")
        return answer

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._asked("status", "--json")
        return answer

    @functools.cached_property
    def ledger(self) -> LedgerReader:
        """As SQL; tables are the daemon's own matter, so for what nothing else tells."""
        return LedgerReader(self.host, f"{STATE}/ledger.db")

    def log(self, lines: int = 40) -> str:
        """The end of the daemon's own log, for a failure's message."""
        return self.host.run("journalctl", "--unit", SERVICE, "--output=cat", f"--lines={lines}").stdout

    def _asked(self, *words: str) -> Any:
        return json.loads(self.host.run(INSTALLED, *words).stdout)


@dataclass(frozen=True)
class Bystander:
    """Somebody else's process on a card."""

    host: LabHost
    unit: str

    def said(self) -> str:
        return self.host.run("journalctl", "--unit", self.unit, "--output=cat").stdout

    def alive(self) -> bool:
        shown = self.host.show(self.unit, "ActiveState", "NRestarts")
        return shown == {"ActiveState": "active", "NRestarts": "0"}


@contextmanager
def inference_host(
    host: LabHost,
    *,
    name: str = "sglang.service",
    way: Way = Way.DROP_IN,
    steps: int | None = 4,
    simulation: Simulation | None = None,
    settings: Mapping[str, object] | None = None,
    **definition: Any,
) -> Iterator[InferenceHost]:
    """Cards, a model's folder, the unit of `definition` (loaded, not started), and the running watchdog.

    `settings` are those of the unit's table in config.toml; None installs no watchdog.
    """
    SimNvml(host.root / CARDS.relative_to("/")).gpus(CARD_COUNT)
    host.write(f"{MODEL}/config.json", json.dumps({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}))
    simulated = dataclasses.replace(simulation or Simulation(), nvml=CARDS, control=CONTROL)
    sglang = SglangUnit(name, free_port(), simulated, steps, way, **definition)
    with ExitStack() as stack:
        followed = stack.enter_context(Followed.by(host, sglang.name))
        inference = InferenceHost(host, sglang, free_port(), followed)
        stack.callback(lambda: inference.ledger.close())
        inference.write_unit(sglang)
        inference.reload()
        if settings is not None:
            stack.enter_context(_watchdog(inference, settings))
        try:
            yield inference
        finally:
            _remove(host, sglang)


def _remove(host: LabHost, sglang: SglangUnit) -> None:
    """Ends it, whatever it ignores, and forgets it."""
    script = (
        'systemctl stop --no-block "$1"; systemctl kill --signal=KILL "$1"; systemctl stop "$1";'
        ' rm -rf "$2" "$2.d" "$3"; systemctl reset-failed "$1"'
    )
    host.run("sh", "-c", script, "remove", sglang.name, sglang.file_path, CONTROL, check=False)


@contextmanager
def _watchdog(inference: InferenceHost, settings: Mapping[str, object]) -> Iterator[None]:
    """The shipped services as they are, with the command of this checkout and the library of the simulated cards."""
    host = inference.host
    for unit in sorted(SHIPPED.glob("sglang-watchdog*.service")):
        host.copy_in(unit, f"/etc/systemd/system/{unit.name}")
    host.run("ln", "--symbolic", "--force", "--no-dereference", COMMAND, INSTALLED)
    show_cards(host)
    host.write(SETTINGS, settings_text(inference.unit, inference.metrics_port, settings))
    host.systemctl("daemon-reload")
    began = time.time()
    started = host.systemctl("start", SERVICE, check=False)
    assert started.returncode == 0, f"{SERVICE} does not start:\n{inference.log()}"
    try:
        yield
        assert not (strangers := signalled_strangers(host, began)), f"processes that were not the unit's: {strangers}"
    finally:
        host.systemctl("stop", SERVICE, check=False)
        host.run("rm", "-rf", STATE, Path(SETTINGS).parent)


def show_cards(host: LabHost) -> None:
    """Drop-ins by which the installed services see the simulated cards; in force after a reload."""
    variables = f"LD_LIBRARY_PATH={sim_nvml.build.library()} SIM_NVML_DIR={CARDS}"
    # The simulated driver writes down when it first saw a process gone; every reader shares that.
    # The checkout stays in sight where it lies under /tmp or /var/tmp, of which the service has its own.
    seen = f"BindReadOnlyPaths={CHECKOUT}"
    drop_in = f"[Service]\nEnvironment={variables}\nReadWritePaths={CARDS}\n{seen}\n"
    host.write(f"/etc/systemd/system/{SERVICE}.d/lab.conf", drop_in)
    host.write(f"/etc/systemd/system/{HAND_BACK}.d/lab.conf", f"[Service]\n{seen}\n")


def signalled_strangers(host: LabHost, since: float) -> set[int]:
    """Pids that the watchdog has signalled by itself since then and that were never seen in the unit's cgroup."""
    wanted = ("--unit", SERVICE, f"--since=@{since:.3f}", "--grep=left-over signalled")
    log = host.run("journalctl", "--output=cat", *wanted, check=False).stdout
    signalled = {int(pid) for pid in re.findall(r"\bpid=(\d+)", log)}
    if not signalled:
        return set()
    code = f"import json, sqlite3\nfor row in sqlite3.connect('file:{STATE}/ledger.db?mode=ro', uri=True).execute("
    code += "'SELECT record FROM launches'): print(*(p['id']['pid'] for p in json.loads(row[0])['processes']))"
    return signalled - {int(pid) for pid in host.run(PYTHON, "-c", code).stdout.split()}


def settings_text(unit: str, metrics_port: int, settings: Mapping[str, object]) -> str:
    """config.toml with one watched unit. TOML's plain values are written as JSON's are."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(["[metrics]", f"port = {metrics_port}", "", f'[units."{unit}"]', *lines, ""])
