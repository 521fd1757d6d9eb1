"""The peers between nodes that fuse nothing: right for every op that they take, and an exchange whose
arrivals a peer's next put does not overwrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_turns import SIZES, scaled_errors, wrong
from torch import distributed

import mkernel
from mkernel.cases import case_of
from mkernel.harness import rank
from mkernel.harness.contenders import host_puts
from mkernel.harness.contenders.host_puts import HostPuts, HostPutsByRank, PutExchange
from mkernel.harness.problem import Problem

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

NODES = 3
TIMEOUT_S = 60.0
EXPERTS = {**SIZES, "tokens": 61, "experts": 6}
ROUNDS = 4


def join() -> None:
    rank._join(mkernel.world(), torch.device("cpu"), TIMEOUT_S)


def product_errors() -> list[str]:
    join()
    found = []
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce"):
        sizes = {"m": 3 * 37 if op != "gemm_all_reduce" else 100, "n": 48, "k": 64}
        if op == "all_reduce":
            del sizes["k"]
        case = case_of(op)(sizes, "float16", "float16")
        found += wrong(HostPuts, op, {}, case=case, nodes=NODES)
    distributed.destroy_process_group()
    return found


def expert_errors() -> list[str]:
    join()
    found = []
    for op in ("moe_dispatch", "moe_dispatch_gemm", "moe_gemm_combine", "moe_layer"):
        for options in ({}, {"capacity": 366}, {"routing": "padded", "id_dtype": "int32"}):
            case = case_of(op)(EXPERTS, "bfloat16", "bfloat16", options=options)
            found += wrong(HostPutsByRank, op, options, case=case, nodes=NODES)
        found += scaled_errors(HostPutsByRank, op, nodes=NODES)
    distributed.destroy_process_group()
    return found


def test_every_op_is_right() -> None:
    for fn in (product_errors, expert_errors):
        assert on_nodes(fn) == [[]] * NODES


def on_nodes(fn: Any, *arguments: Any) -> list[Any]:
    return mkernel.launch(
        fn, *arguments, nodes=NODES, ranks_per_node=1, accelerator="ascend", nic="cx7", verbs="soft"
    )


def overwritten(halves: int) -> bool:
    """Return whether a rank finds another call's rows. It copies the first peer's rows of a call out
    when that peer's put of the next call is there, which the peer queues as early as it can."""
    join()
    world = mkernel.world()
    host_puts._HALVES = halves
    case = case_of("all_reduce")({"m": 3, "n": 64}, "float16", "float16")
    problem = Problem(case, world.rank, world.size, torch.device("cpu"), nodes=NODES)
    exchange = PutExchange(problem, 512)
    honest, late = exchange._slice, (world.rank + 1) % NODES

    def slow(slot: int, nbytes: int) -> torch.Tensor:
        arrives = slot >= NODES and slot % NODES == late
        if world.rank == 0 and arrives and exchange._calls < ROUNDS:
            exchange._port.wait(late, exchange._calls + 1, "the peer's next put")
        return honest(slot, nbytes)

    exchange._slice = slow  # type: ignore[method-assign]
    found = False
    for number in range(ROUNDS):
        parts = [torch.full((64,), 10 * number + world.rank)] * NODES
        arriving = torch.zeros(NODES, 64, dtype=torch.int64)
        exchange(arriving.unbind(), parts)
        wanted = 10 * number + torch.arange(NODES)[:, None]
        found |= not arriving.eq(wanted).all()
    exchange.close()
    distributed.destroy_process_group()
    return found


def test_arrivals_are_copied_before_they_are_overwritten() -> None:
    assert on_nodes(overwritten, 2) == [False] * NODES
    assert on_nodes(overwritten, 1)[0], "with one half the check sees nothing"
