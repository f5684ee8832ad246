"""What holds for the tree as a whole: what a wheel installs, which parts are pure, how long a file may be."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "watchdog" / "sglang_watchdog"
PURE = ("domain", "diagnosis", "recovery")
# What touches the outside world: a pure part may import none of it. importlib.resources is allowed, for the
# signatures that are data of the package.
IMPURE = frozenset(
    {"asyncio", "aiohttp", "psutil", "pynvml", "pystemd", "sqlite3", "subprocess", "socket", "time", "os", "pathlib"}
    | {"shutil", "signal", "threading", "random", "prometheus_client", "structlog", "rich", "click", "datetime"}
)
OWN_IMPURE = ("sglang_watchdog.host", "sglang_watchdog.reporting", "sglang_watchdog.ledger", "sglang_watchdog.cli")
TEXT_SUFFIXES = (".py", ".sh", ".c", ".md", ".toml", ".service")


def pure_modules() -> list[Path]:
    """The executor is the edge of recovery/: it is the one module there that acts."""
    return [p for part in PURE for p in sorted((PACKAGE / part).rglob("*.py")) if p.name != "executor.py"]


def imported(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("module", pure_modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_pure_part_imports_nothing_of_the_outside_world(module: Path) -> None:
    names = imported(module)
    assert not {name for name in names if name.split(".")[0] in IMPURE}
    assert not {name for name in names if name.startswith(OWN_IMPURE)}


def test_only_the_command_line_imports_rich_and_click() -> None:
    importers = {p for p in PACKAGE.rglob("*.py") if imported(p) & {"rich", "click"} or "rich." in str(imported(p))}
    assert {p.relative_to(PACKAGE).parts[0] for p in importers} <= {"cli"}


def test_the_source_root_is_no_package() -> None:
    """An importable `watchdog` would shadow the well-known package of that name."""
    assert not (CHECKOUT / "watchdog" / "__init__.py").exists()


def test_a_wheel_installs_sglang_watchdog_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(CHECKOUT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_watchdog"}
    assert "sglang_watchdog/py.typed" in names
    assert "sglang_watchdog/diagnosis/wordings/pools.toml" in names


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=30)
    return [CHECKOUT / line for line in listed.stdout.splitlines()]


def test_no_source_file_is_longer_than_500_lines() -> None:
    sources = [p for p in tracked_files() if p.suffix in TEXT_SUFFIXES and p.is_file() and "corpus" not in p.parts]
    assert {str(p.relative_to(CHECKOUT)): n for p in sources if (n := len(p.read_text().splitlines())) > 500} == {}


def test_requirements_are_pinned_hashed_and_name_no_registry() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (CHECKOUT / "packaging" / name).read_text()
        assert "://" not in text
        pins = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
        assert pins
        assert all("==" in line and line.endswith("\\") for line in pins)
