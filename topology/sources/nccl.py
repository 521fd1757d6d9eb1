"""NCCL's topology XML, which ``NCCL_TOPO_DUMP_FILE`` writes, and clouds ship for their machines.

NCCL shows a whole switch as one ``pci`` element and leaves root ports out, while sysfs and hwloc show
every port. To get the same paths, each child of a switch is given its own downstream port here, and
each top element of a CPU a host bridge and a root port, which the file does not name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from mkernel.errors import InputFileError
from mkernel.topology.model import (
    FABRIC_HOST,
    FABRIC_SWITCH,
    Accelerator,
    Bridge,
    FabricLink,
    KindName,
    Nic,
    NumaNode,
)
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.cpu import parse_cpu_mask
from mkernel.topology.sources.findings import Findings, Notes
from mkernel.topology.sources.xml import BusIds, Element, Place

SOURCE = "NCCL XML"
ROOT = "system"
"""The tag of the root element."""

_NVSWITCH, _NPU_BRIDGE = "0x068000", "0x068001"
"""The PCI classes of NVLink's other ends: a switch, and the CPU of a POWER machine."""
_GCN = {"910": "90a"}
"""The real names of architectures for which RCCL once wrote another number, by that number."""


class _Gpu(NamedTuple):
    kind: KindName
    place: Place
    element: Element
    gpu: Element | None


def read(system: Element, path: Path) -> tuple[Findings, ...]:
    """Return the hosts of the file, in order of appearance; dumps of one host hold one.

    Raises:
        InputFileError: no CPUs, a bus id that is none, or one that occurs twice on a host.
    """
    hosts: dict[str, list[Element]] = {}
    for cpu in system.all("cpu"):
        hosts.setdefault(cpu.attributes.get("host_hash", ""), []).append(cpu)
    if not hosts:
        raise InputFileError(f"topology file {path}: <system> holds no <cpu>; is it a whole dump?")
    return tuple(_Host(path).read(cpus) for cpus in hosts.values())


class _Host:
    def __init__(self, path: Path) -> None:
        self._notes = Notes(SOURCE)
        self._buses = BusIds(path, "busid")
        self._numa: list[NumaNode] = []
        self._bridges: list[Bridge] = []
        self._gpus: dict[pci.DeviceAt, _Gpu] = {}
        self._unclassed: list[str] = []
        self._nics: list[Nic] = []
        self._sockets: dict[str, Nic] = {}
        """The NICs below a CPU, by name: NCCL lists a NIC of unknown place below each CPU."""

    def read(self, cpus: list[Element]) -> Findings:
        for number, cpu in enumerate(cpus):
            self._cpu(number, cpu)
        self._notes.add_unclassed(self._unclassed)
        accelerators = self._numbered()
        return Findings(
            source=SOURCE,
            numa=tuple(self._numa),
            accelerators=tuple(sorted(accelerators.values(), key=lambda one: one.index)),
            nics=(*self._nics, *self._sockets.values()),
            bridges=tuple(self._bridges),
            fabric=tuple(self._fabric(accelerators)),
            fabric_known=any(
                one.gpu is not None and "sm" in one.gpu.attributes for one in self._gpus.values()
            ),
            notes=self._notes.all(),
        )

    def _cpu(self, number: int, cpu: Element) -> None:
        numa = cpu.number("numaid")
        if numa is None:
            self._notes.add(f"line {cpu.line}: a CPU without a NUMA node; its place is unknown")
        else:
            self._numa.append(NumaNode(id=numa, cpus=self._affinity(cpu)))
        self._network(cpu, None, Place(numa, ()))
        for index, element in enumerate(cpu.all("pci")):
            bridge = f"cpu{number}/{index}"
            self._function(element, Place(numa, (bridge, f"{bridge}/port")))

    def _affinity(self, cpu: Element) -> tuple[int, ...]:
        mask = cpu.attributes.get("affinity", "")
        try:
            return tuple(sorted(parse_cpu_mask(mask)))
        except ValueError as error:
            self._notes.add(f"line {cpu.line}: affinity: {error}; ignored")
            return ()

    def _function(self, element: Element, place: Place) -> None:
        address = self._buses.take(element)
        code = element.number("class", 16)
        pci_class = (code or 0) >> 8
        children = list(element.all("pci"))
        if next(element.all("gpu"), None) or kinds.is_display(pci_class):
            self._accelerators(element, address, pci_class, place)
        elif kinds.is_network(pci_class) or next(element.all("nic"), None):
            self._network(element, address, place)
        elif code is None and not children:
            self._unclassed.append(address)
        if children or kinds.is_bridge(pci_class):
            self._bridges.append(Bridge(id=address, pcie_gbs=self._gbs(element)))
        for index, child in enumerate(children):
            self._function(
                child, place._replace(bridges=(*place.bridges, address, f"{address}/{index}"))
            )

    def _accelerators(self, element: Element, address: str, pci_class: int, place: Place) -> None:
        """Add the devices of a PCI function: one for each ``dev`` of its GPUs, which ranks may
        share."""
        gpus = {gpu.number("dev"): gpu for gpu in reversed(list(element.all("gpu")))}
        vendor, device = (element.number(name, 16) for name in ("vendor", "device"))
        kind = _accelerator_kind(pci_class, vendor, device, next(iter(gpus.values()), None))
        if kind is None:
            why = (
                kinds.why_none(pci_class, vendor, device) or "no known kind of accelerator; ignored"
            )
            self._notes.add(f"{address}: {why}")
            return
        for at, number in pci.parts(address, gpus).items():
            self._gpus[at] = _Gpu(kind, place, element, gpus.get(number))

    def _network(self, parent: Element, address: str | None, place: Place) -> None:
        """Add the ports of a PCI function; ``address`` None: of the NICs directly below a CPU."""
        nets = [net for nic in parent.all("nic") for net in nic.all("net")]
        if not nets and address is not None:
            self._nics.append(self._nic(parent, address, place, None, address))
        several = Counter(net.attributes.get("name") for net in nets)
        for net in nets:
            name = net.attributes.get("name") or address
            if name is None:
                self._notes.add(f"line {net.line}: a network without name or bus id; ignored")
            elif "+" in name:
                self._notes.add(f"{name} joins ports that are listed themselves; ignored")
            elif address is not None:
                nic = self._nic(parent, address, place, net, name)
                if several[name] > 1:
                    nic = nic.model_copy(update={"id": f"{name}:{nic.port}"})
                self._nics.append(nic)
            else:
                nic = self._nic(parent, None, place, net, name)
                known = self._sockets.setdefault(name, nic)
                if known.numa_node != nic.numa_node:
                    self._sockets[name] = known.model_copy(update={"numa_node": None})

    def _nic(
        self, function: Element, address: str | None, place: Place, net: Element | None, name: str
    ) -> Nic:
        code = function.number("class", 16) if address else None
        pci_class = (code or 0) >> 8
        vendor, device = (function.number(each, 16) for each in ("vendor", "device"))
        gdr = net.attributes.get("gdr") if net is not None else None
        kind: KindName = kinds.network(pci_class, vendor, device)
        if kind == "ethernet" and gdr == "1":
            kind = kinds.rdma(vendor)
        speed = self._number(net, "speed") if net is not None else None  # Mb/s
        if speed == 0:
            self._notes.add(f"{name}: speed is 0; counted as unknown")
        return Nic(
            id=name,
            kind=kind,
            name=name,
            port=(net.number("port") if net is not None else None) or 1,
            pci=address,
            pci_path=place.bridges if address else (),
            pcie_gbs=self._gbs(function) if address else None,
            numa_node=place.numa,
            speed_gbps=speed / 1000 if speed else None,
            link_layer="InfiniBand" if kinds.is_infiniband(pci_class) else None,
            gpudirect={"1": True, "0": False}.get(gdr or ""),
        )

    def _numbered(self) -> dict[pci.DeviceAt, Accelerator]:
        """Return GPUs by bus id, with the numbers that NCCL found or else, like drivers, numbered
        in that order."""
        numbers = pci.numbered(
            {
                at: (one.kind, one.gpu.number("dev") if one.gpu else None)
                for at, one in self._gpus.items()
            }
        )
        return {
            at: Accelerator(
                id=kinds.accelerator_id(one.kind, numbers[at]),
                kind=one.kind,
                name=kinds.model(
                    one.element.number("vendor", 16), one.element.number("device", 16)
                ),
                index=numbers[at],
                pci=at.address,
                pci_path=one.place.bridges,
                pcie_gbs=self._gbs(one.element),
                numa_node=one.place.numa,
                architecture=_architecture(one),
                cores=self._compute_units(one),
            )
            for at, one in self._gpus.items()
        }

    def _compute_units(self, one: _Gpu) -> int | None:
        """Return the number of compute units, which RCCL writes as ``sm``."""
        if one.gpu is None or one.kind != "rocm":
            return None
        return self._number(one.gpu, "sm") or None

    def _fabric(self, accelerators: dict[pci.DeviceAt, Accelerator]) -> Iterator[FabricLink]:
        """Yield each pair once. Links to several switches, or several rows of one pair, add up."""
        found: dict[frozenset[str], FabricLink] = {}
        for at, one in self._gpus.items():
            if one.gpu is None:
                continue
            own = accelerators[at].id
            counts: Counter[tuple[Literal["nvlink", "xgmi"], str]] = Counter()
            for kind in ("nvlink", "xgmi"):
                for link in one.gpu.all(kind):
                    end = self._end(link, accelerators)
                    if end is not None and end != own:
                        counts[kind, end] += self._count(link)
            rate = kinds.nvlink_gbs(one.gpu.number("sm")) if one.kind == "cuda" else None
            for (kind, end), count in (+counts).items():
                gbs = round(rate * count, 3) if rate and kind == "nvlink" else None
                link_ = FabricLink(kind=kind, ends=(own, end), count=count, gbs=gbs)
                first = found.setdefault(frozenset(link_.ends), link_)
                if first.count != count:
                    self._notes.add(
                        f"{own} has {count} links to {end}, which has {first.count} back; the "
                        "latter are counted"
                    )
            for link in one.gpu.all("c2c"):
                count, mbs = max(self._count(link), 1), self._number(link, "bw")
                ends = (own, FABRIC_HOST)
                gbs = mbs * count / 1000 if mbs else None
                found[frozenset(ends)] = FabricLink(kind="c2c", ends=ends, count=count, gbs=gbs)
        yield from found.values()

    def _end(self, link: Element, accelerators: dict[pci.DeviceAt, Accelerator]) -> str | None:
        target = link.attributes.get("target", "")
        tclass = link.attributes.get("tclass", "")
        if tclass == _NVSWITCH:
            return FABRIC_SWITCH
        if tclass == _NPU_BRIDGE:
            return FABRIC_HOST
        known = accelerators.get(pci.DeviceAt(pci.normalise(target) or ""))
        if known is None:
            self._notes.add(
                f"line {link.line}: a link to {target[:40]!r}, which is no accelerator of this "
                "file; ignored"
            )
        return known.id if known else None

    def _count(self, link: Element) -> int:
        count = self._number(link, "count")
        return 1 if count is None else count

    def _gbs(self, element: Element) -> float | None:
        text = element.attributes.get("link_speed", "")
        speed = pci.parse_speed(text)
        if speed is None and text and not text.lower().startswith("unknown"):
            self._notes.add(f"line {element.line}: link_speed {text[:40]!r} is no speed; ignored")
        lanes = self._number(element, "link_width")
        gbs = pci.link_gbs(speed, lanes)
        if gbs is None and speed and lanes:
            self._notes.add(
                f"line {element.line}: no link has {text[:40]} with {lanes} lanes; ignored"
            )
        return gbs

    def _number(self, element: Element, name: str) -> int | None:
        """Return an attribute's number; add a note if it has a value that is none."""
        number = element.number(name)
        text = element.attributes.get(name)
        if number is None and text:
            self._notes.add(
                f"line {element.line}: {name} {text[:40]!r} is no number from 0 to 2^31 - 1; ignored"
            )
        return number


def _accelerator_kind(
    pci_class: int, vendor: int | None, device: int | None, gpu: Element | None
) -> KindName | None:
    """Return the kind of an accelerator. Files for NCCL that name no vendor describe NVIDIA's GPUs;
    those of AMD's RCCL name a ``gcn``. A device that ranks run on is no console, whatever its
    class."""
    if vendor is None:
        return "rocm" if gpu is not None and "gcn" in gpu.attributes else "cuda"
    return kinds.accelerator(pci_class, vendor, device) if gpu is None else kinds.made_by(vendor)


def _architecture(one: _Gpu) -> str | None:
    """Return ``sm_90``, from the attribute ``sm``; for AMD's GPUs ``gfx942``, from the attribute
    ``gcn``."""
    if one.gpu is None:
        return None
    if one.kind == "rocm":
        gcn = one.gpu.attributes.get("gcn", "").partition(":")[0].removeprefix("gfx")
        return f"gfx{_GCN.get(gcn, gcn)}" if re.fullmatch(r"[0-9a-f]{3,5}", gcn) else None
    sm = one.gpu.number("sm")
    return f"sm_{sm}" if sm else None
