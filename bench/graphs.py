"""CUDA graphs of calls, and what a replay of one takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name")


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, one after another, of which the first two ran before: libraries,
    workspaces and plans are made outside of a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of one of its ``calls``, by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def medians_us(
    graphs: Mapping[Name, torch.cuda.CUDAGraph], calls: int, replays: int
) -> dict[Name, float]:
    """Microseconds of one of the ``calls`` of each graph: they take turns, one more than is counted;
    the median of the replays."""
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for turn in range(1 + replays):
        for name, graph in graphs.items():
            us = replay_us(graph, calls)
            if turn:
                times[name].append(us)
    return {name: statistics.median(found) for name, found in times.items()}
