"""The growth of a call's time with the world: plans and simulations of 1, 2, 4, … nodes, and a
picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field

from mkernel.plan.planner import Planned
from mkernel.plan.simulate import simulate
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Model
from mkernel.user_files import save_picture


class Point(Model):
    """One simulated size of the world. Times are in microseconds."""

    nodes: int = Field(ge=1)
    ranks: int = Field(ge=1)
    exchange: str
    time_us: float
    compute_us: float
    exposed_us: float
    floor_us: float


def points(
    made: Callable[[int], Planned],
    constants: MachineConstants,
    most: int,
) -> Iterator[Point]:
    """Simulate worlds of 1, 2, 4, … and ``most`` nodes. ``made`` plans for a number of nodes."""
    nodes = 1
    while nodes <= most:
        plan, _, pipeline = made(nodes)
        found = simulate(plan, pipeline, constants)
        yield Point(
            nodes=nodes,
            ranks=plan.world_size,
            exchange=found.exchange,
            time_us=found.time_us,
            compute_us=found.compute_us,
            exposed_us=found.exposed_us,
            floor_us=found.floor_us,
        )
        nodes = most if nodes < most < 2 * nodes else 2 * nodes


def write(found: list[Point], title: str, path: Path) -> None:
    """Draw the points to a .svg, .png or .pdf file. Raises ImportError if matplotlib is missing
    (extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    ranks = [point.ranks for point in found]
    for label, values, style in (
        ("a call, simulated", [point.time_us for point in found], "o-"),
        (
            "its communication that compute does not hide",
            [point.exposed_us for point in found],
            "s-",
        ),
        ("its compute", [point.compute_us for point in found], ":"),
        ("no schedule is faster", [point.floor_us for point in found], "--"),
    ):
        axes.plot(ranks, [value / 1e3 for value in values], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(each) for each in ranks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms, predicted")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)
    pyplot.close(figure)
