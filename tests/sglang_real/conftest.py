"""The lab host and the environments of the real SGLang. They are made before the tests, or found in their cache."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.host import CHECKOUT, LabHost

GIB = 1 << 30
# Three processes of 0.6 GB each, twice during a recovery, and the page cache of what they read.
HOST_MEMORY = 6 * GIB
MIDDLE = "0.5.16"
RELEASES = tuple(os.environ.get("SGLANG_RELEASES", MIDDLE).split())


@pytest.fixture(scope="session")
def sglang_envs() -> Mapping[str, Path]:
    """The environment's folder of each release; makes those that are not there, which takes minutes."""
    wanted = tuple(dict.fromkeys((MIDDLE, *RELEASES)))  # the others are laid over the middle one
    made = subprocess.run(
        [CHECKOUT / "packaging/sglang-env.sh", *wanted], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(zip(wanted, map(Path, made.stdout.split()), strict=True))


@pytest.fixture(scope="session")
def sglang_env(sglang_envs: Mapping[str, Path]) -> Path:
    """That of the middle release."""
    return sglang_envs[MIDDLE]


@pytest.fixture(scope="session")
def host(sglang_envs: Mapping[str, Path]) -> Iterator[LabHost]:
    with LabHost.boot("sglang", memory_bytes=HOST_MEMORY, binds=tuple(sglang_envs.values())) as booted:
        yield booted
