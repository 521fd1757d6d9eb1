"""What ranks do in tests of the GEMM ops' operands, and of several accelerators, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from operand_forms import (
    FORMS,
    OPS,
    TOLERANCE,
    RoundedOnce,
    columns_of,
    differences,
    dims_of,
    expected,
    packed,
    rows_of,
    transposed,
    weighed,
)
from python_calls import plans

import mkernel
from mkernel.ops.gemm import GemmCall


def called(name: str) -> list[str]:
    """What is wrong of each form's call in bfloat16: into memory of its own and of the caller's, with
    gradients."""
    world, op, found = mkernel.world(), OPS[name], []
    public = getattr(mkernel, name)
    for label, usual in FORMS.items():
        form = replace(usual, dtype=torch.bfloat16, device="cuda")
        rank, dims = world.rank, dims_of(op, form)
        wanted = expected(op, form)[rank]
        a, b, bias = form.a(op, rank), form.b(rank), form.bias_of(op, rank)
        c = public(a, b, bias=bias, **dims)
        wrong = differences((c,), wanted[:1], form.dtype)
        out = torch.full(tuple(c.shape), float("nan"), dtype=form.dtype, device="cuda")
        if public(a, b, bias=bias, out=out, **dims) is not out or not torch.equal(out, c):
            wrong += " out differs"
        plan = op.call(GemmCall(a, b, bias, form.dim if op.dim else 0)).plan
        if (form.b_lies is packed and "b" in plan.copies) or (
            plan.bias is not None
        ) is not form.bias:
            wrong += f" copies {plan.copies}, bias {plan.bias}"
        inputs = [x.requires_grad_() for x in (a, b, bias) if x is not None]
        c = public(a, b, bias=bias, **dims)
        gradients = torch.autograd.grad(weighed(op, c, rank), inputs)
        wrong += differences((c.detach(), *gradients), wanted, form.dtype)
        if wrong:
            found.append(f"{label}: {wrong}")
    mkernel.synchronize()
    return found


def strided(name: str, path: str) -> list[str]:
    """What is wrong of calls whose operands are parts of larger matrices, with and without a bias: the
    first from Python, the others by native code where no copy is needed, also into a given ``out``."""
    world, op, found = mkernel.world(), OPS[name], []
    public, size, rank = getattr(mkernel, name), world.size, world.rank
    m, n, k = 512, 768, 384
    draw = torch.Generator("cuda").manual_seed(7)
    shape = (size, m // size if op.gathers else m, k)
    a = torch.randn(shape, generator=draw, device="cuda").bfloat16()
    b = torch.randn(size, k, n, generator=draw, device="cuda").bfloat16()
    bias = 9 * torch.randn(n, generator=draw, device="cuda").bfloat16()
    if op.gathers:
        exact = a.double().flatten(0, 1) @ b[rank].double()
    else:
        exact = (a.double() @ b.double()).sum(0)
        exact = exact.chunk(size)[rank] if op.scatters else exact
    forms = {"packed": packed, "columns": columns_of, "transposed": transposed, "rows": rows_of}
    for a_form in ("packed", "columns"):
        for b_form, b_lies in forms.items():
            given = forms[a_form](a[rank]), b_lies(b[rank])
            for row in (None, bias):
                wanted = exact if row is None else exact + row.double()
                plan = op.call(GemmCall(*given, row)).plan
                copies = ("a",) if op.gathers and a_form != "packed" else ()
                said = "launch" if row is not None else None
                wrong = "" if (plan.copies, plan.bias, plan.path) == (copies, said, path) else (
                    f"copies {plan.copies}, bias {plan.bias}, path {plan.path} "
                )  # fmt: skip
                first = public(*given, bias=row)
                with plans(of_all=False) as by_python:
                    again = [public(*given, bias=row) for _ in range(2)]
                    out = torch.full_like(first, float("nan"))
                    again += [public(*given, bias=row, out=out).clone() for _ in range(2)]
                mkernel.synchronize()
                if len(by_python) != 1:  # the first with that out
                    wrong += f"Python made {len(by_python)} calls of four "
                error = float((first.double() - wanted).norm() / wanted.norm())
                if not error <= TOLERANCE[first.dtype]:
                    wrong += f"off by {error:g} "
                if not all(torch.equal(each, first) for each in again):
                    wrong += "other results for the same call "
                if wrong:
                    found.append(f"a {a_form}, b {b_form}, bias {row is not None}: {wrong}")
    return found


def rounded_once(name: str, views: Sequence[Any]) -> list[str]:
    """Calls with a bias whose results were rounded more than once, or are wrong."""
    world, op, found = mkernel.world(), OPS[name], []
    public, rank = getattr(mkernel, name), world.rank
    for dtype in (torch.bfloat16, torch.float16):
        for rows, n, k in ((512, 512, 64), (1024, 4096, 512), (264, 776, 72)):
            made = RoundedOnce(op, world.size, rows, n, k, dtype)
            a, b, bias = made.a[rank].cuda(), made.b[rank].cuda(), made.bias.cuda()
            wanted, twice = made.wanted[rank].cuda(), made.twice[rank].cuda()
            outs = {view: op.call(GemmCall(a, b, bias), view=view).outputs["out"] for view in views}
            outs |= {f"call {turn}": public(a, b, bias=bias) for turn in range(3)}
            shared = mkernel.empty(tuple(wanted.shape), dtype=dtype)
            outs["symmetric"] = public(a, b, bias=bias, out=shared)
            outs["every second"] = public(a, b, bias=bias.repeat_interleave(2)[::2])
            outs["unaligned"] = public(a, b, bias=torch.cat((bias[:1], bias))[1:])
            mkernel.synchronize()
            found += [
                f"{dtype} {rows} x {n} x {k}, {label}: "
                + ("rounded twice" if torch.equal(out, twice) else "wrong")
                for label, out in outs.items()
                if not torch.equal(out, wanted)
            ]
    return found


def several() -> list[float]:
    """Relative errors of several products of one gather, and of what is gathered."""
    world = mkernel.world()

    def drawn(name: str, rank: int, *shape: int) -> torch.Tensor:
        seed = 1000 * rank + sum(map(ord, name))
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.bfloat16().cuda()

    shards = [drawn("a", rank, 2, 64, 256) for rank in range(world.size)]
    whole = torch.cat(shards, 1)
    b = [drawn(f"b{n}", world.rank, 256, n) for n in (128, 512, 64)]
    b.append(drawn("wide", world.rank, 256, 1024)[:, 256:512])
    c, gathered = mkernel.all_gather_gemm(shards[world.rank], b, gather_dim=1, return_gathered=True)
    mkernel.synchronize()
    pairs = [(gathered, whole.double())]
    pairs += [(one, whole.double() @ each.double()) for one, each in zip(c, b, strict=True)]
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


def whole_model() -> dict[str, float]:
    """Accelerators by call in a world of several, with the errors of their calls: of a product and of
    attention, in bfloat16 and in float32."""
    world, found = mkernel.world(), {}
    torch.manual_seed(3)
    for step in range(1, 4):  # of other sizes each, since calls of known plans run by themselves
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(64 * step * world.size, 256).to(dtype).cuda()
            w = torch.randn(256, 128).to(dtype).cuda()
            with plans() as made:
                y = mkernel.all_gather_gemm(x.chunk(world.size)[world.rank], w)
            exact = x.double() @ w.double()
            error = float((y.double() - exact).norm() / exact.norm())
            found[f"{step} {made[0].accelerator} product of {dtype}"] = error
            q = torch.randn(1, 4, 64 * step * world.size, 64).to(dtype).cuda()
            own = q.chunk(world.size, 2)[world.rank].contiguous()
            with plans() as made:
                out = mkernel.ring_attention(own, own, own)
            exact = torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3)
            exact = exact.chunk(world.size, 2)[world.rank]
            error = float((out.double() - exact).norm() / exact.norm())
            found[f"{step} {made[0].accelerator} {dtype}"] = error
    mkernel.synchronize()
    return found
