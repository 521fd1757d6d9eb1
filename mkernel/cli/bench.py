"""``mkernel bench OP[,OP]``: mkernel against its peers, timed alike and judged in the same run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.console import Console

from mkernel.backends import registry
from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.cli import terminal
from mkernel.cli.options import Accelerator, FastAccum, Nic, Scaling, Verbs, layout_of, scales_of
from mkernel.cli.terminal import MATPLOTLIB, Terminal, writing
from mkernel.errors import ArgumentError
from mkernel.harness import (
    bench_report,
    bench_run,
    conditions,
    contenders,
    modelled,
    numbers,
    plot,
    results,
)
from mkernel.harness.draws import MOST_DRAWS, ROWS, drawn
from mkernel.harness.shapes import NODES, SHIPPED, SMALL, TARGETS, shapes
from mkernel.harness.spec import GEMMS, MODES, Benched, BenchSpec, Mode, sized_like
from mkernel.launch import check_ranks
from mkernel.ops.validate import DTYPES
from mkernel.plan import ops
from mkernel.plan.invariance import Invariant, PartialName
from mkernel.plan.model import E4M3, DtypeName, ScaleMode
from mkernel.selection import chosen_accelerator, real_devices
from mkernel.settings import check_timeout
from mkernel.settings import load as load_settings
from mkernel.topology.model import Model

_CPU_RANKS = 2
_ITERATIONS, _CPU_ITERATIONS = 20, 5
_CPU_FLOPS = 2e10
"""The floating-point operations that a CPU does at least in a second of a product."""
_LONG_S = 60.0
_MULTIPLYING = 3
"""The number of contenders of a CPU that multiply: mkernel, a library's sequence, the product
alone."""
_MODELLED_RANKS = 4
_MODELLED_BY = frozenset(
    (
        "op",
        "ranks",
        "shapes_",
        "dtype",
        "layout",
        "accelerator",
        "table",
        "machine",
        "json",
        "timeout",
        "explain",
    )
)
"""Parameters that ``--model-only`` uses; none of the others may be given with it."""


def command(
    context: typer.Context,
    op: Annotated[
        str | None,
        typer.Argument(
            metavar="OP,...",
            help=f"Time these ops, separated by commas, or all: {ops.named()}; or moe_layer, which is "
            "dispatch+GEMM with SiLU, then GEMM+combine. [the GEMM ops]",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Spread the ranks over so many emulated nodes.")
    ] = 1,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start so many processes in all, one accelerator each. [all, as many on each node; "
            "without any 2]",
        ),
    ] = None,
    shapes_: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help=f"Time these shapes: {', '.join(SHIPPED)}, a JSON file, M x N x K, ..., or any "
            "op's as `name=value name=value, ...`. [GEMMs: targets, without GPUs small; others as run]",
        ),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Time the gradients of ring_attention instead of itself."),
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_DRAWS,
            metavar="N",
            help="Time N shapes drawn by --seed, instead of --shapes.",
        ),
    ] = None,
    most_rows: Annotated[
        int | None,
        typer.Option(
            min=ROWS[0], max=ROWS[1], metavar="M", help="Draw shapes of at most M rows by --random."
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help=f"Time in these modes, separated by commas: {', '.join(MODES)} (the first call of a "
            "shape)."
        ),
    ] = "kernel",
    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Compare with these peers: {', '.join(contenders.PEERS)}; module:Class; none. [all]"
        ),
    ] = None,
    only_peers: Annotated[
        bool, typer.Option("--only-peers", help="Leave mkernel itself out.")
    ] = False,
    accelerator: Accelerator = None,
    nic: Nic = None,
    verbs: Verbs = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Give inputs and outputs this dtype; inputs of GEMM ops, dispatch_gemm, "
            "gemm_combine and moe_layer also float8_e4m3, with scales and bfloat16 outputs. [bfloat16; "
            "float32 without accelerators]"
        ),
    ] = None,
    scales: Scaling = None,
    fast_accum: FastAccum = False,
    layout: Annotated[
        str | None,
        typer.Option(help="Lay B in memory by row or column. [row; of float8_e4m3 column]"),
    ] = None,
    routing: Annotated[
        str, typer.Option(help="Route MoE's tokens in this way: uniform, or zipf (exponent 1.2).")
    ] = "uniform",
    capacity: Annotated[
        bool,
        typer.Option(
            "--capacity",
            help="Give MoE a capacity: nothing waits for the host, and graphs capture it.",
        ),
    ] = False,
    invariant: Annotated[
        str | None,
        typer.Option(
            metavar="SEGMENTS[:DTYPE]",
            help="Time invariant results, too, by sums of so many segments with partial sums in that "
            "dtype, beside an invariant product and a tree of sums, which nothing fuses.",
        ),
    ] = None,
    norm: Annotated[
        bool,
        typer.Option("--norm", help="Time all_reduce and gemm_ar with a residual and RMSNorm."),
    ] = False,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, help="Take so many timed turns of each contender. [20; 5 without accelerators]"
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=1, help="Take so many untimed turns of each contender.")
    ] = 3,
    seed: Annotated[
        int, typer.Option(min=0, help="Draw the random data and shapes by this seed.")
    ] = 0,
    launches: Annotated[
        bool,
        typer.Option(
            "--launches", help="Count what a call costs the host to launch, in mode kernel."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="End every step after so many seconds.")] = 60.0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all times and figures.")
    ] = None,
    plot_: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw bars and rho: .svg, .png or .pdf."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Name the commit of this tree, where there is no git to ask.")
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="Run also what takes more than a minute without accelerators."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print all conditions of the figures, and the commit.")
    ] = False,
    model_only: Annotated[
        bool,
        typer.Option(
            "--model-only", help="Predict times of ascend by its machine model; nothing is run."
        ),
    ] = False,
    table: Annotated[
        str | None,
        typer.Option(
            help="Print this table with --model-only: a3, published times beside modelled ones."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print with --model-only where the time goes, beside floors."
        ),
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="CHIP|FILE",
            help="Model this chip with --model-only: a3, a2-24, a2-20, or a machine description. "
            "[MKERNEL_ASCEND_MACHINE]",
        ),
    ] = None,
    render: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Print the page of the results in DIR, and stop."),
    ] = None,
) -> None:
    """Time an op and its peers. Exit code 0 only if every contender's every result was right."""
    if render is not None:
        terminal.write(numbers.page(render))
        return
    console = Terminal()
    names = _ops(op, backward)
    for option, given in (
        ("--table", table),
        ("--machine", machine),
        ("--explain", explain or None),
    ):
        if given is not None and not model_only:
            raise ArgumentError(option, given, "nothing, or --model-only beside it")
    dtype, mode_of_scales, lies = _operands(
        dtype, scales, layout, names, fast=fast_accum, model_only=model_only
    )
    check_timeout("--timeout", timeout)
    if model_only:
        _refuse_unheeded(context)
        _model(
            console,
            names,
            shapes_,
            ranks or _MODELLED_RANKS,
            dtype or "bfloat16",
            lies,
            accelerator,
            table,
            machine,
            json,
            explain,
        )
        return
    _check_random(random, shapes_, names)
    if most_rows is not None and random is None:
        raise ArgumentError("--most-rows", most_rows, "nothing without --random")
    chosen = accelerator or chosen_accelerator(nodes, sized_like(names[0]))
    devices = len(real_devices(registry.accelerator(chosen)))
    ranks = ranks or _usual_ranks(devices, nodes)
    _check_ranks(nodes, ranks)
    promise = _invariant(invariant)
    usual = (NODES if (nodes, ranks) == (2, 2) else TARGETS) if devices else SMALL
    listed = shapes_ or (usual if set(names) & set(GEMMS) else "as mkernel run")
    spec = BenchSpec(
        shapes=drawn(random, seed, names, ranks, most_rows or ROWS[1])
        if random
        else shapes(shapes_, names, ranks, usual),
        source="random" if random else listed,
        modes=_modes(mode, launches),
        contenders=contenders.chosen(_peers(peers), not only_peers, promise is not None),
        dtype=dtype or ("bfloat16" if devices else "float32"),
        layout=lies,
        scales=mode_of_scales,
        routing=_routing(routing, capacity, names),
        capacity=capacity,
        fast_accum=fast_accum,
        norm=_norm(norm, names),
        invariant=promise,
        warmup=warmup,
        iterations=iterations or (_ITERATIONS if devices else _CPU_ITERATIONS),
        seed=seed,
        launches=launches,
        timeout_s=timeout,
    )
    if not devices:
        _say_what(console, spec, chosen, ranks, f"{random} drawn" if random else listed)
        if not long:
            _refuse_long(spec, ranks)
    rows = len(spec.shapes) * len(spec.modes)
    with terminal.progress(
        console, f"starting ranks to time {rows} row{'s' if rows > 1 else ''}", rows
    ) as on_row:
        outcome = bench_run.run(
            spec,
            ranks=ranks,
            accelerator=chosen,
            nodes=nodes,
            nic=nic,
            verbs=verbs,
            name=",".join(names),
            commit=commit,
            on_row=on_row,
        )
    if json is not None:
        results.write(outcome, json)
    if plot_ is not None:
        _draw(outcome, plot_, console)
    brief = not devices and not verbose
    console.print(bench_report.table(outcome, brief=brief))
    said = conditions.timed(outcome) if spec.modes != ("kernel",) else []
    said = said if brief else conditions.sentences(outcome)
    for line in (bench_report.legend(brief=brief), *said):
        console.print(line, style="dim")
    for line in bench_report.promise(outcome):
        console.print(line)
    console.print(bench_report.verdict(outcome))
    raise typer.Exit(0 if outcome.passed else 1)


def _check_random(random: int | None, shapes_: str | None, names: Sequence[Benched]) -> None:
    if random is not None and shapes_ is not None:
        raise ArgumentError("--random", random, "nothing beside --shapes")
    if random is not None and not set(names) <= set(GEMMS):
        raise ArgumentError("--random", random, f"nothing beside ops other than {', '.join(GEMMS)}")


def _usual_ranks(devices: int, nodes: int) -> int:
    """Return the default number of ranks: as many on each node, which is its share of the devices,
    or 2 if these are emulated."""
    return nodes * (max(1, devices // nodes) if devices else _CPU_RANKS)


def _check_ranks(nodes: int, ranks: int) -> None:
    if ranks % nodes:
        raise ArgumentError("--ranks", ranks, f"a multiple of {nodes}, the number of nodes")
    check_ranks(nodes, ranks // nodes, load_settings().ranks_per_cpu, ("--nodes", "--ranks"))


def _say_what(console: Console, spec: BenchSpec, accelerator: str, ranks: int, listed: str) -> None:
    """Print what is about to run, if the figures are not the usual ones."""
    ops = ", ".join(dict.fromkeys(shape.op for shape in spec.shapes))
    console.print(
        f"No accelerator is used: {_count(ranks, 'rank')} of {accelerator} on this machine's CPU will "
        f"time {ops} at {_count(len(spec.shapes), 'shape')} ({listed}), "
        f"{_count(spec.iterations, 'timed call')} of each contender. The figures compare contenders "
        "on this CPU and say nothing of GPUs."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _refuse_long(spec: BenchSpec, ranks: int) -> None:
    """Raise ArgumentError if products alone would take a CPU more than a minute."""
    turns = (spec.warmup + spec.iterations) * len(spec.modes)
    products = sum(2.0 * prod(one.named_sizes.values()) for one in spec.shapes if one.op in GEMMS)
    cpus = len(os.sched_getaffinity(0))
    seconds = (
        products * ranks * turns * min(len(spec.contenders), _MULTIPLYING) / (_CPU_FLOPS * cpus)
    )
    if seconds > _LONG_S:
        raise ArgumentError(
            "--shapes",
            spec.source,
            "sizes that a CPU multiplies within a minute (small), fewer --iterations, or --long",
            why=f"about {seconds / 60:.0f} minutes on {cpus} CPUs without an accelerator",
        )


def _refuse_unheeded(context: typer.Context) -> None:
    """Raise ArgumentError for an option that has no meaning if nothing is run."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in {*_MODELLED_BY, "model_only"}:
            value = context.params[name]
            raise ArgumentError(parameter.opts[0], value, "nothing: --model-only runs no processes")


def _model(
    console: Console,
    names: tuple[Benched, ...],
    sizes: str | None,
    ranks: int,
    dtype: str,
    layout: str,
    accelerator: str | None,
    table: str | None,
    machine: str | None,
    json: Path | None,
    explain: bool,
) -> None:
    if accelerator != modelled.ACCELERATOR:
        raise ArgumentError(
            "--accelerator",
            accelerator or chosen_accelerator(),
            f"{modelled.ACCELERATOR}, the one with a machine model, beside --model-only",
        )
    if MOE_LAYER in names:
        raise ArgumentError("op", MOE_LAYER, "its two ops by themselves, beside --model-only")
    if table not in (None, *modelled.TABLES):
        raise ArgumentError("--table", repr(table), f"one of: {', '.join(modelled.TABLES)}")
    if table is not None and explain:
        raise ArgumentError("--explain", explain, "nothing beside --table")
    described = load_machine(machine)
    with console.status("modelling") as status:
        report: Model
        if table is not None:
            report = modelled.compare(described, status.update)
            drawn = modelled.render_comparison(report)
        else:
            report = modelled.shapes(
                shapes(sizes, names, ranks),
                ranks,
                cast(DtypeName, dtype),
                cast(Literal["row", "column"], layout),
                described,
                status.update,
                explained=explain,
            )
            drawn = modelled.render(report)
    if json is not None:
        results.write(report, json)
    console.print(drawn)


def _ops(text: str | None, backward: bool) -> tuple[Benched, ...]:
    """Return the ops to time. ArgumentError: gradients are not timed for one of them."""
    if text == "all":
        names: tuple[Benched, ...] = (*ops.OPS, *ops.COMPANIONS)
    else:
        names = tuple(map(_benched, (text or ",".join(GEMMS)).split(",")))
    if not backward:
        return names
    if names != ("ring_attention",):
        raise ArgumentError("--backward", ", ".join(names), "ring_attention alone")
    return (ops.BACKWARD["ring_attention"],)


def _benched(text: str) -> Benched:
    return "moe_layer" if text.strip() == MOE_LAYER else ops.canonical(text)


def _operands(
    dtype: str | None,
    scales: str | None,
    layout: str | None,
    names: Sequence[Benched],
    *,
    fast: bool,
    model_only: bool,
) -> tuple[str | None, ScaleMode | None, Literal["row", "column"]]:
    """Return the dtype of the inputs, None if it is left open; their scales; and B's layout.
    ArgumentError."""
    if layout not in (None, "row", "column"):
        raise ArgumentError("--layout", repr(layout), "row or column")
    mode = scales_of(dtype, scales, *map(sized_like, names), fast=fast)
    if mode is not None:
        if model_only:
            raise ArgumentError("--dtype", dtype, "another one beside --model-only")
        return E4M3, mode, layout_of(layout, mode)
    legal = tuple(name for name in DTYPES if name != E4M3)
    if dtype not in (None, *legal):
        raise ArgumentError("--dtype", repr(dtype), f"one of: {', '.join(legal)}, float8_e4m3")
    return dtype, None, layout_of(layout, None)


def _modes(text: str, launches: bool) -> tuple[Mode, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        if name not in MODES:
            raise ArgumentError("--mode", repr(name), f"one or several of: {', '.join(MODES)}")
    if launches and "kernel" not in found:
        raise ArgumentError("--launches", text, "mode kernel: the others say by themselves")
    return cast(tuple[Mode, ...], found)


def _routing(text: str, capacity: bool, names: Sequence[Benched]) -> Literal["uniform", "zipf"]:
    """Return the routing. ArgumentError: also if none of the ops routes tokens."""
    if text not in ("uniform", "zipf"):
        raise ArgumentError("--routing", repr(text), "uniform or zipf")
    if not any(name.startswith("moe") for name in names):
        given = {"--capacity": capacity, "--routing": text != "uniform" and text}
        for option in filter(given.get, given):
            raise ArgumentError(option, given[option], "nothing, or an op of MoE beside it")
    return cast(Literal["uniform", "zipf"], text)


def _norm(wanted: bool, names: Sequence[Benched]) -> bool:
    """Return whether sums have a norm. ArgumentError: none of the ops is a sum."""
    if wanted and not {"all_reduce", "gemm_all_reduce"}.intersection(names):
        raise ArgumentError("--norm", wanted, "nothing, or all_reduce or gemm_ar beside it")
    return wanted


def _invariant(text: str | None) -> Invariant | None:
    if text is None:
        return None
    count, _, name = text.partition(":")
    if not count.isdecimal():
        raise ArgumentError("--invariant", repr(text), "SEGMENTS or SEGMENTS:DTYPE")
    return Invariant(int(count), cast("PartialName | None", name or None))


def _peers(text: str | None) -> Sequence[str] | None:
    if text is None:
        return None
    return [] if text == "none" else [part.strip() for part in text.split(",")]


def _draw(outcome: results.Report, path: Path, console: Console) -> None:
    with writing("--plot", path, ", .svg, .png or .pdf"):
        try:
            plot.write(outcome, path)
        except ImportError:
            console.print(f"{path} was not drawn: matplotlib is missing; {MATPLOTLIB}")
