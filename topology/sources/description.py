"""Descriptions of one machine in mkernel's own words: JSON that is short enough to write by hand.

A description says which kinds of devices there are, which of them hang in which tree of PCIe, and
which links join the accelerators. What it leaves out is unknown. Its ``about`` and ``sources`` are for
readers: what the machine is, and where each figure comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from typing_extensions import Self

from mkernel.topology.model import (
    FABRIC_SWITCH,
    MAX_ACCELERATORS,
    Accelerator,
    Bridge,
    FabricLink,
    KindName,
    Many,
    Model,
    Name,
    Nic,
    NumaNode,
)
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.cpu import parse_cpu_list
from mkernel.topology.sources.findings import Findings

MARK = "trees"
"""The key by which a description is told from a dumped topology."""
_MOST_NODES, _MOST_DEVICES, _MOST_LINKS = 1024, 2048, 8
"""More than any machine has, so that a file of any contents is read in little time and memory."""


def _address(text: str) -> str:
    address = pci.normalise(text)
    if address is None:
        raise ValueError(f"{text[:40]!r} is no PCI address, such as 3b:00.0 or 0001:00:00.0")
    return address


Address = Annotated[str, AfterValidator(_address)]
Hex4 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}$")]


class Link(Model):
    """A PCIe link: GT/s of a lane, and the number of lanes."""

    gts: float | None = Field(None, gt=0)
    lanes: int | None = Field(None, ge=1)

    @property
    def gbs(self) -> float | None:
        """Return GB/s in one direction; None: unknown."""
        return pci.link_gbs(self.gts, self.lanes)


class DeviceKind(Link):
    """The properties that all devices of one kind share. Either ``kind``, or ``class`` and ``id``, by
    which PCI tells what they are."""

    kind: KindName | None = None
    pci_class: Hex4 | None = Field(None, alias="class", description="without the interface: 0302")
    id: str | None = Field(
        None, pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$", description="vendor and device: 10de:2330"
    )
    name: Name | None = Field(None, description="of the product, where the id does not say it")
    memory_gib: float | None = Field(None, gt=0, description="of an accelerator")
    gbps: float | None = Field(None, gt=0, description="of a NIC's port")
    link_layer: Literal["InfiniBand", "Ethernet", "Unspecified"] | None = None

    @property
    def ids(self) -> tuple[int | None, int | None]:
        """Return the PCI ids of vendor and device."""
        vendor, _, device = (self.id or "").partition(":")
        return (int(vendor, 16), int(device, 16)) if device else (None, None)

    @property
    def accelerator(self) -> KindName | None:
        """Return the kind of accelerator; None: it is none."""
        if self.kind is not None:
            return self.kind if kinds.is_accelerator(self.kind) else None
        return kinds.accelerator(int(self.pci_class or "0", 16), *self.ids)

    @property
    def network(self) -> KindName | None:
        """Return the kind of NIC; None: it is none."""
        if self.kind is not None:
            return None if kinds.is_accelerator(self.kind) else self.kind
        pci_class = int(self.pci_class or "0", 16)
        return kinds.network(pci_class, *self.ids) if kinds.is_network(pci_class) else None

    def device(self, kind: KindName, index: int, place: Mapping[str, Any]) -> Accelerator:
        """Return one accelerator of this kind. ``place``: where it is on PCIe."""
        return Accelerator(
            id=kinds.accelerator_id(kind, index),
            kind=kind,
            name=self.name or kinds.model(*self.ids),
            index=index,
            memory_bytes=_bytes(self.memory_gib),
            **place,
        )

    def nic(self, id_: str, place: Mapping[str, Any]) -> Nic:
        """Return one port of this kind."""
        return Nic(
            id=id_,
            kind=self.network or "ethernet",
            name=self.name or id_,
            speed_gbps=self.gbps,
            link_layer=self.link_layer,
            **place,
        )

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if self.accelerator is None and self.network is None:
            raise ValueError("nobody knows what it is: give its kind, or its PCI class and id")
        return self


class Tree(Model):
    """Devices that hang below one host bridge or one switch, and all the bridges above them."""

    numa: int = Field(ge=0)
    host: str | None = Field(
        None, pattern=r"^([0-9a-f]{4}:)?[0-9a-f]{2}$", description="the host bridge's first bus"
    )
    port: Address | None = Field(None, description="the root port")
    switch: Address | None = Field(None, description="the switch's upstream port")
    devices: dict[Name, Many[Address]] = Field(description="addresses by kind of device")

    @property
    def bridges(self) -> tuple[str, ...]:
        """Return the PCIe bridges, outermost first."""
        return tuple(bridge for bridge in (self.port, self.switch) if bridge is not None)

    def path(self, number: int) -> tuple[str, ...]:
        """Return all that is above the devices. ``number``: of the tree, which names a host bridge
        that the description does not name."""
        if self.host is None:
            return f"tree{number}", *self.bridges
        return f"pci{self.host if ':' in self.host else '0000:' + self.host}", *self.bridges


class Links(Model):
    """Links that all accelerators have alike: to switches, or each to each other."""

    kind: KindName
    to: Literal["switch", "peers"]
    count: int | None = Field(None, ge=1, description="of an accelerator, or of a pair")
    gbs: float | None = Field(None, gt=0, description="all of them together, in one direction")

    def between(self, ids: tuple[str, ...]) -> tuple[FabricLink, ...]:
        """Return the links of these accelerators."""
        ends = (
            ((one, FABRIC_SWITCH) for one in ids) if self.to == "switch" else combinations(ids, 2)
        )
        return tuple(
            FabricLink(kind=self.kind, ends=each, count=self.count, gbs=self.gbs) for each in ends
        )


class Description(Model):
    """A whole description. Devices are numbered in the order in which it lists them."""

    about: Name = Field("", description="the machine in a line")
    aliases: Many[Name] = ()
    sources: dict[Name, Name] = Field({}, description="where each figure comes from, in words")
    cpus: dict[int, str] = Field(
        max_length=_MOST_NODES, description="by NUMA node, as Linux writes lists: 0-23,48-71"
    )
    memory_gib: float | None = Field(None, gt=0, description="of each NUMA node")
    kinds: dict[Name, DeviceKind]
    switch: Link = Field(Link(gts=None, lanes=None), description="above and below switches")
    links: tuple[Links, ...] | None = Field(
        None, max_length=_MOST_LINKS, description="none: []; unknown: left out"
    )
    trees: Many[Tree]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name in (name for tree in self.trees for name in tree.devices):
            if name not in self.kinds:
                raise ValueError(f"devices of a tree are {name!r}, which kinds does not list")
        devices = sum(len(each) for tree in self.trees for each in tree.devices.values())
        if devices > _MOST_DEVICES:
            raise ValueError(f"{devices} devices; expected at most {_MOST_DEVICES}")
        known: set[int] = set()
        for node, text in self.cpus.items():
            cpus = parse_cpu_list(text)
            if known & cpus:
                raise ValueError(f"CPU {min(known & cpus)} of NUMA node {node} is in another, too")
            known |= cpus
        return self

    def findings(self) -> Findings:
        """Return the machine's parts."""
        accelerators: list[Accelerator] = []
        nics: list[Nic] = []
        count: Counter[str] = Counter()
        for number, tree in enumerate(self.trees):
            for name, addresses in tree.devices.items():
                kind = self.kinds[name]
                for address in addresses:
                    here = {
                        "pci": address,
                        "pci_path": tree.path(number),
                        "pcie_gbs": kind.gbs,
                        "numa_node": tree.numa,
                    }
                    of = kind.accelerator or name
                    index = count[of]
                    count[of] += 1
                    if kind.accelerator is None:
                        nics.append(kind.nic(f"{name}{index}", here))
                    else:
                        accelerators.append(kind.device(kind.accelerator, index, here))
        ids = tuple(one.id for one in accelerators[:MAX_ACCELERATORS])
        bridges = dict.fromkeys(each for tree in self.trees for each in tree.bridges)
        return Findings(
            source="description",
            numa=tuple(
                NumaNode(
                    id=node,
                    cpus=tuple(sorted(parse_cpu_list(cpus))),
                    memory_bytes=_bytes(self.memory_gib),
                )
                for node, cpus in self.cpus.items()
            ),
            accelerators=tuple(accelerators),
            nics=tuple(nics),
            bridges=tuple(Bridge(id=each, pcie_gbs=self.switch.gbs) for each in bridges),
            fabric=tuple(link for links in self.links or () for link in links.between(ids)),
            fabric_known=self.links is not None,
        )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
