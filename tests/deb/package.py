"""The package that `make deb` made: the file itself, and the same files again with a higher version number."""

import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.host import CHECKOUT

NAME = "sglang-watchdog"
SITES = f"usr/lib/{NAME}/lib/python3.*/site-packages"
Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Package:
    path: Path
    version: str

    @classmethod
    def built(cls) -> "Package":
        """What lies in dist/. Raises FileNotFoundError."""
        version = str(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"])
        path = CHECKOUT / "dist" / f"{NAME}_{version}_amd64.deb"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; `make deb` makes it")
        return cls(path, version)

    def again(self, version: str, folder: Path, edit: Edit = lambda _: None) -> "Package":
        """Another version in `folder`, its files changed by `edit` and not compressed: a matter of seconds."""
        tree, path = folder / f"tree-{version}", folder / f"{NAME}_{version}_amd64.deb"
        _dpkg_deb("--raw-extract", self.path, tree)
        control = tree / "DEBIAN/control"
        control.write_text(control.read_text().replace(f"\nVersion: {self.version}\n", f"\nVersion: {version}\n"))
        edit(tree)
        _dpkg_deb("--root-owner-group", "-Znone", "--build", tree, path)
        shutil.rmtree(tree)
        return Package(path, version)


def newer_ledger(tree: Path) -> None:
    """As a release that has added a table to the ledger."""
    for module in tree.glob(f"{SITES}/sglang_watchdog/ledger.py"):
        with module.open("a") as text:
            text.write('\nSCHEMA_VERSION += 1\n_STEPS = (*_STEPS, "CREATE TABLE later (a TEXT) STRICT")\n')


def other_settings(tree: Path) -> None:
    """As a release that says something else in its config.toml, which dpkg knows as a conffile."""
    path = tree / "etc/sglang-watchdog/config.toml"
    path.write_text(path.read_text() + "# A word of a later release.\n")


def _dpkg_deb(*words: str | Path) -> None:
    subprocess.run(["dpkg-deb", *words], check=True, capture_output=True, text=True, timeout=120)
