"""The library path of the GEMM ops: torch.mm and one collective of our own, one after the other.

  AllGather+GEMM      a ──▶ all_gather ──▶ whole A (``gathered``, or scratch) ──▶ mm ──▶ out
  GEMM+ReduceScatter  mm ──▶ partial results (scratch) ──▶ reduce_scatter ──▶ out
  GEMM+AllReduce      mm ──▶ partial results (scratch) ──▶ all_reduce ──▶ out
A bias is added in float32 before ``out`` is rounded: by the product's epilogue, or by the collective.
Scratch comes from torch's allocator on the call's stream, so a captured graph owns its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.hopper.device_world import (
    DispatchContext,
    call_id,
    collective_blocks,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.accelerators.hopper.norm import normalise
from mkernel.backends.accelerators.hopper.operands import aligned
from mkernel.backends.accelerators.hopper.schedule import LibrarySchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import ArgumentError
from mkernel.plan.model import DTYPE_BYTES, DtypeName, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class LibraryExecutor:
    """One plan's calls in a world, on torch's current stream."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """``call``: any of them; what differs from call to call is not looked at."""
        plan, made = call.plan, native()
        shape, how = plan.gemm, plan.part(LibrarySchedule)
        self._plan, self._context = plan, context
        self._product = _torch_dtype(how.product)
        self._way: _hopper.Way | None = None
        self._world_size = plan.world_size
        self._gathers = plan.op == "all_gather_gemm"
        self._scatters = plan.op == "gemm_reduce_scatter"
        self._collective = made.Collective(
            device_world(call, context), _staging(plan), blocks=collective_blocks(context)
        )
        if self._gathers:
            self._between = (shape.m, shape.k)
        else:
            self._between = (shape.m, shape.n)
            self._element = _element(plan)
            self._elements = shape.m * shape.n
            self._one_shot, self._way = how.way == "one_shot", _way(plan)

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """What a plan on this path needs of symmetric memory. Unsupported."""
        one_node(plan)
        _check(plan)
        return Workspace((native().DATA_OFFSET + _staging(plan),))

    def start(self, call: Call, stream: int) -> None:
        """Queue one; ``stream`` is torch's current one."""
        if self._gathers:
            self._gather_then_product(call, stream)
        elif self._world_size == 1:
            self._multiply(call.tensors["a"], call)
        else:
            self._product_then_sum(call, stream)
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object:
        """Starts calls without ``gathered``."""
        plan, context, made = self._plan, self._context, native()
        dtype = _torch_dtype(plan.dtype)
        apart = self._product != dtype
        whole = None  # what out is rounded from
        if apart and (self._gathers or self._world_size == 1):
            whole = _allocation((plan.gemm.m, plan.gemm.n), self._product, context.device)
        scratch_dtype = dtype if self._gathers else self._product
        scratch = _allocation(self._between, scratch_dtype, context.device)
        element = made.Element.bfloat16 if self._gathers else self._element
        outs: list[int] = []
        if self._way == made.Way.two_shot:
            outs = list(symmetric.get("out", ()))
        found: object = made.library_starter(
            context.device,
            context.order,
            context.control_block,
            torch.mm,
            torch.addmm,
            torch.add,
            (self._product,) if apart else (),
            whole,
            scratch,
            self._collective,
            element,
            self._way or made.Way.one_shot,
            plan.op,
            plan.gemm.m * plan.gemm.n,
            plan.gemm.n,
            plan.gemm.m // plan.world_size * plan.gemm.k * DTYPE_BYTES[plan.dtype],
            outs,
        )
        return found

    def _together(self, call: Call) -> _hopper.Collective:
        together: _hopper.Collective = self._collective.of_call(call_id(call), call.timeout_s)
        return together

    def _gather_then_product(self, call: Call, stream: int) -> None:
        a = call.tensors["a"]
        whole = call.tensors.get("gathered")
        if self._world_size == 1:
            if whole is not None:
                whole.copy_(a)
            whole = a
        else:
            outs: list[int] = []
            if whole is None:
                whole = a.new_empty(self._between)
            elif call.symmetric:
                outs = list(call.symmetric.get("gathered", ()))
            if call.view != "compute_only":
                native().all_gather(
                    self._together(call), a.data_ptr(), a.nbytes, outs or [whole.data_ptr()], stream
                )
        self._multiply(whole, call)

    def _product_then_sum(self, call: Call, stream: int) -> None:
        tensors = call.tensors
        partial = tensors["a"].new_empty(self._between, dtype=self._product)
        _mm(tensors["a"], tensors["b"], partial)
        if call.view == "compute_only":
            return
        made, together, element = native(), self._together(call), self._element
        elements, source, out = self._elements, partial.data_ptr(), tensors["out"].data_ptr()
        bias = aligned(tensors["bias"]) if self._plan.bias == "launch" else None
        row = {"bias": 0 if bias is None else bias.data_ptr(), "columns": self._plan.gemm.n}
        if self._scatters:
            part = elements // self._world_size
            made.reduce_scatter(together, element, source, part, out, stream, **row)
            return
        outs = [out]
        if call.symmetric and not self._one_shot:
            outs = list(call.symmetric.get("out", ())) or outs
        made.all_reduce(together, element, source, elements, outs, self._way, stream, **row)

    def _multiply(self, a: torch.Tensor, call: Call) -> None:
        """The call's ``out`` from a whole ``a``, rounded once."""
        b, out = call.tensors["b"], call.tensors["out"]
        bias = call.tensors["bias"] if self._plan.bias == "launch" else None
        if self._product != out.dtype:
            whole = torch.empty(out.shape, dtype=self._product, device=out.device)
            _mm(a, b, whole)
            out.copy_(whole) if bias is None else torch.add(whole, bias, out=out)
        elif bias is None:
            _mm(a, b, out)
        else:  # the library's epilogue adds it before it rounds
            torch.addmm(bias, a, b, out=out)


def _allocation(
    shape: tuple[int, int], dtype: torch.dtype, device: int
) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """(function, arguments) that make a tensor on the device, which is the current one then."""
    # As torch's own compiler allocates: past the dispatcher, in a quarter of the time of torch.empty.
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if quick is not None:
        return quick, (shape, (shape[1], 1), dtype)
    return partial(torch.empty, dtype=dtype, device=f"cuda:{device}"), (shape,)


def _mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


def _check(plan: LaunchPlan) -> None:
    """ArgumentError for a schedule that a call would not follow."""
    how = plan.part(LibrarySchedule)
    if how.product not in (plan.dtype, "float32"):
        raise ArgumentError("plan.schedule.product", how.product, f"{plan.dtype} or float32")
    reduced = plan.op == "gemm_all_reduce" and plan.world_size > 1
    if (how.way is not None) != reduced:
        legal = "one_shot or two_shot" if reduced else "None: nothing is summed everywhere"
        raise ArgumentError("plan.schedule.way", how.way, legal)


def _staging(plan: LaunchPlan) -> int:
    """Bytes of the data area; enough also where outs turn out not to be symmetric."""
    made, shape, world = native(), plan.gemm, plan.world_size
    if world == 1:
        return 0
    needed: int
    if plan.op == "all_gather_gemm":
        shard = shape.m // world * shape.k * DTYPE_BYTES[plan.dtype]
        needed = made.all_gather_staging(world, shard, False)
    elif plan.op == "gemm_reduce_scatter":
        needed = made.reduce_scatter_staging(world, _element(plan), shape.m * shape.n // world)
    else:
        needed = made.all_reduce_staging(
            world, _element(plan), shape.m * shape.n, _way(plan), False
        )
    return needed


def _way(plan: LaunchPlan) -> _hopper.Way | None:
    name = plan.part(LibrarySchedule).way
    way: _hopper.Way | None = None if name is None else getattr(native().Way, name)
    return way


def _torch_dtype(name: DtypeName) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _element(plan: LaunchPlan) -> _hopper.Element:
    """The native name of the elements that are added up and of the results."""
    sent = plan.part(LibrarySchedule).product
    name = plan.dtype if sent == plan.dtype else f"{sent}_to_{plan.dtype}"
    element: _hopper.Element = getattr(native().Element, name)
    return element
