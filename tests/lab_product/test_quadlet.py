"""Units whose podman leaves after the start: as Quadlet generates them of a `.container` file (podman 5.4.2), and as
`podman generate systemd` did before it. The main process is podman's monitor, and podman itself stops the server."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lab_product import podman
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import CARDS, SERVICE, InferenceHost
from lab_product.sglang_unit import Way
from lab_product.test_gate import ran, refused_and_put_back
from sim_sglang.simulation import Simulation
from waiting import wait_until

pytestmark = pytest.mark.lab

SIMULATION = Simulation(nvml=CARDS)
SOURCE = "/etc/containers/systemd/sglang.container"
CIDFILE = "--cidfile=%t/%N.cid"
REMOVE = f"/usr/bin/podman rm -v -f -i {CIDFILE}"
SERVICE_LINES = (
    "Environment=PODMAN_SYSTEMD_UNIT=%n",
    "ExecStartPre=/bin/rm -f %t/%N.cid",  # podman 4.3, which runs here, leaves the file behind
    f"ExecStop={REMOVE}",
    f"ExecStopPost=-{REMOVE}",
    "Delegate=yes",
    "Type=notify",
    "NotifyAccess=all",
    "SyslogIdentifier=%N",
)
CLIENT = ("--name=systemd-%N", CIDFILE, "--replace", "--rm", "--sdnotify=conmon", "-d", "--stop-timeout=2")
QUADLET = ("--cgroups=split",)
GENERATED = ("--cgroups=no-conmon",)  # the container in a group of podman's own, its monitor in the unit's


ACTING = {"act": True, "soak": 0.5}
RESTARTING = {**ACTING, "serving_budget": 5.0, "restart_unresponsive": True}


@contextmanager
def unit_of_podman(
    containers: Inference,
    *options: str,
    settings: Mapping[str, object] = ACTING,
    simulation: Simulation = SIMULATION,
    **unit: object,
) -> Iterator[InferenceHost]:
    names = (*simulation.environment(), "PYTHONDONTWRITEBYTECODE")
    wrapper = podman.run(*CLIENT, *options, variables=names)
    with containers(settings=settings, simulation=simulation, wrapper=wrapper, service=SERVICE_LINES, **unit) as host:
        yield host


@pytest.mark.parametrize(
    "options",
    [QUADLET, (*QUADLET, "--log-driver=passthrough"), GENERATED],
    ids=["quadlet", "passthrough", "generated"],
)
def test_a_stop_that_podman_forces_is_told_and_a_bad_config_is_replaced(
    containers: Inference, options: tuple[str, ...]
) -> None:
    with unit_of_podman(containers, *options) as host:
        proven(host)
        host.load(4, tokens=200_000)
        host.stop()
        told = host.wait_alert(CLASS="stop_timeout_sigkill")
        assert "with 4 requests still in flight" in told.message
        host.start()
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom", OUTCOME="contained")
        assert "--speculative-num-steps 4" in override(host)


@pytest.mark.parametrize("options", [QUADLET, GENERATED], ids=["quadlet", "generated"])
def test_a_server_whose_scheduler_is_dead_is_ended_with_its_container_and_serves_again(
    containers: Inference, options: tuple[str, ...]
) -> None:
    simulation = replace(SIMULATION, release="0.5.9")  # main stays up
    with unit_of_podman(containers, *options, settings=RESTARTING, simulation=simulation) as host:
        proven(host)
        before = schedulers(host)
        host.host.run("kill", f"-{int(signal.SIGKILL)}", str(before[0]))
        alert = host.wait_alert(CLASS="unresponsive")
        host.wait_alert(since=alert.time, OUTCOME="recovered")
        assert host.tokens(8) == 8
        assert not set(before) & set(schedulers(host))


def test_a_frozen_server_is_ended_with_its_container_once_sglangs_own_watchdog_has_had_its_time(
    containers: Inference,
) -> None:
    with unit_of_podman(containers, *QUADLET, settings=RESTARTING, flags=("--watchdog-timeout", "8")) as host:
        proven(host)
        before = schedulers(host)
        host.host.run("kill", f"-{int(signal.SIGSTOP)}", *map(str, before))
        alert = host.wait_alert(CLASS="unresponsive")
        host.wait_alert(since=alert.time, OUTCOME="recovered")
        assert host.tokens(8) == 8
        assert not set(before) & set(schedulers(host))


def test_the_start_gate_refuses_what_is_proven_not_to_fit(containers: Inference) -> None:
    with unit_of_podman(containers, *QUADLET, way=Way.DROP_IN) as host:
        told = refused_and_put_back(host)
        assert host.tokens(4) == 4
        assert ran(host, host.invocation())
        assert not ran(host, told.get("INVOCATION"))


def schedulers(host: InferenceHost) -> list[int]:
    """Pids of the host's own."""
    shown = host.host.run("podman", "top", f"systemd-{host.unit.removesuffix('.service')}", "pid", "args").stdout
    return [int(line.split()[0]) for line in shown.splitlines() if "sglang::scheduler" in line]


def test_a_watchdog_that_comes_later_knows_what_runs(containers: Inference) -> None:
    with unit_of_podman(containers, *QUADLET) as host:
        host.host.systemctl("stop", SERVICE)
        host.start()
        host.wait_ready()
        host.host.systemctl("start", SERVICE)
        host.wait_known_good()


def test_a_container_file_that_was_edited_without_a_reload_is_a_stale_definition(containers: Inference) -> None:
    with unit_of_podman(containers, *QUADLET, way=Way.DROP_IN) as host:
        generated_of(host, steps=4)
        host.reload()
        proven(host)
        host.host.write(SOURCE, container_file(host, steps=2))
        host.restart()
        told = host.wait_alert(CLASS="stale_unit_file")
        assert "steps 2" in told.message
        assert SOURCE in told.get("EVIDENCE")


def test_a_container_file_that_is_edited_takes_the_override_away_and_loads_nothing(containers: Inference) -> None:
    with unit_of_podman(containers, *QUADLET, way=Way.DROP_IN) as host:
        generated_of(host, steps=4)
        host.reload()
        proven(host)
        generated_of(host, steps=10)
        host.reload()
        host.restart(wait=False)
        host.wait_alert(OUTCOME="contained")
        host.host.write(SOURCE, container_file(host, steps=2))
        wait_until(lambda: override(host) == "", 20, "the override is gone before the operator's reload")
        assert "a daemon-reload puts them in force" in host.wait_alert(ACTION="withdraw").message


def container_file(host: InferenceHost, steps: int, section: str = "Container") -> str:
    words = host.sglang.command_line().partition(f" {podman.ROOT} ")[2]
    words = re.sub(r"(--speculative-num-steps) \d+", rf"\1 {steps}", words)
    return f"[{section}]\nRootfs={podman.ROOT}\nExec={words}\n"


def generated_of(host: InferenceHost, steps: int) -> None:
    """The unit's file as the generator leaves it."""
    host.change(steps=steps)
    host.host.write(SOURCE, container_file(host, steps))
    head = f"[Unit]\nSourcePath={SOURCE}\n{container_file(host, steps, 'X-Container')}"
    host.host.write(host.sglang.file_path, head + host.sglang.text())
