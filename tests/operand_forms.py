"""Forms in which calls of the GEMM ops pass their tensors, and what each must give, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.gemm import GemmOp

RANKS = 2
S, K, N = 8, 16, 24
"""S counts the positions of all ranks; K and N are one rank's where they are sharded."""
BACKENDS = ("streams", "ascend")
OPS: dict[str, GemmOp] = {
    "all_gather_gemm": all_gather_gemm.OP,
    "gemm_reduce_scatter": gemm_reduce_scatter.OP,
    "gemm_all_reduce": gemm_all_reduce.OP,
}


def drawn(name: str, rank: int, *shape: int) -> Tensor:
    """Values that every process can draw of any rank's."""
    seed = 1000 * rank + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- how tensors may lie in memory ---------------------------------------------------------------


def packed(x: Tensor) -> Tensor:
    return x.contiguous()


def transposed(x: Tensor) -> Tensor:
    """In column-major order."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def columns_of(x: Tensor, first: int = 16, step: int = 1, after: int = 8) -> Tensor:
    """Some of the columns of a larger tensor."""
    wider = x.new_full((*x.shape[:-1], first + step * x.shape[-1] + after), float("nan"))
    wider[..., first : first + step * x.shape[-1] : step] = x
    return wider[..., first : first + step * x.shape[-1] : step]


def rows_of(x: Tensor) -> Tensor:
    """Some of the rows of a larger matrix in column-major order."""
    return columns_of(x.t()).t()


def of_odd_pitch(x: Tensor) -> Tensor:
    return columns_of(x, first=3)


def from_odd_column(x: Tensor) -> Tensor:
    return columns_of(x, first=3, after=13)


def every_second(x: Tensor) -> Tensor:
    return columns_of(x, step=2)


def outermost(x: Tensor) -> Tensor:
    """With dimension 1 outermost in memory."""
    return x.movedim(1, 0).contiguous().movedim(0, 1)


# ---- a call, and what it must give ---------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How one call of an op passes its tensors.

    Attributes:
        batch: sizes of the dimensions of an activation beside the sharded one and K.
        dim: where the sharded one is.
        lies, b_lies: in memory, of a and of b.
        copies: what of them the plan says is copied, by backend; None: nothing.
    """

    batch: tuple[int, ...] = ()
    dim: int = 0
    lies: Callable[[Tensor], Tensor] = packed
    b_lies: Callable[[Tensor], Tensor] = packed
    bias: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def a(self, op: GemmOp, rank: int) -> Tensor:
        rows = S // RANKS if op.gathers else S
        shape = [*self.batch]
        shape.insert(self.dim, rows)
        return self.lies(self._there(drawn("a", rank, *shape, K)))

    def b(self, rank: int) -> Tensor:
        return self.b_lies(self._there(drawn("b", rank, K, N)))

    def bias_of(self, op: GemmOp, rank: int) -> Tensor | None:
        if not self.bias:
            return None
        return self._there(drawn("bias", rank if op.gathers else 0, N))

    def _there(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)


def both(*names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(BACKENDS, names)


MATRICES = {
    "packed": Form(),
    "b transposed": Form(b_lies=transposed),
    "columns of b": Form(b_lies=columns_of),
    "columns of b transposed": Form(b_lies=rows_of),
    "columns of an odd b": Form(b_lies=of_odd_pitch, copies={"ascend": ("b",)}),
    "columns of b from an odd one": Form(b_lies=from_odd_column),
    "every second column of b": Form(b_lies=every_second, copies=both("b")),
    "columns of a": Form(lies=columns_of, copies={"streams": ("a",)}),
    "a transposed": Form(lies=transposed, copies=both("a")),
    "a and b": Form(lies=every_second, b_lies=every_second, copies=both("a", "b")),
    "bias": Form(bias=True),
    "bias in bfloat16": Form(bias=True, dtype=torch.bfloat16),
    "float16": Form(bias=True, b_lies=columns_of, dtype=torch.float16),
}
ACTIVATIONS = {
    "[S, B, H]": Form(batch=(3,)),
    "[1, S, H]": Form(batch=(1,), dim=1),
    "[3, S, H]": Form(batch=(3,), dim=1, copies=both("a")),
    "[3, S, H], S outermost": Form(batch=(3,), dim=1, lies=outermost),
    "columns of [3, S, H]": Form(batch=(3,), dim=1, lies=columns_of, copies=both("a")),
    "[2, 3, S, H]": Form(batch=(2, 3), dim=2, bias=True, copies=both("a")),
    "[2, S, 3, H]": Form(batch=(2, 3), dim=1, bias=True, copies=both("a")),
}
FORMS = MATRICES | ACTIVATIONS


def whole(
    op: GemmOp, form: Form, a: list[Tensor], b: list[Tensor], bias: list[Any]
) -> list[Tensor]:
    """Every rank's C, by plain torch on all ranks' operands."""
    if op.gathers:
        results = [torch.cat(a, form.dim) @ each for each in b]
    else:
        total = sum((x @ y for x, y in zip(a, b, strict=True)), torch.zeros(()))
        results = list(total.chunk(RANKS, form.dim)) if op.scatters else [total] * RANKS
    return [c if z is None else c + z for c, z in zip(results, bias, strict=True)]


def weighed(op: GemmOp, c: Tensor, rank: int) -> Tensor:
    """A rank's loss. C of an AllReduce is one tensor, so its loss is the same on all ranks."""
    of = rank if op.gathers or op.scatters else 0
    return (c * drawn("weights", of, *c.shape).to(c.device)).sum()


def expected(op: GemmOp, form: Form) -> list[tuple[Tensor, ...]]:
    """Every rank's C and the gradients of its a, b and bias, in float64, on the CPU."""

    def leaf(x: Tensor) -> Tensor:
        return x.double().cpu().requires_grad_()

    a = [leaf(form.a(op, rank)) for rank in range(RANKS)]
    b = [leaf(form.b(rank)) for rank in range(RANKS)]
    bias: list[Any] = [form.bias_of(op, rank) for rank in range(RANKS)]
    if form.bias:
        bias = [leaf(each) for each in bias]
        bias = bias if op.gathers else [bias[0]] * RANKS
    c = whole(op, form, a, b, bias)
    losses = [weighed(op, each, rank) for rank, each in enumerate(c)]
    (losses[0] if not (op.gathers or op.scatters) else sum(losses)).backward()
    return [
        tuple(
            x
            for x in (c[r].detach(), a[r].grad, b[r].grad, bias[r].grad if form.bias else None)
            if x is not None
        )
        for r in range(RANKS)
    ]


class RoundedOnce:
    """Operands of all ranks, small integers: float32 holds every sum exactly, and the dtype each rank's
    part of a sum. So ``wanted`` is the only result that is rounded once, and ``twice`` what comes of a
    bias that is added to rounded sums.

    Args:
        rows: of each rank's a.
    """

    def __init__(
        self, op: GemmOp, ranks: int, rows: int, n: int, k: int, dtype: torch.dtype
    ) -> None:
        exact = 1 << (8 if dtype == torch.bfloat16 else 11)  # the dtype has all integers up to it
        most = exact if op.gathers or ranks == 1 else exact // 2
        random = torch.Generator().manual_seed(5)
        down = torch.randint(most, (ranks, rows), generator=random)
        along = torch.randint(most, (ranks, n), generator=random)
        bias = torch.randint(-3, 4, (n,), generator=random)
        self.a = torch.zeros(ranks, rows, k, dtype=dtype)
        self.b = torch.zeros(ranks, k, n, dtype=dtype)
        self.a[:, :, 0], self.b[:, 0] = down, 1
        self.a[:, :, -1], self.b[:, -1] = 1, along.to(dtype)
        self.bias = bias.to(dtype)
        if op.gathers:
            sums = [down.view(-1, 1) + row for row in along]
        else:
            total = (down[:, :, None] + along[:, None]).sum(0)
            sums = list(total.chunk(ranks)) if op.scatters else [total] * ranks
        self.wanted = [(each + bias).to(dtype) for each in sums]
        self.twice = [each.to(dtype) + self.bias for each in sums]
        assert all(
            bool((once != twice).any()) for once, twice in zip(self.wanted, self.twice, strict=True)
        )


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def differences(found: tuple[Any, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> str:
    """Which of C and its gradients are wrong."""
    wrong = []
    for name, one, other in zip(("C", "da", "db", "dbias"), found, wanted, strict=False):
        if one is None or one.shape != other.shape:
            wrong.append(f"{name} is {None if one is None else tuple(one.shape)}")
            continue
        error = float((one.double().cpu() - other).norm() / other.norm())
        if not error <= TOLERANCE[dtype] * (1 if name == "C" else 4):
            wrong.append(f"{name} is off by {error:g}")
    return ", ".join(wrong)


def dims_of(op: GemmOp, form: Form) -> dict[str, Any]:
    """The argument that names the sharded dimension, where the op has one."""
    return {} if op.dim is None else {op.dim: form.dim}
