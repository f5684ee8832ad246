"""Plays the scenarios on a machine with a GPU, and writes what came of them.

    run.py OUT --kit FOLDER [--seconds N] [--only NAME,…]     on the machine with the GPU, as root
    run.py OUT --rehearse [--only NAME,…]                     on a development machine, without a GPU

FOLDER is an unpacked kit (kit.sh). `--only real_…` plays with a real SGLang (real_server.py). OUT gets `results.json`
and `records.tar.gz`, written anew after each scenario, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.gpu import inference, machine
from lab.gpu.inference import Card
from lab.gpu.real_server import REAL_SCENARIOS
from lab.gpu.scenarios import SCENARIOS, Stage
from lab.host import LabHost

WORK = Path("/run/gpu-lab")
SCENARIO_S = 540


class TooLong(Exception):
    """A scenario outlasted its time."""


def main() -> int:
    asked = _asked()
    end = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    folder = Path("/var/tmp/gpu-lab-records") / str(int(time.time()))
    folder.mkdir(parents=True)
    results: dict[str, Any] = {}
    card = Card(simulated=asked.rehearse)
    with _host(asked) as host, _sampled(card, folder):
        inference.install(host, card)
        for name in asked.only.split(",") if asked.only else SCENARIOS:
            if end - time.monotonic() < 20 or _hopeless(results):
                results[name] = {"skipped": True}
                continue
            results[name] = _played(
                Stage(host, card, folder / name), name, int(min(SCENARIO_S, end - time.monotonic()))
            )
            _write(asked.out, folder, results)
    _write(asked.out, folder, results)
    print(json.dumps({name: found.get("findings", found) for name, found in results.items()}, indent=1))
    return 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", default="")
    return parser.parse_args()


@contextmanager
def _host(asked: argparse.Namespace) -> Iterator[LabHost]:
    if asked.rehearse:
        with LabHost.boot("gpu-rehearsal", memory_bytes=3 << 30) as host:
            yield host
    else:
        with machine.booted(asked.kit, WORK) as host:
            yield host


@contextmanager
def _sampled(card: Card, folder: Path) -> Iterator[None]:
    if card.simulated:
        yield
        return
    sampler = subprocess.Popen([sys.executable, "-m", "lab.gpu.sample", str(folder / "nvml.jsonl")])
    try:
        yield
    finally:
        sampler.kill()
        sampler.wait()


def _played(stage: Stage, name: str, seconds: int) -> dict[str, Any]:
    stage.folder.mkdir()
    began = time.time()
    print(f"== {name}", flush=True)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(seconds)
    found: dict[str, Any] = {}
    try:
        found = {**SCENARIOS, **REAL_SCENARIOS}[name](stage)
    except Exception:  # noqa: BLE001 - whatever it is, the next scenario shall be played
        stage.findings.append(traceback.format_exc())
        print(stage.findings[-1][-3000:], flush=True)
    finally:
        signal.alarm(0)
    took = round(time.time() - began, 1)
    print(f"== {name} took {took} s, findings: {len(stage.findings)}", flush=True)
    return {"began": began, "took_s": took, "findings": stage.findings, "found": found}


def _hopeless(results: dict[str, Any]) -> bool:
    """Where three in a row raised, it is the set-up that is wrong, and time on the machine is short."""
    raised = [
        any("Traceback" in finding for finding in found["findings"])
        for found in results.values()
        if "findings" in found
    ]
    return len(raised) >= 3 and all(raised[-3:])


def _too_long(*_: object) -> None:
    raise TooLong


def _write(out: Path, folder: Path, results: dict[str, Any]) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str))
    with tarfile.open(out / "records.tar.gz", "w:gz") as archive:
        archive.add(folder, "records")


if __name__ == "__main__":
    sys.exit(main())
