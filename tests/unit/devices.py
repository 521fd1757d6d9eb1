"""Synthetic devices and nodes: GPUs and NICs below switches, simulated ones, and worlds of them."""

from __future__ import annotations

from typing import Any

from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology

SIM = Accelerator(id="ascend-sim0", kind="ascend", name="simulator", index=0, emulated=True)
SOFT = Nic(id="soft0", kind="soft", name="soft0", emulated=True)


def bridges(switch: int, slot: int) -> tuple[str, ...]:
    """Bridges above slot ``slot`` of a switch: host bridge, root port, upstream, downstream port."""
    bus = f"{switch:02x}"
    return (f"pci0000:{bus}", f"0000:{bus}:01.0", f"0001:{bus}:00.0", f"0002:{bus}:{slot:02x}.0")


def gpu(index: int, switch: int | None = None, **more: Any) -> Accelerator:
    """GPU ``index`` below a switch; None: nobody knows where. ``more``: fields, in place of these."""
    fields = {
        "id": f"cuda{index}",
        "kind": "cuda",
        "name": "gpu",
        "index": index,
        "pci": None if switch is None else f"0000:{index:02x}:00.0",
        "pci_path": () if switch is None else bridges(switch, index),
        **more,
    }
    return Accelerator.model_validate(fields)


def nic(index: int, switch: int | None = None, **more: Any) -> Nic:
    """NIC ``index``, 400 Gb/s, below a switch; as :func:`gpu`."""
    fields = {
        "id": f"mlx5_{index}",
        "kind": "cx",
        "name": f"mlx5_{index}",
        "pci": None if switch is None else f"0001:{index:02x}:00.0",
        "pci_path": () if switch is None else bridges(switch, 16 + index),
        "speed_gbps": 400.0,
        **more,
    }
    return Nic.model_validate(fields)


def node(
    accelerators: tuple[Accelerator, ...] = (), nics: tuple[Nic, ...] = (), **more: Any
) -> Node:
    """A node of one NUMA node with four CPUs."""
    numa = (NumaNode(id=0, cpus=(0, 1, 2, 3)),)
    fields = {"id": 0, "hostname": "h", "numa": numa, **more}
    return Node(accelerators=accelerators, nics=nics, **fields)


def rails(count: int = 8, nics_each: int = 1) -> Node:
    """``count`` switches, each with a GPU and ``nics_each`` NICs."""
    return node(
        tuple(gpu(i, i) for i in range(count)),
        tuple(nic(n, n // nics_each) for n in range(count * nics_each)),
    )


def world(*nodes: Node) -> Topology:
    """These nodes, numbered."""
    return Topology(
        nodes=tuple(
            one.model_copy(update={"id": i, "hostname": f"h{i}"}) for i, one in enumerate(nodes)
        )
    )
