"""``mkernel plan OP``: what would be launched, without launching it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from mkernel import selection
from mkernel.backends import registry
from mkernel.cli import sizes
from mkernel.cli.plan_world import backends_of, world_of_file, world_of_machine
from mkernel.errors import Unsupported
from mkernel.identity import Backends
from mkernel.plan import ops, render
from mkernel.plan import scaling as growth
from mkernel.plan.decide import Alternative
from mkernel.plan.model import Exchange, LaunchPlan, OpName
from mkernel.plan.order import Runs
from mkernel.plan.planner import explain
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.plan.simulate import Simulation, trace
from mkernel.settings import Settings
from mkernel.settings import load as load_settings
from mkernel.topology.cost import constants_for
from mkernel.topology.model import Model, Topology


class PlanReport(Model):
    """What ``--json`` prints where more than the plan was asked for."""

    plan: LaunchPlan
    alternatives: tuple[Alternative, ...] = ()
    simulation: Simulation | None = None
    scaling: tuple[growth.Point, ...] = ()


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op or its alias, as `ag_gemm`.")],
    m: sizes.M = None,
    n: sizes.N = None,
    k: sizes.K = None,
    tokens: sizes.Tokens = None,
    hidden: sizes.Hidden = None,
    features: sizes.Features = None,
    experts: sizes.Experts = None,
    top_k: sizes.TopK = None,
    batch: sizes.Batch = None,
    heads: sizes.Heads = None,
    kv_heads: sizes.KvHeads = None,
    sequence: sizes.Sequence = None,
    head_dim: sizes.HeadDim = None,
    causal: sizes.Causal = False,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    nodes: Annotated[int, typer.Option(help="Number of (emulated) nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 2,
    accelerator: Annotated[str | None, typer.Option(help="Accelerator backend.")] = None,
    nic: Annotated[str | None, typer.Option(help="NIC backend between nodes.")] = None,
    verbs: Annotated[str | None, typer.Option(help="Verbs provider of the NIC.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tiles in a chunk.")] = None,
    path: Annotated[
        str | None, typer.Option(help="auto, fused or library; default: MKERNEL_PATH.")
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
            help="Of `mkernel probe --measure`; default: MKERNEL_CONSTANTS, or the shipped ones.",
        ),
    ] = None,
    exchange: Annotated[
        str, typer.Option(help="Between nodes: auto, direct or hierarchical.")
    ] = "auto",
    why: Annotated[
        bool, typer.Option("--explain", help="The alternatives, with their predicted times.")
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Print the launch plan of an op: placement, routes, chunks, order, predicted time."""
    name = ops.canonical(op)  # before a backend is loaded: a typo should not wait for that
    wanted = sizes_or_defaults(
        name,
        {
            "m": m,
            "n": n,
            "k": k,
            "tokens": tokens,
            "hidden": hidden,
            "features": features,
            "experts": experts,
            "top_k": top_k,
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "sequence": sequence,
            "head_dim": head_dim,
            "causal": causal,
        },
    )
    settings = load_settings()
    given = {"accelerator": accelerator, "nic": nic, "verbs": verbs}
    chosen = settings.model_copy(update={key: value for key, value in given.items() if value})
    world, backends = _world(chosen, given, topology, nodes, ranks_per_node, name)
    capabilities = registry.accelerator(backends.accelerator).capabilities()
    selection.require_op(backends.accelerator, capabilities, name)
    name_of_constants = capabilities.constants or backends.accelerator
    constants = constants_for(name_of_constants, constants_file or settings.constants)
    if _elsewhere(world, topology):
        capabilities = capabilities.model_copy(
            update={"exchanges": get_args(Exchange), "orders": get_args(Runs)}
        )
    planned = partial(
        explain,
        name,
        wanted,
        dtype=dtype,
        ranks_per_node=ranks_per_node,
        accelerator=backends.accelerator,
        capabilities=capabilities,
        nic=backends.nic,
        verbs=backends.verbs,
        chunk=chunk,
        constants=constants,
        path=path or settings.path,
        pinning=settings.pinning,
        exchange=exchange,
    )
    made, considered = planned(nodes=nodes, topology=world)
    console = Console()
    if not as_json:
        console.print(render.topology(world))
        console.print(render.plan(made))
    found = None
    if simulated or trace_file:
        traced = trace(
            made,
            constants,
            kernel_a_chunk=capabilities.kernel_a_chunk,
            keep=trace_file is not None,
        )
        found = traced.result
        if trace_file:
            from mkernel.job.files import write_trace
            from mkernel.job.timeline import simulated as timeline

            write_trace(timeline(traced), trace_file)
    points: list[growth.Point] = []
    if scaling_file:
        points = list(
            growth.points(
                lambda count: planned(nodes=count, topology=_first(world, count)).plan,
                constants,
                nodes,
                capabilities.kernel_a_chunk,
            )
        )
        _draw(points, f"{made.op}, {made.accelerator}, {ranks_per_node} ranks a node", scaling_file)
    if as_json:
        report: Model = made
        if why or found or points:
            report = PlanReport(
                plan=made,
                alternatives=considered if why else (),
                simulation=found,
                scaling=tuple(points),
            )
        typer.echo(report.model_dump_json(indent=2))
        return
    if why:
        console.print(render.alternatives(considered))
    if found:
        console.print(render.simulation(found))
    for file in (trace_file, scaling_file):
        if file:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)


def _world(
    chosen: Settings,
    given: dict[str, str | None],
    file: Path | None,
    nodes: int,
    ranks: int,
    op: OpName,
) -> tuple[Topology, Backends]:
    """The world, and its backends: those given, else those of the file's devices or the settings."""
    apart = nodes > 1
    world = world_of_file(file, nodes) if file else None
    if world is not None:
        natural = backends_of(world, chosen, apart)
        return world, Backends(
            given["accelerator"] or natural.accelerator,
            (given["nic"] or natural.nic) if apart else None,
            (given["verbs"] or natural.verbs) if apart else None,
        )
    backends = selection.backends(chosen, nodes, op=op)
    return world_of_machine(backends, nodes, ranks, chosen.ranks_per_device, file), backends


def _elsewhere(world: Topology, file: Path | None) -> bool:
    """Whether the world is of real devices in a file: nothing is launched on it from here, so any
    exchange and order may be planned for it, whatever backends provide today."""
    return file is not None and not world.nodes[0].accelerators[0].emulated


def _first(world: Topology, count: int) -> Topology:
    return world if count == len(world.nodes) else Topology(nodes=world.nodes[:count])


def _draw(points: list[growth.Point], title: str, file: Path) -> None:
    try:
        growth.write(points, title, file)
    except ImportError as error:
        raise Unsupported(
            f"--scaling needs matplotlib: pip install 'mkernel-fused[bench]' ({error})"
        ) from error
