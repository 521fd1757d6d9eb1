"""What a machine is made of: nodes, accelerators, NICs, CPUs, as validated data.

Units: bandwidth in GB/s (1e9 bytes a second, one direction), NIC port speed in Gb/s, latency in
microseconds, memory in bytes. Models are frozen and round-trip exactly through JSON.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

AcceleratorKind = Literal["cuda", "ascend", "rocm", "cpu"]
NicKind = Literal["cx", "infiniband", "efa", "soft", "ethernet"]


class Model(BaseModel):
    """Frozen, strict about unknown fields: a typo in a file is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NumaNode(Model):
    """One NUMA node: its id and the logical CPUs that belong to it."""

    id: int = Field(ge=0)
    cpus: tuple[int, ...]
    memory_bytes: int | None = None


class Accelerator(Model):
    """One device that computes.

    ``id`` is unique in its node (``cuda0``, ``ascend-sim1``). ``emulated`` marks devices that a
    simulator provides.
    """

    id: str
    kind: AcceleratorKind
    name: str
    index: int = Field(ge=0)
    pci: str | None = None
    numa_node: int | None = None
    memory_bytes: int | None = None
    emulated: bool = False


class Nic(Model):
    """One RDMA device port, or one that a software provider emulates."""

    id: str
    kind: NicKind
    name: str
    port: int = 1
    pci: str | None = None
    numa_node: int | None = None
    speed_gbps: float | None = None
    link_layer: Literal["InfiniBand", "Ethernet", "Unspecified"] | None = None
    active: bool = True
    emulated: bool = False


class Node(Model):
    """A set of ranks joined by a scale-up fabric. ``emulated``: one of several on one machine."""

    id: int = Field(ge=0)
    hostname: str
    emulated: bool = False
    numa: tuple[NumaNode, ...]
    accelerators: tuple[Accelerator, ...] = ()
    nics: tuple[Nic, ...] = ()

    @model_validator(mode="after")
    def _unique_ids(self) -> Node:
        for what, ids in (
            ("accelerator", [a.id for a in self.accelerators]),
            ("nic", [n.id for n in self.nics]),
            ("numa node", [str(n.id) for n in self.numa]),
        ):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            if twice:
                raise ValueError(f"node {self.id}: {what} id {twice[0]!r} occurs twice")
        return self

    @property
    def cpus(self) -> tuple[int, ...]:
        """Logical CPUs of the node, sorted."""
        return tuple(sorted(cpu for numa in self.numa for cpu in numa.cpus))


class Topology(Model):
    """The nodes of a world, or the one node of a machine."""

    schema_version: Literal[1] = 1
    nodes: tuple[Node, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consecutive_nodes(self) -> Topology:
        ids = [node.id for node in self.nodes]
        if ids != list(range(len(ids))):
            raise ValueError(f"node ids are {ids}; expected 0 to {len(ids) - 1} in order")
        return self
