"""Packed documents on the host, with the stand-ins of test_hopper_attention.py and one of the library's
kernel of sequences of various lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hopper_attention import Fabric, flat_at, on_stream, planned, run

from mkernel.backends.accelerators.cuda import capabilities, device_world
from mkernel.backends.accelerators.cuda.attention import documents as attention_documents
from mkernel.backends.accelerators.cuda.attention import in_parts as attention
from mkernel.backends.accelerators.cuda.attention import merge as attention_merge
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention.backward import AttentionBackwardExecutor
from mkernel.backends.accelerators.cuda.attention.documents import Documents
from mkernel.backends.accelerators.cuda.attention.in_pieces import AttentionInPiecesExecutor
from mkernel.backends.accelerators.cuda.schedule import (
    AttentionBackwardSchedule,
    AttentionInPiecesSchedule,
    AttentionSchedule,
)
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.errors import ArgumentError
from mkernel.plan.shapes import takes


def various(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor,
    longest_q: int, longest_k: int, dropped: float, causal: bool, debug: bool, *, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As the library's [R, H, D]: a query without keys has result 0 and log-sum-exp inf; where causal,
    the last query of a document sees its last key."""
    assert of_q.dtype == of_k.dtype == torch.int32
    assert of_q[-1] == len(q)
    assert of_k[-1] <= len(k)
    assert of_q.diff().max() <= longest_q
    assert of_k.diff().max() <= longest_k
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), math.inf)
    groups = q.shape[1] // k.shape[1]
    if longest_q == 1 and groups > 1:  # torch swaps a group's heads and its one query
        q.reshape(len(of_q) - 1, k.shape[1], groups, q.shape[2])
    for begin, end, first, last in zip(of_q, of_q[1:], of_k, of_k[1:], strict=False):
        if begin == end or first == last:
            continue
        some = q[begin:end].double().transpose(0, 1)
        keys, values = (
            each[first:last].double().transpose(0, 1).repeat_interleave(groups, 0)
            for each in (k, v)
        )
        scores = some @ keys.transpose(1, 2) * scale
        if causal:
            ahead = int((last - first) - (end - begin))
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(ahead + 1)
            scores = scores.masked_fill(hidden, -math.inf)
        out[begin:end] = (scores.softmax(2) @ values).transpose(0, 1).to(q.dtype)
        lse[:, begin:end] = scores.logsumexp(2).float()
    return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Fabric]:
    def make(world: int) -> Fabric:
        made = Fabric(world)
        for module in (attention, attention_merge, attention_ring, device_world):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(attention, "attend", None)
        monkeypatch.setattr(attention, "on_stream", on_stream)
        library = SimpleNamespace(_flash_attention_forward=various)
        monkeypatch.setattr(attention_documents, "_aten", library)
        monkeypatch.setattr(attention_ring, "bytes_at", flat_at)
        return made

    return make


def bounds_of(sequence: int, world: int) -> list[tuple[int, ...]]:
    """Documents that begin where pieces do, one before and one behind; empty ones; of one position;
    one alone."""
    seams = [sequence // (2 * world) * piece for piece in range(1, 2 * world)]
    return [
        *((0, *(seam + by for seam in seams), sequence) for by in (-1, 0, 1)),
        (0, 1, 1, 3, sequence - 1, sequence), (0, sequence), tuple(range(sequence + 1)),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_results(fabric: Any, world: int, causal: bool, layout: str) -> None:
    sequence = 32 * world
    plan = planned(world, causal=causal, layout=layout, sequence=sequence, documents=True)
    assert plan.part(AttentionSchedule).library == "flash"
    for bounds in bounds_of(sequence, world):
        assert run(fabric(world), plan, calls=1, cu_seqlens=bounds) == [], bounds


def test_a_boundary_off_by_one_is_seen(fabric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(2, causal=True, sequence=64, documents=True)
    right = Documents.keys

    def late(self: Documents, source: Any) -> Any:
        found = right(self, source)
        at = found.at.clone()
        at[1:-1] = (at[1:-1] + 1).clamp(max=int(at[-1]))
        return found._replace(at=at, longest=found.longest + 1)

    monkeypatch.setattr(Documents, "keys", late)
    assert run(fabric(2), plan, calls=1, cu_seqlens=(0, 7, 40, 64))


def test_what_takes_no_documents_says_so() -> None:
    claims = HopperAccelerator().capabilities()
    claims = claims.model_copy(update={"ops": (*capabilities.OPS, *capabilities.ATTENTION)})
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 2,
        "sequence": 64,
        "head_dim": 64,
        "documents": True,
    }
    assert takes(claims, "ring_attention", sizes, 2, "bfloat16")
    assert not takes(claims, "ring_attention_backward", sizes, 2, "bfloat16")
    plan = planned(2, documents=True)
    backward = AttentionBackwardSchedule(library="cudnn", sum_blocks=1)
    pieces = AttentionInPiecesSchedule(library="cudnn", merge_blocks=1, piece_rows=16, slots=2)
    for executor, how in (
        (AttentionBackwardExecutor, backward), (AttentionInPiecesExecutor, pieces),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="documents"):
            executor.workspace(plan.model_copy(update={"schedule": how}))  # type: ignore[attr-defined]
    cudnn = plan.part(AttentionSchedule).model_copy(update={"library": "cudnn"})
    with pytest.raises(ArgumentError, match="'flash'"):
        attention.AttentionExecutor.workspace(plan.model_copy(update={"schedule": cudnn}))


def test_long_documents_are_not_cut_in_pieces() -> None:
    plan = planned(2, batch=1, heads=32, kv_heads=8, head_dim=128, sequence=1 << 20, documents=True)
    assert isinstance(plan.schedule, AttentionSchedule)


def test_boundaries_on_the_cpu_are_refused_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values would be those of the capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bounds = torch.tensor((0, 5, 64), dtype=torch.int32)
    tensors = {"q": torch.zeros(1, device="meta"), "cu_seqlens": bounds}
    call: Any = SimpleNamespace(plan=planned(2, documents=True), rank=0, tensors=tensors)
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        Documents(call)
