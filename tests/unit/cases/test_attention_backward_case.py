"""The judge of ring attention's gradients: autograd's pass, and each planted fault fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mkernel.cases import attention, case_of
from mkernel.cases.attention_backward import RingAttentionBackwardCase

WORLD, RANK = 4, 1
SIZES = {"batch": 2, "heads": 6, "kv_heads": 2, "sequence": 96, "head_dim": 16}
Outputs = dict[str, torch.Tensor]


def case(causal: bool, **options: Any) -> RingAttentionBackwardCase:
    made = case_of("ring_attention_backward")(
        {**SIZES, "causal": causal}, "float64", "float64", options=options
    )
    assert isinstance(made, RingAttentionBackwardCase)
    return made


def by_autograd(each: RingAttentionBackwardCase, shift: int = 0) -> Outputs:
    """What rank 1 must get. ``shift``: keys before a query that it sees too many."""
    whole = each._whole(2)
    leaves = {name: whole[name].double().requires_grad_() for name in "qkv"}
    k, v = (leaves[name].repeat_interleave(3, 1) for name in "kv")
    given = each.options.get("scale")
    scores = leaves["q"] @ k.transpose(2, 3) * (0.25 if given is None else given)
    at = torch.arange(96)
    if each.sizes["causal"]:
        scores = scores.masked_fill(at[None, :] > at[:, None] + shift, float("-inf"))
    bounds = each.options.get("cu_seqlens")
    if bounds is not None:
        of = torch.tensor([sum(begin <= i for begin in bounds) for i in range(96)])
        scores = scores.masked_fill(of[None, :] != of[:, None], float("-inf"))
    (scores.softmax(3) @ v).backward(whole["grad_out"].double())
    mine = each.positions(RANK, WORLD)
    return {f"grad_{name}": leaf.grad[:, :, mine] for name, leaf in leaves.items()}  # type: ignore[index]


@pytest.mark.parametrize("scores", [1 << 24, 1000], ids=["at once", "by rows"])
@pytest.mark.parametrize("options", [{}, {"scale": -0.3}, {"cu_seqlens": (0, 7, 7, 50, 96)}])
@pytest.mark.parametrize("causal", [False, True])
def test_autograd_is_right(
    causal: bool, options: dict[str, Any], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    each = case(causal, **options)
    found = each.compared(by_autograd(each), RANK, WORLD, 2)
    assert set(found) == {"grad_q", "grad_k", "grad_v"}
    assert each.passed(found), found


def test_faults_fail() -> None:
    each = case(True)
    right = by_autograd(each)
    faults = {
        "of another rank's rows": {name: one.roll(1, 2) for name, one in right.items()},
        "a query sees one key more": by_autograd(each, shift=1),
        "of another head": {name: one.roll(1, 1) for name, one in right.items()},
        "scaled twice": {**right, "grad_q": right["grad_q"] * 0.25},
    }
    for what, wrong in faults.items():
        assert not each.passed(each.compared(wrong, RANK, WORLD, 2)), what
    assert not each.passed(each.compared(right, RANK, WORLD, 3)), "of another turn's inputs"
