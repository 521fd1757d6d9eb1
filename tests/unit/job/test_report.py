"""The three views' figures, from known times."""

from __future__ import annotations

import pytest

from mkernel.backends.base import KernelSpan, ModelledRun
from mkernel.job import report


def test_formulae() -> None:
    each = report.clock(compute=6.0, comm=4.0, sequential=10.0, pipelined=7.0)
    assert each.speedup == pytest.approx(10 / 7)
    assert each.overlap_efficiency == pytest.approx((6 + 4 - 7) / 4)


def test_one_rank_has_nothing_to_overlap() -> None:
    each = report.clock(compute=6.0, comm=0.0, sequential=6.0, pipelined=6.0)
    assert (each.speedup, each.overlap_efficiency) == (1.0, 0.0)


def test_the_slowest_rank_of_the_median_iteration_counts() -> None:
    samples = [[1.0, 9.0, 3.0], [2.0, 1.0, 4.0]]  # slowest: 2, 9, 4
    assert report.slowest(samples) == 4.0
    assert report.spread(samples) == 7.0


def test_communication_ends_when_the_bytes_have_arrived() -> None:
    """Not when the kernel that sent them has returned."""
    kernels = tuple(
        KernelSpan(rank, kernel, start, end)
        for rank in (0, 1)
        for kernel, start, end in (("comm", 1.0, 5.0), ("compute", 350.0 + rank, 400.0))
    )
    run = ModelledRun("a machine", "sequential", 400.0, kernels, ())
    assert report._arrival_us(run) == 351.0


def test_an_efficiency_below_the_noise_is_not_shown() -> None:
    loud = report.clock(200.0, 4.0, 210.0, 190.0, noise=20.0)
    quiet = report.clock(200.0, 40.0, 240.0, 210.0, noise=20.0)
    assert "noise" in report._efficiency(loud)
    assert report._efficiency(quiet) == "75%"
