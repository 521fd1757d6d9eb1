"""The functions of torch.ops.symm_mem: the arguments, results and gradients of torch's own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from torch import Tensor, distributed
from torch.distributed import _symmetric_memory as symm_mem

import mkernel
from mkernel.errors import ArgumentError, MkernelError, ShapeError
from mkernel.ops.symm_mem import fused_all_gather_matmul, fused_matmul_reduce_scatter

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


def test_results_are_torchs(tmp_path: Path) -> None:
    found = ranks(like_torch, tmp_path, size=RANKS)
    assert found == [12 * 3 + 9 * 3] * RANKS


@pytest.mark.parametrize("function", [fused_all_gather_matmul, fused_matmul_reduce_scatter])
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
    case = (2, 0, "avg", world.name, True, torch.bfloat16)
    found = scatters(fused_matmul_reduce_scatter, *case)
    same(found, scatters(symm_mem._fused_matmul_reduce_scatter_fallback, *case), torch.bfloat16)
    return True


def test_means_where_sums_are_not_wider(tmp_path: Path) -> None:
    assert ranks(without_float32, tmp_path, size=RANKS) == [True] * RANKS


def refused() -> list[str]:
    mkernel.init(distributed.group.WORLD, accelerator="streams", timeout_s=TIMEOUT_S)
    a, b = torch.ones(4, 12), torch.ones(12, 8)
    said = []
    for call in (
        lambda: fused_all_gather_matmul(a, [], 0, "0"),
        lambda: fused_all_gather_matmul(a, [b], 2, "0"),
        lambda: fused_all_gather_matmul(a[0], [b], 0, "0"),
        lambda: fused_matmul_reduce_scatter(a, b, "max", 0, "0"),
        lambda: fused_matmul_reduce_scatter(a[:3], b, "sum", 0, "0"),
        lambda: fused_matmul_reduce_scatter(a, b, "sum", 0, "no such group"),
    ):
        with pytest.raises(MkernelError) as error:
            call()
        assert error.type in (ArgumentError, ShapeError) or "group" in str(error.value)
        said.append(str(error.value))
    return said


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    words = ("Bs", "gather_dim = 2", "A = (12,)", "reduce_op", "(3, 8)", "no such group")
    for said in ranks(refused, tmp_path, size=RANKS):
        for text, word in zip(said, words, strict=True):
            assert word in text
