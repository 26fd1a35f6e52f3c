"""Cards out of the kernel's folder."""

from __future__ import annotations

from pathlib import Path

from gpuctl.cluster.network.devices import found_cards


def test_efa_infiniband_and_ethernet_cards_are_told_apart(tmp_path: Path) -> None:
    listed = tmp_path / "class"
    _card(tmp_path, "rdmap16s27", driver="efa", link="Unspecified", rate="100 Gb/sec (4X EDR)")
    _card(tmp_path, "mlx5_ib0", driver="mlx5_core", link="InfiniBand", rate="200 Gb/sec (4X HDR)")
    _card(tmp_path, "mlx5_an0", driver="mlx5_core", link="Ethernet", rate="40 Gb/sec (4X QDR)")
    _card(tmp_path, "mlx5_ib1", driver="mlx5_core", link="InfiniBand", rate="10 Gb/sec (4X SDR)", state="1: DOWN")
    found = {card.name: (card.kind, card.active, card.gbps) for card in found_cards(listed)}
    assert found == {
        "rdmap16s27": ("efa", True, 100.0),
        "mlx5_ib0": ("infiniband", True, 200.0),
        "mlx5_an0": ("roce", True, 40.0),
        "mlx5_ib1": ("infiniband", False, 10.0),
    }


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    assert found_cards(tmp_path / "class") == ()


def _card(root: Path, name: str, *, driver: str, link: str, rate: str, state: str = "4: ACTIVE") -> None:
    """A device as the kernel has it: the folder of the class links to the device, which links to its driver."""
    device = root / "devices" / name
    port = device / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("link_layer", link), ("rate", rate), ("state", state)):
        (port / file).write_text(f"{text}\n")
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(root / "drivers" / driver)
    (device / "infiniband" / name / "device").symlink_to(device)
    (root / "class").mkdir(exist_ok=True)
    (root / "class" / name).symlink_to(device / "infiniband" / name)
