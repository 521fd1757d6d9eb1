"""``mkernel probe``: the parts of this machine, or of a recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mkernel.cli import terminal
from mkernel.cli.options import AsJson
from mkernel.cli.terminal import Terminal
from mkernel.errors import ArgumentError
from mkernel.probe import picture
from mkernel.probe.matrix import matrix
from mkernel.probe.report import report
from mkernel.probe.tree import tree
from mkernel.settings import AUTO
from mkernel.settings import load as load_settings
from mkernel.topology import presets
from mkernel.topology.cost import MachineConstants
from mkernel.topology.discover import Discovery, discover, read
from mkernel.topology.model import Accelerator, Nic, Note
from mkernel.topology.sources import formats
from mkernel.user_files import write_file


def backend_devices() -> tuple[tuple[Accelerator, ...], tuple[Nic, ...], tuple[Note, ...]]:
    """Return the devices that installed backends report for this machine. A backend that fails adds
    a note."""
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
    from_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            "--topology",
            metavar="FILE|PRESET",
            help=f"Read a machine from {formats.KNOWN}, JSON that this command printed, or a "
            "description of your own; or take one of --list. Given several times: files about one "
            "machine are merged, and another machine is one more node.",
        ),
    ] = None,
    sysfs_root: Annotated[
        Path | None,
        typer.Option(
            "--sysfs-root",
            metavar="DIR",
            help="Read a recorded tree: a folder that holds `sys/`. Drivers are not asked then.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Name the machines that --topology takes.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the machine for --topology: a preset's description to edit, or JSON.",
        ),
    ] = None,
    as_json: AsJson = False,
    as_matrix: Annotated[
        bool, typer.Option("--matrix", help="Print the path class of every pair of devices.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the machine: .svg, .png or .pdf."),
    ] = None,
    measure_file: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE",
            help="Measure the accelerator of the settings (seconds) and write its constants for "
            "MKERNEL_CONSTANTS and `mkernel plan --constants`: a GPU's products, memory, copies and "
            "exchanges, or what a CPU rank has of this machine (compute, shared memory, the settings' "
            "NIC).",
        ),
    ] = None,
    measured_ranks: Annotated[
        int,
        typer.Option(
            "--ranks", min=1, help="Measure a CPU with so many ranks that share its cores."
        ),
    ] = 2,
) -> None:
    """Show what this machine, or a recorded one, is made of: CPUs, accelerators, NICs, links."""
    if listed:
        _list(as_json)
        return
    if measure_file is not None:
        if from_file or sysfs_root:
            raise ArgumentError("--measure", measure_file, "no --from and no --sysfs-root")
        _measure(measure_file, measured_ranks, as_json)
        return
    found = _discovery(tuple(from_file or ()), sysfs_root)
    first = found.topology.nodes[0]
    if save is not None:
        with terminal.writing("--save", save):
            write_file(save, _saved(tuple(from_file or ()), found))
    if plot is not None:
        with terminal.writing("--plot", plot, ", .svg, .png or .pdf"):
            picture.write(first, plot)
    if as_json:
        terminal.write_json(report(found).model_dump_json(indent=2, by_alias=True))
        return
    if as_matrix:
        nodes = found.topology.nodes
        titles = [f"node {node.id} · {node.hostname}\n" if nodes[1:] else "" for node in nodes]
        parts = [title + matrix(node) for title, node in zip(titles, nodes, strict=True)]
        terminal.write("\n\n".join(parts))
        return
    console = Terminal()
    console.print(tree(found.topology))
    for note in found.notes:
        console.print(Text(f"note: {note.source}: {note.message}", style="dim"))


def _discovery(files: tuple[Path, ...], sysfs_root: Path | None) -> Discovery:
    if files and sysfs_root is not None:
        raise ArgumentError("--sysfs-root", sysfs_root, "nothing beside --from")
    if files:
        return read(*files)
    if sysfs_root is not None:
        return discover(sysfs_root)
    return discovered()


def _list(as_json: bool) -> None:
    known = presets.presets()
    if as_json:
        rows = [
            {"name": name, "aliases": one.aliases, "about": one.about, "sources": one.sources}
            for name, one in known.items()
        ]
        terminal.write_json(json.dumps(rows, indent=2))
        return
    console = Terminal(highlight=False, soft_wrap=True)
    for name, one in known.items():
        console.print(f"{', '.join((name, *one.aliases)):<27} {one.about}")
    console.print("All are described from public figures, and were never measured.", style="dim")


def _saved(files: tuple[Path, ...], found: Discovery) -> str:
    preset = presets.find(str(files[0])) if len(files) == 1 else None
    if preset is not None:
        return preset.read_text(encoding="utf-8")
    return found.topology.model_dump_json(indent=2, exclude_defaults=True) + "\n"


def discovered() -> Discovery:
    """Discover this machine, with the devices that backends report."""
    accelerators, nics, notes = backend_devices()
    found = discover(accelerators=accelerators, nics=nics)
    return found.model_copy(update={"notes": found.notes + notes})


def _measure(file: Path, ranks: int, as_json: bool) -> None:
    text = (_of_devices() or _of_cpu(ranks)).model_dump_json(indent=2)
    with terminal.writing("--measure", file):
        write_file(file, text + "\n")
    if as_json:
        terminal.write_json(text)
    else:
        Terminal(soft_wrap=True, highlight=False).print(f"wrote {file}")


def _of_devices() -> MachineConstants | None:
    """Return the constants of the devices of the settings' accelerator; None: it measures none."""
    from mkernel import machine, selection
    from mkernel.world.identity import Backends

    name, *_ = selection.accelerator_names(load_settings().accelerator)
    if name == AUTO:
        name = selection.chosen_accelerator()
    backend = machine.usable_accelerator(name)
    if not selection.real_devices(backend):
        return None
    return backend.measure(machine.machine_topology(Backends(name, None, None)))


def _of_cpu(ranks: int) -> MachineConstants:
    from mkernel.launch import check_ranks
    from mkernel.measure import measure
    from mkernel.selection import nic_and_verbs

    settings = load_settings()
    check_ranks(1, ranks, settings.ranks_per_cpu, ("--nodes", "--ranks"))
    return measure(ranks, *nic_and_verbs(settings))
