"""The picture of a timeline: shares of tracks that work and wait, in three colours."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.backends.contracts.instrumented import ModelledRun, Span, Track
from mkernel.harness import timeline
from mkernel.harness.timeline_picture import share, write_timeline

TRACKS = (
    Track(0, "AIC 0", "compute", [Span("TMATMUL", 0, 300), Span("TWAIT", 300, 300)]),
    Track(0, "AIC 1", "compute", [Span("TWAIT", 0, 600)]),
    Track(0, "AIV 0", "comm", [Span("TPUT", 0, 600)]),
)


def test_shares_are_of_all_tracks() -> None:
    """One of two works from 0 to 3, both from 3 to 4, none after 6; what takes no time is nothing."""
    spans = [Span("a", 0, 4), Span("b", 3, 3), Span("c", 5, 0)]
    assert share(spans, 2) == ([0, 3, 4, 6], [0.5, 1.0, 0.5, 0.0])
    assert share([], 2) == ([], [])


def test_each_colour_fills_the_share_of_what_it_stands_for(tmp_path: Path) -> None:
    """Half of the cores compute for half of the time. They wait for the rest, three times as long."""
    image = pytest.importorskip("matplotlib.image")
    run = timeline.modelled([ModelledRun("a machine", "pipelined", 600.0, (), TRACKS, ())])
    write_timeline(run, tmp_path / "timeline.png")
    pixels = image.imread(tmp_path / "timeline.png")[..., :3].reshape(-1, 3)

    def area(colour: str) -> int:
        wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        return int((abs(pixels - wanted).max(axis=1) < 0.01).sum())

    compute, communication, waiting = map(area, ("#2a6fbb", "#d9822b", "#dde2e8"))
    assert compute > 1000
    assert waiting / compute == pytest.approx(3, rel=0.15)  # of the legend and the grid, too
    assert communication / compute == pytest.approx(4, rel=0.15)
