"""Invariant attention on ``hopper``: any number of ranks and nodes, a sequence alone, one that ends
earlier and a graph give a row the same bits, which are right. Keys in the order of ranks are seen."""

from __future__ import annotations

import pytest
import torch
from device_buffers import needs_gpus, pair, takes_ranks, worlds
from invariant_attention_ranks import Draw, Result, differing, whole, wrong

from mkernel.errors import MkernelError

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

SEQUENCE = 1024
DRAWS = [
    Draw(SEQUENCE, torch.bfloat16, True, (8, 2), 128, device="cuda"),
    Draw(SEQUENCE, torch.bfloat16, False, (4, 4), 64, lies="positions", device="cuda"),
    Draw(SEQUENCE, torch.float16, True, (4, 2), 64, scale=-0.2, apart=True, device="cuda"),
    Draw(SEQUENCE, torch.float16, False, (4, 1), 128, apart=True, device="cuda"),
]


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    return whole(DRAWS, None, ranks_per_node=1, accelerator="hopper")


def test_results_on_one_rank_are_right(alone: list[Result]) -> None:
    assert not [
        each for draw, found in zip(DRAWS, alone, strict=True) for each in wrong(draw, found)
    ]


@worlds
@pytest.mark.parametrize("how", ["", "graph"], ids=["eager", "graph"])
def test_ranks_change_no_bit(world: int, how: str, alone: list[Result]) -> None:
    found = whole(DRAWS, None, how, ranks_per_node=world, accelerator="hopper")
    assert not differing(DRAWS, found, alone)


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [pytest.param(2, 1, marks=takes_ranks(2)), pytest.param(2, 2, marks=takes_ranks(4))],
)
def test_nodes_change_no_bit(nodes: int, ranks: int, alone: list[Result]) -> None:
    found = whole(
        DRAWS,
        None,
        nodes=nodes,
        ranks_per_node=ranks,
        accelerator="hopper",
        nic="cx7",
        verbs="soft",
    )
    assert not differing(DRAWS, found, alone)


@pair
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(
    world: int, alone: list[Result]
) -> None:
    found = whole(DRAWS, None, "", 1, ranks_per_node=world, accelerator="hopper")
    assert not differing(DRAWS, found, [(out[1:], lse[1:]) for out, lse in alone])


@pytest.mark.parametrize("length", [640, 672])
def test_a_causal_row_has_the_same_bits_if_the_sequence_ends_earlier(
    length: int, alone: list[Result]
) -> None:
    causal = [number for number, draw in enumerate(DRAWS) if draw.causal]
    cut = [DRAWS[number]._replace(ends=length) for number in causal]
    found = whole(cut, None, ranks_per_node=1, accelerator="hopper")
    wanted = [tuple(each[:, :, :length] for each in alone[number]) for number in causal]
    assert not differing(cut, found, wanted)


@pair
def test_keys_in_the_order_of_ranks_are_seen(world: int, alone: list[Result]) -> None:
    """The planted order is another one for some rows of every call, whose sums it then rounds anew."""
    found = whole(DRAWS, None, "ring", ranks_per_node=world, accelerator="hopper")
    for draw, *both in zip(DRAWS, found, alone, strict=True):
        assert differing([draw], both[:1], both[1:])


@pair
def test_what_has_no_such_order_is_refused_by_name(world: int) -> None:
    for other in ({"sequence": 1024 - 128}, {"width": 256}, {"documents": (0, 500, SEQUENCE)}):
        with pytest.raises(MkernelError, match="with invariant results on 'hopper' takes heads of"):
            whole([DRAWS[0]._replace(**other)], None, ranks_per_node=world, accelerator="hopper")
