"""Forward-mode tangents, for which mkernel has no derivatives: every op and layer refuses an operand
that has one before it starts anything, whatever else it was given, and the world goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from ranks import SCALED_MM, on_ranks, operand
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

import mkernel
from mkernel import nn
from mkernel.errors import ArgumentError, Unsupported

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ROWS, K, N = 8, 16, 16
TOKENS, EXPERTS, TOP = 4, 4, 2
Operands = dict[str, Tensor]
Call = Callable[..., object]


def drawn(**shapes: tuple[int, ...]) -> Operands:
    return {name: operand(name, mkernel.world().rank, *shape) for name, shape in shapes.items()}


def ids() -> Tensor:
    return torch.arange(TOKENS * TOP).view(TOKENS, TOP) % EXPERTS


def of_gemms() -> Iterator[tuple[str, Call, Operands]]:
    gemm = {"a": (ROWS, K), "b": (K, N), "bias": (N,)}
    norm = {"residual": (ROWS, N), "norm_weight": (N,)}
    for name in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        yield name, getattr(mkernel, name), drawn(**gemm)
        yield f"torch.ops.{name}", partial(registered, name), drawn(a=(ROWS, K), b=(K, N))
    kept = partial(mkernel.all_gather_gemm, return_gathered=True, save_gathered=True)
    yield "kept", kept, drawn(**gemm)
    yield "norm", mkernel.gemm_all_reduce, drawn(**gemm, **norm)
    yield "several", several, drawn(a=(ROWS, K), b=(K, N), other=(K, 2 * N), bias=(2 * N,))
    group = mkernel.world().name
    yield "fused_all_gather_matmul", lambda a, b: mkernel.fused_all_gather_matmul(
        a, [b, b], 0, group
    ), drawn(a=(ROWS, K), b=(K, N))  # fmt: skip
    for op in ("sum", "avg"):
        yield f"fused_matmul_reduce_scatter {op}", lambda a, b, op=op: (
            mkernel.fused_matmul_reduce_scatter(a, b, op, 0, group)
        ), drawn(a=(ROWS, K), b=(K, N))  # fmt: skip
    if SCALED_MM and "float8_e4m3fn" in mkernel.world().accelerator.capabilities().dtypes:
        a, b = drawn(a=(16, 128), b=(128, 128)).values()
        a, b = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        yield "scaled", lambda **scales: mkernel.all_gather_gemm(a, b, **scales), drawn(
            a_scale=(1, 1), b_scale=(1, 1)
        )  # fmt: skip


def registered(name: str, **operands: Tensor) -> object:
    return getattr(torch.ops.mkernel, name)(*operands.values(), group=mkernel.world().name)


def several(a: Tensor, b: Tensor, other: Tensor, bias: Tensor) -> object:
    return mkernel.all_gather_gemm(a, [b, other], bias=[bias[:N], bias])


def of_others() -> Iterator[tuple[str, Call, Operands]]:
    rows = {"x": (ROWS, N)}
    norm = {"residual": (ROWS, N), "norm_weight": (N,)}
    yield "all_reduce", mkernel.all_reduce, drawn(**rows)
    yield "all_reduce norm", mkernel.all_reduce, drawn(**rows, **norm)
    piece = (1, 2, 8, 16)
    yield "ring_attention", mkernel.ring_attention, drawn(q=piece, k=piece, v=piece)
    with_lse = partial(mkernel.ring_attention, causal=True, return_lse=True)
    yield "ring_attention causal", with_lse, drawn(q=piece, k=piece, v=piece)
    own = EXPERTS // mkernel.world().size
    tokens = drawn(x=(TOKENS, K), w=(own, K, 2 * N))
    sent = mkernel.moe_dispatch_gemm(**tokens, topk_ids=ids())
    yield "dispatch", partial(mkernel.moe_dispatch_gemm, topk_ids=ids()), tokens
    weights = drawn(topk_weights=(TOKENS, TOP))
    home = partial(mkernel.moe_combine, handle=sent.handle)
    yield "combine", home, {"y": sent.outputs, **weights}
    multiplied = partial(mkernel.moe_gemm_combine, handle=sent.handle)
    second = {"h": sent.outputs[:, :N].contiguous(), **drawn(w2=(own, N, K)), **weights}
    yield "gemm_combine", multiplied, second


def of_layers() -> Iterator[tuple[str, Call, Operands]]:
    """Inputs and parameters of layers."""
    x = drawn(x=(ROWS, K))
    for split in (True, False):
        layer: Any = nn.ColumnParallelLinear(K, N, sequence_parallel=split)
        yield from of_layer(f"column {split}", layer, x)
        layer = nn.RowParallelLinear(K * mkernel.world().size, N, sequence_parallel=split)
        yield from of_layer(f"row {split}", layer, x)
        block = drawn(x=(1, ROWS, K))
        yield from of_layer(
            f"mlp {split}", nn.ParallelMLP(K, 2 * N, sequence_parallel=split), block
        )
        attention = nn.ParallelAttention(K, 2, sequence_parallel=split)
        yield from of_layer(f"attention {split}", attention, block)
    table = nn.VocabParallelEmbedding(8, K)
    found = torch.arange(8)
    yield (
        "embedding",
        lambda weight: functional_call(table, {"weight": weight}, found),
        {"weight": table.weight.detach()},
    )
    turned = (1, 8, 2, 16)
    yield "RingAttention", nn.RingAttention(), drawn(q=turned, k=turned, v=turned)
    experts = nn.ExpertParallelMLP(K, N, EXPERTS)
    given = {"x": (TOKENS, K), "topk_weights": (TOKENS, TOP)}
    yield "experts", partial(experts, topk_ids=ids()), drawn(**given)


def of_layer(name: str, layer: Any, x: Operands) -> Iterator[tuple[str, Call, Operands]]:
    parameters = dict(layer.named_parameters())
    some = {"x": x["x"], **{each: one.detach() for each, one in parameters.items()}}

    def call(**given: Tensor) -> object:
        own = {each: given[part] for part, each in zip(parts, parameters, strict=True)}
        return functional_call(layer, own, given["x"])

    parts = [each.replace(".", "_") for each in parameters]
    yield name, call, {"x": some["x"], **dict(zip(parts, list(some.values())[1:], strict=True))}


def calls_made() -> int:
    number: int = mkernel.world()._failure.call[0]
    return number


def outcome(call: Call, dual: str, operands: Operands) -> str:
    """Return how a call ends whose operand ``dual`` has a tangent; empty: as it should."""
    with forward_ad.dual_level():
        tangent = torch.ones_like(operands[dual])
        given = {**operands, dual: forward_ad.make_dual(operands[dual], tangent)}
        try:
            result = call(**given)
        except ArgumentError as error:
            return "" if "a tensor with a forward-mode tangent" in str(error) else str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        kept = isinstance(result, Tensor) and forward_ad.unpack_dual(result).tangent is not None
        return "" if kept else "taken, and the tangent was lost"


def wrongs(name: str, call: Call, operands: Operands, most: int = 0) -> Iterator[str]:
    """Yield what is wrong with the refusals of a call: a tangent on each operand in turn, beside
    others that do and do not require grad. ``most``: calls that may run before the operand is
    looked at."""
    for dual in operands:
        for wanting in (None, *operands):
            given, before = dict(operands), calls_made()
            if wanting is not None:
                given[wanting] = operands[wanting].clone().requires_grad_()
            found = outcome(call, dual, given)
            if not found and calls_made() - before > most:
                found = f"refused after {calls_made() - before} calls"
            if found:
                yield f"{name}, tangent on {dual}, grad on {wanting}: {found}"


def found_in(*kinds: Callable[[], Iterator[tuple[str, Call, Operands]]]) -> list[str]:
    found: list[str] = []
    for kind in kinds:
        for name, call, operands in kind():
            pair = kind is of_layers and name.split()[0] in ("mlp", "attention", "experts")
            found += wrongs(name, call, operands, most=1 if pair else 0)
    return [*found, *goes_on()]


def goes_on() -> list[str]:
    """Return what is wrong with a call that is made now; empty: nothing."""
    ones = torch.ones(ROWS, N)
    right = torch.full((ROWS, N), float(N * mkernel.world().size))
    same = torch.equal(mkernel.gemm_all_reduce(ones, torch.ones(N, N)), right)
    return [] if same else ["the world goes on, but wrong"]


def test_it_is_refused_before_anything_starts() -> None:
    assert on_ranks(found_in, of_gemms, of_others, of_layers) == [[], []]


def of_one_rank() -> list[str]:
    """Rank 0 has a tangent where rank 1 has none, and calls again without it."""
    a, b = torch.ones(ROWS, K), torch.ones(K, N, requires_grad=True)
    found = []
    if mkernel.world().rank == 0:
        found.append(outcome(mkernel.all_gather_gemm, "a", {"a": a, "b": b}))
    mkernel.all_gather_gemm(a, b).sum().backward()
    wanted = torch.full((K, N), float(ROWS * mkernel.world().size))
    found.append("" if b.grad is not None and torch.equal(b.grad, wanted) else "wrong gradients")
    return [each for each in [*found, *goes_on()] if each]


def test_a_rank_that_was_refused_may_call_again() -> None:
    assert on_ranks(of_one_rank) == [[], []]


def transformed() -> list[str]:
    """A transform of torch.func knows no rule of an op: it would take tangents along it for zero."""
    name = mkernel.world().name
    x, w = torch.ones(ROWS, K), torch.ones(K, N)
    wanting = w.clone().requires_grad_()
    column = nn.ColumnParallelLinear(K, 2 * N, sequence_parallel=False)
    called = torch.ops.mkernel.all_gather_gemm
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "public": lambda x: mkernel.all_gather_gemm(x, w),
        "beside grad": lambda x: mkernel.all_gather_gemm(x, wanting),
        "of torch": lambda x: called(x, w, group=name),
        "of torch beside grad": lambda x: called(x, wanting, group=name),
        "layer": column,
    }
    found, before = [], calls_made()
    for said, call in calls.items():
        for compiles in (False, True):
            torch._dynamo.reset()

            def pushed(x: Tensor, call: Any = call) -> Any:
                return torch.func.jvp(call, (x,), (torch.ones_like(x),))

            run = torch.compile(pushed, backend="aot_eager") if compiles else pushed
            try:
                run(x)
                found.append(f"{said}: taken, compiled: {compiles}")
            except Unsupported as error:
                if "a transform of torch.func" not in str(error):
                    found.append(f"{said}: {error}")
    for call in (calls["public"], calls["beside grad"], column):
        run = torch.compile(call, backend="aot_eager")
        found.append(outcome(run, "x", {"x": x}))
    if calls_made() != before:
        found.append(f"{calls_made() - before} calls were started")
    return [each for each in [*found, *goes_on()] if each]


def test_no_transform_and_no_compiler_loses_it() -> None:
    assert on_ranks(transformed) == [[], []]
