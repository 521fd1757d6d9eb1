"""Ports as pyverbs describes them, with a stand-in for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.topology.sources import verbs


class FakeVerbs:
    """As much of ``pyverbs.device`` as the source calls. A device is (vendor, its ports)."""

    def __init__(self, **devices: Any) -> None:
        self.devices = devices
        self.opened = 0

    def get_device_list(self) -> list[Any]:
        return [SimpleNamespace(name=name.encode()) for name in self.devices]

    @contextmanager
    def Context(self, name: str) -> Iterator[Any]:
        if self.devices[name] is None:
            raise OSError("Failed to open device")
        self.opened += 1
        vendor, ports = self.devices[name]
        yield SimpleNamespace(
            query_device=lambda: SimpleNamespace(vendor_id=vendor, phys_port_cnt=len(ports)),
            query_port=lambda number: SimpleNamespace(**ports[number - 1]),
        )
        self.opened -= 1


def port(width: int = 2, speed: int = 128, layer: int = 1, state: int = 4) -> dict[str, int]:
    return {"active_width": width, "active_speed": speed, "link_layer": layer, "state": state}


def test_ports_with_rate_layer_and_state() -> None:
    library = FakeVerbs(
        mlx5_0=(0x02C9, [port(), port(width=1, speed=32, layer=2, state=1)]),
        rdmap0=(0x1D0F, [port(width=99, layer=0)]),
    )
    found = verbs.read(library)
    assert [(n.id, n.kind, n.port, n.speed_gbps, n.link_layer, n.active) for n in found.nics] == [
        ("mlx5_0:1", "cx", 1, 400.0, "InfiniBand", True),
        ("mlx5_0:2", "cx", 2, 25.0, "Ethernet", False),
        ("rdmap0", "efa", 1, None, None, True),
    ]
    assert found.notes == ()
    assert library.opened == 0


def test_one_device_that_fails_does_not_hide_the_others() -> None:
    found = verbs.read(FakeVerbs(bad0=None, rxe0=(0, [port(width=1, speed=1)])))
    assert [(n.id, n.kind, n.speed_gbps) for n in found.nics] == [("rxe0", "infiniband", 2.5)]
    assert found.notes[0].message == "bad0 cannot be read: Failed to open device; ignored"


def test_no_pyverbs_is_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(verbs.importlib, "import_module", gone)
    assert (verbs.read().nics, verbs.read().notes) == ((), ())
