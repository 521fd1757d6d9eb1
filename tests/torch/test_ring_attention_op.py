"""Ring attention as a registered op: its gradients, and what compilers make of it."""

from __future__ import annotations

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.errors import MkernelError, Unsupported

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


DOCUMENTS = (0, 1, 5, 5, 17, 30, SEQUENCE)
"""Where they begin: one of one position, an empty one, and no two boundaries of pieces among them."""


def of_documents(bounds: tuple[int, ...]) -> Tensor:
    """[S, S], whether two positions are of one document."""
    lengths = torch.tensor(bounds).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    return document[:, None] == document[None, :]


def expected(
    causal: bool,
    scale: float | None,
    of_lse: bool,
    dtype: torch.dtype,
    bounds: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Gradients of all positions, in float64 and without ranks."""
    inputs = [each.double().requires_grad_() for each in whole(dtype)]
    q, k, v = inputs
    groups = HEADS // KV_HEADS
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (WIDTH**-0.5 if scale is None else scale)
    if causal:
        later = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    if bounds is not None:
        scores = scores.masked_fill(~of_documents(bounds), float("-inf"))
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


def by_positions(each: Tensor) -> Tensor:
    """The same, a view of [B, S/W, H, D]."""
    return each.transpose(1, 2).contiguous().transpose(1, 2)


def differentiated(
    causal: bool,
    scale: float | None,
    of_lse: bool,
    dtype: torch.dtype,
    chunk: int | None,
    turned: bool,
) -> list[Tensor]:
    q, k, v = own(dtype, causal)
    if turned:
        q, k, v = (by_positions(each.detach()).requires_grad_() for each in (q, k, v))
    out, lse = mkernel.ring_attention(
        q, k, v, causal=causal, scale=scale, chunk=chunk, return_lse=True
    )
    loss(out, lse, mkernel.world().rank, of_lse=of_lse).backward()
    assert [each.stride() for each in (out, q.grad)] == [q.stride()] * 2
    return [each.grad for each in (q, k, v) if each.grad is not None]


@pytest.mark.parametrize(
    ("causal", "scale", "of_lse", "dtype", "chunk", "turned"),
    [
        (False, None, False, torch.float32, None, False),
        (True, None, False, torch.float32, None, True),
        (True, 0.3, True, torch.float32, 4, False),
        (False, 0.3, True, torch.float32, 5, True),
        (True, None, False, torch.float16, None, False),
        (True, -0.3, True, torch.float32, None, False),
        (False, 0.0, True, torch.float32, None, False),
    ],
)
def test_gradients_are_those_of_the_unsharded_attention(
    causal: bool,
    scale: float | None,
    of_lse: bool,
    dtype: torch.dtype,
    chunk: int | None,
    turned: bool,
) -> None:
    wanted = expected(causal, scale, of_lse, dtype)
    results = on_ranks(differentiated, causal, scale, of_lse, dtype, chunk, turned, ranks=RANKS)
    for rank, found in enumerate(results):
        mine = positions(causal, rank)
        for name, one, other in zip("qkv", found, wanted, strict=True):
            close(one, other[:, :, mine], TOLERANCE[dtype], f"rank {rank}, d{name}")


def of_packed(causal: bool, of_lse: bool, dtype: torch.dtype) -> list[Tensor]:
    inputs = own(dtype, causal)
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
    out, lse = mkernel.ring_attention(*inputs, causal=causal, cu_seqlens=bounds, return_lse=True)
    loss(out, lse, mkernel.world().rank, of_lse=of_lse).backward()
    return [each.grad for each in inputs if each.grad is not None]


@pytest.mark.parametrize(
    ("causal", "of_lse", "dtype"),
    [(True, False, torch.float32), (False, True, torch.float32), (True, True, torch.float16)],
)
def test_gradients_of_packed_documents(causal: bool, of_lse: bool, dtype: torch.dtype) -> None:
    wanted = expected(causal, None, of_lse, dtype, DOCUMENTS)
    for rank, found in enumerate(on_ranks(of_packed, causal, of_lse, dtype, ranks=RANKS)):
        mine = positions(causal, rank)
        for name, one, other in zip("qkv", found, wanted, strict=True):
            close(one, other[:, :, mine], TOLERANCE[dtype], f"rank {rank}, d{name}")


def refused(bounds: Tensor) -> str:
    try:
        mkernel.ring_attention(*(each.detach() for each in own(torch.float16, True)),
                               causal=True, cu_seqlens=bounds)  # fmt: skip
    except MkernelError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    each = ([0, SEQUENCE - 1], [1, SEQUENCE], [0, 9, 8, SEQUENCE], [0])
    wrong = [torch.tensor(bounds, dtype=torch.int32) for bounds in each]
    return [refused(bounds) for bounds in (*wrong, torch.tensor([0, SEQUENCE]))]


def test_wrong_boundaries_are_refused() -> None:
    for said in on_ranks(refusals, ranks=RANKS):
        assert all("cu_seqlens" in one for one in said)
        assert all(f"from 0 to {SEQUENCE}" in one for one in said[:3])
        assert "int32" in said[4]


def test_an_accelerator_without_packed_documents_says_so() -> None:
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
    for said in on_ranks(refused, bounds, accelerator="ascend", ranks=RANKS):
        assert "'ascend' takes no packed documents" in said


def compiled() -> tuple[list[float], int]:
    """Greatest differences of results and gradients from the eager ones; graphs made."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mkernel.ring_attention(mkernel.ring_attention(q, k, v, causal=True), k, v)

    inputs = own(torch.float32, causal=True)
    eager = attend(*inputs)
    wanted = torch.autograd.grad(eager.sin().sum(), inputs)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    got = torch.compile(attend, backend=graphs, fullgraph=True)(*inputs)
    found = torch.autograd.grad(got.sin().sum(), inputs)
    pairs = zip((got, *found), (eager, *wanted), strict=True)
    return [float((x - y).abs().max().detach()) for x, y in pairs], graphs.frame_count


def test_attention_compiles_into_one_graph_with_the_same_results() -> None:
    for differences, graphs in on_ranks(compiled):
        assert graphs == 1
        assert max(differences) <= 1e-5


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
