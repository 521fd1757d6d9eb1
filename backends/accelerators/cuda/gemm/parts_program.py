"""The native program of each call of a plan of 16-bit operands in parts: the steps that its
executor takes, recorded once with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import cublas
from mkernel.backends.accelerators.cuda.gemm.library import (
    Allocation,
    element_of,
    starters_product,
)
from mkernel.backends.accelerators.cuda.gemm.parts_exchange import Copied, Exchanges
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class RecordedCall(Exchanges):
    """A recorder that stands in for the exchanges of a call and passes their steps to native code.
    Tensors whose place differs from call to call come from :meth:`tensor`; all others keep their
    place."""

    def __init__(
        self,
        plan: LaunchPlan,
        context: DispatchContext,
        world: _kernels.DeviceWorld,
        strides: Mapping[str, Sequence[int]],
        *,
        partial: Allocation | None = None,
        blocks: int = 1,
    ) -> None:
        """Start a program. ``strides``: those of a call's tensors. ``partial``: allocates the
        partial results, if products are not results of the call; ``blocks``: blocks of the kernel
        that adds them."""
        self._context = context
        self.far = None
        product = cublas.product_of(plan, context, strides, starters_product(plan))
        self._program: _kernels.PartsProgram = native().PartsProgram(
            world, product, partial, element_of(plan), blocks, plan.gemm.n
        )

    def tensor(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
    ) -> Any:
        """Return a stand-in for a tensor of each call, or for ``partial``; packed unless
        ``strides`` is given."""
        (height, columns), itemsize = shape, dtype.itemsize
        pitch = columns if strides is None else strides[0]
        return _Rows(name, 0, height, columns * itemsize, pitch * itemsize, itemsize)

    def starter(self) -> object:
        """Return the starter of such calls (``Executor.starter``)."""
        context = self._context
        found: object = native().parts_starter(context.device, context.order, self._program)
        return found

    def multiply(self, rows: Any, _: torch.Tensor | None, out: Any) -> None:
        """Record a product, into rows of ``out`` or ``partial``."""
        ours = isinstance(rows, _Rows)
        self._program.multiply(
            None if ours else rows,
            rows.first if ours else 0,
            len(rows),
            out.first,
            _place(rows),
            _place(out),
        )

    def fork(self) -> None:
        self._program.fork()

    def send(self, peer: int, rows: torch.Tensor, to: int, flag: int | None = None) -> None:
        number = native().NO_FLAG if flag is None else flag
        self._program.push(peer, _place(rows), rows.nbytes, to, number)

    def wait(self, source: int, flag: int) -> None:
        self._program.wait(source, flag)

    def add(
        self,
        own: torch.Tensor,
        theirs: Sequence[int],
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        ends: bool,
    ) -> None:
        places = [_place(own), *(("here", at) for at in theirs)]
        self._program.sum(places, out.numel(), _place(out), ends)

    def copy(self, copied: Copied) -> None:
        self._program.copy(*_copied(copied))

    def normalise(self, sums: _kernels.SummedRows) -> None:
        """Record the norm of the call's ``out``."""
        self._program.normalise(sums)

    def join(self) -> None:
        self._program.join()

    def end(self, copies: Sequence[Copied] = ()) -> None:
        self.join()
        self._program.end([*map(_copied, copies)])


class _Rows:
    """Rows of a tensor of each call, from ``first`` on, without memory: torch's own tensors without
    memory take their host ten times as long. ``_row``, ``_pitch`` and ``_itemsize`` count bytes: of a
    row's columns, from a row to the next one, and of an element."""

    __slots__ = ("_height", "_itemsize", "_name", "_pitch", "_row", "first")

    def __init__(
        self, name: str, first: int, height: int, row: int, pitch: int, itemsize: int
    ) -> None:
        self._name, self.first, self._height = name, first, height
        self._row, self._pitch, self._itemsize = row, pitch, itemsize

    def __len__(self) -> int:
        return self._height

    def __getitem__(self, rows: slice) -> _Rows:
        first, last, _ = rows.indices(self._height)
        return _Rows(
            self._name, self.first + first, max(0, last - first),
            self._row, self._pitch, self._itemsize,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self._height * self._row

    def numel(self) -> int:
        return self.nbytes // self._itemsize

    def place(self) -> tuple[str, int]:
        return self._name, self.first * self._pitch


def _place(rows: Any) -> tuple[str, int]:
    """Return where rows begin, as native code takes it."""
    return rows.place() if isinstance(rows, _Rows) else ("here", rows.data_ptr())


def _copied(copied: Copied) -> tuple[tuple[str, int], tuple[str, int], int]:
    return _place(copied.rows), _place(copied.into), copied.rows.nbytes
