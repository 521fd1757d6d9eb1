"""Cases of the three GEMM ops. Option ``replicate_b`` (AllGather only, default True): every rank uses
the same B, else its own columns. Option ``tensors``: the user's own whole ``a`` and ``b`` instead of
random data; A is then cut by rows (AllGather) or K (the others), B by columns or K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch

from mkernel.backends.contracts.instrumented import View
from mkernel.cases import poison
from mkernel.cases.base import EVERY_RANK, Case, Outcome
from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.gemm import GemmOp
from mkernel.world.lifecycle import current

_A, _B = 0, 1


class GemmCase(Case):
    """What the three have in common."""

    gemm: ClassVar[GemmOp]

    def inputs(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """a and b of ``rank``."""
        b = self._b(rank, world_size, iteration)
        if self.layout == "column":
            b = b.t().contiguous().t()
        return {"a": self._a(rank, world_size, iteration), "b": b}

    def poisoned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``out``."""
        a, size = tensors["a"], current().size
        rows = len(a) * (size if self.gemm.gathers else 1)
        shape = (rows // size if self.gemm.scatters else rows, tensors["b"].shape[1])
        return {"out": poison.full(shape, getattr(torch, self.out_dtype), a.device)}

    def call(
        self,
        tensors: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        *,
        view: View = "pipelined",
        trace: bool = False,
        wait: bool = True,
    ) -> Outcome:
        """Call the op into ``out``."""
        done = self.gemm.call(
            tensors["a"],
            tensors["b"],
            out=outputs["out"],
            chunk=self.chunk,
            view=view,
            trace=trace,
            wait=wait,
            path=self.options.get("path"),
        )
        return Outcome(done.outputs, done.plan, done.record)

    def _a(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        rows = self.sizes["m"] // (world_size if self.gemm.gathers else 1)
        if self.given is None:
            return self.normal(iteration, _A, rank, rows, self.sizes["k"])
        whole = self.given["a"]
        if self.gemm.gathers:
            return whole[rank * rows : (rank + 1) * rows]
        k = self.sizes["k"]
        return whole[:, rank * k : (rank + 1) * k].contiguous()

    def _b(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        n, k = self.sizes["n"], self.sizes["k"]
        shared = self.gemm.gathers and self.options.get("replicate_b", True)
        if self.given is None:
            return self.normal(iteration, _B, EVERY_RANK if shared else rank, k, n)
        whole = self.given["b"]
        if not self.gemm.gathers:
            return whole[rank * k : (rank + 1) * k]
        return whole if shared else whole[:, rank * n : (rank + 1) * n].contiguous()


class AllGatherGemmCase(GemmCase):
    """C = concat(a) @ b."""

    op = "all_gather_gemm"
    gemm = all_gather_gemm.OP

    def reference(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """C [M, N]."""
        b = self._b(rank, world_size, iteration).double()
        parts = [
            self._a(source, world_size, iteration).double() @ b for source in range(world_size)
        ]
        return {"out": torch.cat(parts)}


class _SumCase(GemmCase):
    def reference(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """This rank's rows of sum(a @ b), or all of them."""
        total = sum(self._partials(world_size, iteration), torch.zeros(()))
        return {"out": self._kept(total, rank, world_size)}

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The same rows of sum(abs(a @ b))."""
        parts = (part.abs() for part in self._partials(world_size, iteration))
        return {"out": self._kept(sum(parts, torch.zeros(())), rank, world_size)}

    def _partials(self, world_size: int, iteration: int) -> Iterator[torch.Tensor]:
        for source in range(world_size):
            a = self._a(source, world_size, iteration).double()
            yield a @ self._b(source, world_size, iteration).double()

    def _kept(self, total: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
        rows = self.sizes["m"] // world_size
        return total[rank * rows : (rank + 1) * rows] if self.gemm.scatters else total


class GemmReduceScatterCase(_SumCase):
    """Rows of sum(a @ b)."""

    op = "gemm_reduce_scatter"
    gemm = gemm_reduce_scatter.OP


class GemmAllReduceCase(_SumCase):
    """sum(a @ b)."""

    op = "gemm_all_reduce"
    gemm = gemm_all_reduce.OP
