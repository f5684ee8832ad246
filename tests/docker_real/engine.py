"""A real Docker on a lab host, unpacked by packaging/docker.sh, and the words before a command that run it in a
container.

The container shares the host's pids and network, so that the simulated NVML and the server's port are the host's; its
image is empty but for links into the host's `/usr`.
"""

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab.host import CHECKOUT, LabHost
from lab_product.installed import CARDS
from lab_product.sglang_unit import MODEL
from waiting import wait_until

DOCKER = "/usr/local/bin/docker"
IMAGE = "base:1"
START_DEADLINE_S = 40.0
_SUITE = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
_DEFAULT = f"/var/cache/sglang-watchdog/docker-{_SUITE}"
# Nothing of the network is touched: the lab host has this machine's. No overlay on overlay.
_FLAGS = "--iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --bridge=none --storage-driver=vfs"
_IMPORT = (
    "mkdir -p /srv/image/usr /srv/image/etc /srv/image/run /srv/image/tmp && cd /srv/image &&"
    " for name in bin sbin lib lib64; do ln -sfn usr/$name $name; done && tar -c . | docker import - "
)


def folder() -> Path:
    """Where it was unpacked."""
    found = Path(os.environ.get("SGLANG_WATCHDOG_DOCKER", _DEFAULT))
    if not (found / "usr/sbin/dockerd").exists():
        pytest.fail(f"{found} has no dockerd: `make test-docker` fetches it", pytrace=False)
    return found


def set_up(host: LabHost, unpacked: Path) -> None:
    """Starts the engine, by this machine's hand: inside, systemd itself lacks the capabilities that it needs."""
    host.run("sh", "-c", f"ln -sf {unpacked}/usr/bin/* {unpacked}/usr/sbin/* /usr/local/bin/; mkdir -p {MODEL}")
    host.run("sh", "-c", f"setsid dockerd {_FLAGS} >/var/log/dockerd.log 2>&1 </dev/null &", env={"PATH": _PATH})
    answers = lambda: host.run(DOCKER, "version", check=False).returncode == 0  # noqa: E731
    wait_until(answers, START_DEADLINE_S, "Docker answers")
    host.run("sh", "-c", f"{_IMPORT}{IMAGE}", env={"PATH": _PATH})


_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


def run(*options: str, variables: Iterable[str] = ()) -> tuple[str, ...]:
    """`variables` go in by name, with the value that the client has."""
    seen = dict.fromkeys(str(path) for path in (CHECKOUT, Path(sys.prefix), Path(MODEL).parent))
    volumes = [f"--volume={path}:{path}:ro" for path in ("/usr", *seen)] + [f"--volume={CARDS}:{CARDS}"]
    environment = [f"--env={name}" for name in variables]
    shared = ("--security-opt=seccomp=unconfined", "--network=host", "--pid=host", f"--workdir={os.sep}")
    return (DOCKER, "run", *options, *shared, *volumes, *environment, IMAGE)
