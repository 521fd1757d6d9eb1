"""``mkernel bench --model-only``: times that the ascend backend's machine model predicts. Nothing is
run and no tensor exists; every time here is *modelled*, but those that were published.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from mkernel import api
from mkernel.backends.accelerators.ascend import reference
from mkernel.backends.accelerators.ascend.backend import record
from mkernel.backends.accelerators.ascend.explain import Explanation, explain
from mkernel.backends.accelerators.ascend.machine import Machine, using
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.accelerators.ascend.trace import communication
from mkernel.harness.floors import Floor, Rates, floor_us, floors
from mkernel.harness.run_report import Clock, modelled_clock
from mkernel.harness.spec import VIEWS, Shape, size_text
from mkernel.plan.model import DtypeName, LaunchPlan, OpName
from mkernel.tabular import Column, Sheet, amount
from mkernel.topology.model import Model

ACCELERATOR = "ascend"
TABLES = ("a3",)
OnRow = Callable[[str], None]


class Sized(Model):
    """An op at one size: all that its plan takes, by name."""

    op: OpName
    sizes: dict[str, int]


class Explained(Model):
    """An account of a row's time, beside the least that bytes and work over the machine's rates allow
    (``floor_us``, with one launch) and what the plan predicts (``predicted_us``)."""

    use: Explanation
    floors: tuple[Floor, ...]
    floor_us: float
    predicted_us: float | None


class ModelledRow(Model):
    """One op and size on ``ranks`` ranks of one node; three views."""

    shape: Sized
    ranks: int
    modelled: Clock
    explained: Explained | None = None


class PublishedComparison(Model):
    """A published row beside what the model makes of the published schedule and of ours.

    ``fitted``: the machine's constants were fitted on this row. ``error``: of the modelled published
    schedule, relative to the published time. ``speedup``: modelled published over modelled ours.
    """

    ranks: int
    m: int
    k: int
    n: int
    fitted: bool
    published_ms: float
    reference_modelled_ms: float
    ours_modelled_ms: float
    error: float
    speedup: float

    def tflops(self, ms: float) -> float:
        """Return 2·M·K·N over a time: what each rank computes, since C is whole on all of them."""
        return 2 * self.m * self.k * self.n / ms / 1e9


class ModelledReport(Model):
    """Shapes of the caller."""

    format: Literal["mkernel-modelled-2"] = "mkernel-modelled-2"
    machine: Machine
    rows: tuple[ModelledRow, ...]


class ComparisonReport(Model):
    """The published table. Errors are relative: their mean and worst size, over the rows that only
    check the machine's constants and over all."""

    format: Literal["mkernel-modelled-table-1"] = "mkernel-modelled-table-1"
    title: str
    machine: Machine
    rows: tuple[PublishedComparison, ...]
    mean_error: float
    worst_error: float
    mean_error_of_checks: float
    geometric_mean_speedup: float


def shapes(
    wanted: Sequence[Shape],
    ranks: int,
    dtype: DtypeName,
    layout: Literal["row", "column"],
    machine: Machine,
    on_row: OnRow = lambda row: None,
    *,
    explained: bool = False,
) -> ModelledReport:
    """Model our schedule at each shape; ``explained``: and say where its time goes."""
    rows = []
    for each in wanted:
        with using(machine):
            plan = _planned(each, ranks, dtype, layout)
            traces = _traces(plan)
        runs = {view: model(traces, machine, view, tracks=False) for view in VIEWS}
        alone = model(communication(traces), machine, tracks=False).total_us if ranks > 1 else 0.0
        sized = Sized(op=each.op, sizes=each.named_sizes)
        why = _explained(plan, traces, machine) if explained else None
        rows.append(
            ModelledRow(
                shape=sized, ranks=ranks, modelled=modelled_clock([runs], alone), explained=why
            )
        )
        on_row(each.size)
    return ModelledReport(machine=machine, rows=tuple(rows))


def compare(machine: Machine, on_row: OnRow = lambda row: None) -> ComparisonReport:
    """Model the published rows: float16 in, float32 out, B and C whole on every rank."""
    table = reference.published()
    rows = []
    for each in table.rows:
        theirs = [reference.trace(each.shape, rank) for rank in range(each.ranks)]
        reference_ms = model(theirs, machine, tracks=False).total_us / 1e3
        shape = Shape(op="all_gather_gemm", m=each.m, n=each.n, k=each.k)
        with using(machine):
            ours = _traces(_planned(shape, each.ranks))
        ours_ms = model(ours, machine, tracks=False).total_us / 1e3
        rows.append(
            PublishedComparison(
                ranks=each.ranks,
                m=each.m,
                k=each.k,
                n=each.n,
                fitted=each.fitted,
                published_ms=each.ms,
                reference_modelled_ms=reference_ms,
                ours_modelled_ms=ours_ms,
                error=reference_ms / each.ms - 1,
                speedup=reference_ms / ours_ms,
            )
        )
        on_row(f"{each.ranks} ranks, {each.m} x {each.k} x {each.n}")
    errors = [abs(row.error) for row in rows]
    checks = [abs(row.error) for row in rows if not row.fitted]
    return ComparisonReport(
        title=table.title,
        machine=machine,
        rows=tuple(rows),
        mean_error=statistics.fmean(errors),
        worst_error=max(errors),
        mean_error_of_checks=statistics.fmean(checks),
        geometric_mean_speedup=statistics.geometric_mean(row.speedup for row in rows),
    )


def _planned(
    shape: Shape,
    ranks: int,
    dtype: DtypeName = "float16",
    layout: Literal["row", "column"] = "row",
) -> LaunchPlan:
    """Plan a call in one node. AllGather+GEMM gives float32, as the published one does; the
    others the dtype of their inputs."""
    sizes: dict[str, Any] = shape.named_sizes
    return api.plan(
        shape.op,
        dtype=dtype,
        out_dtype=None if shape.op == "all_gather_gemm" else dtype,
        b_layout=layout,
        nodes=1,
        ranks_per_node=ranks,
        accelerator=ACCELERATOR,
        **sizes,
    )


def _traces(plan: LaunchPlan) -> list[bytes]:
    return [record(plan, rank) for rank in range(plan.world_size)]


def rates_of(machine: Machine, dtype: DtypeName) -> Rates:
    """Return what floors take of a machine."""
    cube, clock = machine.cube, machine.clock_ghz
    macs = cube.macs_per_cycle_32bit if dtype == "float32" else cube.macs_per_cycle_16bit
    return Rates(
        matrix_tflops=2e-3 * macs * clock * machine.aic_cores,
        sums_gbs=machine.vector.bytes_per_cycle * clock * machine.aiv_cores,
        link_gbs=machine.fabric.link_rate,
        egress_gbs=machine.fabric.egress_rate,
        launch_us=machine.chip.launch_us,
        between_units_gbs=machine.chip.l2_gbs,
    )


def _explained(plan: LaunchPlan, traces: Sequence[bytes], machine: Machine) -> Explained:
    rates = rates_of(machine, plan.dtype)
    found = floors(plan.op, plan.shape, plan.dtype, plan.world_size, rates, "balanced")
    predicted = plan.prediction
    return Explained(
        use=explain(traces, machine),
        floors=found,
        floor_us=floor_us(found, rates),
        predicted_us=predicted.pipelined_us if predicted else None,
    )


def render(report: ModelledReport) -> RenderableType:
    """Show shapes on a terminal."""
    times = ("compute only", "communication only", "sequential", "pipelined")
    drawn = Sheet(
        (
            *(Column(name, key=True) for name in ("op", "world", "M x N x K, or sizes")),
            *(Column(f"{name}, modelled", right=True, unit="ms") for name in times),
            *(Column(name, right=True) for name in ("speed-up", "overlap efficiency")),
        ),
        f"modelled times on {report.machine.name}",
    )
    for row in report.rows:
        clock = row.modelled
        drawn.row(
            row.shape.op,
            f"{row.ranks} ranks",
            size_text(row.shape.op, row.shape.sizes),
            f"{clock.compute_only_ms:.3f}",
            f"{clock.comm_only_ms:.3f}",
            f"{clock.sequential_ms:.3f}",
            f"{clock.pipelined_ms:.3f}",
            f"{clock.speedup:.2f}",
            f"{clock.overlap_efficiency:.0%}",
        )
    why = [table for row in report.rows for table in _explanation(row)]
    return Group(drawn, *why, _note(report.machine))


def _explanation(row: ModelledRow) -> list[RenderableType]:
    """Show what a row's floors are, and where its ranks' time goes."""
    if row.explained is None:
        return []
    why, use = row.explained, row.explained.use
    least = Sheet(
        (
            Column("the least that", key=True),
            *(Column(name, right=True) for name in ("amount", "us")),
        ),
        f"\n{row.shape.op} on {row.ranks} ranks, {size_text(row.shape.op, row.shape.sizes)}: modelled",
    )
    for one in why.floors:
        size = amount(one.amount) if one.unit == "B" else f"{one.amount / 1e9:.1f} Gflop"
        least.row(f"{one.resource} takes", size, f"{one.us:.1f}")
    said = (
        f"floor {why.floor_us:.1f} us with the launch; modelled {use.pipelined_us:.1f} us, "
        f"{use.pipelined_us / why.floor_us:.2f} of it; communication alone "
        f"{use.communication_us:.1f} us"
    )
    if why.predicted_us is not None:
        off = why.predicted_us / use.pipelined_us - 1
        said += f"; the plan predicts {why.predicted_us:.1f} us, {off:+.0%}"
    names = tuple(dict.fromkeys(name for rank in use.ranks for name in rank.pipes))
    peers = tuple(str(rank.rank) for rank in use.ranks)
    tables = [
        _by_rank("busy, us a core, in the mean", names, [rank.pipes for rank in use.ranks]),
        _by_rank(
            "what a rank's cores share, us",
            ("memory", "egress", "ingress"),
            [
                {"memory": one.memory_us, "egress": one.egress_us, "ingress": one.ingress_us}
                for one in use.ranks
            ],
        ),
        _by_rank("link to each rank, us", peers, [_named(one.links) for one in use.ranks]),
    ]
    tables += [
        _by_rank(
            f"the {kernel} kernel waits for signals of each rank, us a core, in the mean",
            peers,
            [_named(one.waits[kernel]) for one in use.ranks],
        )
        for kernel in ("compute", "comm")
        if any(one.waits[kernel] for one in use.ranks)
    ]
    return [least, Text(said), *tables]


def _named(times: Mapping[int, float]) -> dict[str, float]:
    return {str(rank): us for rank, us in times.items()}


def _by_rank(title: str, names: Sequence[str], ranks: Sequence[Mapping[str, float]]) -> Sheet:
    drawn = Sheet((Column("rank", key=True), *(Column(name, right=True) for name in names)), title)
    for rank, times in enumerate(ranks):
        cells = (f"{times[name]:.0f}" if name in times else "-" for name in names)
        drawn.row(str(rank), *cells)
    return drawn


def render_comparison(report: ComparisonReport) -> RenderableType:
    """Show the published table on a terminal."""
    figures = (
        ("published", "ms"),
        ("published", "TFLOP/s"),
        ("published schedule, modelled", "ms"),
        ("error", ""),
        ("ours, modelled", "ms"),
        ("ours, modelled", "TFLOP/s"),
        ("modelled speed-up", ""),
    )
    drawn = Sheet(
        (
            Column("world", key=True),
            Column("M x K x N", key=True),
            *(Column(name, right=True, unit=unit) for name, unit in figures),
            Column("used to"),
        ),
        f"{report.title}; modelled on {report.machine.name}",
    )
    for row in report.rows:
        drawn.row(
            f"{row.ranks} ranks",
            f"{row.m} x {row.k} x {row.n}",
            f"{row.published_ms:.3f}",
            f"{row.tflops(row.published_ms):.0f}",
            f"{row.reference_modelled_ms:.3f}",
            f"{row.error:+.1%}",
            f"{row.ours_modelled_ms:.3f}",
            f"{row.tflops(row.ours_modelled_ms):.0f}",
            f"{row.speedup:.2f}x",
            "fit" if row.fitted else "check",
        )
    summary = Text(
        f"modelled against published: mean error {report.mean_error:.1%}, worst "
        f"{report.worst_error:.1%}; rows that only check: mean {report.mean_error_of_checks:.1%}\n"
        f"modelled speed-up of our schedule over the published one: geometric mean "
        f"{report.geometric_mean_speedup:.2f}x\n"
        "TFLOP/s are of one rank. Each computes all of C, so that more ranks shorten what travels and "
        "no product: where that is hidden, a rank computes as fast as alone."
    )
    return Group(drawn, summary, _note(report.machine))


def _note(machine: Machine) -> Text:
    return Text(
        f"Modelled, not measured: no device was used. Constants: {machine.source}", style="dim"
    )
