"""A log of any size is read in constant memory."""

import subprocess
import sys

import pytest

# Half of the log: reading it whole, even once, would not fit.
LIMIT_MB = 50
LOG_MB = 100
READ = """
import io, resource, sys
from sglang_watchdog.diagnosis.formats import read_entries
from sglang_watchdog.diagnosis.launches import read_launch
from sglang_watchdog.diagnosis.leavings import Leavings
form, size = sys.argv[1], int(sys.argv[2]) << 20
text = b"[2026-03-09 22:35:06 TP0] " + b"x" * 4000
ROW = {
    "plain": text + b"\\n",
    "json": b'{"__REALTIME_TIMESTAMP":"1780000000000000","_SYSTEMD_INVOCATION_ID":"a","MESSAGE":"' + text + b'"}\\n',
    "export": b"__CURSOR=s=1\\n__REALTIME_TIMESTAMP=1\\n_SYSTEMD_INVOCATION_ID=a\\nMESSAGE=" + text + b"\\n\\n",
    "endless": b"x" * 65536,
}[form]
class Endless(io.RawIOBase):
    left = size
    rest = b""
    def readable(self):
        return True
    def readinto(self, buffer):
        if not self.rest:
            self.rest = ROW if self.left > 0 else b""
            self.left -= len(ROW)
        piece, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
entries = read_entries(ROW[:65536], io.BufferedReader(Endless(), 1 << 20), Leavings("it"), journal=False)
lines = read_launch(entries).lines
print(lines, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("form", ["plain", "json", "export", "endless"])
def test_a_hundred_megabytes_take_no_more_memory_than_a_few_lines(form: str) -> None:
    command = [sys.executable, "-c", READ, form, str(LOG_MB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines, grown_mb = map(int, done.stdout.split())
    assert lines >= (1 if form == "endless" else 22_000)
    assert grown_mb < LIMIT_MB
