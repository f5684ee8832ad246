"""Servers that do not run as root: the watchdog, which is root with three capabilities, does the same for them."""

from collections.abc import Iterator

import pytest

from lab.host import LabHost
from lab_product import podman
from lab_product.conftest import GIB, Inference, deploy, leaves_a_child_that_is_freed, override, proven
from lab_product.installed import CARDS
from lab_product.sglang_unit import Way
from sim_sglang.simulation import Simulation

pytestmark = pytest.mark.lab

ACTING = {"act": True, "soak": 0.5}
SIMULATION = Simulation(nvml=CARDS)
USER = "llm"
# podman of another user than root, from a unit that gives it its own group. No ids below the user's are mapped, which
# wants a tool of its own, so root in the container is the user.
CLIENT = ("--name=rootless", "--replace", "--rm", "--stop-timeout=2", "--cgroups=split", "--log-driver=passthrough")
STORAGE = '[storage]\ndriver="vfs"\n'


@pytest.fixture
def user(lab: LabHost) -> Iterator[tuple[str, ...]]:
    """Lines of [Service] of a unit whose server runs as somebody else."""
    lab.run("useradd", "--create-home", USER)
    yield (f"User={USER}",)
    lab.run("userdel", "--remove", USER, check=False)


@pytest.fixture
def rootless(lab: LabHost, user: tuple[str, ...]) -> tuple[str, ...]:
    """As `user`, on a host on which podman works for that user."""
    podman.set_up(lab)
    lab.run("rm", "-f", "/etc/containers/storage.conf", "/etc/subuid", "/etc/subgid")
    home = f"/home/{USER}"
    lab.write(f"{home}/.config/containers/storage.conf", STORAGE)
    lab.run("chown", "-R", USER, home, podman.ROOT)
    environment = f"Environment=XDG_RUNTIME_DIR=/run/{USER} HOME={home}"
    return (*user, f"RuntimeDirectory={USER}", environment, "Delegate=yes")


@pytest.mark.parametrize("way", list(Way))
def test_a_bad_config_is_replaced(inference: Inference, user: tuple[str, ...], way: Way) -> None:
    with inference(settings=ACTING, service=user, way=way) as host:
        proven(host)
        main = host.show("MainPID")["MainPID"]
        assert host.host.run("stat", "--format=%U", f"/proc/{main}").stdout.strip() == USER
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom", OUTCOME="contained")
        assert "--speculative-num-steps 4" in override(host)


def test_a_left_over_is_ended_and_the_same_config_serves(inference: Inference, user: tuple[str, ...]) -> None:
    with inference(settings=ACTING, service=user, kill_mode="process") as host, host.bystander(3, 2 * GIB) as stranger:
        leaves_a_child_that_is_freed(host, "leak_child 1")  # which heeds no SIGTERM
        assert stranger.alive()


def test_a_bad_config_is_replaced_where_podman_is_the_users_own(
    inference: Inference, rootless: tuple[str, ...]
) -> None:
    names = (*SIMULATION.environment(), "PYTHONDONTWRITEBYTECODE")
    wrapper = podman.run(*CLIENT, variables=names)
    with inference(settings=ACTING, simulation=SIMULATION, wrapper=wrapper, service=rootless) as host:
        proven(host)
        deploy(host, 10)
        host.wait_alert(CLASS="kv_cache_oom", OUTCOME="contained")
        assert "--speculative-num-steps 4" in override(host)
