"""A timeline as a picture: one row a rank and kernel, of which three colours fill the shares that
compute, communicate and wait."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from mkernel.backends.contracts.instrumented import Span, Track
from mkernel.harness.timeline import Timeline
from mkernel.user_files import save_picture

_KINDS = {"compute": ("compute", "#2a6fbb"), "comm": ("communication", "#d9822b")}
_WAITING = "#dde2e8"
_HEIGHT = 0.8


def write_timeline(run: Timeline, path: Path) -> None:
    """Draw a timeline, in milliseconds.

    Raises:
        ImportError: matplotlib is missing (extra ``bench``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [
        (rank, kind)
        for rank in sorted({track.rank for track in run.tracks})
        for kind in _KINDS
        if any((track.rank, track.kernel) == (rank, kind) for track in run.tracks)
    ]
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.45 * len(rows)), constrained_layout=True)
    waits = False
    for row, (rank, kind) in enumerate(rows):
        tracks = [track for track in run.tracks if (track.rank, track.kernel) == (rank, kind)]
        bottom = row + _HEIGHT / 2  # the axis points down
        calls = [track for track in run.tracks if (track.rank, track.kernel) == (rank, "call")]
        works = share(_spans(tracks, waiting=False), len(tracks))
        either = share((span for track in (*tracks, *calls) for span in track.spans), len(tracks))
        waits = waits or either != works
        for (times, shares), colour in ((either, _WAITING), (works, _KINDS[kind][1])):
            tops = [bottom - _HEIGHT * min(1.0, each) for each in shares]
            axes.fill_between(
                [time / 1e3 for time in times], bottom, tops, step="post", color=colour, linewidth=0
            )
    for number, (name, start) in enumerate(
        run.sections
    ):  # at two heights, as sections may be short
        above = -0.6 - 0.4 * (number % 2)
        axes.annotate(name, (start / 1e3, above), fontsize="small", annotation_clip=False)
        axes.axvline(start / 1e3, color="#5b6776", linewidth=0.8)
    labels = {kind: name for kind, (name, _) in _KINDS.items()}
    waiting = "the rest of the call"
    if not run.sections:
        labels["comm"] += ": cores that send, not the NIC behind them"
        waiting = "waits for a signal"
    patches = [Patch(color=_KINDS[kind][1], label=label) for kind, label in labels.items()]
    if waits:
        patches.append(Patch(color=_WAITING, label=waiting))
    axes.set_yticks(range(len(rows)), [f"rank {rank} {_KINDS[kind][0]}" for rank, kind in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, run.total_us / 1e3)
    axes.set_xlabel(f"ms; {run.clock}")
    axes.set_title(run.title, pad=26 if run.sections else 6)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    save_picture(figure, path)
    pyplot.close(figure)


def _spans(tracks: Iterable[Track], *, waiting: bool) -> Iterable[Span]:
    return (span for track in tracks for span in track.spans if (span.name == "TWAIT") == waiting)


def share(spans: Iterable[Span], tracks: int) -> tuple[list[float], list[float]]:
    """Return the share of tracks that is in one of the spans, from each of the returned times to the
    next. Microseconds."""
    changes: dict[float, int] = {}
    for span in spans:
        if span.duration_us > 0:
            end = span.start_us + span.duration_us
            changes[span.start_us] = changes.get(span.start_us, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    times = sorted(changes)
    return times, [count / tracks for count in accumulate(changes[time] for time in times)]
