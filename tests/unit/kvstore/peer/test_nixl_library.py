"""Which network devices UCX may use."""

import os

from kvstore.peer.nixl import library


def test_ucx_uses_no_network_devices_of_containers(monkeypatch, tmp_path):
    """It would open them, and end the process if one goes while it connects."""
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    lasting = ["lo", "eth0", "br0", "br-ex", "enp3s0"]
    passing = ["docker0", "br-22be79e259eb", "veth4290bb3", "cali0a1b2c3d4e5", "virbr0-nic"]
    monkeypatch.setattr(library, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(
        library.socket, "if_nameindex", lambda: [*enumerate([*passing, *lasting], 1)]
    )
    monkeypatch.setattr(library, "_import_first", lambda: None)
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    library.load_nixl()
    assert environment["UCX_NET_DEVICES"] == ",".join([*lasting, "mlx5_0:1"])
    environment["UCX_NET_DEVICES"] = "docker0"
    library.load_nixl()
    assert environment["UCX_NET_DEVICES"] == "docker0", "the operator's own choice"
