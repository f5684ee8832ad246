"""podman on a lab host: what makes it run there, and the words before a command that run it in a container.

The container shares the host's pids and network, so that the simulated NVML and the server's port are the host's, and
its root is the host's `/usr`: no image is needed.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from lab.host import CHECKOUT, LabHost
from lab_product.installed import CARDS
from lab_product.sglang_unit import MODEL

PODMAN = "/usr/bin/podman"
# Found before the real one by whoever looks along systemd's path.
BEFORE_PODMAN = "/usr/local/sbin/podman"
ROOT = "/srv/container"
_LINKS = " ".join(f"ln -sfn usr/{name} {name};" for name in ("bin", "sbin", "lib", "lib64"))
# A host in a container of its own has neither a kernel keyring nor a group of pids to give, and no overlay on overlay.
_CONTAINERS = "[containers]\nkeyring=false\npids_limit=0\n"
_STORAGE = '[storage]\ndriver="vfs"\nrunroot="/run/containers/storage"\ngraphroot="/var/lib/containers/storage"\n'


def set_up(host: LabHost) -> None:
    host.write("/etc/containers/containers.conf", _CONTAINERS)
    host.write("/etc/containers/storage.conf", _STORAGE)
    make_root(host)


def make_root(host: LabHost) -> None:
    """ROOT, which holds nothing but links into the host's `/usr` and places for what is mounted."""
    host.run("sh", "-c", f"mkdir -p {ROOT}/usr {ROOT}/etc {ROOT}/run {ROOT}/tmp {MODEL}; cd {ROOT}; {_LINKS}")


def shared_with_host(variables: Iterable[str]) -> tuple[str, ...]:
    """Options of any engine: network, pids and folders of the host, and variables by name, with the value that the
    client has."""
    seen = dict.fromkeys(str(path) for path in (CHECKOUT, Path(sys.prefix), Path(MODEL).parent))
    volumes = [f"--volume={path}:{path}:ro" for path in ("/usr", *seen)] + [f"--volume={CARDS}:{CARDS}"]
    environment = [f"--env={name}" for name in variables]
    return ("--network=host", "--pid=host", f"--workdir={os.sep}", *volumes, *environment)


def run(*options: str, variables: Iterable[str] = ()) -> tuple[str, ...]:
    return (PODMAN, "run", *options, "--privileged", *shared_with_host(variables), "--rootfs", ROOT)
