"""Who takes turns, by name: mkernel's op, the plain library path, its parts alone, other libraries.

A contender is made anew for every problem. Another one is named ``module:Class``, as backends are.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mkernel.errors import ArgumentError
from mkernel.harness.contender import Contender
from mkernel.harness.library_contenders import Collective, Gemm
from mkernel.harness.own_contenders import (
    Mkernel,
    MkernelAllocating,
    MkernelFused,
    MkernelLibrary,
    MkernelSymmetric,
)

_KNOWN = {
    **{
        kind.name: f"{kind.__module__}:{kind.__name__}"
        for kind in (
            Mkernel,
            MkernelSymmetric,
            MkernelAllocating,
            MkernelFused,
            MkernelLibrary,
            Gemm,
            Collective,
        )
    },
    "copy": "mkernel.harness.symm_mem:Copy",
    "mkernel-parts": "mkernel.harness.own_contenders:MkernelParts",
    "mkernel-halves": "mkernel.harness.own_contenders:MkernelHalves",
    "mkernel-sequential": "mkernel.harness.own_contenders:MkernelSequential",
    "nccl+cublas": "mkernel.harness.library_contenders:NcclCublas",
    "gloo+matmul": "mkernel.harness.library_contenders:GlooMatmul",
    "nccl-windows": "mkernel.harness.nccl_windows:NcclWindows",
    "symm_mem": "mkernel.harness.symm_mem:SymmMem",
    "symm_mem-one-shot": "mkernel.harness.symm_mem_sums:OneShot",
    "symm_mem-two-shot": "mkernel.harness.symm_mem_sums:TwoShot",
    "deepep": "mkernel.harness.deep_ep:DeepEp",
    "gather+grouped": "mkernel.harness.library_peers:GatheredExperts",
    "ring": "mkernel.harness.library_peers:Ring",
    "context-parallel": "mkernel.harness.context_parallel:ContextParallel",
    "context-parallel-alltoall": "mkernel.harness.context_parallel:ContextParallelAllToAll",
}
NAMES = tuple(_KNOWN)
ALWAYS = ("gemm", "comm", "copy")
"""What gives T_c and T_m."""
OURS = (
    "mkernel", "mkernel-symmetric", "mkernel-allocating", "mkernel-fused", "mkernel-library",
    "mkernel-parts", "mkernel-halves", "mkernel-sequential",
)  # fmt: skip
PEERS = (*(name for name in NAMES if name not in (*OURS, *ALWAYS)), "mkernel-sequential")
"""Who takes part unless others are named."""
SEQUENTIAL = ("nccl+cublas", "gloo+matmul", "mkernel-sequential")


def named(name: str) -> type[Contender]:
    """The contender of that name, or at ``module:Class``. ArgumentError."""
    module, colon, attribute = _KNOWN.get(name, name).partition(":")
    if not colon:
        raise ArgumentError("--peers", repr(name), f"one of: {', '.join(NAMES)}; or module:Class")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("--peers", name, "module:Class", why=str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Contender)):
        raise ArgumentError("--peers", name, "a class that derives from Contender")
    return found


def chosen(peers: Sequence[str] | None, with_mkernel: bool) -> tuple[str, ...]:
    """The contenders of a run in their order: mkernel, the peers (default: all), the parts alone."""
    wanted = PEERS if peers is None else tuple(peers)
    for name in wanted:
        named(name)
    first = ("mkernel",) if with_mkernel else ()
    return tuple(dict.fromkeys((*first, *wanted, *ALWAYS)))
