"""Looks into the ledger on a lab host, as often as one likes.

It is read inside the host: SQLite follows the links of a path, and /proc/PID/root, the way in from outside, is one. A
reader stays there for all questions, since an interpreter for each would keep the machine busier than what is watched.
"""

import json
import subprocess
import sys

from lab.host import LabHost

READER = """
import json, sqlite3, sys
for line in sys.stdin:
    sql, parameters = json.loads(line)
    db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
    print(json.dumps(db.execute(sql, parameters).fetchall()), flush=True)
    db.close()
"""


class LedgerReader:
    """`rows` of the SQLite file at `path` on the host. Starts at the first question."""

    def __init__(self, host: LabHost, path: str) -> None:
        self._host = host
        self._path = path
        self._process: subprocess.Popen[str] | None = None

    def rows(self, sql: str, *parameters: str) -> list[list[str]]:
        """Raises AssertionError where it cannot be read; stderr says why."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([sql, parameters]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self.close()
            raise AssertionError(f"{self._path} does not answer to {sql}")
        rows: list[list[str]] = json.loads(answer)
        return rows

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:  # the host may have been booted anew
            pipe = subprocess.PIPE
            self._process = self._host.popen(sys.executable, "-c", READER, self._path, stdin=pipe, stdout=pipe)
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
