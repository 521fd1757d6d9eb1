"""``mkernel probe``: what this machine, or a recorded one, is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mkernel.plan import render
from mkernel.topology.discover import Discovery, discover
from mkernel.topology.model import (
    Accelerator,
    AcceleratorKind,
    Model,
    Nic,
    NicKind,
    Note,
    Topology,
)
from mkernel.topology.placement import assign_nics, usable_nics


class AcceleratorEntry(Model):
    """An accelerator, by the keys that other tools may rely on."""

    id: str
    kind: AcceleratorKind
    pci: str | None
    numa_node: int | None


class NicEntry(Model):
    """A NIC, by the keys that other tools may rely on. ``speed_gbps`` in Gb/s."""

    id: str
    kind: NicKind
    pci: str | None
    numa_node: int | None
    speed_gbps: float | None


class ProbeReport(Model):
    """What ``mkernel probe --json`` prints: stable keys first, then the whole model.

    ``affinity``: accelerator id → ids of its NICs, nearest first. ``topology`` alone can be saved
    and given to ``mkernel plan --topology``, and so can the whole report.
    """

    accelerators: tuple[AcceleratorEntry, ...]
    nics: tuple[NicEntry, ...]
    affinity: dict[str, tuple[str, ...]]
    notes: tuple[Note, ...]
    topology: Topology


def report(found: Discovery) -> ProbeReport:
    """The report of one machine."""
    node = found.topology.nodes[0]
    affinity = assign_nics(node.accelerators, usable_nics(node))
    return ProbeReport(
        accelerators=tuple(
            AcceleratorEntry(id=a.id, kind=a.kind, pci=a.pci, numa_node=a.numa_node)
            for a in node.accelerators
        ),
        nics=tuple(
            NicEntry(
                id=n.id, kind=n.kind, pci=n.pci, numa_node=n.numa_node, speed_gbps=n.speed_gbps
            )
            for n in node.nics
        ),
        affinity={key: tuple(nic.id for nic in nics) for key, nics in affinity.items()},
        notes=found.notes,
        topology=found.topology,
    )


def backend_devices() -> tuple[tuple[Accelerator, ...], tuple[Nic, ...], tuple[Note, ...]]:
    """What every installed backend reports of this machine. A backend that fails is a note."""
    accelerators: list[Accelerator] = []
    nics: list[Nic] = []
    notes: list[Note] = []
    try:
        from mkernel.backends import registry
    except Exception as error:  # torch may be broken; the machine can be probed all the same
        return (), (), (Note(source="backends", message=f"cannot be loaded: {error}"),)
    for name in registry.names(registry.ACCELERATORS):
        try:
            accelerators += registry.accelerator(name).probe()
        except Exception as error:  # noqa: PERF203 - one that fails must not hide the others
            notes.append(Note(source=f"accelerator {name}", message=str(error)))
    for name in registry.names(registry.NICS):
        try:
            backend = registry.nic(name)
            for provider in backend.providers:
                nics += backend.probe(provider)
        except Exception as error:  # noqa: PERF203
            notes.append(Note(source=f"nic {name}", message=str(error)))
    return tuple(accelerators), tuple(nics), tuple(notes)


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    sysfs_root: Annotated[
        Path | None,
        typer.Option(
            "--sysfs-root",
            metavar="DIR",
            help="Read a recorded tree: a folder that holds `sys/`. Drivers are not asked then.",
        ),
    ] = None,
) -> None:
    """Show CPUs, accelerators and NICs of this machine."""
    if sysfs_root is None:
        accelerators, nics, notes = backend_devices()
        found = discover(accelerators=accelerators, nics=nics)
        found = found.model_copy(update={"notes": found.notes + notes})
    else:
        found = discover(sysfs_root)
    if as_json:
        typer.echo(report(found).model_dump_json(indent=2))
        return
    console = Console()
    console.print(render.topology(found.topology))
    for note in found.notes:
        console.print(Text(f"note: {note.source}: {note.message}", style="dim"))
