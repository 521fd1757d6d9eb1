"""The chip of an accelerator: the architecture that kernels are compiled for and constants hold
for, and its cores."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

from mkernel.topology.model import Accelerator, Model

_FILE = Path(__file__).parents[1] / "data" / "chips.json"

_NVIDIA_DEVICES = {
    0x1D: "sm_70",
    0x1E: "sm_75",
    0x1F: "sm_75",
    0x20: "sm_80",
    0x22: "sm_86",
    0x23: "sm_90",
    0x24: "sm_86",
    0x25: "sm_86",
    0x26: "sm_89",
    0x27: "sm_89",
    0x28: "sm_89",
    0x29: "sm_100",
    0x2B: "sm_120",
    0x2C: "sm_120",
    0x31: "sm_103",
}
"""Architectures by the upper byte of the PCI device id; each generation has its own bytes."""
_NVIDIA_NAMES = (
    (r"G?V100", "sm_70"),
    (r"T4", "sm_75"),
    (r"G?A100|A800|A30", "sm_80"),
    (r"A10G?|A16|A40|A2", "sm_86"),
    (r"L4|L40S?|L20", "sm_89"),
    (r"G?H100|G?H200|H800|H20", "sm_90"),
    (r"G?B100|G?B200", "sm_100"),
    (r"G?B300", "sm_103"),
)
"""Architectures by a word of the product's name."""


def architecture(device: Accelerator) -> str | None:
    """Return the architecture, such as ``sm_90``: the one that a source reported, or else the one
    that the device's PCI id or name implies. None: unknown, or of another vendor's device."""
    if device.kind == "ascend" and _has_word(device.name, "910B2?"):
        return device.architecture or "dav-2201"
    if device.architecture is not None or device.kind != "cuda" or device.emulated:
        return device.architecture
    return _of_product(device.name)


def capability(device: Accelerator) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA device, such as (9, 0); None: unknown, or none."""
    return _capability(architecture(device) or "")


@lru_cache(maxsize=64)
def _capability(name: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"sm_(\d+)(\d)a?", name)
    return None if found is None else (int(found[1]), int(found[2]))


def runs(claimed: str, device: Accelerator) -> bool:
    """Return whether a device runs what is compiled for ``claimed``: an architecture, or with a plus
    (``sm_80+``) that one and later ones."""
    if not claimed.endswith("+"):
        return architecture(device) == claimed
    found, least = capability(device), _capability(claimed[:-1])
    return found is not None and least is not None and found >= least


@lru_cache(maxsize=256)  # each plan queries each of its devices
def _of_product(name: str) -> str | None:
    id_ = re.fullmatch(r"10de:([0-9a-f]{2})[0-9a-f]{2}", name)
    if id_ is not None:
        return _NVIDIA_DEVICES.get(int(id_[1], 16))
    for names, found in _NVIDIA_NAMES:
        if _has_word(name, names):
            return found
    return None


@lru_cache(maxsize=1024)
def _has_word(name: str, words: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z0-9])", name, re.IGNORECASE) is not None


class _Chip(Model):
    ids: tuple[str, ...]
    name: str
    cores: int


class _Chips(Model):
    source: str
    chips: tuple[_Chip, ...]
    cards: str
    products: dict[str, str]


@cache
def _known() -> _Chips:
    return _Chips.from_file(_FILE, "file of chips")


def cores(device: Accelerator) -> int | None:
    """Return the number of cores: the one that a source counted, or else that of products of its
    PCI id or name. None: unknown."""
    if device.cores is not None or device.kind != "cuda" or device.emulated:
        return device.cores
    return next((chip.cores for chip in _known().chips if _is(device.name, chip)), None)


def _is(name: str, chip: _Chip) -> bool:
    return name in chip.ids or _has_word(name, chip.name)


def product(device: Accelerator) -> str:
    """Return the vendor's name of the product if only its PCI id is known, else the name it has."""
    return _known().products.get(device.name, device.name)


def is_product(device: Accelerator, words: tuple[str, ...]) -> bool:
    """Return whether a device's name has one of these words."""
    return bool(words) and _has_word(product(device), "|".join(map(re.escape, words)))


def is_named(device: Accelerator) -> bool:
    """Return whether a device's name says which product of NVIDIA it is."""
    return any(_has_word(product(device), names) for names, _ in _NVIDIA_NAMES)


def is_card(device: Accelerator) -> bool:
    """Return whether the product is a card for a PCIe slot, which only a bridge can join to others."""
    return device.kind == "cuda" and _is_card(product(device))


@lru_cache(maxsize=256)
def _is_card(name: str) -> bool:
    return _has_word(name, _known().cards)


def described(device: Accelerator) -> str:
    """Return a device's name with its architecture, for messages: ``NVIDIA A100 (sm_80)``."""
    return f"{product(device)} ({architecture(device) or 'architecture unknown'})"
