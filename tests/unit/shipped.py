"""The constants that backends bring, by their names."""

from __future__ import annotations

from mkernel.backends.accelerators.ascend import machine as ascend
from mkernel.backends.accelerators.cuda import machine as hopper
from mkernel.backends.accelerators.streams.device import torch_device
from mkernel.topology.cost import MachineConstants


def constants_of(name: str) -> MachineConstants:
    """``ascend``, ``hopper``, ``streams`` (on a CPU) or ``streams-cuda``."""
    every = (
        ascend.machine().constants(),
        hopper.machine().constants,
        torch_device("cpu").constants,
        torch_device("cuda").constants,
    )
    return next(one for one in every if one is not None and one.name == name)
