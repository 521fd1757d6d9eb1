"""The picture of a run: time over the product alone, by contender; rho against size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkernel.harness.bench_report import SHORT, contenders, title
from mkernel.harness.results import Report
from mkernel.user_files import save_picture

_COLOURS = {
    "mkernel": "#d1495b",
    "symm_mem": "#30638e",
    "nccl+cublas": "#edae49",
    "gloo+matmul": "#edae49",
}
_OTHERS = ("#00798c", "#8d96a3", "#66a182", "#2e4057")


def write(report: Report, path: Path) -> None:
    """Draw it. ImportError: matplotlib is missing (extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row.shape.op for row in report.rows))
    names = [
        name
        for name in contenders(report)
        if any(row.entries[name].kind == "op" for row in report.rows)
    ]
    rest = iter(_OTHERS * len(names))
    colours = {name: _COLOURS.get(name) or next(rest) for name in names}
    figure, axes = pyplot.subplots(
        2,
        len(ops),
        figsize=(max(6.0, 5.2 * len(ops)), 8.0),
        squeeze=False,
        constrained_layout=True,
    )
    for column, op in enumerate(ops):
        _bars(axes[0][column], report, op, names, colours)
        _roofline(axes[1][column], report, op, names, colours)
    figure.suptitle(f"{title(report)}, commit {report.provenance['commit'][:10]}")
    save_picture(figure, path)
    pyplot.close(figure)


def _bars(axes: Any, report: Report, op: str, names: list[str], colours: dict[str, str]) -> None:
    rows = [row for row in report.rows if row.shape.op == op]
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        at, heights = [], []
        for j, row in enumerate(rows):
            found = row.entries[name].figures
            if found is not None and found.to_gemm is not None:
                at.append(j - 0.4 + (i + 0.5) * width)
                heights.append(found.to_gemm)
        axes.bar(at, heights, width, label=name, color=colours[name])
    for j, row in enumerate(rows):
        if row.target is not None:
            axes.plot((j - 0.4, j + 0.4), (row.target,) * 2, color="black", linewidth=1.2)
        if row.floor_us is not None and row.compute_us:
            floor = row.floor_us / row.compute_us
            axes.plot((j - 0.4, j + 0.4), (floor, floor), "k:", linewidth=1.0)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    labels = [
        (row.shape.name or row.shape.size.replace(" ", ""))
        + ("" if row.mode == "kernel" else f" {row.mode}")
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels, rotation=90 if len(rows) > 6 else 20, fontsize=7)
    axes.set_title(f"{SHORT.get(op, op)}: time / product alone")
    axes.set_ylabel("lower is better (— target, ··· floor)")
    axes.legend(fontsize=7)


def _roofline(
    axes: Any, report: Report, op: str, names: list[str], colours: dict[str, str]
) -> None:
    for name in names:
        points = sorted(
            (row.shape.flops(report.ranks) or 0.0, found.rho)
            for row in report.rows
            if row.shape.op == op
            and (found := row.entries[name].figures) is not None
            and found.rho is not None
        )
        if points:
            sizes, rho = zip(*points, strict=True)
            axes.plot(sizes, rho, "o-", label=name, color=colours[name], markersize=3)
    axes.set_xscale("log")
    axes.set_xlabel("floating-point operations a rank")
    axes.set_ylabel("rho = floor / time")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
