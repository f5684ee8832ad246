"""One watchdog for one state directory, and a lock that needs no file."""

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_watchdog.host.lock import AlreadyRuns, only_one

HOLDS = "import sys, pathlib\nfrom sglang_watchdog.host.lock import only_one\n"
HOLDS += "with only_one(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"


def test_a_second_one_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRuns, match=str(tmp_path)), only_one(tmp_path):
            pass
        first.kill()
    with only_one(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_the_ledgers_to_tell(tmp_path: Path) -> None:
    with only_one(tmp_path / "none"):
        pass
