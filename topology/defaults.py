"""What links, NICs and hosts give where no source and no measured constants say it better.

The numbers lie in ``data/links.json``, each section with its source in words. Those of accelerators are
no part of it: they lie beside their backends.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field

from mkernel.topology.model import KindName, Model

FILE = Path(__file__).parent / "data" / "links.json"


class Sourced(Model):
    """Numbers, and where they come from."""

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
        """GB/s of one link of a device of that generation; None for one before the first."""
        rates = [gbs for first, gbs in self.gbs_from_generation if generation >= first]
        return rates[-1] if rates else None


class NicPort(Sourced):
    """A NIC's port of unknown speed; the latency is that of any."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0, description="command to visible signal, proxies included")


class RailShares(Sourced):
    """Which ports are rails, and how rails are joined."""

    least_share: float = Field(gt=0, le=1, description="of the fastest port's rate; below: no rail")
    cross_share: float = Field(ge=0, le=1)
    cross_latency_us: float = Field(ge=0)


class Host(Sourced):
    """Host memory, as a stop of bytes on their way."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0)


class Paths(Sourced):
    """Parts of a way between two devices of a node, each direction."""

    sockets_gbs: float = Field(gt=0)
    sockets_us: float = Field(ge=0)
    host_bridge_us: float = Field(ge=0)
    pcie_us: float = Field(ge=0)
    fabric_us: float = Field(ge=0)


class Defaults(Model):
    """The whole file. ``fabrics``: by kind of link, what is known of its generations."""

    fabric: Fabric
    fabrics: dict[KindName, FabricGenerations]
    nic: NicPort
    rails: RailShares
    host: Host
    paths: Paths


@cache
def defaults() -> Defaults:
    """The defaults that come with mkernel; read once."""
    return Defaults.from_file(FILE, "defaults of links")
