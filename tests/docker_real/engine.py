"""A real Docker on a lab host, unpacked by packaging/docker.sh, and the words before a command that run it in a
container.

The container shares the host's pids and network, so that the simulated NVML and the server's port are the host's; its
image is empty but for links into the host's `/usr`.
"""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab.host import LabHost
from lab_product import podman
from waiting import wait_until

DOCKER = "/usr/local/bin/docker"
IMAGE = "base:1"
START_DEADLINE_S = 40.0
_SUITE = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
_DEFAULT = f"/var/cache/sglang-watchdog/docker-{_SUITE}"
# Nothing of the network is touched: the lab host has this machine's. No overlay on overlay.
_FLAGS = "--iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --bridge=none --storage-driver=vfs"
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


def folder() -> Path:
    """Where it was unpacked."""
    found = Path(os.environ.get("SGLANG_WATCHDOG_DOCKER", _DEFAULT))
    if not (found / "usr/sbin/dockerd").exists():
        pytest.fail(f"{found} has no dockerd: `make test-docker` fetches it", pytrace=False)
    return found


def set_up(host: LabHost, unpacked: Path) -> None:
    """Starts the engine, by this machine's hand: inside, systemd itself lacks the capabilities that it needs."""
    host.run("sh", "-c", f"ln -sf {unpacked}/usr/bin/* {unpacked}/usr/sbin/* /usr/local/bin/")
    host.run("sh", "-c", f"setsid dockerd {_FLAGS} >/var/log/dockerd.log 2>&1 </dev/null &", env={"PATH": _PATH})
    answers = lambda: host.run(DOCKER, "version", check=False).returncode == 0  # noqa: E731
    wait_until(answers, START_DEADLINE_S, "Docker answers")
    podman.make_root(host)
    host.run("sh", "-c", f"tar -C {podman.ROOT} -c . | {DOCKER} import - {IMAGE}")


def run(*options: str, variables: Iterable[str] = ()) -> tuple[str, ...]:
    """As podman's."""
    unconfined = "--security-opt=seccomp=unconfined"
    return (DOCKER, "run", *options, unconfined, *podman.shared_with_host(variables), IMAGE)
