"""Partitions of rows: into the chunks of a message, and over the ranks."""

from __future__ import annotations

from mkernel.backends.accelerators.streams.schedule import RotatingSchedule
from mkernel.plan.model import LaunchPlan


def chunks(rows: int, step: int) -> list[tuple[int, int]]:
    """Return [start, end) of each chunk of ``step`` rows; empty if there are no rows."""
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def share(rows: int, world: int, rank: int) -> tuple[int, int]:
    """Return [start, end) of a rank's rows: as even as possible, with one more for the first ranks."""
    each, more = divmod(rows, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def rotation(plan: LaunchPlan, rank: int) -> tuple[tuple[int, int], ...]:
    """Return (source to consume from, rank that consumes from here) in each step of the plan's
    order, own rows left out.

    The order is a rotation: in every step each rank has one partner on either side, so messages
    that all ranks post step by step always match.
    """
    order = plan.order(plan.part(RotatingSchedule).order)
    return tuple(zip(order[rank][1:], order.consumers(rank)[1:], strict=True))
