"""``mkernel bench --model-only``: times that the ascend backend's machine model predicts. Nothing is
run and no tensor exists; every time here is *modelled*, but those that were published.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from mkernel import api
from mkernel.backends.accelerators.ascend import reference
from mkernel.backends.accelerators.ascend.backend import record
from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.harness.run_report import Clock, modelled_clock
from mkernel.harness.spec import GEMMS, VIEWS, Shape, size_text
from mkernel.plan.model import DtypeName, OpName
from mkernel.tabular import Column, Sheet
from mkernel.topology.model import Model

ACCELERATOR = "ascend"
TABLES = ("a3",)
OnRow = Callable[[str], None]


class Sized(Model):
    """An op at one size: all that its plan takes, by name."""

    op: OpName
    sizes: dict[str, int]


class ModelledRow(Model):
    """One op and size on ``ranks`` ranks of one node; three views."""

    shape: Sized
    ranks: int
    modelled: Clock


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
) -> ModelledReport:
    """Our schedule at each shape."""
    rows = []
    for each in wanted:
        traces = _ours(each, ranks, dtype, layout)
        runs = {view: model(traces, machine, view, tracks=False) for view in VIEWS}
        sized = Sized(op=each.op, sizes=each.named_sizes)
        rows.append(ModelledRow(shape=sized, ranks=ranks, modelled=modelled_clock([runs])))
        on_row(each.size)
    return ModelledReport(machine=machine, rows=tuple(rows))


def compare(machine: Machine, on_row: OnRow = lambda row: None) -> ComparisonReport:
    """The published rows: float16 in, float32 out, B and C whole on every rank."""
    table = reference.published()
    rows = []
    for each in table.rows:
        theirs = [reference.trace(each.shape, rank) for rank in range(each.ranks)]
        reference_ms = model(theirs, machine, tracks=False).total_us / 1e3
        ours = _ours(Shape(op="all_gather_gemm", m=each.m, n=each.n, k=each.k), each.ranks)
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


def _ours(
    shape: Shape,
    ranks: int,
    dtype: DtypeName = "float16",
    layout: Literal["row", "column"] = "row",
) -> list[bytes]:
    """Traces of our kernels in one node, as they are planned. GEMMs give float32, the others the
    dtype of their inputs."""
    sizes: dict[str, Any] = shape.named_sizes
    plan = api.plan(
        shape.op,
        dtype=dtype,
        out_dtype=None if shape.op in GEMMS else dtype,
        b_layout=layout,
        nodes=1,
        ranks_per_node=ranks,
        accelerator=ACCELERATOR,
        **sizes,
    )
    return [record(plan, rank) for rank in range(ranks)]


def render(report: ModelledReport) -> RenderableType:
    """Shapes for a terminal."""
    times = ("compute only", "communication", "sequential", "pipelined")
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
    return Group(drawn, _note(report.machine))


def render_comparison(report: ComparisonReport) -> RenderableType:
    """The published table for a terminal."""
    figures = (
        ("published", "ms"),
        ("published schedule, modelled", "ms"),
        ("error", ""),
        ("ours, modelled", "ms"),
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
            f"{row.reference_modelled_ms:.3f}",
            f"{row.error:+.1%}",
            f"{row.ours_modelled_ms:.3f}",
            f"{row.speedup:.2f}x",
            "fit" if row.fitted else "check",
        )
    summary = Text(
        f"modelled against published: mean error {report.mean_error:.1%}, worst "
        f"{report.worst_error:.1%}; rows that only check: mean {report.mean_error_of_checks:.1%}\n"
        f"modelled speed-up of our schedule over the published one: geometric mean "
        f"{report.geometric_mean_speedup:.2f}x"
    )
    return Group(drawn, summary, _note(report.machine))


def _note(machine: Machine) -> Text:
    return Text(
        f"Modelled, not measured: no device was used. Constants: {machine.source}", style="dim"
    )
