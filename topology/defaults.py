"""Defaults of links, NICs and hosts, used where no source and no measured constants are better.

The numbers are in ``data/links.json``, each section with its source in words. Constants of
accelerators are not among them: they belong to their backends.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field

from mkernel.topology.model import KindName, Model

FILE = Path(__file__).parent / "data" / "links.json"


class Sourced(Model):
    """Numbers together with their source."""

    source: str = Field(min_length=1, description="where the numbers come from, in words")


class Fabric(Sourced):
    """A scale-up link, one direction, and the signal after a message over it."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    signal_us: float = Field(ge=0)


class FabricGenerations(Sourced):
    """Nominal rates of one kind of scale-up link."""

    gbs_from_generation: tuple[tuple[int, float], ...] = Field(
        min_length=1, description="(first generation of devices, GB/s of a link in one direction)"
    )

    def gbs(self, generation: int = 0) -> float | None:
        """Return the GB/s of one link of a device of that generation; None for one before the
        first."""
        rates = [gbs for first, gbs in self.gbs_from_generation if generation >= first]
        return rates[-1] if rates else None


class NicPort(Sourced):
    """A NIC's port of unknown speed; the latency holds for any port."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0, description="command to visible signal, proxies included")


class RailShares(Sourced):
    """The threshold for ports to be rails, and the way rails are joined."""

    least_share: float = Field(gt=0, le=1, description="of the fastest port's rate; below: no rail")
    cross_share: float = Field(ge=0, le=1)
    cross_latency_us: float = Field(ge=0)


class Host(Sourced):
    """Host memory, as a stop of bytes on their way."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0)


class Paths(Sourced):
    """The parts of a path between two devices of a node, in each direction."""

    pcie_share: float = Field(
        gt=0, le=1, description="of a PCIe link's rate, that copies between devices reach"
    )
    host_bridge_share: float = Field(
        gt=0, le=1, description="of that, what they reach through a host bridge"
    )
    sockets_gbs: float = Field(gt=0)
    sockets_us: float = Field(ge=0)
    host_bridge_us: float = Field(ge=0)
    pcie_us: float = Field(ge=0)
    fabric_us: float = Field(ge=0)


class Defaults(Model):
    """The contents of the whole file. ``fabrics``: by kind of link, the rates of its generations."""

    fabric: Fabric
    fabrics: dict[KindName, FabricGenerations]
    nic: NicPort
    rails: RailShares
    host: Host
    paths: Paths


@cache
def defaults() -> Defaults:
    """Return the defaults that come with mkernel; the file is read once."""
    return Defaults.from_file(FILE, "defaults of links")
