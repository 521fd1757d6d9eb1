"""What a machine is made of: nodes, accelerators, NICs, CPUs, as validated data.

Units: bandwidth in GB/s (1e9 bytes a second, one direction), NIC port speed in Gb/s, latency in
microseconds, memory in bytes. Models are frozen and round-trip exactly through JSON.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from mkernel.errors import InputFileError

SCHEMA_VERSION = 1

AcceleratorKind = Literal["cuda", "ascend", "rocm", "cpu"]
NicKind = Literal["cx", "infiniband", "efa", "soft", "ethernet"]


class Model(BaseModel):
    """Frozen, strict about unknown fields: a typo in a file is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_file(cls, file: Path, what: str) -> Self:
        """The JSON of a file; ``what`` it is, in words. InputFileError names the bad field."""
        try:
            return cls.model_validate_json(file.read_text())
        except OSError as error:
            raise InputFileError(f"{what} {file}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "file"
            raise InputFileError(f"{what} {file}: {field}: {first['msg']}") from error


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
    pci_path: tuple[str, ...] = Field(
        default=(), description="host bridge and PCIe bridges above the device, outermost first"
    )
    pcie_gbs: float | None = Field(default=None, gt=0, description="its own PCIe link")
    numa_node: int | None = None
    memory_bytes: int | None = None
    emulated: bool = False


class Nic(Model):
    """One port of a network device, or one that a software provider emulates.

    ``gpudirect``: whether it reads and writes accelerators' memory; None where nobody said.
    """

    id: str
    kind: NicKind
    name: str
    port: int = 1
    pci: str | None = None
    pci_path: tuple[str, ...] = Field(
        default=(), description="host bridge and PCIe bridges above the device, outermost first"
    )
    pcie_gbs: float | None = Field(default=None, gt=0, description="its own PCIe link")
    numa_node: int | None = None
    speed_gbps: float | None = None
    link_layer: Literal["InfiniBand", "Ethernet", "Unspecified"] | None = None
    active: bool = True
    gpudirect: bool | None = None
    emulated: bool = False


class Bridge(Model):
    """A PCIe bridge that some ``pci_path`` names: a root port, or a port of a switch.

    ``pcie_gbs`` is the link of that port: below a root or downstream port, above an upstream port.
    """

    id: str
    pcie_gbs: float | None = Field(default=None, gt=0)


FABRIC_SWITCH = "switch"
FABRIC_HOST = "host"
"""As second end of a :class:`FabricLink`: the switches that join all accelerators linked to them,
and the CPU with its memory."""


class FabricLink(Model):
    """The scale-up links between two accelerators of a node, or from one to switches or its CPU.

    ``gbs``: all ``count`` links together, one direction. Either may be unknown.
    """

    kind: Literal["nvlink", "hccs", "xgmi", "c2c"]
    ends: tuple[str, str] = Field(description="accelerator ids; the second may be switch or host")
    count: int | None = Field(default=None, ge=1)
    gbs: float | None = Field(default=None, gt=0)


class Node(Model):
    """A set of ranks joined by a scale-up fabric. ``emulated``: one of several on one machine.

    ``no_p2p``: pairs of accelerators whose driver refuses them access to each other's memory.
    """

    id: int = Field(ge=0)
    hostname: str
    emulated: bool = False
    numa: tuple[NumaNode, ...]
    accelerators: tuple[Accelerator, ...] = ()
    nics: tuple[Nic, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    fabric: tuple[FabricLink, ...] = ()
    no_p2p: tuple[tuple[str, str], ...] = ()

    @model_validator(mode="after")
    def _unique_ids(self) -> Node:
        for what, ids in (
            ("accelerator", [a.id for a in self.accelerators]),
            ("nic", [n.id for n in self.nics]),
            ("numa node", [str(n.id) for n in self.numa]),
            ("bridge", [bridge.id for bridge in self.bridges]),
        ):
            twice = [i for i, times in Counter(ids).items() if times > 1]
            if twice:
                raise ValueError(f"node {self.id}: {what} id {min(twice)!r} occurs twice")
        return self

    @model_validator(mode="after")
    def _known_ends(self) -> Node:
        known = {a.id for a in self.accelerators}
        for what, ends, legal in (
            *(
                ("fabric link", link.ends, known | {FABRIC_SWITCH, FABRIC_HOST})
                for link in self.fabric
            ),
            *(("no_p2p pair", pair, known) for pair in self.no_p2p),
        ):
            strangers = [end for end in ends if end not in legal]
            if strangers or ends[0] == ends[1]:
                raise ValueError(
                    f"node {self.id}: {what} {ends}: expected two different accelerators of the "
                    f"node{f', not {strangers[0]!r}' if strangers else ''}"
                )
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


class Note(Model):
    """What a source could not find out, or found to contradict another, in one sentence."""

    source: str
    message: str
