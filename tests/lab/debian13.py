"""The Debian 13 root (systemd 257) that hosts of `Base.DEBIAN13` boot from.

It holds no Python: what depends on systemd's behaviour is tested with systemctl, busctl, journalctl and shell.
Run as `python -m lab.debian13` to have it made ahead of the tests.
"""

from pathlib import Path

from lab.debootstrap import Root

ROOT = Root("trixie", ("systemd", "dbus"), edition=1)


def root() -> Path:
    """The root's folder; makes it first if need be. Raises LabUnavailable."""
    return ROOT.made()


if __name__ == "__main__":
    print(root())
