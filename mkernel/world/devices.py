"""The device that this process already uses, or that its launcher means it to use."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mkernel.backends.contracts.accelerator import AcceleratorBackend


@dataclass(frozen=True)
class Chosen:
    """A device of this process: torch's name of its kind, and its index there."""

    kind: str
    index: int

    def described(self, backend: AcceleratorBackend) -> tuple[str | None, int] | None:
        """Return its PCI address, if known, and index; None: it is none of the backend's devices."""
        if backend.device != self.kind:
            return None
        for one in backend.probe():
            if one.index == self.index and not one.emulated:
                return one.pci, one.index
        return None


def chosen() -> Chosen | None:
    """Return the current device, where the process has used any, else that of LOCAL_RANK; None:
    there is neither. Call it before backends look at devices, since to look may be to use one."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    kind, module = found.type, torch.get_device_module(found.type)
    text = os.environ.get("LOCAL_RANK", "")
    if module.is_initialized():
        return Chosen(kind, int(module.current_device()))
    if text.isdecimal() and int(text) < module.device_count():
        return Chosen(kind, int(text))
    return None
