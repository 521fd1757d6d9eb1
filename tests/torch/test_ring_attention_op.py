"""Ring attention as a registered op: its gradients, and what compilers make of it."""

from __future__ import annotations

import pytest
import torch
from ranks import checked, close, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.errors import Unsupported

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
BATCH, HEADS, KV_HEADS, SEQUENCE, WIDTH = 2, 4, 2, 36, 8
SHAPES = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def whole(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of all positions."""
    return [
        operand(name, 0, BATCH, heads, SEQUENCE, WIDTH, dtype=dtype)
        for name, heads in SHAPES.items()
    ]


def positions(causal: bool, rank: int) -> Tensor:
    if causal:
        return mkernel.zigzag_positions(SEQUENCE, RANKS, rank)
    return torch.arange(SEQUENCE).chunk(RANKS)[rank]


def loss(out: Tensor, lse: Tensor, rank: int, *, of_lse: bool) -> Tensor:
    total = (out * operand("out", rank, *out.shape).to(out.dtype)).sin().sum()
    if of_lse:
        total = total + (lse * operand("lse", rank, *lse.shape)).sin().sum()
    return total


def expected(causal: bool, scale: float | None, of_lse: bool, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of all positions, in float64 and without ranks."""
    inputs = [each.double().requires_grad_() for each in whole(dtype)]
    q, k, v = inputs
    groups = HEADS // KV_HEADS
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (WIDTH**-0.5 if scale is None else scale)
    if causal:
        later = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    out, lse = scores.softmax(dim=3) @ v, scores.logsumexp(dim=3)
    losses = [
        loss(out[:, :, at], lse[:, :, at], rank, of_lse=of_lse)
        for rank in range(RANKS)
        for at in [positions(causal, rank)]
    ]
    return list(torch.autograd.grad(torch.stack(losses).sum(), inputs))


def own(dtype: torch.dtype, causal: bool) -> list[Tensor]:
    mine = positions(causal, mkernel.world().rank)
    return [each[:, :, mine].contiguous().requires_grad_() for each in whole(dtype)]


def differentiated(
    causal: bool, scale: float | None, of_lse: bool, dtype: torch.dtype, chunk: int | None
) -> list[Tensor]:
    q, k, v = own(dtype, causal)
    out, lse = mkernel.ring_attention(
        q, k, v, causal=causal, scale=scale, chunk=chunk, return_lse=True
    )
    loss(out, lse, mkernel.world().rank, of_lse=of_lse).backward()
    return [each.grad for each in (q, k, v) if each.grad is not None]


@pytest.mark.parametrize(
    ("causal", "scale", "of_lse", "dtype", "chunk"),
    [
        (False, None, False, torch.float32, None),
        (True, None, False, torch.float32, None),
        (True, 0.3, True, torch.float32, 4),
        (False, 0.3, True, torch.float32, 5),
        (True, None, False, torch.float16, None),
    ],
)
def test_gradients_are_those_of_the_unsharded_attention(
    causal: bool, scale: float | None, of_lse: bool, dtype: torch.dtype, chunk: int | None
) -> None:
    wanted = expected(causal, scale, of_lse, dtype)
    results = on_ranks(differentiated, causal, scale, of_lse, dtype, chunk, ranks=RANKS)
    for rank, found in enumerate(results):
        mine = positions(causal, rank)
        for name, one, other in zip("qkv", found, wanted, strict=True):
            close(one, other[:, :, mine], TOLERANCE[dtype], f"rank {rank}, d{name}")


def seen_by_torch() -> dict[str, dict[str, str]]:
    q, k, v = own(torch.float32, causal=True)
    op, gradients = torch.ops.mkernel.ring_attention, torch.ops.mkernel.ring_attention_backward
    out, lse = mkernel.ring_attention(
        q.detach(), k.detach(), v.detach(), causal=True, return_lse=True
    )
    plain = [each.detach() for each in (q, k, v)]
    return {
        "plain": checked(op, plain, causal=True),
        "differentiable": checked(op, (q, k, v), causal=True, scale=0.4),
        "backward": checked(gradients, (out, None, *plain, out, lse), causal=True),
        "backward with lse": checked(gradients, (out, lse, *plain, out, lse), causal=True),
    }


def test_torch_finds_nothing_wrong_with_the_op() -> None:
    for found in on_ranks(seen_by_torch):
        assert not any(found.values()), found


def compiled(backend: str) -> tuple[list[float], int]:
    """Greatest differences of results and gradients from the eager ones; graphs made."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mkernel.ring_attention(mkernel.ring_attention(q, k, v, causal=True), k, v)

    inputs = own(torch.float32, causal=True)
    eager = attend(*inputs)
    wanted = torch.autograd.grad(eager.sin().sum(), inputs)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    got = torch.compile(attend, backend=graphs, fullgraph=True)(*inputs)
    found = torch.autograd.grad(got.sin().sum(), inputs)
    pairs = zip((got, *found), (eager, *wanted), strict=True)
    return [float((x - y).abs().max().detach()) for x, y in pairs], graphs.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_attention_compiles_into_one_graph_with_the_same_results(backend: str) -> None:
    for differences, graphs in on_ranks(compiled, backend):
        assert graphs == 1
        assert max(differences) <= 1e-5


def exported() -> tuple[bool, list[str]]:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mkernel.ring_attention(q, k, v, causal=True)

    q, k, v = (each.detach() for each in own(torch.float32, causal=True))
    program = torch.export.export(Attention(), (q, k, v))
    same = torch.equal(program.module()(q, k, v), Attention()(q, k, v))
    return same, [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_attention_can_be_exported() -> None:
    for same, targets in on_ranks(exported):
        assert same
        assert any("ring_attention" in target for target in targets)


def without_a_backward() -> str:
    q, k, v = own(torch.float16, causal=False)
    out = mkernel.ring_attention(q, k, v)
    try:
        out.sum().backward()
    except Unsupported as error:
        return str(error)
    return ""


def test_a_backend_without_the_backward_says_so() -> None:
    for said in on_ranks(without_a_backward, accelerator="ascend", ranks=RANKS):
        assert "'ascend' does not provide 'ring_attention_backward'" in said
        assert "streams does" in said
