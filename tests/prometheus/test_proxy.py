"""The proxy that the documentation shows, by Debian's nginx: it starts with that text, and asks for the password."""

import base64
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.host import CHECKOUT, free_port
from sglang_watchdog.reporting.metrics import Metrics
from waiting import wait_until

SHOWN = (CHECKOUT / "docs/alerts-and-metrics.md").read_text().split("```nginx\n")[1].split("```")[0]
PASSWORD = "q7-scraper"


def openssl(*words: str | Path) -> str:
    return subprocess.run(["openssl", *words], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def proxy(programs: Path, tmp_path: Path) -> Iterator[tuple[int, ssl.SSLContext]]:
    """nginx with what is shown, but for ports and folder, in front of an exporter; its port, and who trusts it."""
    port, exporter = free_port(), Metrics(("sglang.service",), "0.1.0").serve("127.0.0.1", 0)
    shown = SHOWN
    for there, here in (("9878", port), ("9877", exporter), ("/etc/nginx", tmp_path)):
        assert there in shown
        shown = shown.replace(there, str(here))
    tls = tmp_path / "tls"
    tls.mkdir()
    pem, key = tls / "exporter.pem", tls / "exporter.key"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(
        "req", *kind, "-subj", "/CN=exporter", "-addext", "subjectAltName=IP:127.0.0.1", "-out", pem, "-keyout", key
    )
    (tmp_path / "metrics.htpasswd").write_text(f"prometheus:{openssl('passwd', '-apr1', PASSWORD)}")
    folders = "".join(f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi"))
    http = f"access_log off;\n{folders}scgi_temp_path {tmp_path}/scgi;\n{shown}"
    # Its workers run as who started it: what is below tmp_path is nobody else's to read.
    main = f"user root;\nworker_processes 1;\npid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{http}}}\n"
    (tmp_path / "nginx.conf").write_text(main)
    log = tmp_path / "error.log"
    nginx: list[str | Path] = [programs.parent / "sbin/nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", log]
    tested = subprocess.run([*nginx, "-t"], check=False, capture_output=True, text=True, timeout=60)
    assert (tested.returncode, tested.stderr.count("[warn]")) == (0, 0), tested.stderr
    with subprocess.Popen([*nginx, "-g", "daemon off;"], stderr=subprocess.DEVNULL) as server:
        try:
            trusting = ssl.create_default_context(cafile=str(pem))
            wait_until(lambda: status(port, trusting) is not None, 20, "nginx answers")
            yield port, trusting
        finally:
            server.terminate()


def status(port: int, context: ssl.SSLContext, password: str = "", path: str = "/metrics") -> int | None:
    """None where nobody answers."""
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}")
    if password:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"prometheus:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            assert "sglang_watchdog_build_info" in answer.read().decode()
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
    except OSError:
        return None


def test_only_who_knows_the_password_gets_the_metrics(proxy: tuple[int, ssl.SSLContext]) -> None:
    assert status(*proxy) == 401
    assert status(*proxy, password="guessed") == 401
    assert status(*proxy, password=PASSWORD) == 200
    assert status(*proxy, password=PASSWORD, path="/") == 404
