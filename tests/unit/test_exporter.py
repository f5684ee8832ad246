"""The exporter: plain on loopback, and TLS with and without client certificates, by real connections."""

import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sglang_watchdog.reporting.metrics import Metrics, Tls
from sglang_watchdog.settings import Settings

LOOPBACK = "127.0.0.1"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is missing")


def metrics() -> Metrics:
    return Metrics(("sglang.service",), "0.1.0")


def scrape(port: int, context: ssl.SSLContext | None = None) -> str:
    url = f"{'https' if context else 'http'}://{LOOPBACK}:{port}/metrics"
    with urllib.request.urlopen(url, timeout=20, context=context) as answer:
        return str(answer.read().decode())


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key: an authority, a server and a client in one."""
    pem, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{LOOPBACK}", "-days", "2"]
    subprocess.run([*words, "-out", pem, "-keyout", key], check=True, capture_output=True, timeout=60)
    return pem, key


def test_without_settings_it_is_plain_http_on_loopback() -> None:
    assert (Settings().metrics.address, Settings().metrics.certificate) == (LOOPBACK, None)
    assert "sglang_watchdog_build_info" in scrape(metrics().serve(LOOPBACK, 0))


@needs_openssl
def test_with_a_certificate_it_is_tls_alone(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, "server")
    port = metrics().serve(LOOPBACK, 0, Tls(pem, key))
    assert "sglang_watchdog_build_info" in scrape(port, ssl.create_default_context(cafile=str(pem)))
    with pytest.raises(OSError):
        scrape(port)


@needs_openssl
def test_with_an_authority_only_its_clients_are_answered(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, "server")
    client_pem, client_key = certificate(tmp_path, "client")
    other_pem, other_key = certificate(tmp_path, "other")
    port = metrics().serve(LOOPBACK, 0, Tls(pem, key, client_pem))
    shows_nothing = ssl.create_default_context(cafile=str(pem))
    shows_another = ssl.create_default_context(cafile=str(pem))
    shows_another.load_cert_chain(other_pem, other_key)
    for refused in (shows_nothing, shows_another):
        with pytest.raises(OSError):
            scrape(port, refused)
    trusted = ssl.create_default_context(cafile=str(pem))
    trusted.load_cert_chain(client_pem, client_key)
    assert "sglang_watchdog_build_info" in scrape(port, trusted)


@needs_openssl
def test_a_file_of_no_use_is_an_error_of_the_outside_world(tmp_path: Path) -> None:
    pem, _ = certificate(tmp_path, "server")
    for key in (tmp_path / "missing.key", pem):
        with pytest.raises(OSError):
            metrics().serve(LOOPBACK, 0, Tls(pem, key))
