"""Ports as libibverbs describes them, if ``pyverbs`` is installed; otherwise NIC backends query it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

from mkernel.topology.model import Nic
from mkernel.topology.sources import kinds
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "pyverbs"

_ACTIVE = 4
_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LANE_GBPS = {
    1: 2.5,
    2: 5.0,
    4: 10.0,
    8: 10.0,
    16: 14.0,
    32: 25.0,
    64: 50.0,
    128: 100.0,
    256: 200.0,
}
"""Gb/s of a lane by libibverbs' code of a port's speed; ``_LANES``: numbers of lanes by its code of
a port's width."""
_LAYERS: dict[int, Literal["InfiniBand", "Ethernet"]] = {1: "InfiniBand", 2: "Ethernet"}


def read(library: ModuleType | Any = None) -> Findings:
    """Return every port of every device. A missing ``pyverbs`` adds no note: it is never needed.

    Args:
        library: replaces ``pyverbs.device``.
    """
    notes = Notes(SOURCE)
    if library is None:
        try:
            library = importlib.import_module("pyverbs.device")
        except Exception:  # an installation that does not fit this Python may raise anything
            return Findings(SOURCE)
    nics: list[Nic] = []
    try:
        devices = [_text(device.name) for device in library.get_device_list()]
    except Exception as error:
        notes.add(f"listing devices failed: {error}")
        devices = []
    for name in devices:
        try:
            nics += _ports(library, name)
        except Exception as error:  # noqa: PERF203 - one that fails must not hide the others
            notes.add(f"{name} cannot be read: {error}; ignored")
    return Findings(SOURCE, nics=tuple(nics), notes=notes.all())


def _ports(library: Any, name: str) -> list[Nic]:
    with library.Context(name=name) as context:
        device = context.query_device()
        found = []
        for number in range(1, device.phys_port_cnt + 1):
            port = context.query_port(number)
            lanes, lane = _LANES.get(port.active_width), _LANE_GBPS.get(port.active_speed)
            found.append(
                Nic(
                    id=name if device.phys_port_cnt == 1 else f"{name}:{number}",
                    kind=kinds.rdma(device.vendor_id),
                    name=name,
                    port=number,
                    speed_gbps=lanes * lane if lanes and lane else None,
                    link_layer=_LAYERS.get(port.link_layer),
                    active=port.state == _ACTIVE,
                )
            )
        return found


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
