"""Says in a lab host what systemd and the cards show of one unit: a JSON line at each change, until it is killed.

Run inside the host (`python -m demo.observer UNIT`), because the simulated cards know processes by their pids there.
"""

import json
import sys
import time

from pystemd.systemd1 import Unit

from sim_nvml import SimNvml

LOOK_EVERY_S = 0.05


def main(name: str) -> None:
    unit, cards = Unit(name.encode()), SimNvml()
    unit.load()
    last: dict[str, object] = {}
    while True:
        seen = look(unit, cards)
        if seen != last:
            print(json.dumps({"time": time.time(), **seen}), flush=True)
            last = seen
        time.sleep(LOOK_EVERY_S)


def look(unit: Unit, cards: SimNvml) -> dict[str, object]:
    return {
        "active": unit.Unit.ActiveState.decode(),
        "sub": unit.Unit.SubState.decode(),
        "result": unit.Service.Result.decode(),
        "gpu_bytes": sum(cards.used(card.index) for card in cards.cards()),
    }


if __name__ == "__main__":
    main(sys.argv[1])
