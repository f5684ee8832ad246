"""What is around this host: nothing, or a container of somebody else's, from which neither the kernel's lines nor the
processes of the outer host are seen."""

from pathlib import Path

# Written by systemd as PID 1 of a container, from the variable `container` that its manager gave (systemd's
# CONTAINER_INTERFACE): lxc, docker, podman, systemd-nspawn …
_KIND = Path("/run/systemd/container")


def container(kind: Path = _KIND) -> str:
    """The kind of container that this host is; empty where it is none."""
    try:
        return kind.read_text(errors="replace").strip()
    except OSError:
        return ""
