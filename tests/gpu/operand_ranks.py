"""What ranks do in tests of the GEMM ops' operands, and of several accelerators, on GPUs."""

from __future__ import annotations

from dataclasses import replace

import torch
from operand_forms import FORMS, OPS, differences, dims_of, expected, packed, weighed

import mkernel


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
        plan = op.call(a, b, bias, dim=form.dim if op.dim else 0).plan
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
    """Accelerators by op in a world that ``auto`` made, with the errors of their calls."""
    world, found = mkernel.world(), {}
    torch.manual_seed(3)
    for step in range(3):
        x = torch.randn(64 * world.size, 256).bfloat16().cuda()
        w = torch.randn(256, 128).bfloat16().cuda()
        y = mkernel.all_gather_gemm(x.chunk(world.size)[world.rank], w)
        exact = x.double() @ w.double()
        accelerator = world.engine("all_gather_gemm").backends.accelerator
        found[f"{step} {accelerator}"] = float((y.double() - exact).norm() / exact.norm())
        q = torch.randn(1, 4, 64 * world.size, 64).bfloat16().cuda()
        own = q.chunk(world.size, 2)[world.rank].contiguous()
        out = mkernel.ring_attention(own, own, own)
        exact = torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3)
        exact = exact.chunk(world.size, 2)[world.rank]
        accelerator = world.engine("ring_attention").backends.accelerator
        found[f"{step} {accelerator}"] = float((out.double() - exact).norm() / exact.norm())
    mkernel.synchronize()
    return found
