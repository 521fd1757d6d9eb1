"""What rank processes on GPUs run of a library's products in parts, beside ``hopper_ranks``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hopper_ranks
from fp8_ranks import planned
from hopper_ranks import Shape

from mkernel.backends.accelerators.cuda.gemm import library_tuning, parts_tuning
from mkernel.backends.accelerators.cuda.gemm.parts_tuning import Times
from mkernel.plan import planner


@contextmanager
def preferred() -> Iterator[None]:
    """Meanwhile the planner takes products in parts to be faster than all others."""
    ways, times = parts_tuning.ways, library_tuning.times
    parts_tuning.ways = lambda _: (parts_tuning.WHOLE, 1, 2)
    library_tuning.times = lambda plan, parts, *_: Times(0.1, 0.1, 0.1 * (3 - parts) ** 2 + 0.1)
    planner._planned.cache_clear()
    try:
        yield
    finally:
        parts_tuning.ways, library_tuning.times = ways, times
        planner._planned.cache_clear()


def known(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """Failures of calls in parts that native code starts (``hopper_ranks.known``)."""
    with preferred():
        kinds = {kind for kind in planned(shapes) if not kind.endswith("_parts")}
        return [*kinds, *hopper_ranks.known(shapes, rounds)]
