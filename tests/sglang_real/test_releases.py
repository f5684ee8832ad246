"""How an old, a middle and a new release of the real server end under a real systemd, and what `diagnose` makes of it.

SGLANG_RELEASES names the releases and asks for every end (`make test-sglang-all`); without it a few ends of the middle
one are tried, since each costs a start.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.host import LabHost, free_port
from lab_product.installed import COMMAND
from sglang_real.conftest import GIB, RELEASES
from sglang_real.server import CANNOT_BE_SIZED, FITS, RealServer
from sglang_watchdog.domain.failure import FailureClass as Class

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
EVERY = "SGLANG_RELEASES" in os.environ
OLD = "0.5.9"
SCHEDULER, DETOKENIZER = "sglang::scheduler", "sglang::detokenizer"
SIGNAL, REFUSED = ("signal", "2", "9"), ("exit-code", "1", "1")
UNLOADED = ("success", "0", "0")  # a unit that ended well and that nobody refers to: its exit status is forgotten
# A pool that is larger than the memory that its host has, and smaller than what the machine seems to offer.
TOO_LARGE = ("--mem-fraction-static", "0.9", "--max-total-tokens", "8000000")
SMALL_HOST = int(2.5 * GIB)


@dataclass(frozen=True)
class End:
    """What is done to a server that is defined; what systemd says then, by release; and the class that it is.

    `old_health`: 0.5.9 stays up, and this is what its health check says. `short`: tried in the short form too.
    """

    act: Callable[[RealServer], None]
    failure: Class
    systemd: Mapping[str, tuple[str, str, str]]
    flags: Sequence[str] = FITS
    stop_s: float = 60.0
    kill_mode: str = "mixed"
    old_health: int = 0
    short: bool = False


def _stop(server: RealServer) -> None:
    server.start()
    server.host.systemctl("stop", server.unit, timeout=90)


def _stop_while_busy(server: RealServer) -> None:
    server.start()
    with server.requests_in_flight(3):
        server.host.systemctl("stop", server.unit, timeout=60)


def _kill(title: str) -> Callable[[RealServer], None]:
    def act(server: RealServer) -> None:
        server.start()
        pid = server.processes()[title] if title else int(server.host.show(server.unit, "MainPID")["MainPID"])
        server.host.run("kill", "-9", str(pid))

    return act


def _start(server: RealServer) -> None:
    server.host.systemctl("start", server.unit)
    server.wait_over()


def _start_beside_a_listener(server: RealServer) -> None:
    with socket.create_server(("127.0.0.1", server.port)):
        _start(server)


def _in_all(end: tuple[str, str, str], **others: tuple[str, str, str]) -> dict[str, tuple[str, str, str]]:
    return {"": end} | {name.removeprefix("v").replace("_", "."): other for name, other in others.items()}


ENDS = {
    "stop_of_all_processes": End(_stop, Class.REQUESTED_STOP, _in_all(SIGNAL), kill_mode="control-group"),
    "stop": End(_stop, Class.REQUESTED_STOP, _in_all(SIGNAL, v0_5_23=UNLOADED)),
    "stop_while_busy": End(_stop_while_busy, Class.STOP_TIMEOUT_SIGKILL, _in_all(("timeout", "2", "9")), stop_s=4),
    "pool_of_no_tokens": End(_start, Class.KV_CACHE_OOM, _in_all(SIGNAL), CANNOT_BE_SIZED),
    "kill_of_scheduler": End(_kill(SCHEDULER), Class.EXTERNAL_KILL, _in_all(SIGNAL), old_health=503, short=True),
    "kill_of_detokenizer": End(_kill(DETOKENIZER), Class.EXTERNAL_KILL, _in_all(SIGNAL), old_health=200),
    "kill_of_main": End(_kill(""), Class.EXTERNAL_KILL, _in_all(SIGNAL)),
    "steps_without_topk": End(
        _start,
        Class.BAD_ARGUMENTS,
        _in_all(REFUSED),
        (*FITS, "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        short=True,
    ),
    "unknown_flag": End(_start, Class.BAD_ARGUMENTS, _in_all(("exit-code", "1", "2")), ("--no-such-flag",)),
    "model_that_is_not_there": End(
        _start, Class.MISSING_DEPENDENCY, _in_all(REFUSED), (*FITS, "--model-path", "/models/none"), short=True
    ),
    "port_in_use": End(
        _start_beside_a_listener,
        Class.PORT_IN_USE,
        _in_all(("exit-code", "1", "3")),
        # The warm-up would talk to whoever listens, and wait for its answer.
        (*FITS, "--skip-server-warmup"),
    ),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", [name for name, end in ENDS.items() if EVERY or end.short])
def test_an_end_is_what_systemd_says_in_this_release_and_is_diagnosed(
    host: LabHost, sglang_envs: Mapping[str, Path], release: str, name: str
) -> None:
    end = ENDS[name]
    with _defined(host, sglang_envs[release], end, f"{name}-{release}") as server:
        end.act(server)
        if end.old_health and release == OLD:
            _stays_up(server, end.old_health)
            return
        server.wait_over()
        assert server.end() == end.systemd.get(release, end.systemd[""])
        _is(server, end.failure)


def _stays_up(server: RealServer, health: int) -> None:
    """Up to 0.5.9 nobody watches the children: systemd sees nothing at all, and only a health check tells. Without a
    tokenizer, as here, a server does not even need its detokenizer."""
    assert server.health() == health
    shown = server.host.show(server.unit, "ActiveState", "SubState", "Result")
    assert shown == {"ActiveState": "active", "SubState": "running", "Result": "success"}
    _is(server, Class.UNRESPONSIVE if health == 503 else Class.UNKNOWN)


@pytest.mark.skipif(not EVERY, reason="in the short form the simulated server is what the kernel kills")
@pytest.mark.parametrize("release", RELEASES)
def test_a_server_that_outgrows_its_hosts_memory_is_killed_by_the_kernel(
    sglang_envs: Mapping[str, Path], release: str
) -> None:
    end = End(_start, Class.CGROUP_OOM_KILL, {}, TOO_LARGE)
    binds = tuple(sglang_envs.values())
    with (
        LabHost.boot("sglang-small", memory_bytes=SMALL_HOST, binds=binds, kmsg=True) as small,
        _defined(small, sglang_envs[release], end, f"memory-{release}") as server,
    ):
        end.act(server)
        _is(server, end.failure)


@contextmanager
def _defined(host: LabHost, env: Path, end: End, name: str) -> Iterator[RealServer]:
    server = RealServer(host, f"{name.replace('_', '-')}.service", free_port(), env / "bin/python")
    server.define(end.flags, stop_s=end.stop_s, kill_mode=end.kill_mode)
    try:
        yield server
    finally:
        host.systemctl("kill", "--signal=KILL", server.unit, check=False)


def _is(server: RealServer, failure: Class) -> None:
    told: dict[str, Any] = json.loads(server.host.run(COMMAND, "diagnose", server.unit, "--json").stdout)
    assert told["class"] == failure, (told, server.log(server.invocation())[-3000:])
    assert told["rollback_helps"] is not True or failure in (Class.KV_CACHE_OOM, Class.BAD_ARGUMENTS)
