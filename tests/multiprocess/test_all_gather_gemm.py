"""all_gather_gemm on the `ascend` simulator, with cx7 on the soft provider between nodes."""

from __future__ import annotations

import pytest
import torch
from in_world import relative, shards

import mkernel
from mkernel.cases.base import TOLERANCE

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

WORLDS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1)]


def repeated(
    rows: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, column: bool, calls: int
) -> list[float]:
    """Errors of several calls with fresh inputs and poisoned outputs."""
    world = mkernel.world()
    out = torch.empty((rows * world.size, n), dtype=out_dtype)
    errors = []
    for call in range(calls):
        a, b = shards(call, world.size, rows, k, n, dtype)
        given = b.t().contiguous().t() if column else b
        out.fill_(float("nan"))
        mkernel.all_gather_gemm(a[world.rank], given, out=out)
        errors.append(relative(out, torch.cat(a).double() @ b.double()))
    return errors


@pytest.mark.parametrize(("nodes", "ranks"), WORLDS)
def test_every_world(nodes: int, ranks: int) -> None:
    for errors in mkernel.launch(
        repeated, 128, 256, 512, torch.float16, torch.float32, False, 5,
        nodes=nodes, ranks_per_node=ranks,
        accelerator="ascend",
    ):  # fmt: skip
        assert max(errors) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("column", [False, True])
def test_dtypes_and_layouts(dtype: str, out_dtype: str, column: bool) -> None:
    for errors in mkernel.launch(
        repeated, 64, 264, 320, getattr(torch, dtype), getattr(torch, out_dtype), column, 2,
        nodes=2, ranks_per_node=1,
        accelerator="ascend",
    ):  # fmt: skip
        assert max(errors) <= TOLERANCE[out_dtype]  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 8, 8), (7, 40, 24), (129, 264, 520), (300, 1000, 72), (128, 8, 2048), (5, 1024, 8)],
)
def test_ragged_shapes(rows: int, n: int, k: int) -> None:
    for errors in mkernel.launch(
        repeated,
        rows,
        n,
        k,
        torch.float16,
        torch.float32,
        False,
        3,
        nodes=2,
        ranks_per_node=2,
        accelerator="ascend",
    ):
        assert max(errors) <= TOLERANCE["float32"]


def several_plans() -> list[bool]:
    """Bit-identity from call to call, between chunk sizes, and with other shapes in between."""
    world = mkernel.world()
    a, b = shards(3, world.size, 256, 1024, 512, torch.float16)
    mine = a[world.rank]
    first = mkernel.all_gather_gemm(mine, b, out_dtype=torch.float32)
    same = []
    for chunk in (None, 1, 3, 64, None):
        other = mkernel.all_gather_gemm(mine[:128], b[:, :256].contiguous())
        assert other.shape == (128 * world.size, 256)
        again = mkernel.all_gather_gemm(mine, b, out_dtype=torch.float32, chunk=chunk)
        same.append(torch.equal(first, again))
    return same


def test_results_are_bit_identical() -> None:
    for same in mkernel.launch(several_plans, nodes=2, ranks_per_node=2, accelerator="ascend"):
        assert all(same)


def result_of(rows: int) -> torch.Tensor:
    world = mkernel.world()
    a, b = shards(5, 4, rows, 512, 256, torch.float16)
    whole = torch.cat(a)
    share = len(whole) // world.size
    return mkernel.all_gather_gemm(
        whole[world.rank * share : (world.rank + 1) * share], b, out_dtype=torch.float32
    )


def test_world_split_does_not_change_a_bit() -> None:
    results = [
        c
        for nodes, ranks in ((1, 1), (1, 4), (2, 2), (4, 1))
        for c in mkernel.launch(
            result_of, 128, nodes=nodes, ranks_per_node=ranks, accelerator="ascend"
        )
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


def gathered() -> tuple[bool, float]:
    world = mkernel.world()
    a, b = shards(9, world.size, 130, 264, 64, torch.bfloat16)
    c, whole = mkernel.all_gather_gemm(
        a[world.rank], b, out_dtype=torch.float32, return_gathered=True
    )
    reference = torch.cat(a)
    return torch.equal(whole, reference), relative(c, reference.double() @ b.double())


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 2), (2, 2)])
def test_gathered_a_is_exact(nodes: int, ranks: int) -> None:
    for exact, error in mkernel.launch(
        gathered, nodes=nodes, ranks_per_node=ranks, accelerator="ascend"
    ):
        assert exact
        assert error <= TOLERANCE["float32"]


def nan_and_infinity() -> bool:
    world = mkernel.world()
    a, b = shards(1, world.size, 64, 64, 64, torch.float16)
    a[0][3, 5] = float("nan")
    a[-1][4, 6] = float("inf")
    c = mkernel.all_gather_gemm(a[world.rank], b, out_dtype=torch.float32)
    wanted = torch.cat(a).double() @ b.double()
    return bool((torch.isnan(c) == torch.isnan(wanted)).all()) and bool(
        (torch.isinf(c) == torch.isinf(wanted)).all()
    )


def test_nan_and_infinity_pass_through() -> None:
    assert all(mkernel.launch(nan_and_infinity, nodes=2, ranks_per_node=1, accelerator="ascend"))


def plan_is_the_launched_one() -> bool:
    world = mkernel.world()
    from mkernel.ops.all_gather_gemm import OP

    a, b = shards(1, world.size, 128, 256, 256, torch.float16)
    out = torch.empty(128 * world.size, 256)
    launched = OP.call(a[0], b, out=out).plan
    asked = mkernel.plan("ag_gemm", m=128 * world.size, n=256, k=256)
    return launched == asked and launched.digest() == asked.digest()


def test_plan_is_what_the_launch_uses() -> None:
    assert all(
        mkernel.launch(plan_is_the_launched_one, nodes=2, ranks_per_node=2, accelerator="ascend")
    )
