"""``mkernel run OP``: a measured, checked run on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mkernel import api, machine, selection
from mkernel.backends import registry
from mkernel.backends.contracts import instrumented
from mkernel.cases import Case, case_of
from mkernel.cases.gemm import GemmCase
from mkernel.cases.moe import ROUTINGS
from mkernel.cli.options import (
    OP_HELP,
    Accelerator,
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
from mkernel.cli.terminal import MATPLOTLIB, Terminal, write_json, writing
from mkernel.errors import ArgumentError, InputFileError, PlanMismatch
from mkernel.harness import inputs, rank, timeline, timeline_picture
from mkernel.harness import run_report as report
from mkernel.harness.footprint import check_fits
from mkernel.harness.guard import Progress as TurnDone
from mkernel.harness.spec import VIEWS, Job
from mkernel.harness.turns import Turns
from mkernel.launch import check_ranks, launch
from mkernel.ops.validate import DTYPES, dtype_name
from mkernel.plan import ops, render
from mkernel.plan.arguments import WITHOUT_B
from mkernel.plan.model import E4M3, DtypeName, LaunchPlan, OpName, ScaleMode
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.settings import AUTO, Settings, check_timeout
from mkernel.settings import load as load_settings
from mkernel.topology.model import Topology
from mkernel.world.identity import Backends

_LAYOUTS = ("row", "column")


@with_sizes
def command(  # one option a parameter: this is the command line
    op: Annotated[str, typer.Argument(metavar="OP", help=OP_HELP)],
    given: Given,
    nodes: Annotated[
        int | None, typer.Option(help="Emulate so many nodes. [2; with real devices 1]")
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Start so many ranks on each node. [its accelerators; 2 of emulated ones]"
        ),
    ] = None,
    accelerator: Accelerator = None,
    nic: Nic = None,
    verbs: Verbs = None,
    scale: Annotated[
        float | None, typer.Option(help="Scale the scores of attention by this. [head_dim^-0.5]")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(help=f"Route the tokens of MoE in this way: {', '.join(ROUTINGS)}. [uniform]"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Give the inputs this dtype; of ops that multiply also float8_e4m3, with scales. "
            "[float16]"
        ),
    ] = None,
    scales: Scaling = None,
    fast_accum: FastAccum = False,
    out_dtype: Annotated[
        str | None,
        typer.Option(
            help="Give the result this dtype. [GEMM: float32 where the accelerator can, bfloat16 of "
            "float8_e4m3; else as the inputs]"
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Lay the weight in memory by row or column. [row]")
    ] = None,
    chunk: Chunk = None,
    input: Annotated[
        list[Path] | None,
        typer.Option(
            help="Read whole tensors from a .safetensors (GEMM: a, b; MoE: x, topk_ids, w, "
            "topk_weights; attention: q, k, v); or, given twice, a GEMM's from a.npy, then b.npy."
        ),
    ] = None,
    replicate_b: Annotated[
        bool | None,
        typer.Option(
            "--replicate-b/--shard-b",
            help="Let every rank of all_gather_gemm use the whole B, or its share of columns. "
            "[replicated random data, sharded files]",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write rank<i>.safetensors, trace.json and timeline.png to this folder."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the timeline as a Perfetto trace."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0, help="Make so many untimed calls of each view. [1; 0 of simulated devices]"
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, help="Make so many timed calls of each view. [3; 1 of simulated devices]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draw the random data by this seed.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(help="End every wait after so many seconds. [MKERNEL_TIMEOUT_S]")
    ] = None,
    json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print the whole plan, with the digest that ranks compare."),
    ] = False,
) -> None:
    """Run an op on ranks of this machine, in three views, and check it against float64."""
    name = ops.canonical(op)
    settings = load_settings()
    if timeout is not None:
        check_timeout("--timeout", timeout)
    _check_ranks(nodes, ranks_per_node, settings)
    backends, nodes, ranks_per_node = _chosen(
        settings, name, nodes, ranks_per_node, accelerator, nic, verbs
    )
    _check_ranks(nodes, ranks_per_node, settings)
    scales = scales_of(dtype, scales, name, fast=fast_accum)
    wanted = _Wanted(
        dtype, out_dtype, layout, routing, scale, replicate_b, chunk, seed, scales, fast_accum
    )
    paths = tuple(input or ())
    world_size = nodes * ranks_per_node
    sized = (
        _from_files(name, paths, given, wanted, world_size)
        if paths
        else _random(name, given, wanted, world_size)
    )
    console = Terminal(quiet=json, highlight=False)
    claims = registry.accelerator(backends.accelerator).capabilities()
    # A simulated device takes as long each time, by its own clock.
    warmup = (0 if claims.simulated else 1) if warmup is None else warmup
    iterations = (1 if claims.simulated else 3) if iterations is None else iterations
    case = _case(name, sized, wanted, claims.mixed_dtypes)
    job = Job(
        cases=(case,),
        contenders=VIEWS,
        warmup=warmup,
        iterations=iterations,
        files=tuple(path.resolve() for path in paths),
        output=output.resolve() if output else None,
    )
    check_fits(name, case.sizes, world_size, case.dtype, case.out_dtype)
    topology = machine.emulated_topology(
        machine.machine_topology(backends),
        backends,
        nodes,
        ranks_per_node,
        settings,
    )
    plan = _plan(case, topology, backends, nodes, ranks_per_node)
    console.print(render.topology(topology))
    console.print(render.plan(plan, brief=True, verbose=verbose))
    if output is not None:
        _make_folder(output)
    if trace is not None and not trace.parent.is_dir():
        raise InputFileError(f"--trace {trace}: no such folder: {trace.parent}; make it first")

    turns = len(VIEWS) * (warmup + iterations) + 1
    with _progress(console, turns) as step:
        results = launch(
            rank.run,
            job,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            accelerator=backends.accelerator,
            nic=backends.nic,
            verbs=backends.verbs,
            timeout_s=timeout,
            on_report=step,
        )
    ranks = report.views(results)
    _same_plan(plan, ranks)
    modelled = _model(backends.accelerator, plan, ranks)
    outcome = report.build(job, plan, topology, results, modelled)
    pipelined = [call["pipelined"] for call in modelled]
    drawn = timeline.modelled(pipelined) if modelled else timeline.wall(ranks)
    if trace is not None:
        with writing("--trace", trace):
            timeline.write_trace(drawn, trace)
    pictured = output is not None and _write_pictures(drawn, output)
    if json:
        write_json(outcome.model_dump_json(indent=2))
    console.print(report.render(outcome, measured_constants=settings.constants is not None))
    if output is not None:
        files = ", trace.json and timeline.png are" if pictured else " and trace.json are"
        console.print(f"results{files} in {output}")
        if not pictured:
            console.print(f"timeline.png was not drawn: matplotlib is missing; {MATPLOTLIB}")
    raise typer.Exit(0 if outcome.passed else 1)


def _check_ranks(nodes: int | None, ranks_per_node: int | None, settings: Settings) -> None:
    """Check the number of ranks; a number that is not given counts as 1."""
    check_ranks(
        1 if nodes is None else nodes,
        1 if ranks_per_node is None else ranks_per_node,
        settings.ranks_per_cpu,
        ("--nodes", "--ranks-per-node"),
    )


def _chosen(
    settings: Settings,
    op: OpName,
    nodes: int | None,
    ranks_per_node: int | None,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> tuple[Backends, int, int]:
    """Choose the backends, once for all ranks, and the world: two nodes of two ranks if devices are
    emulated, else one node with all ranks that the machine's devices take."""
    named = selection.named_for(op, accelerator or settings.accelerator)
    if named == AUTO:
        named = selection.accelerator_here(op, settings, nodes)
    backend = machine.usable_accelerator(named)
    selection.require_op(named, backend.capabilities(), op)
    chosen, nodes, ranks_per_node = selection.world_here(
        settings, named, nodes, ranks_per_node, nic, verbs
    )
    if chosen.nic and chosen.verbs:
        machine.usable_nic(chosen.nic, chosen.verbs)
    return chosen, nodes, ranks_per_node


@dataclass(frozen=True)
class _Wanted:
    """The command line's options other than sizes, as given."""

    dtype: str | None
    out_dtype: str | None
    layout: str | None
    routing: str | None
    scale: float | None
    replicate_b: bool | None
    chunk: int | None
    seed: int
    scales: ScaleMode | None
    fast_accum: bool


@dataclass(frozen=True)
class _Sized:
    """The inputs of a plan, from the options or from files."""

    sizes: dict[str, int]
    dtype: DtypeName
    replicate_b: bool


def _random(op: OpName, given: Given, wanted: _Wanted, world_size: int) -> _Sized:
    chosen = sizes_or_defaults(op, given)
    replicate = wanted.replicate_b is not False
    if not replicate and op == "all_gather_gemm":
        chosen["n"] = inputs.columns_of_b(chosen["n"], world_size)
    dtype = E4M3 if wanted.scales else _dtype("--dtype", wanted.dtype or "float16")
    return _Sized(chosen, dtype, replicate)


def _from_files(
    op: OpName,
    paths: tuple[Path, ...],
    given: Given,
    wanted: _Wanted,
    world_size: int,
) -> _Sized:
    others = {"dtype": wanted.dtype, "routing": wanted.routing}
    decided = {**{name: size for name, size in given.items() if name != "causal"}, **others}
    for name, value in decided.items():
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(option, "given", "nothing beside --input, which decides it")
    sizes_or_defaults(op, {"causal": given["causal"]})  # refuses it where it means nothing
    tensors = inputs.load(op, paths)
    replicate = bool(wanted.replicate_b)
    first = next(iter(tensors))
    if tensors[first].dtype == DTYPES[E4M3]:
        raise ArgumentError("--input", f"{first} in {E4M3}", "another dtype: files have no scales")
    return _Sized(
        inputs.sizes(op, tensors, world_size, replicate_b=replicate, causal=bool(given["causal"])),
        dtype_name(f"{first}.dtype", tensors[first].dtype, tuple(DTYPES)),
        replicate,
    )


def _case(op: OpName, sized: _Sized, wanted: _Wanted, mixes: bool) -> Case:
    """Return the case. ``mixes``: the accelerator's results may differ from its inputs in dtype."""
    case = case_of(op)
    gemm, moe, attention = issubclass(case, GemmCase), op.startswith("moe"), op == "ring_attention"
    for option, value, legal, where in (
        ("--replicate-b", wanted.replicate_b, op == "all_gather_gemm", "all_gather_gemm"),
        ("--routing", wanted.routing, moe, "the MoE ops"),
        ("--scale", wanted.scale, attention, "ring_attention"),
        ("--layout", wanted.layout, op not in WITHOUT_B, "ops with a weight"),
        ("--out-dtype", wanted.out_dtype, not attention, "ops whose result may differ in dtype"),
    ):
        if value is not None and not legal:
            raise ArgumentError(option, value, f"nothing: only for {where}, not {op}")
    _one_of("--routing", wanted.routing, ROUTINGS)
    _one_of("--layout", wanted.layout, _LAYOUTS)
    options: dict[str, Any] = {"replicate_b": sized.replicate_b} if gemm else {}
    if wanted.routing is not None:
        options["routing"] = wanted.routing
    if wanted.scale is not None:
        options["scale"] = wanted.scale
    if wanted.scales is not None:
        options["scales"] = wanted.scales
    if wanted.fast_accum:
        options["use_fast_accum"] = True
    default = "float32" if gemm and mixes else sized.dtype
    default = "bfloat16" if wanted.scales is not None else default
    layout = layout_of(wanted.layout, wanted.scales)
    return case(
        sizes=sized.sizes,
        dtype=sized.dtype,
        out_dtype=_dtype("--out-dtype", wanted.out_dtype or default),
        layout=layout,
        chunk=wanted.chunk,
        seed=wanted.seed,
        options=options,
    )


def _dtype(option: str, name: str) -> DtypeName:
    _one_of(option, name, tuple(DTYPES))
    return cast(DtypeName, name)


def _one_of(option: str, value: str | None, legal: Sequence[str]) -> None:
    if value is not None and value not in legal:
        raise ArgumentError(option, repr(value), "one of " + ", ".join(legal))


def _plan(
    case: Case, topology: Topology, backends: Backends, nodes: int, ranks_per_node: int
) -> LaunchPlan:
    """Return the plan, which the ranks will compute too."""
    return api.plan(
        case.op,
        dtype=case.dtype,
        out_dtype=case.out_dtype,
        b_layout=_layout(case),
        scales=case.options.get("scales"),
        use_fast_accum=case.options.get("use_fast_accum", False),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=backends.accelerator,
        nic=backends.nic,
        verbs=backends.verbs,
        topology=topology,
        chunk=case.chunk,
        path=None,
        exchange=None,
        invariant=None,
        **case.sizes,
    )


def _layout(case: Case) -> Literal["row", "column"]:
    """Return the layout that the op detects: a weight of one row or column has both, and is called
    row."""
    sizes = case.sizes
    inner, outer = ("k", "n") if isinstance(case, GemmCase) else ("hidden", "features")
    thin = 1 in (sizes.get(inner, 1), sizes.get(outer, 1))
    known = not thin or case.dtype == E4M3  # which is column-major, or nothing
    return "column" if case.layout == "column" and known else "row"


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputFileError(f"--output {output}: cannot be made: {error.strerror}") from error


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting ranks", total=total)

        def step(_rank: int, turn: TurnDone) -> None:
            progress.update(task, advance=1, description=turn.done.replace("_", " "))

        yield step
        progress.update(task, completed=total, description="done")


def _same_plan(plan: LaunchPlan, ranks: Sequence[Mapping[str, Turns]]) -> None:
    """Check that the plan that was printed is the one that was launched."""
    for number, found in enumerate(ranks):
        digest = found["pipelined"].digest
        if digest != plan.digest():
            raise PlanMismatch((0, number), "digest", (plan.digest(), digest))


def _model(
    accelerator: str, plan: LaunchPlan, ranks: Sequence[Mapping[str, Turns]]
) -> list[report.Views]:
    """Return each call of the ranks' traced iteration in three views; none if time is not modelled."""
    backend = registry.accelerator(accelerator)
    calls = []
    for traces in zip(*(found["pipelined"].traces for found in ranks), strict=True):
        runs = {view: instrumented.model(backend, plan, traces, view) for view in VIEWS}
        calls.append({view: run for view, run in runs.items() if run is not None})
    return [views for views in calls if len(views) == len(VIEWS)]


def _write_pictures(run: timeline.Timeline, output: Path) -> bool:
    """Write trace.json, and timeline.png if matplotlib is available; return whether it was."""
    with writing("--output", output):
        timeline.write_trace(run, output / "trace.json")
        try:
            timeline_picture.write_timeline(run, output / "timeline.png")
        except ImportError:
            return False
    return True
