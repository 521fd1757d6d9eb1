"""``mkernel plan OP``: what would be launched, without launching it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mkernel import selection
from mkernel.backends import registry
from mkernel.cli.options import (
    OP_HELP,
    AsJson,
    Chunk,
    FastAccum,
    Given,
    Nic,
    Scaling,
    Verbs,
    layout_of,
    scales_of,
    with_sizes,
)
from mkernel.cli.plan_world import planned_world
from mkernel.cli.terminal import Terminal, write_json, writing
from mkernel.errors import Unsupported
from mkernel.plan import ops, render
from mkernel.plan import scaling as growth
from mkernel.plan.arguments import Around, check_world, path_of
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.missing import WhatIf
from mkernel.plan.model import LaunchPlan, Scales
from mkernel.plan.planner import explain
from mkernel.plan.request import Alternative
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.plan.simulate import Simulation, trace
from mkernel.settings import load as load_settings
from mkernel.topology.cost import MachineConstants, constants_for
from mkernel.topology.model import Model, Topology
from mkernel.topology.sources.chips import cores, described
from mkernel.topology.world_map import WorldMap, world_map


class PlanReport(Model):
    """The object that ``--json`` prints: ``plan``, which ``init`` and the op would accept on such
    machines, or else ``what_if``, a prediction that states what is missing. ``notes``: what was
    left out, and why: RDMA ports that are no rails, accelerator backends that do not run there."""

    plan: LaunchPlan | None = None
    what_if: WhatIf | None = None
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    simulation: Simulation | None = None
    scaling: tuple[growth.Point, ...] = ()


@with_sizes
def command(
    op: Annotated[str, typer.Argument(metavar="OP", help=OP_HELP)],
    given: Given,
    dtype: Annotated[
        str,
        typer.Option(
            help="Plan for inputs of float16, bfloat16 or float32; of GEMM ops also float8_e4m3."
        ),
    ] = "float16",
    scales: Scaling = None,
    fast_accum: FastAccum = False,
    nodes: Annotated[
        int | None,
        typer.Option(help="Plan for so many nodes. [the file's, else 2; with real devices here 1]"),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Plan for so many ranks on each node. [its accelerators; 2 of emulated ones]"
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="Use this accelerator backend. [the most preferred that runs there]"),
    ] = None,
    nic: Nic = None,
    verbs: Verbs = None,
    chunk: Chunk = None,
    path: Annotated[
        str | None, typer.Option(help="Take this path: auto, fused or library. [MKERNEL_PATH]")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the machine in it, times --nodes: `mkernel probe --json` output, or what "
            "`mkernel probe --from` reads.",
        ),
    ] = None,
    constants_file: Annotated[
        Path | None,
        typer.Option(
            "--constants",
            metavar="FILE",
            help="Predict by the constants in a file of `mkernel probe --measure`. [MKERNEL_CONSTANTS, "
            "or the shipped ones]",
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            help="Exchange between nodes in this way: auto, direct or hierarchical. [MKERNEL_EXCHANGE]"
        ),
    ] = None,
    why: Annotated[
        bool, typer.Option("--explain", help="Print the alternatives, with their predicted times.")
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Simulate the call: contention, waves, signals.")
    ] = False,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the simulation for ui.perfetto.dev."),
    ] = None,
    scaling_file: Annotated[
        Path | None,
        typer.Option(
            "--scaling",
            metavar="FILE",
            help="Simulate 1, 2, 4, … nodes up to --nodes and draw it: .svg, .png or .pdf.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print also what the schedule leaves unused, and the digest that ranks compare.",
        ),
    ] = False,
) -> None:
    """Print an op's launch plan; where it cannot be launched, what is missing.

    A plan has placement, routes, chunks, order and predicted time. Where none can be launched, a
    what-if shows what the machines would do."""
    name = ops.canonical(op)  # before a backend is loaded: a typo should not wait for that
    wanted = sizes_or_defaults(name, given)
    mode = scales_of(dtype, scales, name, fast=fast_accum)
    settings = load_settings()
    check_world(
        1 if nodes is None else nodes,
        1 if ranks_per_node is None else ranks_per_node,
        ("--nodes", "--ranks-per-node"),
    )
    where = planned_world(
        settings, name, topology, nodes, ranks_per_node,
        accelerator=accelerator, nic=nic, verbs=verbs,
    )  # fmt: skip
    world, backends, claims = where.topology, where.backends, where.capabilities
    selection.require_op(backends.accelerator, claims, name)
    mapped = partial(
        world_map,
        ranks_per_node=where.ranks_per_node,
        constants=constants_for(_own(claims, world), constants_file or settings.constants),
        group=claims.process_group,
        pinning=settings.pinning,
        nics=selection.nic_use(backends.nic, settings),
    )
    here = mapped(world)

    def first(count: int) -> WorldMap:
        few = count < len(world.nodes)
        return mapped(Topology(nodes=world.nodes[:count])) if few else here

    planned = partial(
        explain,
        name,
        wanted,
        dtype=dtype,
        b_layout=layout_of(None, mode),
        around=Around(
            scales=None if mode is None else Scales(mode=mode, use_fast_accum=fast_accum)
        ),
        accelerator=backends.accelerator,
        capabilities=claims,
        nic=backends.nic,
        verbs=backends.verbs,
        chunk=chunk,
        path=path or path_of(name, settings.path),
        exchange=exchange or settings.exchange,
        schedule=registry.accelerator(backends.accelerator).schedule,
    )
    made, considered, pipeline = planned(world=here)
    notes = where.notes + _assumed(made, here, claims)
    if constants_file is None and settings.constants is None:
        notes += _of_another_cpu(made, world)
    console = Terminal()
    if not as_json:
        console.print(render.topology(world))
        console.print(render.plan(made, notes, verbose=verbose))
    found = None
    constants = here.constants
    if constants is None and (simulated or trace_file or scaling_file):
        raise Unsupported(
            f"accelerator {backends.accelerator!r} brings no constants of these chips, so nothing "
            "can be simulated; --constants FILE gives some (`mkernel probe --measure` writes them)"
        )
    if constants is not None and (simulated or trace_file):
        traced = trace(made, pipeline, constants, keep=trace_file is not None)
        found = traced.result
        if trace_file:
            from mkernel.harness import timeline

            with writing("--trace", trace_file):
                timeline.write_trace(timeline.simulated(traced), trace_file)
    points: list[growth.Point] = []
    if constants is not None and scaling_file:
        points = list(
            growth.points(
                lambda count: planned(world=first(count)),
                constants,
                made.nodes,
            )
        )
        ranks = f"{made.ranks_per_node} ranks a node on {made.accelerator}"
        title = f"{made.op} of {render.sizes(made)}, {ranks}"
        with writing("--scaling", scaling_file, ", .svg, .png or .pdf"):
            growth.write(points, title, scaling_file)
    if as_json:
        report = PlanReport(
            plan=made if isinstance(made, LaunchPlan) else None,
            what_if=made if isinstance(made, WhatIf) else None,
            notes=notes,
            alternatives=considered if why else (),
            simulation=found,
            scaling=tuple(points),
        )
        write_json(report.model_dump_json(indent=2))
        return
    if why:
        console.print(render.alternatives(considered))
    if found:
        console.print(render.simulation(found))
    for file in (trace_file, scaling_file):
        if file:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)


def _own(claims: AcceleratorCapabilities, world: Topology) -> MachineConstants | None:
    """Return the backend's constants, if it runs on these chips."""
    alike = {id(node.accelerators): node.accelerators for node in world.nodes}  # copies share them
    fits = all(claims.misfit(one) is None for devices in alike.values() for one in devices)
    return claims.constants if fits else None


def _of_another_cpu(made: LaunchPlan | WhatIf, world: Topology) -> tuple[str, ...]:
    """Return a note if the times are predicted by constants of another CPU than this one."""
    kinds = {one.kind for node in world.nodes for one in node.accelerators}
    if kinds != {"cpu"} or made.prediction is None:
        return ()
    return (
        "times are those of the CPU that the shipped constants were measured on; `mkernel probe "
        "--measure FILE` measures this one, for --constants",
    )


def _assumed(
    made: LaunchPlan | WhatIf, here: WorldMap, claims: AcceleratorCapabilities
) -> tuple[str, ...]:
    """Return a note if the number of the chips' cores is unknown."""
    if isinstance(made, WhatIf) and made.prediction is None:
        return ()
    unknown = [
        described(one)
        for node in here.kinds.prototypes
        for one in node.accelerators
        if not one.emulated and cores(one) is None
    ]
    if not unknown:
        return ()
    return (f"nobody says how many cores {unknown[0]} has: {claims.compute_cores} are assumed",)
