"""The library path of the GEMM ops: torch's product and one collective of our own, one after the other.

  AllGather+GEMM      a ──▶ all_gather ──▶ whole A (``gathered``, or scratch) ──▶ mm ──▶ out
  GEMM+ReduceScatter  mm ──▶ partial results (scratch) ──▶ reduce_scatter ──▶ out
  GEMM+AllReduce      mm ──▶ partial results (scratch) ──▶ all_reduce ──▶ out; of few rows that are
                      normalised, sum_rows, which does both
Scales of e4m3 rows are gathered with them. A bias is added in float32 before ``out`` is rounded: by
the product's epilogue, by the collective, or to a product in float32. Scratch comes from torch's
allocator on the call's stream, so a captured graph owns its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.cuda import long_products
from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.collectives.landing import outputs_of, wanted
from mkernel.backends.accelerators.cuda.collectives.norm import normalise, sum_by_mail
from mkernel.backends.accelerators.cuda.device_world import (
    DispatchContext,
    call_id,
    collective_blocks,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.cuda.gemm import cublas
from mkernel.backends.accelerators.cuda.gemm.products import multiply_by
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.prefetch import prefetch_of
from mkernel.backends.accelerators.cuda.schedule import (
    MOST_NORMED_COLUMNS,
    LibrarySchedule,
    ProductSchedule,
    ScaledBy,
)
from mkernel.backends.accelerators.cuda.starters import summed_rows
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.model import DTYPE_BYTES, DtypeName, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


Allocation = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""(function, arguments) that allocate a tensor on a device, which must be the current one then."""


class LibraryExecutor:
    """The executor of one plan's calls in a world, on torch's current stream."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        shape, how = plan.gemm, plan.part(LibrarySchedule)
        self._plan, self._context = plan, context
        cublas.open_cublas(context, plan)
        self._product = torch_dtype(how.product)
        self._way: _kernels.Way | None = None
        self._normalises = how.normalises
        self._world_size = plan.world_size
        self._gathers = plan.op == "all_gather_gemm"
        self._scatters = plan.op == "gemm_reduce_scatter"
        self._world = device_world(call, context)
        self._collective = made.Collective(
            self._world,
            _staging(plan),
            blocks=collective_blocks(context),
            by_mail=how.by_mail,
        )
        if self._gathers:
            self._between = (shape.m, shape.k)
        else:
            self._between = (shape.m, shape.n)
            self._element = element_of(plan)
            self._elements = shape.m * shape.n
            self._one_shot, self._way = how.way == "one_shot", _way(plan)
        self._outputs = outputs_of(plan, context) if _lands(plan) else made.Outputs()

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan on this path needs. Unsupported."""
        one_node(plan)
        _check(plan)
        nbytes = native().DATA_OFFSET + _staging(plan)
        return Workspace((nbytes,), outputs=wanted(plan) if _lands(plan) else 0)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        if self._gathers:
            self._gather_then_product(call, stream)
        elif self._world_size == 1:
            self._multiply_call(call.tensors["a"], call.tensors.get("a_scale"), call)
        else:
            self._product_then_sum(call, stream)
        if not self._normalises or call.view == "compute_only":
            normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return a starter of calls; None where other ranks write to ``gathered``."""
        if "gathered" in symmetric:
            return None
        plan, context, made = self._plan, self._context, native()
        dtype = torch_dtype(plan.dtype)
        height, width = scales_of_a_rank(plan)
        scales = None  # the tensor for the gathered scales of all rows
        if height and self._gathers:
            places = (plan.world_size * height, width)
            scales = allocation(places, torch.float32, context.device)
        scratch_dtype = dtype if self._gathers else self._product
        element = made.Element.bfloat16 if self._gathers else self._element
        outs: list[int] = []
        if self._way == made.Way.two_shot:
            outs = list(symmetric.get("out", ()))
        found: object = made.library_starter(
            context.device,
            context.order,
            self._starters_product(strides),
            allocation(self._between, scratch_dtype, context.device),
            scales,
            self._collective,
            element,
            self._way or made.Way.one_shot,
            plan.op,
            plan.gemm.m * plan.gemm.n,
            plan.gemm.n,
            plan.gemm.m // plan.world_size * plan.gemm.k * DTYPE_BYTES[plan.dtype],
            height * width * DTYPE_BYTES["float32"],
            outs,
            self._outputs,
            summed_rows(  # one a multiprocessor
                plan,
                collective_blocks(context) // 2,
                twice=self._way == made.Way.two_shot,
                unrounded=self._normalises and self._product == torch.float32,
            ),
            self._normalises,
        )
        return found

    def _starters_product(self, strides: Mapping[str, Sequence[int]]) -> _kernels.LibraryProduct:
        plan, made = self._plan, native()
        if plan.scales is not None:
            scaled: _kernels.LibraryProduct = made.scaled_product(self._multiply)
            return scaled
        apart = self._product != torch_dtype(plan.dtype)
        whole = None  # the tensor from which out is rounded
        if apart and (self._gathers or self._world_size == 1):
            shape = plan.gemm.m, plan.gemm.n
            whole = allocation(shape, self._product, self._context.device)
        product = starters_product(plan, whole)
        if whole is not None:
            return product
        return cublas.product_of(plan, self._context, strides, product)

    def _together(self, call: Call) -> _kernels.Collective:
        together: _kernels.Collective = self._collective.of_call(call_id(call), call.timeout_s)
        return together

    def _gather_then_product(self, call: Call, stream: int) -> None:
        tensors = call.tensors
        mine, rows = tensors["a"], tensors.get("gathered")
        own, scales = tensors.get("a_scale"), tensors.get("gathered_scale")
        if self._world_size == 1:
            for kept, one in ((rows, mine), (scales, own)):
                if kept is not None and one is not None:
                    kept.copy_(one)
            self._multiply_call(mine, own, call)
            return
        outs: list[int] = []
        if rows is None:
            rows = mine.new_empty(self._between)
        elif call.symmetric:
            outs = list(call.symmetric.get("gathered", ()))
        if own is not None and scales is None:
            scales = own.new_empty((self._world_size * len(own), own.shape[1]))
        if call.view != "compute_only":
            self._gather(call, mine, outs or [rows.data_ptr()], own, scales, stream)
        self._multiply_call(rows, scales, call)

    def _gather(
        self,
        call: Call,
        mine: torch.Tensor,
        outs: list[int],
        own: torch.Tensor | None,
        scales: torch.Tensor | None,
        stream: int,
    ) -> None:
        """Gather all ranks' rows, and their ``own`` scales into ``scales``: together with the rows,
        or, if rows go straight to every rank, after them."""
        gather, together = native().all_gather, self._together(call)
        if own is None or scales is None:
            gather(together, mine.data_ptr(), mine.nbytes, outs, stream)
            return
        beside = own.data_ptr(), own.nbytes, scales.data_ptr()
        if len(outs) == 1:
            gather(together, mine.data_ptr(), mine.nbytes, outs, stream, *beside)
            return
        gather(together, mine.data_ptr(), mine.nbytes, outs, stream)
        gather(together, own.data_ptr(), own.nbytes, [scales.data_ptr()], stream)

    def _product_then_sum(self, call: Call, stream: int) -> None:
        tensors = call.tensors
        partial = tensors["a"].new_empty(self._between, dtype=self._product)
        b, of_b = tensors["b"], tensors.get("b_scale")
        self._multiply(tensors["a"], tensors.get("a_scale"), b, of_b, None, partial)
        if call.view == "compute_only":
            return
        if self._normalises:
            blocks = collective_blocks(self._context) // 2  # one a multiprocessor
            sum_by_mail(call, self._world, partial, blocks, stream, not self._one_shot)
            return
        made, element = native(), self._element
        landings = self._outputs.landings(tensors["out"].data_ptr())
        together = self._collective.of_call(
            call_id(call), call.timeout_s, landings, **prefetch_of(call)
        )
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

    def _multiply_call(self, a: torch.Tensor, scale: torch.Tensor | None, call: Call) -> None:
        tensors = call.tensors
        bias = tensors["bias"] if self._plan.bias == "launch" else None
        self._multiply(a, scale, tensors["b"], tensors.get("b_scale"), bias, tensors["out"])

    def _multiply(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor | None,
        b: torch.Tensor,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Compute ``out`` from a whole ``a``, rounded once."""
        how = self._plan.part(LibrarySchedule)
        behind = self._product != out.dtype
        multiply = multiply_by(
            b, b_scale, self._plan.scales, how, self._context, None if behind else bias
        )
        if not behind:
            multiply(a, a_scale, out)
            return
        whole = torch.empty(out.shape, dtype=self._product, device=out.device)
        multiply(a, a_scale, whole)
        out.copy_(whole) if bias is None else torch.add(whole, bias, out=out)


def starters_product(plan: LaunchPlan, whole: Allocation | None = None) -> _kernels.LibraryProduct:
    """Return the product with which native code multiplies 16-bit operands. ``whole``: an
    allocation of the tensor from which results are rounded, if they have another dtype than
    products."""
    product = torch_dtype(plan.part(ProductSchedule).product)
    more = (product,) if product != torch_dtype(plan.dtype) else ()
    mm, addmm = (
        (long_products.mm, long_products.addmm)
        if long_products.may_lose_terms(plan.gemm.k)
        else (torch.mm, torch.addmm)
    )
    made: _kernels.LibraryProduct = native().torch_product(mm, addmm, torch.add, more, whole)
    return made


def allocation(shape: tuple[int, int], dtype: torch.dtype, device: int) -> Allocation:
    """Return the allocation of a tensor."""
    # torch's own compiler allocates in this way: past the dispatcher, in a quarter of the time of
    # torch.empty.
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if quick is not None:
        return quick, (shape, (shape[1], 1), dtype)
    return partial(torch.empty, dtype=dtype, device=f"cuda:{device}"), (shape,)


def _check(plan: LaunchPlan) -> None:
    """Raise ArgumentError for a schedule that a call would not follow."""
    how = plan.part(LibrarySchedule)
    check_product(plan, how)
    reduced = plan.op == "gemm_all_reduce" and plan.world_size > 1
    if (how.way is not None) != reduced:
        legal = "one_shot or two_shot" if reduced else "None: nothing is summed everywhere"
        raise ArgumentError("plan.schedule.way", how.way, legal)
    if how.by_mail and plan.world_size == 1:
        raise ArgumentError("plan.schedule.by_mail", True, "False: there is no exchange")
    sent = mail.of_plan(plan, how.product, how.way) if how.by_mail else 0
    if sent > mail.MAIL_BYTES:
        legal = (
            f"False: ranks would send {sent} bytes, and a call by mail may have {mail.MAIL_BYTES}"
        )
        raise ArgumentError("plan.schedule.by_mail", True, legal)
    if how.normalises and not (
        how.by_mail
        and how.way
        and plan.norm
        and plan.bias is None
        and (how.product == plan.out_dtype or how.way == "one_shot")
        and mail.keeps_rows(plan.gemm, plan.world_size, how.way)
    ):
        legal = (
            "False: no whole rows by mail, in two exchanges of the results' dtype, without a bias "
            f"and of at most {MOST_NORMED_COLUMNS} columns, to normalise"
        )
        raise ArgumentError("plan.schedule.normalises", True, legal)


def check_product(plan: LaunchPlan, how: ProductSchedule) -> None:
    """Raise ArgumentError for products that calls would not make."""
    product, scales = how.product, plan.scales
    legal = {plan.out_dtype, "float32"}
    whole = plan.op == "all_gather_gemm" or plan.world_size == 1
    if whole and scales is not None and plan.bias == "launch":
        legal = {"float32"}  # the bias is added after the product
    if product not in legal:
        raise ArgumentError("plan.schedule.product", product, " or ".join(sorted(legal)))
    ways: tuple[ScaledBy | None, ...] = (None,)
    if scales is not None:
        by_kernel = scales.mode != "block" and product != "float32"
        ways = ("library", "kernel") if by_kernel else ("library",)
    if how.scaled_by not in ways:
        legal_ways = " or ".join(map(repr, ways))
        raise ArgumentError("plan.schedule.scaled_by", repr(how.scaled_by), legal_ways)


def _staging(plan: LaunchPlan) -> int:
    """Return the bytes of the data area; enough also if outs turn out not to be symmetric."""
    made, shape, world = native(), plan.gemm, plan.world_size
    if world == 1:
        return 0
    needed: int
    if plan.op == "all_gather_gemm":
        shard = shape.m // world * shape.k * DTYPE_BYTES[plan.dtype]
        rows, columns = scales_of_a_rank(plan)
        scales = rows * columns * DTYPE_BYTES["float32"]
        needed = made.all_gather_staging(world, shard, False, scales)
    elif plan.op == "gemm_reduce_scatter":
        needed = made.reduce_scatter_staging(world, element_of(plan), shape.m * shape.n // world)
    else:
        needed = made.all_reduce_staging(
            world, element_of(plan), shape.m * shape.n, _way(plan), False
        )
    return needed


def scales_of_a_rank(plan: LaunchPlan) -> tuple[int, int]:
    """Return the shape of the scales of one rank's rows; (0, 0) for operands without scales."""
    if plan.scales is None:
        return 0, 0
    shape = plan.gemm
    rows = shape.m // plan.world_size if plan.op == "all_gather_gemm" else shape.m
    return scale_sizes(plan.scales.mode, rows, shape.n, shape.k)[0]


def _lands(plan: LaunchPlan) -> bool:
    """Return whether ranks put results into each other's outputs where these may be written."""
    how = plan.part(LibrarySchedule)
    return how.way == "two_shot" and not how.by_mail


def _way(plan: LaunchPlan) -> _kernels.Way | None:
    name = plan.part(LibrarySchedule).way
    way: _kernels.Way | None = None if name is None else getattr(native().Way, name)
    return way


def torch_dtype(name: DtypeName) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def element_of(plan: LaunchPlan) -> _kernels.Element:
    """Return the native name of the elements that are added and of the results."""
    sent = plan.part(ProductSchedule).product
    name = plan.out_dtype if sent == plan.out_dtype else f"{sent}_to_{plan.out_dtype}"
    element: _kernels.Element = getattr(native().Element, name)
    return element
