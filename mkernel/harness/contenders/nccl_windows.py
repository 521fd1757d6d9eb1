"""NCCL's symmetric kernels as a peer: its collectives read and write memory in registered windows.

Torch registers the segments of a memory pool with ``NCCL_WIN_COLL_SYMMETRIC``, which is what makes the
kernels eligible that load and store peers' memory directly. Multicast stays off, as for all peers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import distributed

from mkernel.errors import Unsupported
from mkernel.harness.contenders import symm_mem
from mkernel.harness.contenders.library import NcclCublas
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS

LEAST_NCCL = (2, 27)
"""The first that has symmetric kernels."""


class NcclWindows(NcclCublas):
    """The plain library path with windows: shares of A and what is gathered of them, products and their
    sums."""

    name = "nccl-windows"
    ops, ops_text = (*GEMMS, "all_reduce"), "for GEMM ops and sums"

    def __init__(self, problem: Problem) -> None:
        self._pools: list[Any] = []
        super().__init__(problem)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or symm_mem.unusable(problem) or _unsupported()

    def inputs(self) -> Inputs:
        if not self.problem.gathers:
            return {}
        sizes, case = self.problem.case.sizes, self.problem.case
        shape = sizes["m"] // self.problem.world, sizes["k"]
        return {"a": self._memory(shape, getattr(torch, case.dtype))}

    def outputs(self) -> Tensors:
        if self.problem.gathers:
            return super().outputs()
        given = self.problem.given(self.kind).items()
        return {name: self._memory(shape, dtype) for name, (shape, dtype) in given}

    def close(self) -> None:
        for pool in self._pools:  # which are kept as long as their tensors
            _backend(self.problem.device).deregister_mem_pool(pool)

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a window of its own. Collective: all ranks make theirs in one order."""
        backend, cuda = _backend(self.problem.device), torch.cuda
        pool = cuda.MemPool(backend.mem_allocator)
        with cuda.use_mem_pool(pool):
            made = torch.empty(math.prod(shape), dtype=dtype, device=self.problem.device)
        try:
            backend.register_mem_pool(pool, symm=True)
        except (RuntimeError, TypeError) as error:
            raise Unsupported(f"NCCL registers no symmetric window: {error}") from error
        self._pools.append(pool)
        return made.view(shape)


def _backend(device: torch.device) -> Any:
    group: Any = distributed.group.WORLD
    return group._get_backend(device)


def _unsupported() -> str | None:
    kind = getattr(distributed, "ProcessGroupNCCL", None)
    if kind is None or not hasattr(kind, "register_mem_pool"):
        return "this torch registers no memory with NCCL"
    nccl: Any = torch.cuda.nccl
    version = nccl.version()
    if version[:2] < LEAST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} has no symmetric kernels: 2.27 or later"
    return None
