"""Plans of a world use the same memory and words, in any order and however far apart ranks are."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any, NamedTuple

import pytest

from mkernel.backends.accelerators.ascend import _ascend
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.transport import _transport
from mkernel.backends.transport._transport import AbortCode
from mkernel.plan.model import LaunchPlan

from .rig import PATIENCE_S, SCALE, Tensors, World, case_for, geometry, make_plan, planned

VIEWS: tuple[View, ...] = ("pipelined", "pipelined", "pipelined", "sequential", "compute_only")


def plans(nodes: int) -> list[LaunchPlan]:
    """Of four ops, each in two shapes."""
    way: dict[str, Any] = {"nodes": nodes, "ranks_per_node": 4 // nodes, "compute_blocks": 3,
                           "comm_blocks": 4}  # fmt: skip
    gemms = [
        make_plan(m, 96, k, op=op, tiles_per_chunk=1, **way)
        for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
        for m, k in ((512, 256), (1100, 64))
    ]
    attention = [
        planned(
            "ring_attention",
            {"batch": 1, "heads": 2, "kv_heads": 1, "sequence": sequence, "head_dim": 16},
            **way,
        )
        for sequence in (64, 200)
    ]
    return gemms + attention


class Step(NamedTuple):
    """One call of all ranks."""

    plan: LaunchPlan
    view: View
    tensors: Tensors


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_calls_of_any_plans_follow_each_other(nodes: int, seed: int) -> None:
    """Each rank makes its calls at its own pace; odd seeds also order its instructions."""
    random = Random(seed)
    strict = _ascend.Strict(seed=seed) if seed % 2 else None
    every = plans(nodes)
    with World(every[0], every[1:], strict=strict) as world:
        world.poison()
        steps = []
        for number in range(16):
            world.take(random.choice(every))
            view = random.choice(VIEWS)
            steps.append(Step(world.plan, view, world.tensors(seed=number)))
        problems: list[str] = []

        def calls(rank: int) -> None:
            pace = Random(f"{seed} {rank}")
            for epoch, (plan, view, tensors) in enumerate(steps, 1):
                time.sleep(pace.choice((0, 0, 0.002, 0.02)))
                options = {"scale": SCALE} if plan.op == "ring_attention" else {}
                launch = world.launch(
                    rank, tensors[rank], plan=plan, view=view, epoch=epoch, options=options
                )
                if not launch.wait(PATIENCE_S):
                    problems.append(f"rank {rank} is still in call {epoch}")
                    return

        threads = [threading.Thread(target=calls, args=(rank,)) for rank in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not problems
        assert [world.outcome(rank)[0] for rank in range(4)] == [AbortCode.none] * 4
        for number, (plan, view, tensors) in enumerate(steps):
            options = {"scale": SCALE} if plan.op == "ring_attention" else {}
            case = case_for(plan, replicate_b=False, **options)
            for rank, own in enumerate(tensors):
                found = case.compared(own, rank, 4, number)
                assert view == "compute_only" or case.passed(found), (plan.op, rank, number, found)
        for rank in world.ranks:  # what was expected to be added was added, to the last one
            words = range(64, 2000)
            counts = [_transport.pad_expected(rank.pad.address, word) for word in words]
            assert counts == [_transport.pad_load(rank.pad.address, word) for word in words]


def after_another_plan(world: World, second: LaunchPlan) -> Tensors:
    """Two calls of a world's plan have been; the next one is of another. Its tensors."""
    for number in range(2):
        world.call(world.tensors(seed=number))
    world.poison()
    world.take(second)
    world.epoch += 1
    return world.tensors(seed=9)


@pytest.mark.parametrize("fault", ["none", "added twice", "moved on too little"])
def test_a_wrong_count_lets_a_later_plan_read_too_early(fault: str) -> None:
    """Planted faults: an arrival of one plan that counts twice, or is not expected, is taken for one of
    the next plan. Without them that plan waits for a peer that does not come."""
    first = make_plan(512, 96, 256, ranks_per_node=2)
    second = make_plan(256, 96, 128, ranks_per_node=2)
    shape = geometry(second)
    with World(first, [second]) as world:
        tensors = after_another_plan(world, second)
        for chunk in range(shape.chunks):
            word = shape.arrived(0, chunk, epoch=world.epoch)
            if fault == "added twice":
                world.add(1, word)
            if fault == "moved on too little":
                _transport.pad_move_on(world.ranks[1].pad.address, word, (1 << 64) - 1)
        # The comm kernel gets through as well: rank 0 has released the calls before.
        limit_s = 0.4 if fault == "none" else PATIENCE_S
        assert world.launch(1, tensors[1], timeout_s=limit_s).wait(PATIENCE_S)
        early = world.outcome(1)[0] == AbortCode.none
        assert early == (fault != "none")
        assert not world.errors(tensors)[1] <= 0.1


def test_a_release_that_counts_twice_lets_a_peer_overwrite_what_is_still_read() -> None:
    """Planted fault: rank 0 writes where rank 1 still reads call 1, of another plan."""
    first = make_plan(512, 96, 256, ranks_per_node=2)
    second = make_plan(256, 96, 128, ranks_per_node=2)
    for fault in (False, True):
        with World(first, [second]) as world:
            for world.epoch in (1, 2):  # rank 1 comes to neither
                tensors = world.tensors(seed=1)
                assert world.launch(0, tensors[0], view="compute_only").wait(PATIENCE_S)
            if fault:
                world.add(0, 1)
            world.poison()
            world.take(second)
            world.epoch = 3
            assert world.launch(0, world.tensors(seed=1)[0], timeout_s=0.3).wait(PATIENCE_S)
            assert any(byte != 0xFF for byte in bytes(world.bytes_of(1))) == fault
