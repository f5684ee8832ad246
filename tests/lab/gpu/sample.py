"""Samples the first card by NVML until it is ended: used bytes every 5 ms, the process list every 50 ms.

    sample.py FILE

Writes changes only, one JSON line each: `{"t": Unix seconds, "used": bytes}`, `{"t": …, "list": [[pid, bytes], …]}`,
and every call that took longer than 50 ms as `{"t": …, "slow": name, "s": seconds}`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

EVERY_S = 0.005
LIST_EACH = 10
SLOW_S = 0.05


def main() -> None:
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    with Path(sys.argv[1]).open("w", buffering=1) as file:

        def note(**values: Any) -> None:
            file.write(json.dumps({"t": round(time.time(), 4), **values}) + "\n")

        def timed(call: Callable[[Any], Any]) -> Any:
            began = time.monotonic()
            answer = call(card)
            if (took := time.monotonic() - began) > SLOW_S:
                note(slow=call.__name__, s=round(took, 4))
            return answer

        used, listed, count = None, None, 0
        while True:
            now = timed(pynvml.nvmlDeviceGetMemoryInfo).used
            if now != used:
                note(used=now)
                used = now
            if count % LIST_EACH == 0:
                found = [[one.pid, one.usedGpuMemory] for one in timed(pynvml.nvmlDeviceGetComputeRunningProcesses)]
                if found != listed:
                    note(list=found)
                    listed = found
            count += 1
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
