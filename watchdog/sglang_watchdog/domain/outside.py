"""What cannot be seen from inside a container that the watchdog itself runs in, and where a person can see it. Pure.

`inside` is the kind of container (`lxc`, `docker`, …) as systemd names it; empty on a host of its own.
"""

_RESET = "`nvidia-smi --gpu-reset` with the card idle, or a reboot, gives it back"
_LXC = "lxc"


def held_from_outside(inside: str) -> str:
    """Whose memory can be that no visible process holds. In a container the host and its other containers share the
    cards, and none of theirs is seen."""
    if not inside:
        return f"the driver's own, or held from another PID namespace; {_RESET}"
    enter = "; `pct exec CTID -- sglang-watchdog gpus` is this view from a Proxmox host" * (inside == _LXC)
    return (
        f"held from outside of this {inside} container, by its host or a neighbour; on the host `nvidia-smi` names the "
        f"pid, and /proc/PID/cgroup its container{enter}"
    )


def kernel_lines(inside: str) -> str:
    """A kernel's lines are in the journal of its own host. Without them a kill for want of memory is told only where
    systemd counts it in the unit's own group (memory.events of cgroup v2)."""
    limit = "; there `pct config CTID` shows the memory limit of this one, on Proxmox" * (inside == _LXC)
    return (
        f"This is a {inside} container: what its kernel says (OOM kills, Xid errors of the cards) is in the journal of "
        f"the host alone, `journalctl -k` there{limit}."
    )
