"""Products of the library path for which native code calls cuBLAS itself, exactly as torch.mm does.

torch.mm takes its host 12 us on a fast CPU and 20 to 35 on a slow one, and small eager calls are
host-bound. For 16-bit operands torch.mm is one cuBLAS function with the same arguments each time
(``host/gemm/cublas_handle.hpp``). The same function of the same library, with a workspace of the same
size, gives the same bits. Everything else is left to torch: products under unusual switches of
torch, or with a workspace size from the environment; a bias, vectors, and matrices that torch
copies first; and kinds of products of which cuBLAS loses terms, or may lose some and was not tried.

Calls of a world are ordered on its device, so its products share a workspace, and room for partial
results or gathered rows. These live as long as the world, because graphs keep their addresses.
Another world's products may run at the same time and have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.long_products import Matrix, may_lose_terms, proven
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import ProductSchedule
from mkernel.plan.model import DtypeName, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

WORKSPACE_BYTES = 32 << 20
"""Bytes of torch's workspace on Hopper (ATen/cuda/CublasHandlePool.cpp); with another size cuBLAS
chooses other kernels."""

ROOM_BYTES = 8 << 20
"""Bytes for the data that a call has between product and exchange. Larger data gets a tensor of its
own, whose allocation the device's time then hides."""

_MOST = (1 << 31) - 1
"""The largest size or pitch, because cuBLAS takes them as int."""

Switch = tuple[Callable[[], object], object]
"""A function of torch, and its result while torch multiplies as cuBLAS is called here."""


def open_cublas(context: DispatchContext, plan: LaunchPlan) -> None:
    """Make the data that the world's products share, before its first call of such a plan is
    queued. CudaError, and OSError if the device has no memory left."""
    version = torch.version.cuda
    wanted = plan.world_size > 1 and plan.scales is None and context.cublas is None
    if not wanted or version is None or _capturing():
        return
    nbytes = WORKSPACE_BYTES + ROOM_BYTES
    allocate = partial(_memory, nbytes, context.device)
    library = f"libcublas.so.{version.partition('.')[0]}"  # torch's
    context.cublas = native().open_cublas(context.device, library, allocate, WORKSPACE_BYTES)


def product_of(
    plan: LaunchPlan,
    context: DispatchContext,
    strides: Mapping[str, Sequence[int]],
    torchs: _kernels.LibraryProduct,
) -> _kernels.LibraryProduct:
    """Return a product that bypasses ``torchs`` in calls whose tensors have these strides;
    ``torchs`` itself if there is none."""
    shape, gathers = plan.gemm, plan.op == "all_gather_gemm"
    m, n, k = shape.m, shape.n, shape.k
    if context.cublas is None or "b" not in strides:
        return torchs
    of_a = (k, 1) if gathers else tuple(strides["a"])
    of_b = tuple(strides["b"])
    a, b = _layout((m, k), of_a), _layout((k, n), of_b)
    packed = not gathers or tuple(strides["out"]) == (n, 1)
    if a is None or b is None or not packed or min(m, n, k) < 2 or max(m, n, k) > _MOST:
        return torchs
    if may_lose_terms(k):
        usual = all(function() == answer for function, answer in switches(plan.dtype))
        dtype, into = (getattr(torch, x) for x in (plan.dtype, plan.part(ProductSchedule).product))
        matrices = Matrix(dtype, (m, k), of_a), Matrix(dtype, (k, n), of_b)
        device = torch.device("cuda", context.device)
        if not usual or not proven(device, *matrices, Matrix(into, (m, n), (n, 1))):
            return torchs
    product: _kernels.LibraryProduct = native().cublas_product(
        torchs,
        context.cublas,
        plan.dtype == "bfloat16",
        plan.part(ProductSchedule).product == "float32",
        n,
        k,
        a,
        b,
        switches(plan.dtype),
    )
    return product


def switches(dtype: DtypeName) -> tuple[Switch, ...]:
    """Return everything that changes how torch multiplies operands of this dtype. A version of
    torch that lacks one of the functions lacks the switch."""
    named: dict[str, object] = {
        "_get_deterministic_algorithms": False,
        "_get_sm_carveout_experimental": None,
        "_cuda_tunableop_is_enabled": False,
        "_get_blas_preferred_backend": torch._C._BlasBackend.Cublas,
    }
    if dtype == "float16":
        reduces = "_get_cublas_allow_fp16_reduced_precision_reduction"
        named["_get_cublas_allow_fp16_accumulation"] = False
    else:
        reduces = "_get_cublas_allow_bf16_reduced_precision_reduction"
    # In later versions of torch it is a pair, whose second item allows K to be split.
    named[reduces] = (True, True) if isinstance(getattr(torch._C, reduces)(), tuple) else True
    found = ((getattr(torch._C, name, None), usual) for name, usual in named.items())
    return tuple((function, usual) for function, usual in found if function is not None)


def _memory(nbytes: int, device: int) -> torch.Tensor:
    """Allocate memory of the device, not of torch: if torch's compiler warms up a CUDA graph with a
    call, torch's memory in that call belongs to the graph's pool, and must not be kept."""
    try:
        made = DeviceMemory.create(nbytes, device)
    except OSError:
        torch.cuda.empty_cache()  # torch may hold unused memory
        made = DeviceMemory.create(nbytes, device)
    return made.tensor(0, (nbytes,), torch.uint8)


def _capturing() -> bool:
    """Return whether a graph is being captured, to which new memory would belong."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def _layout(shape: tuple[int, int], strides: Sequence[int]) -> tuple[bool, int] | None:
    """Return (is it column-major, elements from row to row or from column to column) of a matrix;
    None: torch copies a matrix of that layout before it multiplies."""
    (rows, columns), (down, along) = shape, strides
    if along == 1 and columns <= down <= _MOST:
        return False, down
    if down == 1 and rows <= along <= _MOST:
        return True, along
    return None
