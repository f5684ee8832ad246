"""The lab host and the environment of the real SGLang. `make test-sglang` makes the environment before the tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.host import CHECKOUT, LabHost

GIB = 1 << 30
# Three processes of 0.6 GB each, twice during a recovery, and the page cache of what they read.
HOST_MEMORY = 6 * GIB


@pytest.fixture(scope="session")
def sglang_env() -> Path:
    """The environment's folder; makes it if it is not there, which takes minutes."""
    made = subprocess.run([CHECKOUT / "packaging/sglang-env.sh"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def host(sglang_env: Path) -> Iterator[LabHost]:
    with LabHost.boot("sglang", memory_bytes=HOST_MEMORY, binds=(sglang_env,)) as booted:
        yield booted
