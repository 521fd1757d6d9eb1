"""The judge of ring attention: right results pass, and each planted fault fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import wrong

from mkernel.cases import attention, case_of
from mkernel.cases.attention import RingAttentionCase
from mkernel.cases.base import TOLERANCE, Case
from mkernel.cases.comparison import Comparison

WORLD, RANK = 4, 1
SIZES = {"batch": 2, "heads": 6, "kv_heads": 2, "sequence": 96, "head_dim": 16}
Outputs = dict[str, torch.Tensor]


def case(causal: bool, dtype: str = "float16", **options: Any) -> RingAttentionCase:
    made = case_of("ring_attention")(
        {**SIZES, "causal": causal},
        dtype,  # type: ignore[arg-type]
        dtype,  # type: ignore[arg-type]
        options=options,
    )
    assert isinstance(made, RingAttentionCase)
    return made


def right(
    each: RingAttentionCase,
    iteration: int = 2,
    *,
    causal: bool | None = None,
    zigzag: bool = True,
    heads: Callable[[int], int] = lambda h: h // 3,
    scale: float | None = None,
    seen: int = SIZES["sequence"],
    documents: tuple[int, ...] | None = None,
    narrow: torch.dtype | None = None,
) -> Outputs:
    """What rank 1 must get, by plain torch in float32; the keywords plant faults.

    ``seen``: keys at all; ``narrow``: what scores are rounded to.
    """
    whole = {name: t.float() for name, t in each._whole(iteration).items()}
    at = each.positions(RANK, WORLD) if zigzag else torch.arange(24, 48)
    mapped = [heads(h) for h in range(SIZES["heads"])]
    q, k, v = whole["q"][:, :, at], whole["k"][:, mapped, :seen], whole["v"][:, mapped, :seen]
    given = each.options.get("scale")
    used = scale if scale is not None else 0.25 if given is None else given
    scores = (q @ k.transpose(2, 3)) * used
    if narrow is not None:
        scores = scores.to(narrow).float()
    if each.sizes["causal"] if causal is None else causal:
        scores = scores.masked_fill(torch.arange(seen)[None, :] > at[:, None], float("-inf"))
    if documents is not None:
        of = [sum(begin <= each for begin in documents) for each in range(seen)]
        other = torch.tensor(of)[None, :] != torch.tensor(of)[at][:, None]
        scores = scores.masked_fill(other, float("-inf"))
    out = scores.softmax(3) @ v
    return {"out": out.to(getattr(torch, each.dtype)), "lse": scores.logsumexp(3)}


def judge(each: Case, outputs: Outputs, iteration: int = 2) -> set[str]:
    return wrong(each, outputs, RANK, WORLD, iteration)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [None, 0.07])
def test_right_results_pass(causal: bool, dtype: str, scale: float | None) -> None:
    each = case(causal, dtype, **({} if scale is None else {"scale": scale}))
    assert judge(each, right(each)) == set()


def one_bit_less(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to seven significant bits, one less than bfloat16 has."""
    mantissa, exponent = tensor.frexp()
    return (mantissa * 128).round().ldexp(exponent - 7)


@pytest.mark.parametrize("seed", [50, 140])  # of 400, where roundings add up most
def test_three_roundings_of_near_even_weights_pass(seed: int) -> None:
    """Of weights, of what each rank's keys give, and of their weighted sum: these are 3.1e-3 and 3.2e-3
    off, more than one rounding allows. Weights of one bit less do not pass."""
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "sequence": 64, "head_dim": 64}
    each = case_of("ring_attention")(
        sizes, "bfloat16", "bfloat16", "row", seed=seed, options={"scale": 0.05}
    )
    whole = {name: tensor.float() for name, tensor in each._whole(0).items()}

    def by_parts(rounded: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Comparison]:
        outs, sums = [], []
        for part in (slice(0, 32), slice(32, 64)):
            scores = whole["q"][:, :, :32] @ whole["k"][:, :, part].mT * 0.05
            weights = (scores - scores.amax(3, keepdim=True)).exp()
            out = rounded(weights) @ whole["v"][:, :, part] / weights.sum(3, keepdim=True)
            outs.append(out.bfloat16().float())
            sums.append(scores.logsumexp(3))
        lse = torch.stack(sums).logsumexp(0)
        shares = [(one - lse).exp()[..., None] for one in sums]
        out = (outs[0] * shares[0] + outs[1] * shares[1]).bfloat16()
        return each.compared({"out": out, "lse": lse}, 0, 2, 0)

    right = by_parts(lambda weights: weights.bfloat16().float())
    assert right["out"].error > TOLERANCE["bfloat16"]
    assert each.passed(right)
    coarse = by_parts(one_bit_less)
    assert not each.passed(coarse)


BOTH = {"out", "lse"}
FAULTS: dict[str, tuple[bool, set[str], Callable[[RingAttentionCase], Outputs]]] = {
    "zeros": (False, BOTH, lambda c: {n: torch.zeros_like(t) for n, t in right(c).items()}),
    "the previous iteration's result": (False, BOTH, lambda c: right(c, 1)),
    "an unwritten row": (True, BOTH, lambda c: {n: unwritten(t) for n, t in right(c).items()}),
    "a missing row": (True, BOTH, lambda c: {n: t[:, :, :-1] for n, t in right(c).items()}),
    "the last chunk of keys dropped": (False, BOTH, lambda c: right(c, seen=88)),
    "scores in bfloat16": (False, BOTH, lambda c: right(c, narrow=torch.bfloat16)),
    "scores in float16": (False, {"lse"}, lambda c: right(c, narrow=torch.float16)),
    "pieces in the wrong order": (
        True,
        BOTH,
        lambda c: {n: t.roll(12, 2) for n, t in right(c).items()},
    ),
    "causal ignored": (True, BOTH, lambda c: right(c, causal=False)),
    "causal where it is not": (False, BOTH, lambda c: right(c, causal=True)),
    "zigzag ignored": (True, BOTH, lambda c: right(c, zigzag=False)),
    "heads of groups interleaved": (False, BOTH, lambda c: right(c, heads=lambda h: h % 2)),
    "one key head for all": (True, BOTH, lambda c: right(c, heads=lambda h: 0)),
    "no scale": (False, BOTH, lambda c: right(c, scale=1.0)),
    "the log-sum-exp without scale": (
        False,
        {"lse"},
        lambda c: {**right(c), "lse": right(c, scale=1.0)["lse"]},
    ),
    "the log-sum-exp in base 2": (
        False,
        {"lse"},
        lambda c: {**right(c), "lse": right(c)["lse"] / 0.6931471805599453},
    ),
}


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2, -1] = float("nan")
    return tensor


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str) -> None:
    causal, names, planted = FAULTS[fault]
    each = case(causal)
    assert judge(each, planted(each)) == names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_see_themselves_alone(causal: bool, dtype: str) -> None:
    bounds = (0, 13, 14, 14, 60, 96)
    each = case(causal, dtype, cu_seqlens=bounds)
    assert judge(each, right(each, documents=bounds)) == set()
    assert judge(each, right(each)) == BOTH
    assert judge(each, right(each, documents=(0, 14, 15, 15, 61, 96))) == BOTH


def test_bf16_faults_fail_at_the_tolerance_of_bfloat16_too() -> None:
    each = case(True, "bfloat16")
    for planted in (right(each, causal=False), right(each, zigzag=False), right(each, 1)):
        assert judge(each, planted) == BOTH


@pytest.mark.parametrize("causal", [False, True])
def test_ranks_hold_the_whole_sequence(causal: bool) -> None:
    each = case(causal)
    held = torch.cat([each.positions(rank, WORLD) for rank in range(WORLD)])
    assert torch.equal(held.sort().values, torch.arange(SIZES["sequence"]))
    parts = torch.cat([each.inputs(rank, WORLD, 1)["k"] for rank in range(WORLD)], dim=2)
    assert torch.equal(parts, each._whole(1)["k"][:, :, held])


def test_inputs_are_fresh_and_reproducible() -> None:
    each = case(False)
    for name in "qkv":
        drawn = each.inputs(0, WORLD, 1)[name]
        assert torch.equal(drawn, each.inputs(0, WORLD, 1)[name])
        assert not torch.equal(drawn, each.inputs(1, WORLD, 1)[name])
        assert not torch.equal(drawn, each.inputs(0, WORLD, 2)[name])


def test_own_tensors_give_the_same_reference() -> None:
    each = case(True)
    own = each.with_(options={"tensors": each._whole(3)})
    for name, value in each.reference(RANK, WORLD, 3).items():
        assert torch.equal(own.reference(RANK, WORLD, 8)[name], value)


def test_the_reference_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    each = case(True)
    whole = each.reference(RANK, WORLD, 1)
    monkeypatch.setattr(attention, "SCORES", 12 * 96 * 5)
    blocks = each.reference(RANK, WORLD, 1)
    for name, value in whole.items():
        assert torch.allclose(blocks[name], value, rtol=1e-12, atol=0)
