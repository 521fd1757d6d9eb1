"""NVIDIA GPUs and the links between them, from the driver's management library (nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import byref
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from mkernel.topology.model import FABRIC_HOST, FABRIC_SWITCH, Accelerator, FabricLink
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "nvml"

# The library's names of these constants would tie us to its releases; the numbers are NVML's
# interface.
_MOST_LINKS = 36
_GPU, _CPU = 0, 1
_WRITE = 1
_P2P_OK, _P2P_UNKNOWN = 0, 6
_SCOPE_NODE = 0
_NODE_WORDS = 16


def read(root: Path = Path("/"), library: Any = None) -> Findings:
    """Return the GPUs that NVML lists. A missing driver is not an error: it only adds a note.

    Args:
        root: the folder that holds sysfs, for the position on PCIe.
        library: replaces the ``pynvml`` module.
    """
    notes = Notes(SOURCE)
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except Exception as error:  # a broken installation may raise anything
            notes.add(f"nvidia-ml-py does not import: {error}")
            return Findings(SOURCE, notes=notes.all())
    try:
        library.nvmlInit()
    except Exception as error:
        notes.add(f"no NVIDIA driver: {error}")
        return Findings(SOURCE, notes=notes.all())
    gpus: list[tuple[Accelerator, Any]] = []
    fabric: tuple[FabricLink, ...] = ()
    answered = False
    no_p2p: tuple[tuple[str, str], ...] = ()
    try:
        gpus += _gpus(library, root, notes)
        fabric = _fabric(library, gpus, notes)
        # Some virtual machines tell of no link at all, which says nothing of them.
        answered = any(
            _answer(library.nvmlDeviceGetNvLinkState, gpu, 0) is not None for _, gpu in gpus
        )
        no_p2p = tuple(_no_p2p(library, gpus, notes))
    except Exception as error:
        notes.add(f"listing GPUs failed: {error}")
    finally:
        with contextlib.suppress(Exception):  # nothing depends on it any more
            library.nvmlShutdown()
    return Findings(
        SOURCE,
        accelerators=tuple(gpu for gpu, _ in gpus),
        fabric=fabric,
        fabric_known=answered,
        no_p2p=no_p2p,
        notes=notes.all(),
    )


class Isolation(NamedTuple):
    """The modes of GPUs in which processes do not map each other's memory. ``mig``: the numbers of
    the GPUs that are split into slices. ``confidential``: whether confidential computing is on."""

    mig: tuple[int, ...] = ()
    confidential: bool = False


def isolation(library: Any = None) -> Isolation:
    """Return the modes that NVML reports as on. A driver that is missing, or that knows no such mode,
    reports none. ``library`` replaces the ``pynvml`` module."""
    try:
        library = importlib.import_module("pynvml") if library is None else library
        library.nvmlInit()
    except Exception:  # a broken installation may raise anything; `read` reports it
        return Isolation()
    try:
        gpus = range(_answer(library.nvmlDeviceGetCount) or 0)
        split = (number for number in gpus if _answer(_mig_mode, library, number))
        modes = (_answer(_confidential, library), _answer(_confidential_fabric, library))
        return Isolation(tuple(split), any(modes))
    finally:
        with contextlib.suppress(Exception):  # nothing depends on it any more
            library.nvmlShutdown()


def _mig_mode(library: Any, number: int) -> int:
    current, _ = library.nvmlDeviceGetMigMode(library.nvmlDeviceGetHandleByIndex(number))
    return int(current)


def _confidential(library: Any) -> int:
    return int(library.nvmlSystemGetConfComputeState().ccFeature)


def _confidential_fabric(library: Any) -> int:
    """Return the mode of several GPUs of one virtual machine, in which a GPU's own is off."""
    settings = library.c_nvmlSystemConfComputeSettings_v1_t()
    failed = library.nvmlSystemGetConfComputeSettings(byref(settings))
    return 0 if failed else int(settings.multiGpuMode)


def _gpus(library: Any, root: Path, notes: Notes) -> Iterator[tuple[Accelerator, Any]]:
    """Yield GPUs with their handles."""
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            name = _text(library.nvmlDeviceGetName(handle))
            raw = _text(library.nvmlDeviceGetPciInfo(handle).busId)
            memory = int(library.nvmlDeviceGetMemoryInfo(handle).total)
        except Exception as error:  # one lost GPU must not hide the others
            notes.add(f"GPU {index} cannot be read: {error}; ignored")
            continue
        address = pci.normalise(raw)
        path: tuple[str, ...] = ()
        gbs = numa = None
        if address is None:
            notes.add(f"GPU {index}: {raw[:40]!r} is no PCI address")
        else:
            function = pci.folder(root, address)
            if function is not None:
                path = pci.bridges_above(function)
                gbs = pci.device_gbs(function, idles=True)
                numa = pci.numa_node(function, notes)
        yield (
            Accelerator(
                id=kinds.accelerator_id("cuda", index),
                kind="cuda",
                name=name,
                index=index,
                pci=address,
                pci_path=path,
                pcie_gbs=gbs,
                numa_node=_near(library, handle) if numa is None else numa,
                memory_bytes=memory,
            ),
            handle,
        )


def _near(library: Any, handle: Any) -> int | None:
    """Return the NUMA node on which the driver places a GPU, if it is one alone: sysfs does not
    know it everywhere."""
    try:
        words = list(library.nvmlDeviceGetMemoryAffinity(handle, _NODE_WORDS, _SCOPE_NODE))
    except Exception:
        return None
    nodes = [
        64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1
    ]
    return nodes[0] if len(nodes) == 1 else None


def _fabric(
    library: Any, gpus: list[tuple[Accelerator, Any]], notes: Notes
) -> tuple[FabricLink, ...]:
    """Return NVLinks that are up, by pair of ends; links to several switches count together."""
    by_address = {gpu.pci: gpu.id for gpu, _ in gpus}
    found: dict[frozenset[str], FabricLink] = {}
    for gpu, handle in gpus:
        ends = Counter(_ends(library, handle, by_address))
        if not ends:
            continue
        try:
            major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
            rate = kinds.nvlink_gbs(10 * major + minor)
        except Exception as error:
            notes.add(f"{gpu.id}: generation of its NVLinks is unknown: {error}")
            rate = None
        for end, count in ends.items():
            gbs = round(rate * count, 3) if rate else None
            link = FabricLink(kind="nvlink", ends=(gpu.id, end), count=count, gbs=gbs)
            first = found.setdefault(frozenset(link.ends), link)
            if first.count != count:
                notes.add(f"{gpu.id} has {count} links to {end}, which has {first.count} back")
    return tuple(found.values())


def _ends(library: Any, handle: Any, by_address: dict[str | None, str]) -> Iterator[str]:
    """Yield the other end of each NVLink that is up. A GPU that this process does not see is left
    out."""
    for link in range(_MOST_LINKS):
        if not _answer(library.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _answer(library.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = _answer(library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        other = by_address.get(pci.normalise(_text(remote.busId))) if remote is not None else None
        if other is not None:
            yield other
        elif kind == _CPU:
            yield FABRIC_HOST
        elif kind != _GPU:  # a switch, even if a virtual machine hides what it is
            yield FABRIC_SWITCH


def _answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's result; None if NVML raises, as it does for what a GPU or a driver has not."""
    try:
        return question(*arguments)
    except Exception:
        return None


def _no_p2p(
    library: Any, gpus: list[tuple[Accelerator, Any]], notes: Notes
) -> Iterator[tuple[str, str]]:
    for (one, handle), (other, other_handle) in combinations(gpus, 2):
        try:
            status = library.nvmlDeviceGetP2PStatus(handle, other_handle, _WRITE)
        except Exception as error:
            notes.add(f"whether GPUs reach each other's memory is unknown: {error}")
            return
        if status not in (_P2P_OK, _P2P_UNKNOWN):
            yield one.id, other.id


def _text(value: str | bytes) -> str:
    """Return text; older releases of nvidia-ml-py return bytes."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
