"""Poison, which outputs hold before a call: a NaN whose payload no arithmetic produces.

A processor's own NaN has an empty payload (0x7fc00000 in float32) or a full one (0x7fffffff on NVIDIA
GPUs). Poison has another, so an element that was never written is told from a NaN that was computed,
also where the reference is NaN. Integers are poisoned with the same kind of odd pattern. A NaN that a
user's file holds keeps its payload on the way to the result; only one with exactly these bits would be
taken for poison.

Where an op takes its output from the caller, the caller fills it (:func:`full`, :func:`fill`). Where
the op allocates it, there are two ways. :func:`freed` leaves poison in freed memory, which costs no
time inside the call, but only allocators that reuse blocks hand it out. :func:`uninitialised_is_nan`
has torch fill whatever it allocates; that takes time, and the NaN is torch's own, so it tells unwritten
elements only where the reference is finite.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float8_e4m3fn: (torch.int8, -1),  # the one NaN beside the usual one, that of 0x7f
    torch.float16: (torch.int16, 0x7EAD),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float32: (torch.int32, 0x7FD5A5A5),
    torch.float64: (torch.int64, 0x7FFD_A5A5_5A5A_A5A5),
    torch.int32: (torch.int32, 0x5AD5A5A5),
    torch.int64: (torch.int64, 0x5AFD_A5A5_5A5A_A5A5),
}
"""For each dtype the integer dtype of its size, and the bits of poison. The NaNs are quiet: copies that
signal or quieten NaNs leave them as they are."""


_SMALL_BYTES, _BLOCKS = 1 << 17, 8
"""With one block 1 of 32 runs on a CPU missed a planted fault that leaves an element; with eight, none
did."""


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Poison every element, in place; returns ``tensor``. Dtypes: float16 to float64, int32, int64."""
    words, bits = _BITS[tensor.dtype]
    tensor.view(words).fill_(bits)
    return tensor


def full(shape: tuple[int, ...], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """Return a new tensor of poison."""
    return fill(torch.empty(shape, dtype=dtype, device=device))


def count(tensor: torch.Tensor) -> int:
    """Count the elements that are poison: were never written. 0 for dtypes that have none."""
    if tensor.dtype not in _BITS:
        return 0
    words, bits = _BITS[tensor.dtype]
    return int((tensor.view(words) == bits).sum())


def freed(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]], device: Any) -> None:
    """Poison memory of these shapes and free it, so that what an op then allocates holds poison
    wherever the allocator reuses blocks. Of small ones several blocks: what else is allocated first
    may take one."""
    blocks = []
    for shape, dtype in shapes:
        small = prod(shape) * dtype.itemsize <= _SMALL_BYTES
        blocks += [full(shape, dtype, device) for _ in range(_BLOCKS if small else 1)]
    del blocks


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Have torch.empty and its kin give NaN (integers: the largest value), on every thread. torch does
    so as part of its deterministic mode, whose warnings about anything else are left out."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?is).*deterministic")
        _set_deterministic(True, warn_only=True)
        try:
            yield
        finally:
            _set_deterministic(before, warn_only=warn_only)


def _set_deterministic(mode: bool, *, warn_only: bool) -> None:
    """Call ``torch.use_deterministic_algorithms`` without its import of torch's compiler, which takes
    every rank process two seconds and which nothing here uses."""
    setter = getattr(torch._C, "_set_deterministic_algorithms", None)
    if setter is None or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        setter(mode, warn_only=warn_only)
