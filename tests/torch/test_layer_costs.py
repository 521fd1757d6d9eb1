"""The costs of a pair of layers: its fused calls, and what torch copies beside the products.

A profiler sees every copy, also those that autograd makes for itself, as of a gradient that lies
otherwise than its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from once import once
from python_calls import plans
from ranks import on_ranks, operand
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import mkernel
from mkernel.nn import ColumnParallelLinear, ParallelAttention, ParallelMLP, RowParallelLinear
from mkernel.ops import derivatives
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
B, S, H, INNER = 3, 16, 24, 40
BACKENDS = ("", "aot_eager")


class Costs(NamedTuple):
    """The fused calls and the copies of a pass."""

    calls: dict[str, int]
    copies: int


class Pair(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(H, INNER, **options)
        self.down = RowParallelLinear(INNER, H, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


class Checkpointed(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Matrices(nn.Module):
    """The ops by themselves, with weights that lie by rows."""

    def __init__(self) -> None:
        super().__init__()
        rank = mkernel.world().rank
        self.up = nn.Parameter(operand("up", rank, H, INNER // RANKS))
        self.down = nn.Parameter(operand("down", rank, INNER // RANKS, H))

    def forward(self, x: Tensor) -> Tensor:
        return mkernel.gemm_reduce_scatter(mkernel.all_gather_gemm(x, self.up).relu(), self.down)


class Layer(NamedTuple):
    """A layer, the shape of a rank's input, and what its passes cost; ``otherwise``: by some backend of
    the compiler."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    forward: Costs
    backward: Costs
    otherwise: Mapping[str, tuple[Costs, Costs]] = {}


def sharded(
    make: Callable[[], nn.Module],
    *shape: int,
    gathers: int = 1,
    scatters: int = 1,
    copies: tuple[int, int] = (0, 0),
) -> Layer:
    """A layer whose activations ranks share; what its backward pass calls."""
    backward = {"all_gather_gemm": gathers, "gemm_reduce_scatter": scatters}
    return Layer(make, shape, Costs(ONE_EACH, copies[0]), Costs(backward, copies[1]))


ONE_EACH = {"all_gather_gemm": 1, "gemm_reduce_scatter": 1}
PART = S // RANKS
REPLICATED = Costs({"gemm_all_reduce": 1}, 0)
LAYERS = {
    "pair": sharded(Pair, PART, H),
    "pair of sequences outermost": sharded(Pair, PART, B, H),
    "pair of one sequence": sharded(lambda: Pair(sequence_dim=1), 1, PART, H),
    # Ranks share an inner dimension. What enters a pass is put in the order in which it travels, the
    # input and the result's gradient; and the input's gradient in that of the input.
    "pair of batches": sharded(lambda: Pair(sequence_dim=1), B, PART, H, copies=(1, 2)),
    # Inductor writes what it computes in the order in which that travels.
    "mlp of batches": sharded(lambda: ParallelMLP(H, INNER), B, PART, H, copies=(1, 2))._replace(
        otherwise={"inductor": (Costs(ONE_EACH, 0), Costs(ONE_EACH, 2))}
    ),
    "pair that keeps nothing": sharded(lambda: Pair(save_gathered=False), PART, H, gathers=2),
    # Compiled, the ops' results are saved, the gathered input among them.
    "checkpointed pair": sharded(Checkpointed, PART, H, gathers=2, scatters=2)._replace(
        otherwise={"aot_eager": (Costs(ONE_EACH, 0), Costs(ONE_EACH, 0))}
    ),
    "pair of whole activations": Layer(
        lambda: Pair(sequence_parallel=False), (B, S, H), REPLICATED, REPLICATED
    ),
    "matrices": sharded(Matrices, PART, H, gathers=2),
    "mlp": sharded(lambda: ParallelMLP(H, INNER), 1, PART, H),
    "mlp that keeps nothing": sharded(
        lambda: ParallelMLP(H, INNER, save_gathered=False), 1, PART, H, gathers=2
    ),
    "attention": sharded(lambda: ParallelAttention(H, 4, 2), 1, PART, H),
}
WAYS = [(name, backend) for name in LAYERS for backend in BACKENDS] + [
    ("mlp", "inductor"),
    ("mlp of batches", "inductor"),
]
"""The ways to run each layer; what divides a graph in two is the same for all backends."""


def costs(run: Callable[[], object]) -> Costs:
    with plans() as made, profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    names = Counter(each.name for each in seen.events())
    calls = Counter(plan.op for plan in made)
    return Costs(dict(calls), names["aten::copy_"])  # which clone and contiguous call


def passes(name: str, backend: str) -> tuple[Costs, Costs]:
    """Count what a layer's forward and backward passes cost, after the first ones."""
    model = LAYERS[name].make()
    run: Callable[[Tensor], Tensor] = model
    if backend:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, fullgraph=True)
    leaf = operand("x", mkernel.world().rank, *LAYERS[name].shape).requires_grad_()
    x = leaf.neg()  # made by a layer before, whose derivative takes the gradient
    y = run(x)
    of_y = torch.ones_like(y, memory_format=torch.contiguous_format)
    y.backward(of_y)
    leaf.grad = None
    model.zero_grad()
    x = leaf.neg()
    kept: list[Tensor] = []
    forward = costs(lambda: kept.append(run(x)))
    return forward, costs(lambda: kept[0].backward(of_y))


def all_passes() -> dict[tuple[str, str], tuple[Costs, Costs]]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    uncached = config.patch(fx_graph_cache=False)
    with uncached, functorch_config.patch(enable_autograd_cache=False):
        return {way: passes(*way) for way in WAYS}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], tuple[Costs, Costs]]]:
    return once(request, lambda: on_ranks(all_passes))


@pytest.mark.parametrize(("name", "backend"), WAYS)
def test_a_layer_costs_its_calls_and_no_copy(
    name: str, backend: str, found: list[dict[tuple[str, str], tuple[Costs, Costs]]]
) -> None:
    for each in found:
        layer = LAYERS[name]
        wanted = layer.otherwise.get(backend, (layer.forward, layer.backward))
        assert each[name, backend] == wanted


def with_gradients_by_rows() -> list[tuple[Costs, Costs]]:
    with mock.patch.object(derivatives, "of_matrix", lambda a, of_c, b: a.t() @ of_c):
        return [passes("pair", backend) for backend in BACKENDS]


def test_a_gradient_that_lies_otherwise_than_its_parameter_is_noticed() -> None:
    wanted = LAYERS["pair"].forward, LAYERS["pair"].backward._replace(copies=2)
    assert on_ranks(with_gradients_by_rows) == [[wanted] * len(BACKENDS)] * RANKS


def what_is_gathered() -> list[bool]:
    """Return whether a layer has the gathered rows given out: in training, and without gradients."""
    found: list[bool] = []
    run = World.run

    def noted(world: World, plan: Any, tensors: Any, **options: Any) -> Any:
        found.append("gathered" in tensors)
        return run(world, plan, tensors, **options)

    layer = ColumnParallelLinear(H, INNER)
    x = operand("x", mkernel.world().rank, PART, H)
    with plans(), mock.patch.object(World, "run", noted):
        layer(x)
        with torch.no_grad():
            layer(x)
        layer.requires_grad_(False)(x)
    return found


def test_nothing_is_kept_where_no_gradient_needs_it() -> None:
    assert on_ranks(what_is_gathered) == [[True, False, False]] * RANKS
