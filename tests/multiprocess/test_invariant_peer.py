"""Invariant results without fusing as the benchmark's peer, on CPU ranks."""

from __future__ import annotations

import kept_ranks
import peer_turns
import pytest
import torch
from torch import Tensor, distributed

import mkernel
from mkernel import Invariant
from mkernel.cases import case_of
from mkernel.harness.contenders import invariant
from mkernel.harness.contenders.invariant import Unfused
from mkernel.harness.problem import Inputs, Problem

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce")


def sizes_of(op: str, world: int, m: int = 96) -> dict[str, int]:
    sizes = {"m": m, "n": 80, "k": 512 if op == "all_gather_gemm" else 512 // world}
    return {name: sizes[name] for name in "mn"} if op == "all_reduce" else sizes


def errors() -> list[str]:
    """What is wrong with the peer's turns."""
    world = mkernel.world().size
    return [
        each
        for op in OPS
        for norm in ((False, True) if op in ("gemm_all_reduce", "all_reduce") else (False,))
        for each in peer_turns.wrong(
            Unfused, op, {},
            case_of(op)(
                sizes_of(op, world), "bfloat16", "bfloat16",
                options={"norm": "residual"} if norm else {},
            ),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_peer_is_right(world: int) -> None:
    kept_ranks.none_failed(kept_ranks.run(errors, ranks_per_node=world, accelerator="streams"))


def rows(m: int, turned: bool) -> Tensor:
    """The first rows of GEMM+AllReduce of M rows, of the same whole operands in every world."""
    world = mkernel.world()
    case = case_of("gemm_all_reduce")(
        sizes_of("gemm_all_reduce", world.size, m), "bfloat16", "bfloat16",
        options={"invariant": Invariant(8)},
    )  # fmt: skip
    problem = Problem(case, world.rank, world.size, torch.device("cpu"))
    chance = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, generator=chance).bfloat16() for size in ((200, 512), (512, 80)))
    inputs: Inputs = {
        "a": a[:m].chunk(world.size, 1)[world.rank].contiguous(),
        "b": b.chunk(world.size)[world.rank],
    }
    peer = Unfused(problem)
    if turned:  # the same leaves from the last one on
        peer._add = lambda terms: invariant._tree(terms.roll(1, 0))  # type: ignore[method-assign]
    found = peer.call(inputs, peer.outputs())["out"][:32].clone()
    distributed.barrier()
    return found


def test_its_rows_have_the_same_bits_in_every_batch_and_world_and_a_turned_tree_is_seen() -> None:
    def called(world: int, m: int, turned: bool = False) -> Tensor:
        return kept_ranks.run(rows, m, turned, ranks_per_node=world, accelerator="streams")[0]

    alone = called(1, 200)
    for world, m in ((1, 32), (2, 32), (2, 200), (4, 65)):
        assert torch.equal(called(world, m), alone)
    assert not torch.equal(called(1, 200, turned=True), alone)
