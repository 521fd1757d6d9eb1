"""Invariant results of MoE on ``hopper`` and ``cuda``: a token has the same bits in any batch, order,
tiling, way home, exchange and world, which are those of the tree. Planted faults are seen."""

from __future__ import annotations

from typing import Any

import kept_ranks
import pytest
import torch
from device_buffers import needs_gpus, several, takes_ranks, worlds
from invariant_experts import SEGMENTS, Draw, differences, each_of, expect_tree, joined, tensors
from invariant_experts_ranks import FAULTS, KINDS, every_token, one_batch, replayed, rows_home
from rounded_tree import rounded, tree
from torch import Tensor

from mkernel.errors import MkernelError

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

T, E = 256, 16
SIZES = {"tokens": T, "hidden": 512, "width": 256, "top_k": 8, "trained": False, "device": "cuda"}
DRAWS: list[Draw] = list(each_of(KINDS, **SIZES))
DRAWS[0] = DRAWS[0]._replace(trained=True)  # bfloat16, whose derivatives are composed


def run(draws: list[Draw], ranks: int, nodes: int = 1, **options: Any) -> list[Any]:
    return kept_ranks.run(
        every_token, draws, nodes, ranks, nodes=nodes, ranks_per_node=ranks, accelerator="hopper",
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Tensor]]:
    """The results of every draw on one rank."""
    found = run(DRAWS, 1)
    return [joined(draw, found, number) for number, draw in enumerate(DRAWS)]


@worlds
def test_a_token_has_the_same_bits_in_every_world_and_batch(world: int, alone: Any) -> None:
    draws = DRAWS[::-1]  # which one rank has in other ways than alone
    every = run(draws, world)
    for number, draw in enumerate(draws):
        assert not differences(joined(draw, every, number), alone[draw.number]), draw


@pytest.mark.parametrize(
    ("nodes", "ranks", "exchange"),
    [
        pytest.param(2, 1, "direct", marks=takes_ranks(2)),
        pytest.param(2, 2, "direct", marks=takes_ranks(4)),
        pytest.param(2, 2, "hierarchical", marks=takes_ranks(4)),
    ],
)
def test_and_between_nodes(
    nodes: int, ranks: int, exchange: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    # Scales are of one node, and so are derivatives.
    draws = [draw._replace(trained=False) for draw in DRAWS if not draw.scaled]
    every = run(draws, ranks, nodes, nic="cx7", verbs="soft")
    for number, draw in enumerate(draws):
        assert every[0][number][1][0][-1] == (exchange == "hierarchical")
        found = joined(draw, every, number)
        right = {name: alone[draw.number][name] for name in found}
        assert not differences(found, right), draw


@worlds
@pytest.mark.parametrize("number", [0, 2])
def test_a_graph_has_the_same_bits_in_either_way_home(world: int, number: int, alone: Any) -> None:
    every = kept_ranks.run(replayed, DRAWS[number], ranks_per_node=world, accelerator="hopper")
    for each in map(torch.cat, zip(*every, strict=True)):
        assert torch.equal(each.view(torch.uint8), alone[number]["out"].view(torch.uint8))


def test_the_bits_are_those_of_the_tree(alone: list[dict[str, Tensor]]) -> None:
    for draw, found in zip(DRAWS, alone, strict=True):
        expect_tree(draw, found)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=takes_ranks(2))])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, world: int) -> None:
    draw = DRAWS[0]._replace(exact=False)
    right, wrong = (
        torch.cat(
            kept_ranks.run(
                one_batch, draw, range(64), each, ranks_per_node=world, accelerator="hopper"
            )
        )
        for each in (None, fault)
    )
    assert not torch.equal(right, wrong)


@several
def test_the_cuda_backend_adds_rows_by_the_tree(world: int) -> None:
    draw = DRAWS[0]
    every = kept_ranks.run(rows_home, draw, ranks_per_node=world, accelerator="cuda")
    home, x = (torch.cat(each).double() for each in zip(*every, strict=True))
    given = tensors(draw._replace(device="cpu"))
    leaves = torch.zeros(SEGMENTS, *x.shape, dtype=torch.float64)
    for token, experts in enumerate(given["ids"].tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                weight = given["weights"][token, slot].double()
                leaves[expert * SEGMENTS // E, token] += weight * x[token]
    kind = draw.dtype
    assert torch.equal(home, rounded(tree(list(rounded(leaves, kind)), kind), kind))


def test_what_is_not_promised_is_refused() -> None:
    with pytest.raises(MkernelError, match="not promise invariant results of 'moe_dispatch_gemm'"):
        kept_ranks.run(one_batch, DRAWS[0], [0], None, ranks_per_node=1, accelerator="cuda")
    with pytest.raises(MkernelError, match="partial_dtype is float32"):
        kept_ranks.run(
            one_batch, DRAWS[0]._replace(partial="float32"), [0], None, ranks_per_node=1,
            accelerator="hopper",
        )  # fmt: skip
