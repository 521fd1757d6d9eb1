"""A modelled timeline as a picture: the compute and comm lanes of every rank."""

from __future__ import annotations

from pathlib import Path

from mkernel.backends.base import ModelledRun

_COLOURS = {"compute": "#2a6fbb", "comm": "#d9822b"}
_WAITING = "#d0d0d0"


def write_timeline(run: ModelledRun, path: Path) -> None:
    """Draw one row a rank and kernel, shaded by how many of its cores are busy.

    Raises:
        ImportError: matplotlib is missing (extra ``bench``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(
        {(lane.rank, lane.kernel) for lane in run.lanes}, key=lambda r: (r[0], r[1] == "comm")
    )
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.45 * len(rows)), constrained_layout=True)
    for row, (rank, kind) in enumerate(rows):
        lanes = [lane for lane in run.lanes if (lane.rank, lane.kernel) == (rank, kind)]
        for lane in lanes:
            for waiting in (True, False):
                spans = [
                    (span.start_us, span.duration_us)
                    for span in lane.spans
                    if span.duration_us > 0 and (span.name == "TWAIT") == waiting
                ]
                axes.broken_barh(
                    spans,
                    (row - 0.4, 0.8),
                    facecolors=_WAITING if waiting else _COLOURS[kind],
                    alpha=0.9 / max(1.0, len(lanes) ** 0.5),
                    linewidth=0,
                )
    axes.set_yticks(range(len(rows)), [f"rank {rank} {kind}" for rank, kind in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, run.total_us)
    axes.set_xlabel(f"modelled time on {run.machine}, µs (not measured)")
    axes.set_title("pipelined: all cores of a lane overlaid; grey waits for a signal")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
