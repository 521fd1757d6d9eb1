"""``mkernel run OP``: a measured, checked run on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mkernel import api, machine
from mkernel.backends import registry
from mkernel.backends.base import ModelledRun, View
from mkernel.errors import ArgumentError, InputFileError, PlanMismatch, ShapeError
from mkernel.identity import Backends
from mkernel.job import files, inputs, rank, report, timeline
from mkernel.job.rank import VIEWS, RankResult
from mkernel.job.spec import JobSpec
from mkernel.launch import launch
from mkernel.ops.validate import DTYPES, dtype_name
from mkernel.plan import ops, render
from mkernel.plan.model import LaunchPlan
from mkernel.settings import load as load_settings

_DEFAULT_SIZES = {"m": 2048, "n": 1024, "k": 2048}


def command(  # one option a parameter: this is the command line
    op: Annotated[str, typer.Argument(help="all_gather_gemm, or an alias such as ag_gemm")],
    nodes: Annotated[int, typer.Option(help="emulated nodes")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="ranks of each node")] = 2,
    accelerator: Annotated[str | None, typer.Option(help="accelerator backend")] = None,
    nic: Annotated[str | None, typer.Option(help="NIC backend between nodes")] = None,
    verbs: Annotated[str | None, typer.Option(help="soft, system, or a library's path")] = None,
    m: Annotated[int | None, typer.Option(help="rows of A, all ranks together [2048]")] = None,
    n: Annotated[int | None, typer.Option(help="columns of B [1024]")] = None,
    k: Annotated[int | None, typer.Option(help="columns of A, rows of B [2048]")] = None,
    dtype: Annotated[str | None, typer.Option(help="of A and B [float16]")] = None,
    out_dtype: Annotated[str, typer.Option(help="of C")] = "float32",
    chunk: Annotated[int | None, typer.Option(help="tiles a chunk [planner's choice]")] = None,
    input: Annotated[
        list[Path] | None,
        typer.Option(help="a .safetensors with keys a, b; or twice: a.npy, then b.npy"),
    ] = None,
    replicate_b: Annotated[
        bool | None,
        typer.Option(
            "--replicate-b/--shard-b",
            help="every rank uses the whole B, or its share of columns "
            "[replicated random data, sharded files]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder for rank<i>.safetensors, trace.json, timeline.png")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="untimed calls of each view")] = 1,
    iterations: Annotated[int, typer.Option(min=1, help="timed calls of each view")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the random data")] = 0,
    timeout: Annotated[float | None, typer.Option(help="deadline of every wait, seconds")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object instead")] = False,
) -> None:
    """Run an op on ranks of this machine, in three views, and check it against float64."""
    name = ops.canonical(op)
    _check_world(nodes, ranks_per_node)
    spec = _spec(
        name, (m, n, k), dtype, out_dtype, chunk, tuple(input or ()), replicate_b, output,
        (seed, warmup, iterations), nodes * ranks_per_node,
    )  # fmt: skip
    console = Console(quiet=json, highlight=False)
    settings = load_settings()
    backends = Backends(
        accelerator or settings.accelerator,
        (nic or settings.nic) if nodes > 1 else None,
        (verbs or settings.verbs) if nodes > 1 else None,
    )
    topology = machine.emulated_topology(
        machine.machine_topology(backends), backends, nodes, ranks_per_node
    )
    plan = api.plan(
        name,
        m=spec.m,
        n=spec.n,
        k=spec.k,
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=accelerator,
        nic=nic,
        verbs=verbs,
        topology=topology,
        chunk=chunk,
    )
    console.print(render.topology(topology))
    console.print(render.plan(plan))
    if output is not None:
        _make_folder(output)

    with _progress(console, rank.steps(spec)) as step:
        results = launch(
            rank.run,
            spec,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            accelerator=accelerator,
            nic=nic,
            verbs=verbs,
            timeout_s=timeout,
            on_report=step,
        )
    _same_plan(plan, results)
    modelled = _model(backends.accelerator, results)
    outcome = report.build(spec, plan, topology, results, modelled)
    if output is not None and modelled:
        _write_pictures(modelled["pipelined"], output, console)
    if json:
        print(outcome.model_dump_json(indent=2))
    console.print(report.render(outcome))
    if output is not None:
        console.print(f"results, trace.json and timeline.png are in {output}")
    raise typer.Exit(0 if outcome.passed else 1)


def _check_world(nodes: int, ranks_per_node: int) -> None:
    for name, value in (("--nodes", nodes), ("--ranks-per-node", ranks_per_node)):
        if value < 1:
            raise ArgumentError(name, value, "an integer of at least 1")


def _spec(  # the command line's options, made consistent
    op: str,
    sizes: tuple[int | None, int | None, int | None],
    dtype: str | None,
    out_dtype: str,
    chunk: int | None,
    paths: tuple[Path, ...],
    replicate_b: bool | None,
    output: Path | None,
    counts: tuple[int, int, int],
    world_size: int,
) -> JobSpec:
    result_dtype = _dtype("--out-dtype", out_dtype)
    if paths:
        given = [f"--{name}" for name, size in zip("mnk", sizes, strict=True) if size is not None]
        if given or dtype is not None:
            raise ArgumentError(
                (given or ["--dtype"])[0], "given", "nothing beside --input, which decides it"
            )
        a, b = inputs.load(paths)
        m, n, k = a.shape[0], b.shape[1], a.shape[1]
        data_dtype = dtype_name("a.dtype", a.dtype, tuple(DTYPES))
        replicate = bool(replicate_b)
    else:
        m, n, k = (
            size if size is not None else _DEFAULT_SIZES[name]
            for name, size in zip("mnk", sizes, strict=True)
        )
        data_dtype = _dtype("--dtype", dtype or "float16")
        replicate = replicate_b is not False
    if not replicate:
        if n % world_size:
            raise ShapeError(
                "n",
                n,
                f"a multiple of {world_size} ranks",
                why="B is sharded by columns; --replicate-b keeps it whole",
            )
        n //= world_size
    seed, warmup, iterations = counts
    return JobSpec(
        op=op, m=m, n=n, k=k, dtype=data_dtype, out_dtype=result_dtype, replicate_b=replicate,
        chunk=chunk, files=tuple(path.resolve() for path in paths),
        output=output.resolve() if output else None, seed=seed, warmup=warmup,
        iterations=iterations,
    )  # fmt: skip


def _dtype(option: str, name: str) -> Any:
    if name not in DTYPES:
        raise ArgumentError(option, repr(name), "one of " + ", ".join(DTYPES))
    return name


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
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting ranks", total=total)

        def step(_rank: int, view: str) -> None:
            progress.update(task, advance=1, description=view.replace("_", " "))

        yield step
        progress.update(task, completed=total, description="done")


def _same_plan(plan: LaunchPlan, results: Sequence[RankResult]) -> None:
    """What was printed is what was launched."""
    for number, result in enumerate(results):
        if result.digest != plan.digest():
            raise PlanMismatch((0, number), "digest", (plan.digest(), result.digest))


def _model(accelerator: str, results: Sequence[RankResult]) -> dict[View, ModelledRun]:
    traces = [result.trace for result in results if result.trace is not None]
    if len(traces) != len(results):
        return {}
    backend = registry.accelerator(accelerator)
    runs = {view: backend.model(traces, view) for view in VIEWS}
    return {view: run for view, run in runs.items() if run is not None}


def _write_pictures(run: ModelledRun, output: Path, console: Console) -> None:
    files.write_trace(run, output / "trace.json")
    try:
        timeline.write_timeline(run, output / "timeline.png")
    except ImportError:
        console.print("timeline.png not drawn: matplotlib is missing; pip install 'mkernel[bench]'")
