"""The functions of torch.ops.symm_mem: the arguments, results and gradients of torch's own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from ranks import SCALED_MM
from torch import Tensor, distributed
from torch.distributed import _symmetric_memory as symm_mem

import mkernel
from mkernel.ops.symm_mem import (
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
SHAPES = {2: (8, 12), 3: (4, 6, 12), 4: (2, 4, 6, 12)}


def drawn(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seed = sum(map(ord, name)) + 1000 * distributed.get_rank()
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gathers(fused: Any, dims: int, dim: int, weights: int, group: str, **options: Any) -> Any:
    shape = SHAPES[dims]
    k = shape[-1] * (RANKS if dim % dims == dims - 1 else 1)
    a = drawn("a", *shape).requires_grad_()
    bs = [drawn(f"b{i}", k, 8 + 2 * i).requires_grad_() for i in range(weights)]
    whole, products = fused(a, bs, dim, group, **options)
    sum((each.sin().sum() for each in products), torch.zeros(())).backward()
    return [whole, *products, a.grad, *(each.grad for each in bs)]


def scatters(
    fused: Any, dims: int, dim: int, reduce_op: str, group: str, column: bool, dtype: torch.dtype
) -> Any:
    a = drawn("a", *SHAPES[dims], dtype=dtype).requires_grad_()
    b = drawn("b", 10, 12, dtype=dtype).t() if column else drawn("b", 12, 10, dtype=dtype)
    b.requires_grad_()
    c = fused(a, b, reduce_op, dim, group)
    if reduce_op == "avg":  # of which torch has no derivative
        return [c.detach()]
    c.float().sin().sum().backward()
    return [c, a.grad, b.grad]


def same(found: list[Any], wanted: list[Any], dtype: torch.dtype = torch.float32) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


as_torchs = pytest.mark.skipif(
    "return_A" not in str(torch.ops.symm_mem.fused_all_gather_matmul.default._schema),
    reason=f"torch.ops.symm_mem of torch {torch.__version__} takes other arguments: no return_A",
)


def like_torch() -> int:
    """How many calls have been compared with torch's own, which runs collectives and products here."""
    group = distributed.group.WORLD
    assert group is not None
    mkernel.init(group, accelerator="streams", timeout_s=TIMEOUT_S)
    name, compared = group.group_name, 0
    for dims in SHAPES:
        for dim in (*range(dims), -1):
            for weights, options in ((1, {}), (1, {"return_A": False}), (3, {"return_A": False})):
                case = (dims, dim, weights, name)
                same(
                    gathers(fused_all_gather_matmul, *case, **options),
                    gathers(symm_mem._fused_all_gather_matmul_fallback, *case, **options),
                )
                compared += 1
            if dim < 0:
                continue  # torch takes none here
            for op, column, dtype in (
                ("sum", True, torch.float32),
                ("avg", False, torch.float32),
                ("avg", True, torch.bfloat16),
            ):
                last = (dims, dim, op, name, column, dtype)
                found = scatters(fused_matmul_reduce_scatter, *last)
                wanted = scatters(symm_mem._fused_matmul_reduce_scatter_fallback, *last)
                same(found, wanted, dtype)
                compared += 1
    return compared


@as_torchs
def test_results_are_torchs(tmp_path: Path) -> None:
    found = ranks(like_torch, tmp_path, size=RANKS)
    assert found == [12 * 3 + 9 * 3] * RANKS


@as_torchs
@pytest.mark.parametrize(
    "function",
    [
        fused_all_gather_matmul,
        fused_matmul_reduce_scatter,
        fused_all_gather_scaled_matmul,
        fused_scaled_matmul_reduce_scatter,
    ],
)
def test_arguments_are_torchs(function: Any) -> None:
    schema = getattr(torch.ops.symm_mem, function.__name__).default._schema
    ours = inspect.signature(function).parameters.values()
    found = [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in ours]
    none = inspect.Parameter.empty
    assert found == [
        (each.name, each.kwarg_only, each.default_value if each.has_default_value() else none)
        for each in schema.arguments
    ]


def without_float32() -> bool:
    """Whether there are means in a world that gives sums in the inputs' dtype alone."""
    world = mkernel.init(distributed.group.WORLD, accelerator="streams", timeout_s=TIMEOUT_S)
    claimed = world.accelerator.capabilities().model_copy(update={"mixed_dtypes": False})
    world.accelerator.capabilities = lambda: claimed  # type: ignore[method-assign]
    rest = (world.name, True, torch.bfloat16)
    found = scatters(fused_matmul_reduce_scatter, 2, 0, "avg", *rest)
    # Gloo's means are sums in torch 2.6.
    sums = scatters(symm_mem._fused_matmul_reduce_scatter_fallback, 2, 0, "sum", *rest)
    same(found, [sums[0].detach() / RANKS], torch.bfloat16)
    return True


def test_means_where_sums_are_not_wider(tmp_path: Path) -> None:
    assert ranks(without_float32, tmp_path, size=RANKS) == [True] * RANKS


# ---- e4m3 ----------------------------------------------------------------------------------------

N = 16


def quantised(name: str, *shape: int) -> Tensor:
    return drawn(name, *shape).to(torch.float8_e4m3fn)


def scale(name: str, *shape: int) -> Tensor:
    return drawn(name, *shape).abs().add(0.1)


def scaled_gathers(mode: str, dims: int, dim: int, group: str, fused: Any) -> Any:
    shape = (*SHAPES[dims][:-1], 32)
    single = mode == "tensor"
    bs = [quantised(f"b{i}", N + i * 16, 32).t() for i in range(2)]
    of_a = scale("a_scale") if single else scale("a_scale", *shape[:-1], 1)
    if mode == "replicated":
        parts = [torch.empty_like(of_a) for _ in range(RANKS)]
        distributed.all_gather(parts, of_a)
        of_a = torch.cat(parts, dim)
    of_bs = [scale("b_scale") if single else scale("b_scale", 1, b.shape[1]) for b in bs]
    biases = [None, drawn("bias", N + 16).bfloat16()]
    whole, products = fused(
        quantised("a", *shape), bs, of_a, of_bs, dim, group,
        biases, [None] * 2, [torch.bfloat16] * 2, [False] * 2,
    )  # fmt: skip
    return [whole.float(), *products]


def gathered_by_torch(mode: str, dims: int, dim: int, group: str) -> Any:
    """By torch's own function, with bytes gathered where the group's library knows no e4m3."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor

    def as_bytes(x: Tensor, *where: Any) -> Tensor:
        if x.dtype != torch.float8_e4m3fn:
            return gather(x, *where)  # type: ignore[no-any-return]
        found: Tensor = symm_mem.funcol.wait_tensor(gather(x.view(torch.uint8), *where))
        return found.view(x.dtype)

    torch.ops._c10d_functional.all_gather_into_tensor = as_bytes
    try:
        fused = symm_mem._fused_all_gather_scaled_matmul_fallback
        return scaled_gathers(mode, dims, dim, group, fused)
    finally:
        torch.ops._c10d_functional.all_gather_into_tensor = gather


def scaled_scatters(
    fused: Any, mode: str, dims: int, dim: int, reduce_op: str, flat: bool, group: str
) -> Any:
    lead, single = SHAPES[dims][:-1], mode == "tensor"
    a, of_a = quantised("a", *lead, 32), scale("a_scale", *(() if single else (*lead, 1)))
    b, of_b = quantised("b", N, 32).t(), scale("b_scale", *(() if single else (1, N)))
    if flat:  # as Inductor calls it
        a, of_a = a.flatten(0, -2), of_a if single else of_a.flatten(0, -2)
    after = min(dim, a.dim() - 1)
    return fused(
        a, b, of_a, of_b, reduce_op, dim, after, group, [*lead, N], out_dtype=torch.float32
    )


def scaled_like_torch() -> int:
    group = distributed.group.WORLD
    assert group is not None
    mkernel.init(group, accelerator="streams", timeout_s=TIMEOUT_S)
    name, compared = group.group_name, 0
    for dims in SHAPES:
        for dim in range(dims - 1):
            for mode in ("tensor", "row", "replicated"):
                case = (mode, dims, dim, name)
                found = scaled_gathers(*case, fused_all_gather_scaled_matmul)
                same(found, gathered_by_torch(*case), torch.bfloat16)
                compared += 1
        for dim in range(dims):
            for mode, reduce_op, flat in (
                ("tensor", "sum", False),
                ("row", "sum", True),
                ("row", "avg", False),
            ):
                last = (mode, dims, dim, reduce_op, flat, name)
                wanted = scaled_scatters(
                    symm_mem._fused_scaled_matmul_reduce_scatter_fallback, *last
                )
                same([scaled_scatters(fused_scaled_matmul_reduce_scatter, *last)], [wanted])
                compared += 1
    return compared


@pytest.mark.skipif(not SCALED_MM, reason=f"torch {torch.__version__} has no _scaled_mm on CPUs")
def test_results_of_e4m3_are_torchs(tmp_path: Path) -> None:
    assert ranks(scaled_like_torch, tmp_path, size=RANKS) == [6 * 3 + 9 * 3] * RANKS
