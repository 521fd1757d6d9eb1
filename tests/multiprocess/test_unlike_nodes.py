"""Worlds whose nodes have unlike accelerators: ops judged by the cases' float64 oracle, what is refused
before anything starts, and what ranks of one kind hear of a dead or slow rank of another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from in_world import DEADLINE_S, TOLD_S, relative, survivors
from judged_backends import Counted
from unlike_ranks import SIZES, case, judge_refusals, refused, unlike_rows, wrong_results

import mkernel
from mkernel.backends.runtime.host_kernels import Kernel
from mkernel.conformance.ranks import judge_calls
from mkernel.errors import MkernelError, Unsupported
from mkernel.world import mixed
from mkernel.world.mixed import Mixed, NodeCalls

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]
BOTH: dict[str, Any] = {
    "nodes": 2, "accelerator": "ascend+streams", "nic": "cx7", "verbs": "soft", "timeout_s": DEADLINE_S,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_ops_of_unlike_nodes(ranks: int) -> None:
    assert mkernel.launch(wrong_results, ranks_per_node=ranks, **BOTH) == [[]] * 2 * ranks


def over_tcp() -> tuple[list[str], str | None]:
    found = [wrong for op in SIZES for wrong in judge_calls(case(op), 3)]
    return found, mkernel.world().backends.nic


def test_nodes_whose_nics_differ_are_joined_by_tcp() -> None:
    world = BOTH | {"accelerator": "ascend", "nic": "cx7+efa"}
    assert mkernel.launch(over_tcp, ranks_per_node=1, **world) == [([], "tcp")] * 2


def unpacked_outputs() -> list[str]:
    """Return the outputs that calls of the node got in rows that are not packed: one row a rank, of
    nodes whose ranks have more."""
    found, run = [], NodeCalls.run

    def noted(self: NodeCalls, call: Any, op: str, tensors: Any, sizes: Any) -> None:
        found.extend(name for name in ("out", "gathered") if not tensors[name].is_contiguous())
        run(self, call, op, tensors, sizes)

    own = torch.ones(9 if mkernel.world().identity.node == 0 else 2, 64).half()
    gathered = torch.empty(22, 64).half()
    with mock.patch.object(NodeCalls, "run", noted):
        mkernel.all_gather_gemm(
            own, own.new_ones(64, 48), chunk=4, shards=[9, 2], gathered=gathered
        )
    return found


def test_a_node_s_calls_have_packed_outputs() -> None:
    assert mkernel.launch(unpacked_outputs, ranks_per_node=2, **BOTH) == [[]] * 4


def work_of_shares(op: str, shards: Any) -> tuple[int, float]:
    """The multiply-adds that this rank makes where nodes share K, or columns, so; and the error."""
    world, size = mkernel.world(), 800
    draw = torch.Generator().manual_seed(5)
    a, b = (torch.randn(size, size, generator=draw).half() for _ in range(2))
    own = mkernel.shard(size, shards, multiple_of=16)
    before, whole = Counted.work, a.double() @ b.double()
    if op == "all_gather_gemm":
        got, wanted = (
            mkernel.all_gather_gemm(a.chunk(world.size)[world.rank], b[:, own]),
            whole[:, own],
        )
    else:
        got, wanted = getattr(mkernel, op)(a[:, own], b[own]), whole
    if op == "gemm_reduce_scatter":
        wanted = whole.chunk(world.size)[world.rank]
    return Counted.work - before, relative(got, wanted)


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_shards_by_speed_end_together(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sides on streams, of which one makes each product three times. What is counted is work: the
    call ends when the side with more of it does. Best is W / (1 + 1/3) each; even shards take twice
    that."""
    monkeypatch.setenv("SLOWED_TIMES", "3")
    both = BOTH | {"accelerator": "judged_backends:Counted+judged_backends:Slowed"}
    ends = {}
    for shards in ("even", "speed"):
        found = mkernel.launch(work_of_shares, op, shards, ranks_per_node=1, **both)
        assert all(error < 1e-3 for _, error in found)
        ends[shards] = max(work for work, _ in found)
    ideal = 800**3 / (1 + 1 / 3)
    assert ends["speed"] <= 1.1 * ideal
    assert ends["even"] > 1.9 * ideal


def test_what_unlike_nodes_cannot_do_is_refused_by_name() -> None:
    judge_refusals(mkernel.launch(refused, ranks_per_node=1, **BOTH), "ascend")


@pytest.mark.parametrize("victim", [0, 3])
def test_all_hear_of_a_rank_that_dies(victim: int) -> None:
    world = BOTH | {"ranks_per_node": 2}
    for kind, seconds, message in survivors(case("gemm_reduce_scatter"), victim, "kill", **world):
        assert kind == "PeerFailure"
        assert f"rank {victim}" in message
        assert seconds < TOLD_S


def with_one_shifted(what: str) -> list[str]:
    """Put the rows of a chunk, or a node's share of all rows, one row later than they belong, on one
    rank of one kind."""
    if mkernel.world().rank == 0 and what == "share":
        placed = mixed._rows_of
        mixed._rows_of = lambda plan, node, whole, each: placed(plan, node, whole.roll(1, 0), each)
    elif mkernel.world().rank == 0:
        plain = Mixed._here

        def shifted(self: Mixed, part: torch.Tensor, tensors: Any) -> torch.Tensor:
            return plain(self, part.roll(1, 0), tensors)

        Mixed._here = shifted  # type: ignore[method-assign]
    return [*judge_calls(case("all_gather_gemm"), 1), *unlike_rows()]


@pytest.mark.parametrize("what", ["chunk", "share"])
def test_a_planted_shift_of_a_row_is_found(what: str) -> None:
    found = mkernel.launch(with_one_shifted, what, ranks_per_node=1, **BOTH)
    assert any("wrong" in each for each in found[0]) or what == "share"
    assert any("gather" in each and "off by" in each for each in found[0])
    assert (what == "chunk") == (found[1] == [])


def last_chunk_held_back(flag: Path) -> list[str]:
    """Send the last chunk from rank 1 only once rank 0 has multiplied the first one of rank 1's."""
    put, run, made = Kernel.put, NodeCalls.run, []

    def late(self: Kernel, peer: int, part: torch.Tensor, signal: int) -> None:
        made.append(signal)
        deadline = time.monotonic() + TOLD_S
        while len(made) == 3 and not flag.exists():
            assert time.monotonic() < deadline, "rank 0 multiplies nothing before all has arrived"
            time.sleep(0.01)
        put(self, peer, part, signal)

    def noted(self: NodeCalls, *given: Any) -> None:
        run(self, *given)
        made.append(given)
        if len(made) == 2:
            flag.touch()

    if mkernel.world().rank == 1:
        Kernel.put = late  # type: ignore[method-assign]
    else:
        NodeCalls.run = noted  # type: ignore[method-assign]
    return [*judge_calls(case("all_gather_gemm", chunk=20), 1)]


def test_the_first_chunk_is_multiplied_before_the_last_has_come(tmp_path: Path) -> None:
    """A rank's 60 rows cross in three chunks."""
    found = mkernel.launch(last_chunk_held_back, tmp_path / "flag", ranks_per_node=1, **BOTH)
    assert found == [[], []]


def of_nodes_that_are_alike() -> None:
    half = torch.ones(4, 32).half()
    for call in (mkernel.all_gather_gemm, mkernel.gemm_reduce_scatter):
        with pytest.raises(Unsupported, match="are alike"):
            call(half, half.t(), shards=[4])
    with pytest.raises(Unsupported, match="are alike"):
        mkernel.plan("gemm_rs", m=4, n=32, k=32, rows=(4,))


def test_nodes_that_are_alike_share_rows_evenly() -> None:
    mkernel.launch(of_nodes_that_are_alike, accelerator="streams")


def of_one_node() -> None:
    mkernel.all_reduce(torch.ones(2, 32))


def test_unlike_accelerators_need_nodes_of_their_own() -> None:
    with pytest.raises(MkernelError, match="for each of 2 kinds as many nodes"):
        mkernel.launch(of_one_node, ranks_per_node=2, **BOTH | {"nodes": 1})
