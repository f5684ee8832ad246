"""Debian's Prometheus and Alertmanager with the shipped configuration, as units of a lab host, and a webhook.

Only ports and intervals differ from what is shipped, so that a test does not wait for minutes.
"""

import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.host import LabHost, free_port
from prometheus.conftest import CONTRIB, RULES
from waiting import wait_until

FOLDER = "/run/monitoring"
READY_S = 60.0


@dataclass
class Webhook:
    """Keeps what it is sent."""

    port: int
    messages: list[dict[str, Any]] = field(default_factory=list)

    def alerts(self, name: str, status: str = "firing") -> list[dict[str, Any]]:
        sent = [alert for message in list(self.messages) for alert in message["alerts"]]
        return [alert for alert in sent if alert["labels"]["alertname"] == name and alert["status"] == status]


@contextmanager
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Webhook(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Monitoring:
    prometheus: int
    alertmanager: int

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of Prometheus' API. Raises OSError where it is no success."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found


@contextmanager
def monitoring(host: LabHost, programs: Path, exporter: int, hook: int) -> Iterator[Monitoring]:
    """Scrapes the exporter each second and tells the webhook's port."""
    servers = Monitoring(free_port(), free_port())
    prometheus = (CONTRIB / "prometheus.yml").read_text()
    for shipped, here in (("9877", exporter), ("9093", servers.alertmanager), ("15s", "1s")):
        assert shipped in prometheus
        prometheus = prometheus.replace(shipped, str(here))
    alertmanager = (CONTRIB / "alertmanager.yml").read_text()
    for shipped, here in (("9095", hook), ("10s", "1s"), ("1m", "1s")):
        assert shipped in alertmanager
        alertmanager = alertmanager.replace(shipped, str(here))
    host.write(f"{FOLDER}/prometheus.yml", prometheus)
    host.write(f"{FOLDER}/{RULES.name}", RULES.read_text())
    host.write(f"{FOLDER}/alertmanager.yml", alertmanager)
    commands = {
        "lab-prometheus.service": (
            programs / "prometheus",
            f"--config.file={FOLDER}/prometheus.yml",
            f"--storage.tsdb.path={FOLDER}/series",
            f"--web.listen-address=127.0.0.1:{servers.prometheus}",
        ),
        "lab-alertmanager.service": (
            programs / "prometheus-alertmanager",
            f"--config.file={FOLDER}/alertmanager.yml",
            f"--storage.path={FOLDER}/alerts",
            f"--web.listen-address=127.0.0.1:{servers.alertmanager}",
            "--cluster.listen-address=",
        ),
    }
    # Where its package would have put the templates of Alertmanager.
    host.run("ln", "-sfn", programs.parent / "share" / "prometheus", "/usr/share/prometheus")
    try:
        for unit, command in commands.items():
            host.run("systemd-run", f"--unit={unit}", "--collect", "--property=Environment=GOMAXPROCS=1", *command)
        for unit, port in zip(commands, (servers.prometheus, servers.alertmanager), strict=True):
            _wait_ready(host, unit, port)
        yield servers
    finally:
        host.systemctl("stop", *commands, check=False)
        host.run("rm", "-rf", FOLDER)


def _wait_ready(host: LabHost, unit: str, port: int) -> None:
    try:
        wait_until(lambda: _ready(port), READY_S, f"{unit} on port {port}")
    except AssertionError as in_vain:
        said = host.run("journalctl", "--unit", unit, "--output=cat", "--lines=20").stdout
        raise AssertionError(f"{in_vain}; it said:\n{said}") from None


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
