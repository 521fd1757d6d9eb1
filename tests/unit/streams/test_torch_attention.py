"""Attention on parts by torch's kernels and the explicit way, merged: both are that of all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkernel.backends.accelerators.streams import explicit_attention, torch_attention
from mkernel.backends.accelerators.streams.merged_attention import MergedAttention
from mkernel.backends.accelerators.streams.torch_attention import attend, gradients

LIMITS = {torch.float32: 2e-6, torch.float64: 1e-14}


def drawn(*shape: int, dtype: torch.dtype, seed: int, turned: bool = False) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return made.transpose(1, 2).contiguous().transpose(1, 2) if turned else made


def scored(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if causal:
        later = torch.ones(scores.shape[2:]).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def truth(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse in the tensors' dtype, with materialised scores."""
    scores = scored(q, k, scale, causal)
    values = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scores.softmax(3) @ values, scores.logsumexp(3)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def explicitly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_taken_by_kernel", lambda *_: False)


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch": lambda monkeypatch: None,
    "explicit": explicitly,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "width", "turned"),
    [
        (1, 1, 1, 1, 1, False),
        (2, 3, 3, 37, 5, False),
        (2, 6, 2, 37, 64, False),
        (3, 4, 1, 130, 128, True),
        (1, 8, 4, 65, 24, True),
    ],
)
def test_parts_merge_to_all_keys(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype,
    batch: int, heads: int, kv_heads: int, rows: int, width: int, turned: bool,
) -> None:  # fmt: skip
    """Queries see their own keys causally, and two other parts: of one all rows, of one some."""
    WAYS[way](monkeypatch)
    monkeypatch.setattr(explicit_attention, "_SCORES", 7 * batch * heads * rows)
    scale = 0.3
    q = drawn(batch, heads, rows, width, dtype=dtype, seed=1, turned=turned)
    k, v, k2, v2 = (
        drawn(batch, kv_heads, rows, width, dtype=dtype, seed=seed, turned=turned)
        for seed in (2, 3, 4, 5)
    )
    of_out = drawn(batch, heads, rows, width, dtype=dtype, seed=6, turned=turned)
    seeing = slice(rows // 2, rows)
    wide = [each.double().clone().requires_grad_() for each in (q, k, v, k2, v2)]
    scores = torch.cat([scored(wide[0], each, scale, False) for each in (wide[3], wide[1])], 3)
    hidden = torch.ones(rows, rows).triu(1).bool()
    mask = torch.cat([torch.zeros(rows, rows).bool(), hidden], 1)
    mask[: rows // 2, :rows] = True
    scores = scores.masked_fill(mask, float("-inf"))
    values = torch.cat([wide[4], wide[2]], 2).repeat_interleave(heads // kv_heads, 1)
    wanted, wanted_lse = scores.softmax(3) @ values, scores.logsumexp(3)
    slopes = torch.autograd.grad(wanted, wide, of_out.double())
    wanted, wanted_lse = wanted.detach(), wanted_lse.detach()

    out, lse = torch.full_like(q, float("nan")), q.new_empty(q.shape[:3])
    merged = MergedAttention(out, lse)
    merged.add(slice(0, rows), attend(q, k, v, causal=True, scale=scale))
    merged.add(seeing, attend(q[:, :, seeing], k2, v2, causal=False, scale=scale))
    merged.finish()
    assert off(out, wanted) < LIMITS[dtype]
    assert off(lse, wanted_lse) < LIMITS[dtype]

    of_q, *own = gradients(of_out, q, k, v, out, lse, causal=True, scale=scale)
    more, *theirs = gradients(
        *(each[:, :, seeing] for each in (of_out, q)), k2, v2,
        *(each[:, :, seeing] for each in (out, lse)), causal=False, scale=scale,
    )  # fmt: skip
    of_q = of_q.clone()
    of_q[:, :, seeing] += more
    for name, found, slope in zip(("q", "k", "v", "k2", "v2"), (of_q, *own, *theirs), slopes,
                                  strict=True):  # fmt: skip
        assert found.shape == slope.shape
        assert float((found - slope).norm()) <= 5 * LIMITS[dtype] * float(of_out.norm()), name


def test_what_torch_has_no_kernel_for_goes_the_explicit_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    went: list[str] = []
    for name in ("attend", "gradients"):
        real = getattr(explicit_attention, name)

        def told(*given: Any, real: Any = real, name: str = name, **how: Any) -> Any:
            went.append(name)
            return real(*given, **how)

        monkeypatch.setattr(explicit_attention, name, told)
    q, k, v = (drawn(1, 2, 9, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    usual = attend(q, k, v, causal=True, scale=0.5)
    assert not went
    with sdpa_kernel(SDPBackend.MATH):
        seen = attend(q, k, v, causal=True, scale=0.5)
        assert seen.sum is not None
        lse = seen.top + seen.sum.log()
        gradients(seen.out, q, k, v, seen.out, lse, causal=True, scale=0.5)
    assert went == ["attend", "gradients"]
    assert torch.allclose(seen.out, usual.out, atol=1e-6)
    assert torch.allclose(lse, usual.top, atol=1e-6)


@pytest.mark.parametrize("level", [1e4, -1e4])
@pytest.mark.parametrize("parts", [(5, 59), (32, 32)])
def test_large_scores_cost_no_precision(level: float, parts: tuple[int, int]) -> None:
    """Whole scores around ±10,000, which float32 holds: float32 log-sum-exps of parts would be off by
    up to 5e-4, and with them the parts' weights."""
    rows, width = sum(parts), 4
    q = torch.ones(1, 1, rows, width)
    q[..., 0] = 100
    k = torch.randint(
        -2, 3, (1, 1, rows, width), generator=torch.Generator().manual_seed(1)
    ).float()
    k[..., 0] = level / 100
    v = drawn(1, 1, rows, width, dtype=torch.float32, seed=2)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    merged = MergedAttention(out, lse)
    for keys, values in zip(k.split(parts, 2), v.split(parts, 2), strict=True):
        merged.add(slice(0, rows), attend(q, keys, values, causal=False, scale=1.0))
    merged.finish()
    wanted, wanted_lse = truth(q.double(), k.double(), v.double(), 1.0, False)
    assert off(out, wanted) < 1e-6
    assert off(lse, wanted_lse) < 1e-6


def merged(q: Tensor, *parts: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Results of queries of ones on parts of one key and one value."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    running = MergedAttention(out, lse)
    for key, value in parts:
        k, v = (torch.full((1, 1, 1, 1), each) for each in (key, value))
        running.add(slice(0, q.shape[2]), attend(q, k, v, causal=False, scale=1.0))
    running.finish()
    return out, lse


@pytest.mark.parametrize("way", WAYS)
def test_a_part_without_weight_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    WAYS[way](monkeypatch)
    q = torch.ones(1, 1, 2, 1)
    nothing = (float("-inf"), 1.0)
    for parts in ((nothing, (0.0, 3.0)), ((0.0, 3.0), nothing)):
        out, lse = merged(q, *parts)
        assert out.flatten().tolist() == [3.0, 3.0]
        assert lse.flatten().tolist() == [0.0, 0.0]
    assert merged(q, nothing)[0].isnan().all()
    assert merged(q, nothing)[1].tolist() == [[[float("-inf")] * 2]]
    assert merged(q, (0.0, 3.0), (float("nan"), 1.0))[0].isnan().all()


BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 7])
def test_nan_and_infinity_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, at: int, way: str, name: str, where: str
) -> None:
    """Of scores; torch's kernel for CPUs itself gives zeros where all scores of a query are NaN."""
    WAYS[way](monkeypatch)
    given = {each: drawn(1, 1, 12, 8, dtype=torch.float32, seed=ord(each)) for each in "qkv"}
    given[where][0, 0, at, 2] = BAD[name]
    q, k, v = given.values()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    merged = MergedAttention(out, lse)
    for keys, values in zip(k.split(6, 2), v.split(6, 2), strict=True):
        merged.add(slice(0, 12), attend(q, keys, values, causal=False, scale=0.3))
    merged.finish()
    wanted, _ = truth(q, k, v, 0.3, False)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
