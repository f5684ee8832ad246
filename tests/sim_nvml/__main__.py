"""Command line of the simulated GPUs: `python -m sim_nvml hold --gpu 0 --bytes 40GiB` is a stranger on the card.

Owns no state; see state.py. PYTHONPATH must name the tests folder, SIM_NVML_DIR the folder of the cards.
"""

from __future__ import annotations

import argparse
import os
import signal

from sim_nvml.state import DRIVER_LAG_S, RTX_PRO_6000, SimNvml, parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="sim_nvml")
    commands = parser.add_subparsers(dest="command", required=True)
    gpus = commands.add_parser("gpus", help="put equal cards in")
    gpus.add_argument("--count", type=int, default=1)
    gpus.add_argument("--bytes", type=parse_bytes, default=RTX_PRO_6000)
    hold = commands.add_parser("hold", help="hold memory until this process ends")
    hold.add_argument("--gpu", type=int, default=0)
    hold.add_argument("--bytes", type=parse_bytes, required=True)
    hold.add_argument("--lag", type=float, default=DRIVER_LAG_S, metavar="SECONDS")
    commands.add_parser("show", help="what each card holds")
    commands.add_parser("hang", help="every NVML call blocks")
    fail = commands.add_parser("fail", help="every NVML call answers this code")
    fail.add_argument("code", type=int)
    commands.add_parser("heal", help="no more faults")
    _do(SimNvml(), parser.parse_args())


def _do(nvml: SimNvml, wanted: argparse.Namespace) -> None:
    match wanted.command:
        case "gpus":
            nvml.gpus(wanted.count, wanted.bytes)
        case "hold":
            nvml.hold(wanted.gpu, os.getpid(), wanted.bytes, lag_s=wanted.lag)
            print(f"holding {wanted.bytes} bytes of GPU {wanted.gpu} as pid {os.getpid()}", flush=True)
            signal.pause()
        case "show":
            _show(nvml)
        case "hang":
            nvml.hang()
        case "fail":
            nvml.fail(wanted.code)
        case "heal":
            nvml.heal()


def _show(nvml: SimNvml) -> None:
    for card in nvml.cards():
        holders = ", ".join(f"pid {pid}: {held >> 20} MiB" for pid, held in nvml.processes(card.index).items())
        print(
            f"GPU {card.index}: {nvml.used(card.index) >> 20} of {card.total >> 20} MiB used; {holders or 'no process'}"
        )


if __name__ == "__main__":
    main()
