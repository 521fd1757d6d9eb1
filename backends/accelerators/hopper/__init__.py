"""Backend for NVIDIA GPUs of compute capability 9.0: persistent kernels that use NVLink while they
compute."""

from mkernel.backends.accelerators.hopper.backend import HopperAccelerator

__all__ = ["HopperAccelerator"]
