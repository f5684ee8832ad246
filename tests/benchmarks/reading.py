"""`make bench`: what a diagnosis costs beside reading the journal, in one run, on a real journal of a lab host.

`python -m benchmarks.reading [LINES]` (in tests/). CPU time is compared, of whole processes: the two take turns on the
same machine, so that the ratio holds on a busy one too. With `--gigabyte` a gigabyte of log is read as well.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lab.host import LabHost

LINES = 100_000
ROUNDS = 3
UNIT = "sglang.service"
DECODE = (
    "Decode batch, #running-req: 16, #full token: {n}, full token usage: 0.41, mamba num: 32, mamba usage: 0.6, accept "
    "len: 3.42, accept rate: 0.68, cuda graph: True, gen throughput (token/s): 1423.11, #queue-req: 0, "
)
PREFILL = (
    "Prefill batch, #new-seq: 1, #new-token: {n}, #cached-token: 0, token usage: 0.40, #running-req: 15, "
    "#queue-req: 0, input throughput (token/s): 2210.00, cuda graph: False"
)
ACCESS = 'INFO:     10.0.3.7:{n} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
OTHER = "Receive: obj=GenerateReqInput(rid='{n:032x}', text=None, sampling_params={{'temperature': 0.7}}, stream=True)"
MIX = (DECODE, DECODE, PREFILL, ACCESS, ACCESS, DECODE, PREFILL, ACCESS, DECODE, OTHER)


def log(lines: int) -> str:
    """A server that serves: of ten lines four decode, two prefill, three answers, and one that nothing knows."""
    stamps = (f"[2026-03-09 {n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02} TP0]" for n in range(lines))
    return "".join(f"{stamp} {MIX[n % len(MIX)].format(n=n)}\n" for n, stamp in enumerate(stamps))


def cpu_s(command: Sequence[str | Path], stdin: int | None = None) -> float:
    """User and system time of a command that writes into nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdin=stdin, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def written(folder: Path, lines: int) -> Path:
    """A folder with the journal of a host whose unit printed so many lines."""
    (folder / "log").write_text(log(lines))
    with LabHost.boot("bench", binds=(folder,)) as host:
        host.run("mkdir", "-p", "/run/systemd/journald.conf.d")
        host.write(
            "/run/systemd/journald.conf.d/bench.conf",
            "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\nRuntimeMaxUse=600M\nRuntimeMaxFileSize=600M\n",
        )
        host.systemctl("restart", "systemd-journald")
        host.unit(UNIT, f"[Service]\nType=oneshot\nExecStart=/bin/cat {folder}/log\n")
        host.systemctl("start", UNIT, timeout=300)
        deadline = time.monotonic() + 300
        while len(host.run("journalctl", "-u", UNIT, "-o", "cat", timeout=120).stdout.splitlines()) < lines:
            if time.monotonic() > deadline:
                raise SystemExit("bench: the journal did not take all lines within 300 s")
            time.sleep(1)
        host.run("journalctl", "--sync")
        host.run("cp", "-r", "/run/log/journal", folder / "journal", timeout=120)
    return folder / "journal"


def compare(folder: Path, lines: int) -> float:
    """Prints what reading and classification take. Returns classification over reading, the least of a few rounds."""
    reading: list[str | Path] = [
        "journalctl",
        "-D",
        written(folder, lines),
        "-o",
        "json",
        "--all",
        f"_SYSTEMD_UNIT={UNIT}",
    ]
    dump = folder / "journal.jsonl"
    with dump.open("wb") as file:
        subprocess.run(reading, stdout=file, check=True)
    diagnosing: list[str | Path] = [sys.executable, "-m", "sglang_watchdog", "diagnose", "--journal", dump, "--json"]
    answers = subprocess.run(diagnosing, capture_output=True, check=True).stdout
    assert json.loads(answers)["class"]
    pairs = [(cpu_s(reading), cpu_s(diagnosing)) for _ in range(ROUNDS)]
    read, classified = (min(times) for times in zip(*pairs, strict=True))
    ratio = min(mine / theirs for theirs, mine in pairs)
    print(f"{lines} lines, {dump.stat().st_size >> 20} MiB of JSON (CPU seconds, least of {ROUNDS})")
    print(f"  journalctl -o json >/dev/null   {read:.2f}")
    print(f"  sglang-watchdog diagnose        {classified:.2f}")
    print(f"  ratio                           {ratio:.2f}")
    return ratio


def gigabyte(folder: Path) -> None:
    """Prints the time and the memory that a gigabyte of plain log takes."""
    path, block = folder / "gigabyte.log", log(50_000).encode()
    with path.open("wb") as file:
        for _ in range((1 << 30) // len(block) + 1):
            file.write(block)
    spent = cpu_s([sys.executable, "-m", "sglang_watchdog", "diagnose", "--text", path])
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{path.stat().st_size >> 20} MiB of plain log: {spent:.1f} s of CPU, {most} MiB of memory at most")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        if "--gigabyte" in sys.argv:
            gigabyte(Path(folder))
            return 0
        numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
        return 0 if compare(Path(folder), numbers[0] if numbers else LINES) < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
