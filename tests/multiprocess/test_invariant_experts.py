"""Invariant results of MoE on ``streams``: a token and its experts have the same bits in any batch, any
order of tokens, chunk, way home, exchange and number of ranks, which are those of the tree over groups
of experts as this file adds it up; so have gradients of tokens, rows and weights of routing."""

from __future__ import annotations

from typing import Any

import kept_ranks
import pytest
import torch
from invariant_experts import Draw, E, differences, each_of, every_token, expect_tree, joined, mine
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.errors import ArgumentError, DtypeError
from mkernel.nn import ExpertParallelMLP

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

T, H, WIDTH, K = 40, 128, 128, 4
WORLDS = [(1, 2, 0), (2, 1, 0), (1, 4, 0), (2, 2, 1), (1, 8, 0)]
LONG = [pytest.param(*world, marks=pytest.mark.long) for world in ((2, 2, 0), (2, 4, 1), (4, 2, 1))]
"""Nodes, ranks of each, and whether these relay."""
DRAWS: list[Draw] = [
    *each_of((
        (torch.bfloat16, False, None, True, None),
        (torch.float32, False, "float16", True, None),
        (torch.bfloat16, False, "float32", False, "silu_and_mul"),
        (torch.float16, False, None, False, "silu_and_mul"),
        (torch.float32, False, None, False, None),
        (torch.bfloat16, True, None, False, "silu_and_mul"),
        (torch.float8_e4m3fn, True, "float16", False, "silu_and_mul"),
    ), tokens=T, hidden=H, width=WIDTH, top_k=K)
]  # fmt: skip


def run(nodes: int, ranks: int) -> list[Any]:
    return kept_ranks.run(
        every_token, DRAWS, nodes, ranks, nodes=nodes, ranks_per_node=ranks, accelerator="streams"
    )


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Tensor]]:
    """The results of every draw on one rank."""
    found = run(1, 1)
    return [joined(draw, found, number) for number, draw in enumerate(DRAWS)]


@pytest.mark.parametrize(("nodes", "ranks", "relays"), WORLDS + LONG)
def test_a_token_has_the_same_bits_in_every_world_and_batch(
    nodes: int, ranks: int, relays: int, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nodes > 1 and ranks > 1:
        monkeypatch.setenv("MKERNEL_EXCHANGE", "hierarchical" if relays else "direct")
    every = run(nodes, ranks)
    for number, draw in enumerate(DRAWS):
        assert all(part[-1] == bool(relays) for part in every[0][number][1])
        found = joined(draw, every, number)
        assert len(found) == (3 if draw.scaled else 6 if draw.activation is None else 5)
        assert not differences(found, alone[number]), draw


def test_the_bits_are_those_of_the_tree(alone: list[dict[str, Tensor]]) -> None:
    for draw, found in zip(DRAWS, alone, strict=True):
        expect_tree(draw, found)


def layer(ranks: int, compiled: bool) -> list[Tensor]:
    """A layer in 16 bits, or e4m3, on batches of two sizes, without and with gradients."""
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn)[: 1 if compiled else 2]:
        torch.manual_seed(5)
        whole = torch.nn.Module()
        for name, shape in (("gate_up_proj", (E, 2 * WIDTH, H)), ("down_proj", (E, H, WIDTH))):
            value = torch.randn(shape).div(8).bfloat16()
            whole.register_parameter(name, torch.nn.Parameter(value))
        x = torch.randn(T, H).bfloat16()
        ids, weights = torch.randint(0, E, (T, K)), torch.rand(T, K)
        made: Any = ExpertParallelMLP.from_experts(
            whole, transposed=True, max_tokens=T // ranks, capacity=T * K, invariant=True,
            dtype=dtype,
        )  # fmt: skip
        if compiled:
            made = torch.compile(made, fullgraph=True, backend="aot_eager")
        for count in (T, 8):
            own = [mine(each[:count]) for each in (x, ids, weights)]
            with torch.no_grad():
                found.append(made(*own))
            if dtype == torch.bfloat16:
                own[0].requires_grad_()
                trained = made(*own)
                assert torch.equal(trained, found[-1]), "training has other bits than inference"
                if compiled:
                    continue
                twice = [torch.autograd.grad(made(*own).sum(), own[0])[0] for _ in range(2)]
                assert torch.equal(*twice)
    return found


@pytest.mark.parametrize(("ranks", "compiled"), [(2, True), (4, False)])
def test_layers(ranks: int, compiled: bool) -> None:
    (one,) = kept_ranks.run(layer, 1, False, ranks_per_node=1, accelerator="streams")
    every = kept_ranks.run(layer, ranks, compiled, ranks_per_node=ranks, accelerator="streams")
    for wanted, few, whole in zip(one[::2], one[1::2], range(0, len(every[0]), 2), strict=False):
        assert torch.equal(wanted[:8], few)
        for at, result in ((whole, wanted), (whole + 1, few)):
            assert torch.equal(torch.cat([each[at] for each in every]), result)


def refusals() -> list[str]:
    x, ids = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    w = torch.ones(1, 8, 8)
    sent = mkernel.moe_dispatch_gemm(x, ids, w, invariant=True)
    found = []
    for dtype, partial, error in (
        (torch.float32, None, ArgumentError),
        (torch.float64, None, DtypeError),
        (torch.float32, torch.float16, DtypeError),
    ):
        how = Invariant(8) if partial else Invariant(1)
        with pytest.raises(error) as refused:
            mkernel.moe_gemm_combine(
                sent.outputs.to(dtype), w.to(dtype), sent.handle, torch.ones(3, 1),
                partial_dtype=partial, invariant=how,
            )  # fmt: skip
        found.append(str(refused.value))
    return found


def test_refusals_name_what_is_legal() -> None:
    few, wide, partial = kept_ranks.run(refusals, ranks_per_node=2, accelerator="streams")[0]
    assert "segments = 1" in few
    assert "2 ranks divide" in few
    assert "dtype = float64" in wide
    assert "partial_dtype = 'float16' is not legal; expected float32" in partial
