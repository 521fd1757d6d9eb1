"""Checks that wrong calls are refused with the right error before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import OPS, AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import GEMMS, typical, typical_of_each, wider
from mkernel.conformance.ranks import Judge, describe, where
from mkernel.errors import (
    ArgumentError,
    DtypeError,
    LayoutError,
    MkernelError,
    PlanMismatch,
    ShapeError,
    Unsupported,
)
from mkernel.harness.outcome import CheckFailed
from mkernel.launch import report
from mkernel.plan.model import DTYPE_BYTES
from mkernel.plan.ops import COMPANIONS

_Inputs = dict[str, torch.Tensor]
_Wrong = tuple[str, type[MkernelError], Callable[[], object]]


def wrong_calls(subject: AcceleratorSubject) -> None:
    """Call wrongly in every way that the claims leave, one after another in one world."""
    world = subject.largest()
    # A combine alone needs a dispatch's handle.
    cases = [case for case in typical_of_each(subject, world) if case.op not in COMPANIONS]
    unclaimed = {*OPS} - {*subject.claimed_in(world)}
    refused = [typical(subject, op, world[0] * world[1]) for op in OPS if op in unclaimed]
    subject.judge(rank_wrong_calls, cases, refused, subject.capabilities, world=world)


def rank_wrong_calls(cases: Sequence[Case], refused: Sequence[Case], claims: Any) -> list[str]:
    """Make the wrong calls; check what is raised and that no kernel starts; then call rightly."""
    found = []
    accelerator = mkernel.world().accelerator
    for case in cases:
        judge = Judge(case)
        found += judge(0)
        wrong = list(_wrong(case, judge.inputs(1), claims))
        with mock.patch.object(accelerator, "launch", wraps=accelerator.launch) as launch:
            for what, expected, call in wrong:
                found += _refused(f"{describe(case)}, {where()}, {what}", expected, call)
                if launch.called:
                    found.append(f"{describe(case)}, {where()}, {what}: a kernel was started")
                    launch.reset_mock()
        found += judge(2)
    for case in refused:
        call = partial(case.run, Judge(case).inputs(0))
        found += _refused(f"{case.op}, which is not claimed, {where()}", Unsupported, call)
    return found


def _refused(what: str, expected: type[MkernelError], call: Callable[[], object]) -> Iterator[str]:
    try:
        call()
    except expected:
        return
    except Exception as error:
        yield f"{what}: raises {type(error).__name__} ({error}), not {expected.__name__}"
        return
    yield f"{what}: is not refused with {expected.__name__}"


def _wrong(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    if case.op in GEMMS:
        yield from _wrong_gemm(case, given, claims)
    elif case.op == "all_reduce":
        yield from _wrong_sum(case, given, claims)
    elif case.op == "moe_dispatch":
        yield from _wrong_rows(case, given, claims)
    elif case.op == "moe_dispatch_gemm":
        yield from _wrong_dispatch(case, given, claims)
    else:
        yield from _wrong_attention(given)


class _Overriding(torch.Tensor):
    """A subclass with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _not_plain(call: Callable[..., object], given: _Inputs) -> Iterator[_Wrong]:
    """Yield the right call ``call(**given)`` with one tensor that is more or less than memory. A
    call that takes ``out`` refuses tensors that require grad; others have derivatives."""
    for name, tensor in given.items():
        changed = {
            "of a subclass": tensor.as_subclass(_Overriding),
            "that is fake": FakeTensorMode().from_tensor(tensor),
            "without data": tensor.to("meta"),
        }
        if "out" in given and tensor.is_floating_point():
            changed["that requires grad"] = tensor.detach().requires_grad_()
        for what, value in changed.items():
            yield f"{name} {what}", ArgumentError, partial(call, **{**given, name: value})


def _wrong_gemm(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    a, b = given["a"], given["b"]
    call = partial(getattr(mkernel, case.op), out_dtype=getattr(torch, case.out_dtype))
    written = case.run(given).outputs["out"]
    yield from _not_plain(call, {"a": a, "b": b, "out": written})
    yield "K differs", ShapeError, lambda: call(a[:, :-8].contiguous(), b)
    yield "a in one dimension", ShapeError, lambda: call(a[0], b)
    yield "b in three dimensions", ShapeError, lambda: call(a, b[None])
    yield "a bias too short", ShapeError, lambda: call(a, b, bias=b[0, 1:].contiguous())
    yield "chunk of 0", ArgumentError, lambda: call(a, b, chunk=0)
    for other in ("float16", "bfloat16", "float32", "float64"):
        kind = getattr(torch, other)
        if other != case.dtype:
            yield "mixed dtypes", DtypeError, partial(call, a, b.to(kind))
        if other not in claims.dtypes:
            yield f"{other}, not claimed", DtypeError, partial(call, a.to(kind), b.to(kind))
        if (case.dtype, other) not in claims.dtype_pairs():
            yield f"{other} output, not claimed", DtypeError, partial(call, a, b, out_dtype=kind)
    yield "out of another shape", ShapeError, lambda: call(a, b, out=written[:-1].clone())
    ragged = b[:, :-1].contiguous()
    if claims.alignment_bytes > DTYPE_BYTES[case.dtype]:
        yield "N that is not aligned", ShapeError, lambda: call(a, ragged)
    if case.op == "gemm_reduce_scatter" and mkernel.world().size > 1:
        yield "M that ranks cannot share", ShapeError, lambda: call(a[1:], b)


def _wrong_sum(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    x = given["x"]
    call = partial(mkernel.all_reduce, out_dtype=getattr(torch, case.out_dtype))
    written = case.run(given).outputs["out"]
    yield from _not_plain(call, {"x": x, "out": written})
    yield "x in one dimension", ShapeError, lambda: call(x[0])
    yield "chunk of 0", ArgumentError, lambda: call(x, chunk=0)
    yield "out of another shape", ShapeError, lambda: call(x, out=written[:-1].clone())
    weight = x[0].clone()
    yield "a residual without a norm", ArgumentError, lambda: call(x, residual=written)
    yield "a norm weight too short", ShapeError, lambda: call(x, norm_weight=weight[1:])
    yield "eps of 0", ArgumentError, lambda: call(x, norm_weight=weight, eps=0)
    quantised = partial(mkernel.all_reduce, x, quantise="row")
    yield "e4m3 rows without a norm", ArgumentError, quantised
    normed = partial(quantised, norm_weight=weight)
    yield "e4m3 rows into out", ArgumentError, lambda: normed(out=written)
    short = written[:-1].clone()
    yield "too few rows to add", ShapeError, lambda: call(x, norm_weight=weight, residual=short)
    for other in ("float16", "bfloat16", "float32", "float64"):
        kind = getattr(torch, other)
        if other not in claims.dtypes:
            yield f"{other}, not claimed", DtypeError, partial(call, x.to(kind))
        if (case.dtype, other) not in claims.dtype_pairs():
            yield f"{other} output, not claimed", DtypeError, partial(call, x, out_dtype=kind)
    if claims.alignment_bytes > DTYPE_BYTES[case.dtype]:
        yield "N that is not aligned", ShapeError, lambda: call(x[:, :-1].contiguous())


def _wrong_dispatch(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    x, ids, w, weights = (given[name] for name in ("x", "topk_ids", "w", "topk_weights"))
    call = partial(mkernel.moe_dispatch_gemm, out_dtype=getattr(torch, case.out_dtype))
    sent = call(x, ids, w)
    yield from _not_plain(call, {"x": x, "topk_ids": ids, "w": w})
    yield "H differs", ShapeError, lambda: call(x, ids, w[:, :-8].contiguous())
    yield "fewer lists than tokens", ShapeError, lambda: call(x, ids[1:], w)
    yield "expert numbers of float", DtypeError, lambda: call(x, ids.float(), w)
    if ids.device.type == "cpu":
        yield "an expert that is not there", ArgumentError, lambda: call(x, ids + 10000, w)
        yield "a negative expert", ArgumentError, lambda: call(x, ids - 10000, w)
    yield "mixed dtypes", DtypeError, lambda: call(x, ids, w.double())
    y = sent.outputs
    yield from _wrong_handle(partial(call, x, w=w, handle=sent.handle), ids, len(y), claims)
    combine = partial(mkernel.moe_combine, handle=sent.handle)
    yield from _not_plain(combine, {"y": y, "topk_weights": weights})
    long = torch.cat([y, y[:1]]) if len(y) else y.new_zeros(1, y.shape[1])
    combined = partial(combine, topk_weights=weights)
    yield "a row too many to combine", ShapeError, lambda: combined(y=long)
    fewer = partial(combine, y=y, topk_weights=weights[1:])
    yield "weights of another shape", ShapeError, fewer
    if ids.device.type == "cpu":
        other = sent.handle.routing.clone()
        other[-1] ^= 1
        foreign = mkernel.MoeHandle(sent.handle.counts, other)
        yield "a handle of another world", ArgumentError, lambda: combined(y=y, handle=foreign)
    if "moe_gemm_combine" in claims.ops:
        yield from _wrong_gemm_combine(case, sent, given)


def _wrong_rows(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    x, ids = given["x"], given["topk_ids"]
    call = partial(mkernel.moe_dispatch, num_experts=case.sizes["experts"])
    sent = call(x, ids)
    yield from _not_plain(call, {"x": x, "topk_ids": ids})
    yield "fewer lists than tokens", ShapeError, lambda: call(x, ids[1:])
    yield "expert numbers of float", DtypeError, lambda: call(x, ids.float())
    yield "experts that ranks cannot share", ShapeError, partial(call, x, ids, num_experts=10007)
    if ids.device.type == "cpu":
        yield "an expert that is not there", ArgumentError, lambda: call(x, ids + 10000)
    yield from _wrong_handle(partial(call, x, handle=sent.handle), ids, len(sent.rows), claims)


def _wrong_handle(
    call: Callable[..., Any], ids: torch.Tensor, rows: int, claims: Any
) -> Iterator[_Wrong]:
    """``call``: a dispatch of as many ids with a handle, whose dispatch had so many rows."""
    if claims.reuses_routing == "never":
        yield "a handle, not claimed", ArgumentError, lambda: call(ids)
        return
    more = ids.repeat(1, 2)
    yield "a handle of other places", ShapeError, lambda: call(more)
    most = rows + 1
    yield "a capacity that its dispatch had not", ArgumentError, lambda: call(ids, capacity=most)


def _wrong_gemm_combine(case: Case, sent: mkernel.MoeDispatch, given: _Inputs) -> Iterator[_Wrong]:
    weights, kind = given["topk_weights"], getattr(torch, case.dtype)
    h = sent.outputs.to(kind)
    w2 = given["w"].transpose(1, 2).contiguous()
    call = partial(
        mkernel.moe_gemm_combine, handle=sent.handle, out_dtype=getattr(torch, case.out_dtype)
    )
    yield from _not_plain(call, {"h": h, "w2": w2, "topk_weights": weights})
    right = partial(call, h, w2, topk_weights=weights)
    long = torch.cat([h, h[:1]]) if len(h) else h.new_zeros(1, h.shape[1])
    yield "a row too many to multiply", ShapeError, lambda: call(long, w2, topk_weights=weights)
    narrow = w2[:, :-8].contiguous()
    yield "I differs", ShapeError, lambda: call(h, narrow, topk_weights=weights)
    fewer = w2[:-1].contiguous()
    yield "an expert too few", ShapeError, lambda: call(h, fewer, topk_weights=weights)
    yield "mixed dtypes", DtypeError, lambda: call(h, w2.double(), topk_weights=weights)
    other = torch.bfloat16 if case.out_dtype != "bfloat16" else torch.float16
    yield "partial results of a third dtype", DtypeError, lambda: right(partial_dtype=other)
    yield "another way home", ArgumentError, lambda: right(returns="rails")


def _wrong_attention(given: _Inputs) -> Iterator[_Wrong]:
    q, k, v = (given[name] for name in "qkv")
    call = mkernel.ring_attention
    yield from _not_plain(call, {"q": q, "k": k, "v": v})
    yield "keys of another width", ShapeError, lambda: call(q, k[..., :-8].contiguous(), v)
    yield "fewer values than keys", ShapeError, lambda: call(q, k, v[:, :, 1:].contiguous())
    yield "mixed dtypes", DtypeError, lambda: call(q, k.double(), v)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    if not turned.is_contiguous():
        yield "q that is not contiguous", LayoutError, lambda: call(turned, k, v)
    yield "an infinite scale", ArgumentError, lambda: call(q, k, v, scale=float("inf"))
    three = torch.cat([k, k[:, :1]], 1)
    yield "heads that do not divide", ShapeError, lambda: call(q, three, three)
    if q.shape[2] > 1:
        one = (tensor[:, :, :1].contiguous() for tensor in (q, k, v))
        yield "a causal sequence that cannot be split", ShapeError, partial(call, *one, causal=True)


# ---- ranks that do not agree ---------------------------------------------------------------------


def mismatched_call(subject: AcceleratorSubject) -> None:
    """Make ranks call different things: all must get PlanMismatch, and nothing is computed from a
    mixture."""
    world = (1, 2)
    for op in subject.claimed()[: 1 if subject.quick else None]:
        if op in COMPANIONS:
            continue
        case = typical(subject, op, 2)
        other = wider(subject, case)
        if "m" in case.sizes:  # columns may differ between unlike nodes
            other = case.with_(sizes={**case.sizes, "m": 2 * case.sizes["m"]})
        subject.judge(rank_first_differs, case, other, world=world)
        told: dict[int, str] = {}
        try:
            subject.launch(rank_later_differs, case, other, world=world, on_report=told.__setitem__)
        except MkernelError as error:
            if not isinstance(error, PlanMismatch):
                told.setdefault(-1, f"{type(error).__name__}: {error}")
        wrong = [f"rank {rank} raised {text}" for rank, text in told.items() if text]
        if 0 not in told:
            wrong.append("rank 0 said nothing")
        if wrong:
            raise CheckFailed(
                f"{describe(case)} on one rank, {describe(other)} on the other: {wrong[0]}, not "
                "PlanMismatch"
            )


def rank_first_differs(case: Case, other: Case) -> list[str]:
    """Give ranks new plans that differ: all must refuse, and the world must go on."""
    mine = other if mkernel.world().rank else case
    call = partial(mine.run, Judge(mine).inputs(0))
    found = list(_refused("ranks with different new plans", PlanMismatch, call))
    return found or Judge(case)(1)


def rank_later_differs(case: Case, other: Case) -> None:
    """Give rank 0 a new plan, and rank 1 one that both know and that starts at once."""
    world = mkernel.world()
    Judge(case)(0)
    world.barrier()
    mine = case if world.rank else other
    try:
        mine.run(Judge(mine).inputs(1))
    except PlanMismatch:
        report("")
        raise
    except MkernelError as error:
        text = f"{type(error).__name__}: {error}"
        # The rank that was in its call already hears from the others what they found.
        report("" if world.rank != 0 and "PlanMismatch" in text else text)
        raise
    report("nothing")


CHECKS = (
    Check("wrong-calls", "wrong calls are refused by name, and nothing is started", wrong_calls),
    Check("mismatched-call", "ranks that call different things are told so", mismatched_call),
)
