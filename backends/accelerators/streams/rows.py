"""How rows are cut: into chunks of a message, and over the ranks."""

from __future__ import annotations

from functools import lru_cache

from mkernel.plan.model import LaunchPlan


def chunks(rows: int, step: int | None) -> list[tuple[int, int]]:
    """[start, end) of each chunk of ``step`` rows; None: one chunk. Empty where there are none."""
    step = step or max(1, rows)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def share(rows: int, world: int, rank: int) -> tuple[int, int]:
    """[start, end) of a rank's rows: as even as can be, the first ranks getting one more."""
    each, more = divmod(rows, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def rotation(plan: LaunchPlan, rank: int) -> tuple[tuple[int, int], ...]:
    """(to consume from, that consumes from here) in each step of the plan's order, own rows left out.

    The order is a rotation: in every step each rank has one partner on either side, so messages
    that all ranks post step by step always find each other.
    """
    return _rotation(plan.order, rank)


@lru_cache(maxsize=64)
def _rotation(order: tuple[tuple[int, ...], ...], rank: int) -> tuple[tuple[int, int], ...]:
    steps = []
    for step, source in enumerate(order[rank]):
        consumers = [other for other, wanted in enumerate(order) if wanted[step] == rank]
        if len(consumers) != 1:
            raise ValueError(
                f"plan.order: step {step} consumes rank {rank} on ranks {consumers}; expected one"
            )
        if step:
            steps.append((source, consumers[0]))
    return tuple(steps)
