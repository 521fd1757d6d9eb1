"""The native program of each call of a plan of 16-bit operands in parts: the steps that its
executor takes, recorded once with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.hopper.device_world import DispatchContext
from mkernel.backends.accelerators.hopper.gemm import cublas
from mkernel.backends.accelerators.hopper.gemm.library import (
    Allocation,
    element_of,
    starters_product,
)
from mkernel.backends.accelerators.hopper.gemm.parts_exchange import Copied, Exchanges
from mkernel.backends.accelerators.hopper.native import native
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class RecordedCall(Exchanges):
    """A recorder that stands in for the exchanges of a call and passes their steps to native code.
    Tensors whose place differs from call to call come from :meth:`tensor`; all others keep their
    place."""

    def __init__(
        self,
        plan: LaunchPlan,
        context: DispatchContext,
        world: _hopper.DeviceWorld,
        strides: Mapping[str, Sequence[int]],
        *,
        partial: Allocation | None = None,
        blocks: int = 1,
    ) -> None:
        """Start a program. ``strides``: those of a call's tensors. ``partial``: allocates the
        partial results, if products are not results of the call; ``blocks``: blocks of the kernel
        that adds them."""
        self._context = context
        self._names: dict[int, str] = {}
        product = cublas.product_of(plan, context, strides, starters_product(plan))
        self._program: _hopper.PartsProgram = native().PartsProgram(
            world, product, partial, element_of(plan), blocks, plan.gemm.n
        )

    def tensor(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a stand-in for a tensor of each call, or for ``partial``; packed unless
        ``strides`` is given."""
        made = torch.empty_strided(
            shape, tuple(strides or (shape[1], 1)), dtype=dtype, device="meta"
        )
        self._names[made.untyped_storage()._cdata] = name
        return made

    def starter(self) -> object:
        """Return the starter of such calls (``Executor.starter``)."""
        context = self._context
        found: object = native().parts_starter(
            context.device, context.order, context.control_block, self._program
        )
        return found

    def multiply(self, rows: torch.Tensor, _: torch.Tensor | None, out: torch.Tensor) -> None:
        """Record a product, into rows of ``out`` or ``partial``."""
        ours = self._name(rows) == "a"
        self._program.multiply(
            None if ours else rows,
            _first(rows) if ours else 0,
            len(rows),
            _first(out),
            self._place(rows),
            self._place(out),
        )

    def fork(self) -> None:
        self._program.fork()

    def send(self, peer: int, rows: torch.Tensor, to: int, flag: int | None = None) -> None:
        number = native().NO_FLAG if flag is None else flag
        self._program.push(peer, self._place(rows), rows.nbytes, to, number)

    def wait(self, source: int, flag: int) -> None:
        self._program.wait(source, flag)

    def add(
        self,
        parts: Sequence[torch.Tensor],
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        ends: bool,
    ) -> None:
        places = [self._place(each) for each in parts]
        self._program.sum(places, out.numel(), self._place(out), ends)

    def copy(self, copied: Copied) -> None:
        self._program.copy(*self._copied(copied))

    def normalise(self, sums: _hopper.SummedRows) -> None:
        """Record the norm of the call's ``out``."""
        self._program.normalise(sums)

    def join(self) -> None:
        self._program.join()

    def end(self, copies: Sequence[Copied] = ()) -> None:
        self.join()
        self._program.end([*map(self._copied, copies)])

    def _copied(self, copied: Copied) -> tuple[tuple[str, int], tuple[str, int], int]:
        return self._place(copied.rows), self._place(copied.into), copied.rows.nbytes

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata)

    def _place(self, tensor: torch.Tensor) -> tuple[str, int]:
        name = self._name(tensor)
        if name is None:
            return "here", tensor.data_ptr()
        return name, int(tensor.storage_offset()) * tensor.itemsize


def _first(rows: torch.Tensor) -> int:
    """Return the number of the first of these rows in their matrix; a single row may have any
    stride."""
    before = int(rows.storage_offset())
    return before // rows.stride(0) if before else 0
