"""Wrong calls are refused with the right error before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

import mkernel
from mkernel.cases import Case, case_of
from mkernel.conformance.accelerator import OPS, AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import GEMMS, typical
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
from mkernel.plan.model import DTYPE_BYTES

_Inputs = dict[str, torch.Tensor]
_Wrong = tuple[str, type[MkernelError], Callable[[], object]]


def wrong_calls(subject: AcceleratorSubject) -> None:
    """Every way to call wrongly that the claims leave, one after another in one world."""
    world = subject.largest()
    size = world[0] * world[1]
    cases = [typical(subject, op, size) for op in subject.claimed() if op != "moe_combine"]
    refused = [_unclaimed(subject, op, size) for op in OPS if op not in subject.capabilities.ops]
    subject.judge(rank_wrong_calls, cases, refused, subject.capabilities, world=world)


def _unclaimed(subject: AcceleratorSubject, op: str, size: int) -> Case:
    return typical(subject, op, size)


def rank_wrong_calls(cases: Sequence[Case], refused: Sequence[Case], claims: Any) -> list[str]:
    """Make the wrong calls; see what is raised and that no kernel starts; then call rightly."""
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
        if case.op == "moe_combine":
            continue  # it needs a dispatch's handle
        judge = Judge(case)
        call = _caller(case, judge.inputs(0))
        found += _refused(f"{case.op}, which is not claimed, {where()}", Unsupported, call)
    return found


def _caller(case: Case, inputs: _Inputs) -> Callable[[], object]:
    return lambda: case.run(inputs)


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
    elif case.op == "moe_dispatch_gemm":
        yield from _wrong_dispatch(case, given)
    else:
        yield from _wrong_attention(case, given)


class _Overriding(torch.Tensor):
    """A subclass with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _not_plain(call: Callable[..., object], given: _Inputs, **options: Any) -> Iterator[_Wrong]:
    """The right call ``call(**given, **options)`` with one tensor that is more or less than memory."""
    for name, tensor in given.items():
        changed = {
            "of a subclass": tensor.as_subclass(_Overriding),
            "that is fake": FakeTensorMode().from_tensor(tensor),
            "without data": tensor.to("meta"),
        }
        if tensor.is_floating_point():
            changed["that requires grad"] = tensor.detach().requires_grad_()
        for what, value in changed.items():
            arguments = {**given, name: value, **options}
            yield f"{name} {what}", ArgumentError, partial(call, **arguments)


def _wrong_gemm(case: Case, given: _Inputs, claims: Any) -> Iterator[_Wrong]:
    a, b = given["a"], given["b"]
    call = getattr(mkernel, case.op)
    wide = torch.cat([a, a], 1)[:, : a.shape[1]]
    shape = case.run(given).outputs["out"].shape
    options = {"out_dtype": getattr(torch, case.out_dtype)}
    written = torch.empty(shape, dtype=options["out_dtype"], device=a.device)
    yield from _not_plain(call, {"a": a, "b": b, "out": written})
    yield (
        "K differs",
        ShapeError,
        lambda: call(wide.contiguous()[:, :-8].contiguous(), b, **options),
    )
    yield "float64", DtypeError, lambda: call(a.double(), b.double(), **options)
    yield "a with gaps between rows", LayoutError, lambda: call(wide, b, **options)
    yield "a in three dimensions", ShapeError, lambda: call(a[None], b, **options)
    yield "chunk of 0", ArgumentError, lambda: call(a, b, chunk=0, **options)
    for other in ("float16", "bfloat16", "float32"):
        kind = getattr(torch, other)
        if other != case.dtype:
            yield "mixed dtypes", DtypeError, partial(call, a, b.to(kind), **options)
        if other not in claims.dtypes:
            yield (
                f"{other}, which is not claimed",
                DtypeError,
                partial(call, a.to(kind), b.to(kind), **options),
            )
        if (case.dtype, other) not in claims.dtype_pairs():
            yield (
                f"{other} output, which is not claimed",
                DtypeError,
                partial(call, a, b, out_dtype=kind),
            )
    out = torch.empty(shape[0] + 1, shape[1], dtype=options["out_dtype"], device=a.device)
    yield "out of another shape", ShapeError, lambda: call(a, b, out=out)
    ragged = b[:, :-1].contiguous()
    if claims.alignment_bytes > DTYPE_BYTES[case.dtype]:
        yield "N that is not aligned", ShapeError, lambda: call(a, ragged, **options)
    if "column" not in claims.b_layouts:
        turned = b.t().contiguous().t()
        yield "column-major b, not claimed", LayoutError, lambda: call(a, turned, **options)
    if "row" not in claims.b_layouts:
        yield "row-major b, not claimed", LayoutError, lambda: call(a, b.contiguous(), **options)
    if case.op == "gemm_reduce_scatter" and mkernel.world().size > 1:
        yield "M that ranks cannot share", ShapeError, lambda: call(a[1:], b, **options)


def _wrong_dispatch(case: Case, given: _Inputs) -> Iterator[_Wrong]:
    x, ids, w, weights = (given[name] for name in ("x", "topk_ids", "w", "topk_weights"))
    options = {"out_dtype": getattr(torch, case.out_dtype)}

    def call(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> object:
        return mkernel.moe_dispatch_gemm(x, ids, w, **options)

    sent = mkernel.moe_dispatch_gemm(x, ids, w, **options)
    yield from _not_plain(mkernel.moe_dispatch_gemm, {"x": x, "topk_ids": ids, "w": w}, **options)
    yield "H differs", ShapeError, lambda: call(x, ids, w[:, :-8].contiguous())
    yield "fewer lists than tokens", ShapeError, lambda: call(x, ids[1:], w)
    yield "expert numbers of float", DtypeError, lambda: call(x, ids.float(), w)
    if ids.device.type == "cpu":
        yield "an expert that is not there", ArgumentError, lambda: call(x, ids + 10000, w)
        yield "a negative expert", ArgumentError, lambda: call(x, ids - 10000, w)
    yield "mixed dtypes", DtypeError, lambda: call(x, ids, w.double())
    y = sent.outputs
    yield from _not_plain(
        mkernel.moe_combine, {"y": y, "topk_weights": weights}, handle=sent.handle
    )
    long = torch.cat([y, y[:1]]) if len(y) else y.new_zeros(1, y.shape[1])
    yield (
        "a row too many to combine",
        ShapeError,
        lambda: mkernel.moe_combine(long, sent.handle, weights),
    )
    yield (
        "weights of another shape",
        ShapeError,
        lambda: mkernel.moe_combine(y, sent.handle, weights[1:]),
    )


def _wrong_attention(case: Case, given: _Inputs) -> Iterator[_Wrong]:
    q, k, v = (given[name] for name in "qkv")
    call = mkernel.ring_attention
    yield from _not_plain(call, {"q": q, "k": k, "v": v})
    yield "keys of another width", ShapeError, lambda: call(q, k[..., :-8].contiguous(), v)
    yield "fewer values than keys", ShapeError, lambda: call(q, k, v[:, :, 1:].contiguous())
    yield "mixed dtypes", DtypeError, lambda: call(q, k.double(), v)
    yield "q that is not contiguous", LayoutError, lambda: call(q.transpose(1, 2), k, v)
    yield "an infinite scale", ArgumentError, lambda: call(q, k, v, scale=float("inf"))
    three = torch.cat([k, k[:, :1]], 1)
    yield "heads that do not divide", ShapeError, lambda: call(q, three, three)
    if q.shape[2] > 1:
        odd = slice(0, 1)
        yield (
            "a causal sequence that cannot be split",
            ShapeError,
            lambda: call(
                q[:, :, odd].contiguous(), k[:, :, odd].contiguous(), v[:, :, odd].contiguous(),
                causal=True,
            ),
        )  # fmt: skip


# ---- ranks that do not agree ---------------------------------------------------------------------


def mismatched_call(subject: AcceleratorSubject) -> None:
    """Ranks in different calls are told so: nothing is computed from a mixture."""
    world = (1, 2)
    for op in subject.claimed()[: 1 if subject.quick else None]:
        if op == "moe_combine":
            continue
        case, other = typical(subject, op, 2), _other(subject, op)
        subject.judge(rank_first_differs, case, other, world=world)
        told: dict[int, str] = {}
        try:
            subject.launch(
                rank_later_differs, case, other, world=world,
                on_report=partial(_note, told),
            )  # fmt: skip
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


def _note(told: dict[int, str], rank: int, text: str) -> None:
    told[rank] = text


def _other(subject: AcceleratorSubject, op: str) -> Case:
    case = typical(subject, op, 2)
    name = {"ring_attention": "head_dim", "moe_dispatch_gemm": "features"}.get(op, "n")
    return case.with_(sizes={**case.sizes, name: case.sizes[name] + subject.step()})


def rank_first_differs(case: Case, other: Case) -> list[str]:
    """New plans that differ: all refuse, and the world goes on."""
    mine = other if mkernel.world().rank else case
    found = list(
        _refused(
            "ranks with different new plans", PlanMismatch, _caller(mine, Judge(mine).inputs(0))
        )
    )
    return found or Judge(case)(1)


def rank_later_differs(case: Case, other: Case) -> None:
    """Rank 0 has a new plan, rank 1 one that both know and that starts at once."""
    world = mkernel.world()
    Judge(case)(0)
    world.barrier()
    mine = case if world.rank else other
    try:
        case_of(mine.op)
        mine.run(Judge(mine).inputs(1))
    except PlanMismatch:
        _say("")
        raise
    except MkernelError as error:
        text = f"{type(error).__name__}: {error}"
        # The rank that was in its call already hears from the others what they found.
        _say("" if world.rank != 0 and "PlanMismatch" in text else text)
        raise
    _say("nothing")


def _say(text: str) -> None:
    from mkernel.launch import report

    report(text)


CHECKS = (
    Check("wrong-calls", "wrong calls are refused by name, and nothing is started", wrong_calls),
    Check("mismatched-call", "ranks that call different things are told so", mismatched_call),
)
