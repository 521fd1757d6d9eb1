"""What NVLink carries."""

from __future__ import annotations

_GENERATIONS = ((60, 20.0), (70, 25.0), (100, 50.0))
"""(capability, rate): GPUs from this compute capability on (60 is 6.0) have links of this nominal rate,
in GB/s and one direction."""


def link_gbs(capability: int | None) -> float | None:
    """GB/s of one link of a GPU of that compute capability. None for one without NVLink."""
    rates = [gbs for first, gbs in _GENERATIONS if capability is not None and capability >= first]
    return rates[-1] if rates else None
