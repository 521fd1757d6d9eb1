"""A world of several accelerators: each op runs on the first that provides it, and they live and die
together."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S, TOLD_S, gathers, stores
from torch import Tensor

import mkernel
from mkernel.cases import case_of
from mkernel.errors import ArgumentError, MkernelError, PlanMismatch, Unsupported
from mkernel.launch import host_store, report
from mkernel.world import lifecycle
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

GEMMS = "limited_backends:GemmsOnAscend"
BOTH = f"{GEMMS},streams"
OPS: dict[str, dict[str, int]] = {
    "all_gather_gemm": {"m": 64, "n": 32, "k": 48},
    "ring_attention": {"batch": 1, "heads": 2, "kv_heads": 1, "sequence": 32, "head_dim": 16},
    "gemm_reduce_scatter": {"m": 64, "n": 32, "k": 48},
    "moe_dispatch_gemm": {"tokens": 8, "hidden": 32, "features": 16, "experts": 8, "top_k": 2},
    "gemm_all_reduce": {"m": 64, "n": 32, "k": 48},
    "moe_combine": {"tokens": 8, "features": 16, "experts": 8, "top_k": 2},
    "moe_gemm_combine": {"tokens": 8, "hidden": 32, "features": 16, "experts": 8, "top_k": 2},
}


def in_ranks(function: Any, *arguments: Any, **world: Any) -> list[Any]:
    options = {"ranks_per_node": 2, "accelerator": BOTH, "timeout_s": DEADLINE_S, **world}
    return mkernel.launch(function, *arguments, **options)


def runs(op: str) -> str:
    """The accelerator of an op's call, which must be right."""
    world = mkernel.world()
    out = "float32" if op != "ring_attention" else "float16"
    case = case_of(op)(OPS[op], "float16", out)
    outcome = case.run(case.inputs(world.rank, world.size, 0))
    found = case.judge(outcome, world.rank, world.size, 0)
    assert case.passed(found), (op, found)
    assert mkernel.plan(op, dtype="float16", out_dtype=out, **OPS[op]).accelerator == (
        outcome.plan.accelerator
    )
    return outcome.plan.accelerator


def every_op() -> dict[str, list[str]]:
    """Which accelerators ran each op, in three rounds, between which others were called."""
    found: dict[str, list[str]] = {op: [] for op in OPS}
    for _ in range(3):
        for op in OPS:
            found[op].append(runs(op))
    assert mkernel.world().backends.accelerators == (GEMMS, "streams")
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_op_runs_on_the_first_that_provides_it(nodes: int) -> None:
    for found in in_ranks(every_op, nodes=nodes):
        for op, by in found.items():
            assert by == [GEMMS if op.startswith(("all_gather", "gemm")) else "streams"] * 3


def both_gemm_and_attention() -> list[str]:
    return [runs("all_gather_gemm"), runs("ring_attention")]


def test_one_that_puts_through_a_nic_may_come_second_in_one_node_only() -> None:
    order = "limited_backends:GemmsOnly,ascend"
    assert in_ranks(both_gemm_and_attention, accelerator=order) == [order.split(",")] * 2
    with pytest.raises(Unsupported, match="'ascend' puts through a NIC between nodes"):
        in_ranks(both_gemm_and_attention, accelerator=order, nodes=2)


def gradients() -> list[float]:
    """How much longer a step of attention between two projections makes the values wrong."""
    world = mkernel.world()

    def drawn(name: str, rank: int, *shape: int) -> Tensor:
        seed = 1000 * rank + sum(map(ord, name))
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    heads, width, rows, ranks = 2, 8, 4, world.size
    xs = [drawn("x", rank, rows, 16).double().requires_grad_() for rank in range(ranks)]
    w = drawn("w", 0, 16, heads * width)

    def split(y: Tensor) -> Tensor:
        return y.view(1, -1, heads, width).transpose(1, 2)

    q = split(torch.cat(xs) @ w.double())
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    exact.sin().sum().backward()
    x = xs[world.rank].detach().float().requires_grad_()
    own = mkernel.all_gather_gemm(x, w)[world.rank * rows :][:rows]
    q = split(own).contiguous()
    out = mkernel.ring_attention(q, q, q)
    out.sin().sum().backward()
    assert x.grad is not None
    wanted = exact[:, :, world.rank * rows :][:, :, :rows]
    return [
        float((out.detach() - wanted).abs().max()),
        float((x.grad - xs[world.rank].grad).abs().max()),
    ]


def test_gradients_pass_from_one_to_the_other() -> None:
    for errors in in_ranks(gradients):
        assert max(errors) < 1e-4


def alone() -> str:
    q = torch.ones(1, 1, 8, 8)
    with pytest.raises(Unsupported) as caught:
        mkernel.ring_attention(q, q, q)
    return str(caught.value)


def test_a_name_stands_for_that_accelerator_alone() -> None:
    for told in in_ranks(alone, accelerator=GEMMS):
        assert f"{GEMMS!r} does not provide 'ring_attention'" in told
        assert f"accelerator='{GEMMS},streams'" in told


def names() -> tuple[str, ...]:
    return mkernel.world().backends.accelerators


def test_they_are_named_in_one_string_in_a_sequence_or_by_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert in_ranks(names, accelerator=[GEMMS, "streams"]) == [(GEMMS, "streams")] * 2
    monkeypatch.setenv("MKERNEL_ACCELERATOR", f"{GEMMS}, streams")
    assert in_ranks(names, accelerator=None) == [(GEMMS, "streams")] * 2
    assert mkernel.plan("ring_attention", **OPS["ring_attention"]).accelerator == "streams"
    assert mkernel.plan("ag_gemm", m=64, n=64, k=64).accelerator == GEMMS


@pytest.mark.parametrize("given", ["streams,streams", "streams,", "auto,streams", ["streams", ""]])
def test_names_that_are_none(given: Any) -> None:
    with pytest.raises(ArgumentError, match="accelerator"):
        mkernel.launch(names, accelerator=given)


# ---- what ends a call of one ends both -----------------------------------------------------------


def gemm(rows: int = 16) -> Tensor:
    return mkernel.all_gather_gemm(torch.ones(rows, 32), torch.ones(32, 32))


def attention(rows: int = 16) -> Tensor:
    q = torch.ones(1, 1, rows, 16)
    return mkernel.ring_attention(q, q, q)


def calls_differ(opened: bool) -> str:
    if opened:
        gemm(), attention()
    with pytest.raises(PlanMismatch) as caught:
        gemm(32) if mkernel.world().rank == 0 else attention(32)
    attention(32), gemm(32)  # nothing was launched, and the world goes on
    return caught.value.field


@pytest.mark.parametrize("opened", [False, True])
def test_ranks_that_call_ops_of_different_ones_are_told(opened: bool) -> None:
    assert in_ranks(calls_differ, opened) == ["op"] * 2


def dies(opened: bool) -> None:
    """Rank 1 is killed; rank 0 hears of it in an attention call, and in every call from then on."""
    if opened:
        attention()
    gemm()
    if mkernel.world().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = []
    for call in (attention, gemm, attention):
        try:
            call()
            told.append("nothing")
        except MkernelError as error:  # noqa: PERF203 - each
            told.append(type(error).__name__)
    report(told)


@pytest.mark.parametrize("opened", [False, True])
def test_a_rank_that_dies_breaks_both(opened: bool) -> None:
    told: dict[int, list[str]] = {}
    with pytest.raises(MkernelError):
        in_ranks(dies, opened, on_report=told.__setitem__)
    assert told == {0: ["PeerFailure"] * 3}


def late() -> None:
    attention()
    mkernel.world().set_timeout(1.5)
    if mkernel.world().rank == 0:
        told = []
        for call in (attention, gemm):
            try:
                call()
                told.append("nothing")
            except MkernelError as error:  # noqa: PERF203 - each
                told.append(type(error).__name__)
        report(told)
        raise SystemExit(0)
    signal.sigtimedwait([], TOLD_S)


def test_a_call_that_nobody_joins_ends_by_the_deadline_on_both() -> None:
    told: dict[int, list[str]] = {}
    with pytest.raises(BaseException):  # noqa: B017,PT011 - whatever launch raises
        in_ranks(late, on_report=told.__setitem__)
    assert told == {0: ["Timeout", "Timeout"]}


# ---- worlds side by side -------------------------------------------------------------------------


def beside(port: int, first_ends: bool) -> None:
    own = mkernel.world()
    other = lifecycle.join(own.identity, own.backends, own.settings, stores(port), "beside")
    assert isinstance(other, World)

    def works(world: World, turn: int) -> None:
        assert gathers(turn, group=world) < 1e-5
        q = torch.full((1, 1, 16, 16), float(turn))
        assert torch.allclose(mkernel.ring_attention(q, q, q, group=world), q)

    for turn in range(3):
        works(own, turn)
        works(other, turn)
    if first_ends:
        mkernel.finalize(group=own)
        works(other, 9)
    else:
        other.close()
        works(own, 9)
    mkernel.finalize()


@pytest.mark.parametrize("first_ends", [True, False])
def test_worlds_of_both_end_in_any_order(first_ends: bool) -> None:
    store, port = host_store(2, 30)
    in_ranks(beside, port, first_ends)
    del store
