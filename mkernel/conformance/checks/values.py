"""Checks that results equal the float64 truth in every shape, dtype, layout and world that is
claimed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import lcm
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch

import mkernel
from mkernel.backends.contracts.scaled import dequantised, quantised_blocks, quantised_rows
from mkernel.cases import Case
from mkernel.cases.all_reduce import SumCase
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.checks.attention import with_nonfinite
from mkernel.conformance.grid import (
    GEMMS,
    draws,
    grid,
    in_turn,
    judge_typical,
    small_ones,
    typical,
    whole_mnk,
    with_tensors,
)
from mkernel.conformance.ranks import (
    EXPERTS,
    Judge,
    describe,
    each_case,
    judge_calls,
    moved,
    where,
)
from mkernel.harness.outcome import CheckSkipped
from mkernel.ops import moe as moe_op
from mkernel.ops.moe_dispatch import moe_dispatch
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.plan.arguments import RESULTS, SCALED_EXPERTS, WITHOUT_B
from mkernel.plan.model import BLOCK, E4M3, DtypeName, ScaleMode
from mkernel.plan.ops import COMPANIONS
from mkernel.plan.pipeline import Returns


def shapes(subject: AcceleratorSubject) -> None:
    """Check a grid of odd shapes and random draws."""
    for world in subject.usual_worlds():
        size = world[0] * world[1]
        count = 4 if subject.quick else 24
        cases = []
        for op in subject.claimed_in(world):
            cases += [*grid(subject, op, world), *draws(subject, op, size, count)]
        subject.judge(
            each_case, judge_calls, in_turn(cases), 1 if subject.quick else 2, world=world
        )


def dtypes(subject: AcceleratorSubject) -> None:
    """Check every dtype of inputs with every dtype of outputs and every layout."""
    claims = subject.capabilities
    cases = [
        typical(subject, op, 2, dtype=dtype, out_dtype=out_dtype, layout=layout)
        for op in subject.claimed()
        for dtype, out_dtype in claims.dtype_pairs()
        if op != "ring_attention" or dtype == out_dtype
        for layout in (claims.b_layouts if op not in WITHOUT_B else (None,))
    ]
    if "moe_gemm_combine" in claims.ops:  # results that are large enough to be rounded on their way
        cases += [
            typical(
                subject, "moe_gemm_combine", 2, {"tokens": 96},
                dtype=dtype, out_dtype=out_dtype, options={"returns": returns},
            )
            for dtype, out_dtype in claims.dtype_pairs()
            for returns in get_args(Returns)
        ]  # fmt: skip
    subject.judge(each_case, judge_calls, in_turn(cases), 1, world=(1, 2))


def operands(subject: AcceleratorSubject) -> None:
    """Check operands that are parts of larger matrices, which the op copies if the backend does not
    claim to take gaps behind rows; and a bias, which the launch adds, or the op after it."""
    step = subject.step()
    cases = [
        typical(subject, op, 2, layout=layout, options=options)
        for op in subject.claimed(*GEMMS)
        for layout in subject.capabilities.b_layouts
        for options in ({"gap": step}, {"gap": 5 * step}, {"bias": True})
    ]
    subject.judge(each_case, judge_calls, cases, 2, world=(1, 2))


def norms(subject: AcceleratorSubject) -> None:
    """Check a residual and RMSNorm after a sum, done by the launch if the backend claims it, or by
    the op; and rows in e4m3, quantised by whichever is claimed."""
    each: list[dict[str, Any]] = [{"norm": "residual"}, {"norm": "alone"}]
    more = {"gemm_all_reduce": {"bias": True}, "all_reduce": {"in_place": True}}
    cases = [
        typical(subject, op, 2, sizes, dtype=dtype, out_dtype=out_dtype, options=options)
        for op in subject.claimed(*more)
        for dtype, out_dtype in subject.capabilities.dtype_pairs()
        for sizes in ({}, {"m": 1}, {"m": 33})
        for options in (*each, {"norm": "residual", **more[op]})
        if dtype == out_dtype or "in_place" not in options
    ]
    subject.judge(each_case, judge_calls, in_turn(cases), 3, world=(1, 2))
    quantised = [
        typical(subject, op, 2, {"m": 33}, dtype=dtype, out_dtype=out_dtype, options={"norm": norm})
        for op in subject.claimed(*more)
        for dtype, out_dtype in subject.capabilities.dtype_pairs()
        if dtype == out_dtype
        for norm in ("residual", "alone")
    ]
    subject.judge(each_case, _judge_quantised, quantised, 2, world=(1, 2))


def _judge_quantised(case: Case, calls: int) -> Iterator[str]:
    """Call a case's op with rows in e4m3 and without, and yield where the first are not the second,
    quantised."""
    assert isinstance(case, SumCase)
    world = mkernel.world()
    for iteration in range(calls):
        given = moved(case.inputs(world.rank, world.size, iteration))
        call = partial(getattr(mkernel, case.op), **given, eps=case.eps)
        plain, found = call(), call(quantise="row")
        normed, *new = plain if "residual" in given else (plain,)
        wanted = *quantised_rows(normed), *new
        for name, got, right in zip(("rows", "scales", "residual"), found, wanted, strict=False):
            if not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
                yield f"{describe(case)}, {where()}: other {name} in e4m3 than of the plain call"


def scales(subject: AcceleratorSubject) -> None:
    """Check e4m3 operands with every kind of scales that is claimed, on every path that takes them;
    and rows of experts in 16 bits, which launches quantise."""
    claims = subject.capabilities
    ops = subject.claimed(*GEMMS) if claims.scale_modes else ()
    experts = subject.claimed(*SCALED_EXPERTS) if claims.scaled_experts else ()
    if not ops and not experts:
        raise CheckSkipped("scale_modes claims none")
    results = [one for one in RESULTS if one in claims.out_dtypes]
    for world in subject.worlds((1, 1), (1, 2), *([] if subject.quick else [subject.largest()])):
        size = world[0] * world[1]
        each = [
            *(_Scaled(out) for out in results),
            _Scaled(results[0], {"m": size}),
            _Scaled(results[0], {"m": 33 * size}, chunk=1),
            _Scaled(results[0], options={"gap": 256, "replicate_b": False}),
            _Scaled(results[-1], options={"bias": True}),  # it may be added to what was rounded
        ]
        cases = [
            _scaled(subject, op, size, mode, more)
            for op in ops
            for mode in claims.scale_modes
            for more in (each[:1] if subject.quick and size == 1 else each)
        ]
        cases += [
            _scaled(subject, op, size, mode, _Scaled(results[0], {"m": 33}, {"norm": norm}))
            for op in ops
            for mode in claims.scale_modes[:1]
            for norm in ("residual", "alone")
            if op == "gemm_all_reduce"
        ]
        cases += [
            typical(
                subject, op, size, {"hidden": 2 * BLOCK, "features": 2 * BLOCK},
                dtype=E4M3, out_dtype=out, layout="column",
                options={"scales": "block", "routing": kind},
            )
            for op in experts
            for out, kind in zip((results[0], results[-1]), ("uniform", "some_empty"), strict=True)
        ]  # fmt: skip
        for fast, modes, of_fused in (
            (True, claims.fused_scale_modes, results[:1]),
            (False, claims.fused_float32_scale_modes, results[-1:]),
        ):
            fused = {"path": "fused", "use_fast_accum": fast}
            cases += [
                _scaled(subject, op, size, mode, _Scaled(out, {"m": 64 * size}, fused))
                for op in ops
                for mode in modes
                for out in (of_fused if subject.quick else results)
            ]
        subject.judge(each_case, judge_calls, cases, 2 if subject.quick else 3, world=world)
        sizes = {"hidden": 2 * BLOCK, "features": 2 * BLOCK}
        wide = [
            typical(subject, op, size, sizes, dtype=E4M3, out_dtype=results[0], layout="column",
                    options={"scales": "block"})
            for op in experts
        ]  # fmt: skip
        subject.judge(each_case, _judge_wide_rows, wide, world=world)


_ROWS = {"moe_dispatch": "x", "moe_dispatch_gemm": "x", "moe_gemm_combine": "h"}
"""The rows of MoE ops that launches quantise where they have 16 bits."""


def _judge_wide_rows(case: Case) -> Iterator[str]:
    """Call a case's op with rows in bfloat16, and with what torch makes of them in e4m3; yield where
    results differ."""
    world, name = mkernel.world(), _ROWS[case.op]
    given = moved(case.inputs(world.rank, world.size, 0))
    rows = dequantised(given[name], given.pop(f"{name}_scale")).to(torch.bfloat16)
    values, scale = quantised_blocks(rows)
    found, wanted = (
        _called(case, given | {name: rows}, None), _called(case, given | {name: values}, scale)
    )  # fmt: skip
    for number, (got, right) in enumerate(zip(found, wanted, strict=True)):
        if not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
            yield (
                f"{describe(case)}, {where()}: rows in bfloat16 give another result {number} than "
                "those that were quantised before"
            )


def _called(
    case: Case, given: Mapping[str, torch.Tensor], scale: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return the results of a case's op, of rows with these scales, or of those in 16 bits."""
    ids, weights = given["topk_ids"], given["topk_weights"]
    if case.op == "moe_dispatch":
        quantise: Literal["block"] | None = "block" if scale is None else None
        sent = moe_dispatch(
            given["x"], ids, num_experts=case.sizes["experts"], x_scale=scale, quantise=quantise
        )
        assert sent.scales is not None
        return sent.rows, sent.scales
    w, of_w = given["w"], given["w_scale"]
    if case.op == "moe_dispatch_gemm":
        made = moe_op.moe_dispatch_gemm(given["x"], ids, w, x_scale=scale, w_scale=of_w)
        return (made.outputs,)
    of_x = given["x_scale"]
    handle = moe_op.moe_dispatch_gemm(given["x"], ids, w, x_scale=of_x, w_scale=of_w).handle
    h, w2, of_w2 = given["h"], given["w2"], given["w2_scale"]
    return (moe_gemm_combine(h, w2, handle, weights, h_scale=scale, w2_scale=of_w2),)


class _Scaled(NamedTuple):
    out_dtype: DtypeName
    sizes: Mapping[str, int] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    chunk: int | None = None


def _scaled(
    subject: AcceleratorSubject, op: str, world_size: int, mode: ScaleMode, more: _Scaled
) -> Case:
    """Make a typical case in which scales by blocks have several blocks along K and N."""
    step = lcm(subject.step(E4M3, more.out_dtype), 8)
    n, k = BLOCK + step, (3 * BLOCK if mode == "block" else 2 * BLOCK + step)
    return typical(
        subject, op, world_size, {"n": n, "k": k, **more.sizes},
        dtype=E4M3, out_dtype=more.out_dtype, layout="column", chunk=more.chunk,
        options={"scales": mode, **more.options},
    )  # fmt: skip


def worlds(subject: AcceleratorSubject) -> None:
    """Check every op in every split of small worlds."""
    wanted = [(1, 1), (1, 3), (2, 1), (1, 4), (2, 2)]
    if not subject.quick:
        wanted += [(1, 2), (3, 1), (3, 2), (4, 1), (1, 8)]
    judge_typical(subject, judge_calls, 2, worlds=subject.worlds(*wanted))


def most_ranks(subject: AcceleratorSubject) -> None:
    """Check the largest world that is claimed, since what a backend keeps of each rank it keeps of
    all; and two and four nodes of 16 ranks."""
    for world in subject.worlds(subject.crowd(), *([] if subject.quick else [(2, 8), (4, 4)])):
        subject.judge(each_case, judge_calls, small_ones(subject, world), 1, world=world)


def many_chunks(subject: AcceleratorSubject) -> None:
    """Cut calls into chunks of one tile or row, more of them than any ring of buffers should
    hold."""
    rows, k = (400, 600) if subject.quick else (1500, 2100)
    for world in subject.worlds((1, 2), *([] if subject.quick else [subject.largest()])):
        size = world[0] * world[1]
        cases = []
        for op in subject.claimed_in(world):
            if op in GEMMS:
                m = rows if op == "gemm_all_reduce" else rows * size
                sizes = {"m": m, "k": subject.aligned(k)}
            elif op == "all_reduce":
                sizes = {"m": rows}
            elif op == "ring_attention":
                sizes = {"batch": 1, "sequence": rows * size}
            else:
                sizes = {"tokens": rows}
            cases.append(typical(subject, op, size, sizes, chunk=None if op in COMPANIONS else 1))
        subject.judge(each_case, judge_calls, cases, 2, world=world)


# ---- accumulation --------------------------------------------------------------------------------


def accumulation(subject: AcceleratorSubject) -> None:
    """Add whole numbers whose large terms cancel: float32 sums are exact, narrower ones lose the
    rest."""
    claims = subject.capabilities
    for world in subject.worlds((1, 2), *([] if subject.quick else [subject.largest()])):
        size = world[0] * world[1]
        gemms = [op for op in GEMMS if op in subject.claimed()]
        cases = [
            _cancelling(subject, op, size, dtype, out_dtype)
            for op in gemms
            for dtype, out_dtype in claims.dtype_pairs()
        ]
        # A backend may have another way for wide results.
        wide = {"m": 2 * size, "n": subject.aligned(4104), "k": subject.aligned(132)}
        cases += [
            _cancelling(subject, op, size, dtype, out_dtype, wide)
            for op in gemms
            for dtype, out_dtype in claims.dtype_pairs()
        ]
        homes = [op for op in COMPANIONS if op in claims.ops]
        experts = [op for op in EXPERTS if op in claims.ops and claims.scaled_experts]
        subject.judge(rank_accumulation, cases, homes, claims.dtypes, experts, world=world)
        if "ring_attention" in claims.ops:
            cases = [_level_attention(subject, dtype) for dtype in claims.dtypes]
            subject.judge(each_case, judge_calls, cases, 1, world=(1, 2))


def _cancelling(
    subject: AcceleratorSubject,
    op: str,
    world_size: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Case:
    """Make A = [P, Q, -P], B = [R; S; R]: C = Q S, whole numbers below 128, while P R passes
    10,000.

    Where the op cuts K, the large terms lie on the first and last ranks; but where what a rank adds
    may be rounded, they cancel on each rank, so that what is rounded are whole numbers below 128.
    """
    case = typical(subject, op, world_size, sizes, dtype=dtype, out_dtype=out_dtype)
    m, n, k = (case.sizes[name] for name in "mnk")
    ranks = 1 if op == "all_gather_gemm" else world_size
    apart = subject.capabilities.rounded_partials
    random = torch.Generator().manual_seed(subject.seed)

    def terms(k: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        third = k // 3
        p = torch.randint(8, 17, (m, third), generator=random)
        r = torch.randint(8, 17, (third, n), generator=random)
        q = torch.randint(-1, 2, (m, k - 2 * third), generator=random)
        s = torch.randint(-1, 2, (k - 2 * third, n), generator=random)
        q[:, most:] = 0
        return torch.cat([p, q, -p], 1), torch.cat([r, s, r])

    each = [terms(k, 120 // ranks) for _ in range(ranks)] if apart else [terms(k * ranks, 120)]
    a, b = torch.cat([a for a, _ in each], 1), torch.cat([b for _, b in each])
    return with_tensors(case, a=a, b=b)


def _level_attention(subject: AcceleratorSubject, dtype: DtypeName) -> Case:
    """Make attention whose queries of zeros weigh 1536 positions alike; half of the values are 1,
    the others 0."""
    case = typical(subject, "ring_attention", 2, {"sequence": 1536}, dtype=dtype)
    batch, heads, kv, length, width = (
        case.sizes[n] for n in ("batch", "heads", "kv_heads", "sequence", "head_dim")
    )
    v = (torch.arange(length) % 2).reshape(1, 1, length, 1)
    return with_tensors(
        case,
        q=torch.zeros(batch, heads, length, width),
        k=torch.ones(batch, kv, length, width),
        v=v.expand(batch, kv, length, width).contiguous(),
    )


def rank_accumulation(
    cases: list[Case], homes: list[str], dtypes: tuple[str, ...], experts: list[str]
) -> list[str]:
    """Return what is wrong with combines and e4m3 experts whose large terms cancel, and with GEMMs,
    which must be exact."""
    combines = [_cancelling_combine(op, getattr(torch, dtype)) for op in homes for dtype in dtypes]
    cancelling = [*combines, *map(_cancelling_experts, experts)]
    return [found for each in cancelling for found in each] + each_case(_inexact, cases)


def _inexact(case: Case) -> Iterator[str]:
    judge = Judge(case)
    got = case.run(judge.inputs(0)).outputs["out"].cpu().double()
    wanted = judge.truth(0)["out"]
    if not torch.equal(got, wanted):
        worst = float((got - wanted).abs().max())
        yield (
            f"{describe(case)}, {where()}: sums that float32 holds exactly are off by up to "
            f"{worst:g}: something narrower added them up"
        )


def _cancelling_combine(op: str, dtype: torch.dtype) -> Iterator[str]:
    """Combine 4096 x + x - 4096 x = x, for whole numbers x that pass through unit matrices."""
    world = mkernel.world()
    width, tokens, experts = 16, 9, 2 * world.size
    if experts < 3:
        return
    random = torch.Generator().manual_seed(world.rank)
    device = world.accelerator.device
    x = torch.randint(1, 8, (tokens, width), generator=random).to(dtype).to(device)
    ids = torch.stack([torch.randperm(experts, generator=random)[:3] for _ in range(tokens)])
    w = torch.eye(width, dtype=dtype).repeat(2, 1, 1).to(device)
    sent = moe_op.moe_dispatch_gemm(x, ids.to(device), w, out_dtype=dtype)
    weights = torch.tensor([4096.0, 1.0, -4096.0]).repeat(tokens, 1).to(device)
    if op == "moe_combine":
        got = moe_op.moe_combine(sent.outputs, sent.handle, weights, out_dtype=dtype)
    else:
        got = moe_gemm_combine(
            sent.outputs, w, sent.handle, weights, out_dtype=dtype, partial_dtype=_sums(dtype)
        )
    if not torch.equal(got, x):
        yield (
            f"{op} {dtype}, {where()}: 4096 x + x - 4096 x is not x: the sum over slots is "
            "not float32"
        )


def _cancelling_experts(op: str) -> Iterator[str]:
    """Have e4m3 experts add 2^23 + s - 2^23 = s, each term by a block of K, for whole numbers s up to
    96. The terms of a block are exact in the 14 bits of matrix units; beside 2^23 these lose s."""
    world, tokens, each = mkernel.world(), 9, 2
    experts, device = each * world.size, world.accelerator.device

    def terms(seed: int, least: int, most: int, count: int, last: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(seed)
        middle, ends = torch.zeros(count, BLOCK), torch.full((count, BLOCK), 256)
        middle[:, :32] = torch.randint(least, most + 1, (count, 32), generator=chance)
        return torch.cat((ends, middle, last * ends), 1)

    x, w = terms(world.rank, 1, 3, tokens, 1), terms(0, -1, 1, experts * BLOCK, -1)
    ids = (torch.arange(tokens) + world.rank) % experts
    w = w.view(experts, BLOCK, -1)
    wanted = torch.einsum("tk,tnk->tn", x.double(), w[ids].double())
    own = w[world.rank * each :][:each].to(torch.float8_e4m3fn).to(device).transpose(1, 2)
    of_w = torch.ones(each, 1, 3, device=device).transpose(1, 2)
    given = x.to(torch.float8_e4m3fn).to(device), ids[:, None].to(device)
    of_x, shares = torch.ones(tokens, 3, device=device), torch.ones(tokens, 1, device=device)
    if op == "moe_dispatch_gemm":
        made = moe_op.moe_dispatch_gemm(*given, own, x_scale=of_x, w_scale=of_w)
        got = moe_op.moe_combine(made.outputs, made.handle, shares)
    else:
        sent = moe_dispatch(*given, num_experts=experts, x_scale=of_x)
        got = moe_gemm_combine(
            sent.rows, own, sent.handle, shares, h_scale=sent.scales, w2_scale=of_w
        )
    if not torch.equal(got.cpu().double(), wanted):
        yield f"{op}, {where()}: 2^23 + s - 2^23 is not s: sums of blocks are not float32"


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- not-a-number --------------------------------------------------------------------------------


def nonfinite(subject: AcceleratorSubject) -> None:
    """Check that NaN and infinity come out where ``a @ b``, a sum or torch's attention has them,
    and nowhere else."""
    subject.claimed(*GEMMS, "all_reduce", "ring_attention")
    world = subject.largest()
    cases = []
    if "all_reduce" in subject.claimed_in(world):
        case = typical(subject, "all_reduce", world[0] * world[1])
        rows, n = case.sizes["m"] * world[0] * world[1], case.sizes["n"]
        x = torch.randn(rows, n, generator=torch.Generator().manual_seed(subject.seed))
        x[3, 5], x[-1, -2] = float("nan"), float("inf")
        cases.append(with_tensors(case, x=x))
    if "ring_attention" in subject.claimed_in(world):
        cases += with_nonfinite(typical(subject, "ring_attention", world[0] * world[1]))
    for op in GEMMS:
        if op not in subject.capabilities.ops:
            continue
        case = typical(subject, op, world[0] * world[1])
        m, n, k = whole_mnk(case, world[0] * world[1])
        random = torch.Generator().manual_seed(subject.seed)
        a = torch.randn(m, k, generator=random)
        a[3, 5], a[-1, -2] = float("nan"), float("inf")
        cases.append(with_tensors(case, a=a, b=torch.randn(k, n, generator=random)))
    subject.judge(each_case, judge_calls, cases, 1, world=world)


CHECKS = (
    Check("shapes", "every legal shape gives the truth: odd, tiny, ragged, random", shapes),
    Check("dtypes", "every claimed dtype, output dtype and layout gives the truth", dtypes),
    Check("operands", "gaps behind rows of matrices, and a bias, give the truth", operands),
    Check("scales", "e4m3 operands count times their scales, which go with their rows", scales),
    Check("norms", "a residual and RMSNorm behind a sum give the truth", norms),
    Check("worlds", "every split of a world into nodes and ranks gives the truth", worlds),
    Check(
        "most-ranks",
        "as many ranks as are claimed, or 16, get the truth, on several nodes too",
        most_ranks,
    ),
    Check("many-chunks", "long inputs in the smallest chunks give the truth", many_chunks),
    Check("accumulation", "sums are float32 all the way, rounded once", accumulation),
    Check("nonfinite", "NaN and infinity pass through products, sums and attention", nonfinite),
)
