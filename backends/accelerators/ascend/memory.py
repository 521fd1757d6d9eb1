"""Symmetric memory of the simulator: shared host pages."""

from mkernel.backends.runtime.host_memory import HostMemory

__all__ = ["HostMemory"]
