"""Plans of windows: float32 on GPUs."""

from __future__ import annotations

from gpu_plans import gpu_plan

from mkernel.backends.accelerators.streams.backend import StreamsAccelerator
from mkernel.plan.model import LaunchPlan


def plan(op: str, world: int, no_p2p: bool = False, **sizes: int) -> LaunchPlan:
    """A plan by what ``streams`` claims on GPUs; the tests' windows are in a CPU's memory."""
    backend = StreamsAccelerator("cpu")
    return gpu_plan(backend, op, world, sizes, no_p2p=no_p2p, dtype="float32")
