"""Layers with invariant results: outputs and input gradients of a row have the same bits in any batch,
on any number of ranks, eager and compiled."""

from __future__ import annotations

from typing import Any

import kept_ranks
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import Linear, Module

import mkernel
from mkernel.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from mkernel.nn.styles import ColwiseParallel, RowwiseParallel
from mkernel.ops import shared_input

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ROWS, HIDDEN, INNER = 16, 128, 256
BATCHES = ([*range(ROWS)], [5, 3, 2, 12], [7, 0, 9, 1, 15, 4, 2, 8])


class Pair(Module):
    """Two layers, of which the first has a bias."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        up, down = whole()
        options: Any = {"sequence_parallel": sequence_parallel, "invariant": True}
        self.up = ColumnParallelLinear.from_linear(up, **options)
        self.down = RowParallelLinear.from_linear(down, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def whole() -> tuple[Linear, Linear]:
    torch.manual_seed(7)
    return (
        Linear(HIDDEN, INNER, dtype=torch.bfloat16),
        Linear(INNER, HIDDEN, bias=False, dtype=torch.bfloat16),
    )


def drawn(rows: list[int]) -> tuple[Tensor, Tensor]:
    """An input and the gradient of its output, of these rows."""
    chance = torch.Generator().manual_seed(3)
    x, of_y = (torch.randn(ROWS, HIDDEN, generator=chance).bfloat16() for _ in range(2))
    return x[rows], of_y[rows]


def passed(model: Any, rows: list[int], split: bool) -> tuple[Tensor, Tensor]:
    """The output of rows and the gradient of the input, of this rank's rows or of all."""
    world = mkernel.world()
    x, of_y = drawn(rows)
    if split:
        x, of_y = (each.chunk(world.size)[world.rank] for each in (x, of_y))
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(of_y)
    assert x.grad is not None
    return y.detach(), x.grad


def layers(split: bool, compiled: bool) -> list[tuple[Tensor, Tensor]]:
    model: Any = Pair(split)
    if compiled:
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    return [passed(model, rows, split) for rows in BATCHES]


def judged(
    found: list[list[tuple[Tensor, Tensor]]], split: bool, wanted: tuple[Tensor, Tensor]
) -> None:
    for rows, parts in zip(BATCHES, zip(*found, strict=True), strict=True):
        for which in range(2):
            got = [part[which] for part in parts]
            result = torch.cat(got) if split else got[0]
            assert torch.equal(result, wanted[which][rows]), (rows, ("y", "gradient")[which])


@pytest.fixture(scope="module")
def alone() -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = kept_ranks.run(
        layers, False, False, ranks_per_node=1, accelerator="streams"
    )[0][0]
    up, down = whole()
    x, of_y = drawn(BATCHES[0])
    x = x.float().requires_grad_()
    y = down.float()(up.float()(x).relu())
    y.backward(of_y.float())
    assert x.grad is not None
    for got, truth in zip(found, (y.detach(), x.grad), strict=True):
        assert (got.float() - truth).norm() < 0.02 * truth.norm()
    return found


@pytest.mark.parametrize(
    ("ranks", "split", "compiled"),
    [(1, True, True), (2, True, False), (2, False, True), (4, True, True), (4, False, False)],
)
def test_layers(ranks: int, split: bool, compiled: bool, alone: tuple[Tensor, Tensor]) -> None:
    found = kept_ranks.run(layers, split, compiled, ranks_per_node=ranks, accelerator="streams")
    judged(found, split, alone)


def depend_on_rows() -> None:
    """Make torch's products, but those that are measured, depend on the number of rows for certain."""
    plain, functional = torch.Tensor.__matmul__, shared_input.linear

    def product(a: Tensor, b: Tensor) -> Tensor:
        return plain(a, b) * (1 + len(a))

    def layer(x: Tensor, *rest: Any) -> Tensor:
        return functional(x, *rest) * (1 + len(x))

    torch.Tensor.__matmul__ = product  # type: ignore[method-assign]
    shared_input.linear = layer


def layers_beside_such_products() -> list[tuple[Tensor, Tensor]]:
    depend_on_rows()
    return layers(False, False)


def test_no_product_is_left_to_a_library_that_promises_nothing(
    alone: tuple[Tensor, Tensor],
) -> None:
    found = mkernel.launch(layers_beside_such_products, ranks_per_node=2, accelerator="streams")
    judged(found, False, alone)


def several(compiled: bool) -> list[list[Tensor]]:
    """Products that share one gather, and each alone; with biases, and in e4m3."""
    depend_on_rows()
    size, rank = mkernel.world().size, mkernel.world().rank
    x = drawn(BATCHES[0])[0].chunk(size)[rank].contiguous()
    (up, _), how = whole(), True
    b, bias = up.weight.detach().t(), up.bias.detach()
    each = [(b, bias), (b[:, :64], bias[:64])]

    def gathered(x: Tensor) -> Any:
        found = mkernel.all_gather_gemm(
            x, [one for one, _ in each], bias=[two for _, two in each], invariant=how
        )
        return [one * 1 for one in found]

    if compiled:
        gathered = torch.compile(gathered, fullgraph=True, backend="aot_eager")
    alone = [mkernel.all_gather_gemm(x, one, bias=two, invariant=how) for one, two in each]
    one = torch.ones(1, 1)
    e4m3 = [part.to(torch.float8_e4m3fn) for part in (x, up.weight.detach())]
    scaled: Any = {"a_scale": one, "invariant": how}
    more = mkernel.all_gather_gemm(
        e4m3[0], [e4m3[1].t(), e4m3[1][:64].t()], b_scale=[one, one], **scaled
    )
    single = mkernel.all_gather_gemm(e4m3[0], e4m3[1].t(), b_scale=one, **scaled)
    return [[*gathered(x), *more], [*alone, single, single[:, :64]]]


@pytest.mark.parametrize("compiled", [False, True])
def test_products_of_one_gather_are_those_of_each_alone(compiled: bool) -> None:
    for together, alone in mkernel.launch(
        several, compiled, ranks_per_node=2, accelerator="streams"
    ):
        assert all(torch.equal(one, two) for one, two in zip(together, alone, strict=True))


def styled(split: bool) -> list[tuple[Tensor, Tensor]]:
    """Torch's styles in a world that promises: two column layers share one input."""
    depend_on_rows()
    mesh = torch.distributed.init_device_mesh("cpu", (mkernel.world().size,))
    mkernel.init(mesh, accelerator="streams", invariant=True)
    layout = Shard(0) if split else Replicate()
    up, down = whole()
    model = torch.nn.ModuleDict({"up": up, "more": whole()[0], "down": down})
    plan = {
        "up": ColwiseParallel(input_layouts=layout),
        "more": ColwiseParallel(input_layouts=layout),
        "down": RowwiseParallel(output_layouts=layout),
    }
    parallelize_module(model, mesh, plan)

    def run(x: Tensor) -> Tensor:
        y: Tensor = model["down"](model["up"](x).relu() + model["more"](x).tanh())
        return y

    try:
        return [passed(run, rows, split) for rows in BATCHES]
    finally:
        mkernel.finalize(group=mesh)


@pytest.mark.parametrize("split", [True, False])
def test_styles_in_a_world_that_promises(split: bool) -> None:
    found = mkernel.launch(styled, split, ranks_per_node=2, accelerator="streams")
    y, of_x = (
        torch.cat([each[0][which] for each in found]) if split else found[0][0][which]
        for which in range(2)
    )
    judged(found, split, (y, of_x))


def blocks() -> Tensor:
    torch.manual_seed(5)
    state = {
        f"{name}.weight": torch.randn(sizes).bfloat16()
        for name, sizes in {
            "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)
        }.items()
    }  # fmt: skip
    block = ParallelMLP(
        HIDDEN, INNER, sequence_parallel=False, dtype=torch.bfloat16,
        invariant=mkernel.Invariant(4, "float32"),
    )  # fmt: skip
    block.load_state_dict(state)
    return block(drawn(BATCHES[0])[0][None]).detach()


def test_a_block() -> None:
    one, two, four = (
        kept_ranks.run(blocks, ranks_per_node=ranks, accelerator="streams")[0]
        for ranks in (1, 2, 4)
    )
    assert torch.equal(one, two)
    assert torch.equal(one, four)
