"""NVIDIA GPUs, from the driver's management library through nvidia-ml-py."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from mkernel.topology.model import Accelerator, Note
from mkernel.topology.sources import pci

SOURCE = "nvml"


def read(
    root: Path = Path("/"), library: Any = None
) -> tuple[tuple[Accelerator, ...], tuple[Note, ...]]:
    """The GPUs that NVML lists, and notes. No driver is not an error: then there is only a note.

    Args:
        root: where sysfs is, for the position on PCIe.
        library: stands in for the ``pynvml`` module.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except Exception as error:  # a broken installation may raise anything
            return (), (_note(f"nvidia-ml-py does not import: {error}"),)
    try:
        library.nvmlInit()
    except Exception as error:
        return (), (_note(f"no NVIDIA driver: {error}"),)
    try:
        return _devices(library, root)
    except Exception as error:
        return (), (_note(f"listing GPUs failed: {error}"),)
    finally:
        with contextlib.suppress(Exception):  # nothing depends on it any more
            library.nvmlShutdown()


def _devices(library: Any, root: Path) -> tuple[tuple[Accelerator, ...], tuple[Note, ...]]:
    found: list[Accelerator] = []
    notes: list[Note] = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            name = _text(library.nvmlDeviceGetName(handle))
            raw = _text(library.nvmlDeviceGetPciInfo(handle).busId)
            memory = int(library.nvmlDeviceGetMemoryInfo(handle).total)
        except Exception as error:  # one lost GPU must not hide the others
            notes.append(_note(f"GPU {index} cannot be read: {error}; ignored"))
            continue
        address = pci.normalise(raw)
        if address is None:
            notes.append(_note(f"GPU {index}: {raw[:40]!r} is no PCI address"))
        numa = None
        if address is not None:
            numa, numa_notes = pci.numa_node(root / "sys/bus/pci/devices" / address, SOURCE)
            notes += numa_notes
        found.append(
            Accelerator(
                id=f"cuda{index}",
                kind="cuda",
                name=name,
                index=index,
                pci=address,
                pci_path=pci.position(root, address) if address else (),
                numa_node=numa,
                memory_bytes=memory,
            )
        )
    return tuple(found), tuple(notes)


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _note(message: str) -> Note:
    return Note(source=SOURCE, message=message)
