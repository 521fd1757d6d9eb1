"""Copies between a GPU, its peers and the host: three engines, and which to use when."""

from mkernel.backends.accelerators.hopper.transfer.engines import (
    Choice,
    Direction,
    Engine,
    Engines,
    load_engines,
    measured_engines,
)

__all__ = ["Choice", "Direction", "Engine", "Engines", "load_engines", "measured_engines"]
