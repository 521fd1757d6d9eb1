"""The oracle of a layer of experts against plain torch, and faults that it must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from judged import wrong
from torch import Tensor

from mkernel.cases import Case, case_of
from mkernel.cases.moe import ROUTINGS
from mkernel.plan.model import DtypeName

WORLD, RANK, OWN, TURN = 2, 1, 3, 4
SIZES = {"tokens": 60, "hidden": 96, "features": 40, "experts": WORLD * OWN, "top_k": 2}
Weights = tuple[Tensor, Tensor]


def made(dtype: DtypeName = "bfloat16", routing: str = "uniform", layout: str = "row") -> Case:
    given = {"routing": routing}
    return case_of("moe_layer")(SIZES, dtype, dtype, layout, options=given)  # type: ignore[arg-type]


def right(case: Case, change: Callable[[Tensor, Tensor], Weights] = lambda *w: w) -> Tensor:
    """What rank 1 must get, token by token, rounded where the ops round."""
    inputs = [case.inputs(rank, WORLD, TURN) for rank in range(WORLD)]
    up, down = change(*(torch.cat([each[name] for each in inputs]) for name in ("w", "w2")))
    kind, mine = getattr(torch, case.dtype), inputs[RANK]
    out = torch.zeros(SIZES["tokens"], SIZES["hidden"])
    for token, experts in enumerate(mine["topk_ids"]):
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            both = mine["x"][token].float() @ up[expert].float()
            gate, linear = both[: SIZES["features"]], both[SIZES["features"] :]
            between = (gate / (1 + (-gate).exp()) * linear).to(kind)
            y = (between.float() @ down[expert].float()).to(kind)
            out[token] += mine["topk_weights"][token, slot] * y.float()
    return out.to(kind)


def passes(case: Case, out: Tensor) -> bool:
    return not wrong(case, {"out": out}, RANK, WORLD, TURN)


@pytest.mark.parametrize(
    ("dtype", "routing"),
    [*(("bfloat16", routing) for routing in ROUTINGS), ("float16", "uniform")],
)
def test_right_results_pass(dtype: DtypeName, routing: str) -> None:
    case = made(dtype, routing)
    assert passes(case, right(case))


def test_weights_are_the_same_in_either_layout() -> None:
    row, column = made().inputs(0, WORLD, TURN), made(layout="column").inputs(0, WORLD, TURN)
    for name in ("w", "w2"):
        assert torch.equal(row[name], column[name])
        assert column[name].stride(1) == 1


FAULTS: dict[str, Callable[[Tensor, Tensor], Weights]] = {
    "gate and up change places": lambda up, down: (up.roll(SIZES["features"], 2), down),
    "the next expert's first weight": lambda up, down: (up.roll(1, 0), down),
    "the next expert's second weight": lambda up, down: (up, down.roll(1, 0)),
    "the last column is left out": lambda up, down: (
        up,
        down.index_fill(1, torch.tensor([SIZES["features"] - 1]), 0),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_fail(fault: str) -> None:
    assert not passes(made(), right(made(), FAULTS[fault]))


def test_tokens_of_the_turn_before_fail() -> None:
    old = made().reference(RANK, WORLD, TURN - 1)["out"].bfloat16()
    assert not passes(made(), old)
