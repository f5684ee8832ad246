"""What a lab host keeps of the machine that it is an overlay of."""

from pathlib import Path

from lab import image


def test_units_and_state_of_the_machine_do_not_reach_a_host(tmp_path: Path) -> None:
    units = tmp_path / "etc/systemd/system"
    left_over = [
        units / "sglang.service",
        units / "sglang.service.d/10-speculation.conf",
        units / "multi-user.target.wants/sglang.service",
        tmp_path / "etc/sglang-watchdog/config.toml",
        tmp_path / "var/lib/sglang-watchdog/ledger.db",
    ]
    for path in left_over:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the machine")

    image.prepare(tmp_path, "host")

    assert not [path for path in left_over if path.exists()]
    assert (units / "default.target").is_symlink()


def test_a_folder_that_is_a_link_is_not_followed_out_of_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "units").mkdir(parents=True)
    root = tmp_path / "root"
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/sglang-watchdog").symlink_to(outside)

    image.prepare(root, "host")

    assert (outside / "units").is_dir()
