"""Units whose podman leaves after the start: as Quadlet generates them of a `.container` file (podman 5.4.2), and as
`podman generate systemd` did before it. The main process is podman's monitor, and podman itself stops the server."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab_product import podman
from lab_product.conftest import Inference, deploy, override, proven
from lab_product.installed import CARDS, SERVICE, InferenceHost
from lab_product.sglang_unit import Way
from sim_sglang.simulation import Simulation

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


@contextmanager
def unit_of_podman(containers: Inference, *options: str, **unit: object) -> Iterator[InferenceHost]:
    names = (*SIMULATION.environment(), "PYTHONDONTWRITEBYTECODE")
    wrapper = podman.run(*CLIENT, *options, variables=names)
    acting = {"act": True, "soak": 0.5}
    with containers(settings=acting, simulation=SIMULATION, wrapper=wrapper, service=SERVICE_LINES, **unit) as host:
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


def container_file(host: InferenceHost, steps: int, section: str = "Container") -> str:
    words = host.sglang.command_line().partition(f" {podman.ROOT} ")[2]
    return f"[{section}]\nRootfs={podman.ROOT}\nExec={words.replace('num-steps 4', f'num-steps {steps}')}\n"


def generated_of(host: InferenceHost, steps: int) -> None:
    """The unit's file as the generator leaves it."""
    host.host.write(SOURCE, container_file(host, steps))
    head = f"[Unit]\nSourcePath={SOURCE}\n{container_file(host, steps, 'X-Container')}"
    host.host.write(host.sglang.file_path, head + host.sglang.text())
