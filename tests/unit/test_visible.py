"""Which cards a launch uses, and that in doubt all of them count."""

import pytest

from sglang_watchdog.domain.gpu import Gpu, GpuReading
from sglang_watchdog.domain.visible import cards_of, only

SERVER = ("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path", "/m")
UUIDS = ("GPU-aa00", "GPU-ab11", "GPU-bc22", "GPU-cd33")


def cards(names: tuple[str, ...] = ("H200",) * 4, uuids: tuple[str, ...] = UUIDS) -> list[Gpu]:
    return [Gpu(i, uuid, name, 1, 0) for i, (uuid, name) in enumerate(zip(uuids, names, strict=True))]


def used(*flags: str, visible: str | None = None, **printed: object) -> set[int] | None:
    cuda = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = cards_of((*SERVER, *flags), printed, cuda, cards())
    return None if found is None else {UUIDS.index(uuid) for uuid in found}


@pytest.mark.parametrize(
    ("flags", "visible", "expected"),
    [
        ((), None, {0}),
        (("--tp-size", "4"), None, {0, 1, 2, 3}),
        (("--tp=2",), "2,3", {2, 3}),
        (("--tp", "2"), "GPU-bc,GPU-aa00", {0, 2}),
        (("--tp-size", "2", "--base-gpu-id", "2"), None, {2, 3}),
        (("--tp-size", "2", "--gpu-id-step", "2"), None, {0, 2}),
        (("--base-gpu-id=1",), "3,2", {2}),
        (("--tp-size", "2", "--pp-size", "2"), None, {0, 1, 2, 3}),
        (("--dp-size", "2"), None, {0, 1}),
        (("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), None, {0, 1}),
    ],
)
def test_the_cards_are_those_that_cuda_shows_and_the_flags_take(
    flags: tuple[str, ...], visible: str | None, expected: set[int]
) -> None:
    assert used(*flags, visible=visible) == expected


def test_what_sglang_printed_counts_before_the_flags() -> None:
    assert used("--tp-size", "1", tp_size=2, base_gpu_id=1) == {1, 2}


@pytest.mark.parametrize(
    ("flags", "visible"),
    [
        (("--tp-size", "8"), None),  # more than there are
        (("--tp-size", "2"), "0,7,1"),  # CUDA stops at what it does not know
        (("--tp-size", "2"), "GPU-a,1"),  # names two
        ((), ""),
        ((), "-1"),
        (("--nnodes", "2"), None),
        (("--tp-size", "many"), None),
        (("--config", "/etc/flags.yaml"), None),
    ],
)
def test_what_does_not_fit_together_is_not_told(flags: tuple[str, ...], visible: str | None) -> None:
    assert used(*flags, visible=visible) is None


@pytest.mark.parametrize(
    "argv", [(), ("podman", "run", "x", "sglang"), ("/bin/sh", "-c", "sglang serve"), ("python3", "-m", "http.server")]
)
def test_what_is_no_server_started_directly_has_another_environment(argv: tuple[str, ...]) -> None:
    assert cards_of(argv, {}, {}, cards()) is None


def test_an_environment_that_cannot_be_read_tells_nothing() -> None:
    assert cards_of(SERVER, {}, None, cards()) is None


def test_cuda_numbers_cards_that_differ_by_speed_unless_it_is_told_otherwise() -> None:
    mixed = cards(("L4", "H200", "H200", "H200"))
    assert cards_of(SERVER, {}, {"CUDA_VISIBLE_DEVICES": "1"}, mixed) is None
    by_bus = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cards_of(SERVER, {}, by_bus, mixed) == frozenset({"GPU-ab11"})
    assert cards_of(SERVER, {}, {"CUDA_VISIBLE_DEVICES": "GPU-ab11"}, mixed) == frozenset({"GPU-ab11"})


def test_of_a_card_in_mig_mode_only_a_named_instance_is_sure() -> None:
    divided = cards(uuids=("MIG-aa00", "MIG-ab11", "GPU-bc22", "GPU-cd33"))
    assert cards_of(SERVER, {}, {"CUDA_VISIBLE_DEVICES": "MIG-ab11"}, divided) == frozenset({"MIG-ab11"})
    assert cards_of(SERVER, {}, {"CUDA_VISIBLE_DEVICES": "0"}, divided) is None
    assert cards_of(SERVER, {}, {}, divided) is None


def test_a_reading_is_narrowed_to_known_cards() -> None:
    whole = GpuReading(0.0, "580", tuple(cards()))
    assert [gpu.index for gpu in only(whole, frozenset({"GPU-bc22"})).gpus] == [2]
    assert only(whole, None) is whole
