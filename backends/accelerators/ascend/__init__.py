"""Backend for Ascend-style NPUs: kernels in a tile ISA, run by a multi-core simulator."""

from mkernel.backends.accelerators.ascend.backend import AscendAccelerator, AscendLaunch

__all__ = ["AscendAccelerator", "AscendLaunch"]
