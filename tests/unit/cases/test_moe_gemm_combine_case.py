"""The oracle of GEMM+combine against plain torch, and faults that it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import wrong

from mkernel.cases import Case, case_of
from mkernel.cases.moe import ROUTINGS
from mkernel.plan.model import DtypeName

WORLD, RANK, OWN, ITERATION = 3, 1, 2, 2
SIZES = {"tokens": 40, "hidden": 120, "features": 24, "experts": WORLD * OWN, "top_k": 3}
Inputs = list[dict[str, torch.Tensor]]


def made(dtype: DtypeName = "float16", **options: Any) -> Case:
    return case_of("moe_gemm_combine")(SIZES, dtype, dtype, options=options)


def places(inputs: Inputs, rank: int) -> list[tuple[int, int, int, int]]:
    """(expert, source, token, slot) of each row of a rank's experts, in their order."""
    found = [
        (int(expert), source, token, slot)
        for source, given in enumerate(inputs)
        for token, experts in enumerate(given["topk_ids"])
        for slot, expert in enumerate(experts)
    ]
    return sorted(place for place in found if place[0] // OWN == rank)


def right(
    case: Case,
    *,
    returns: str = "slots",
    expert_off: int = 0,
    token_off: int = 0,
    drop_tail: bool = False,
    narrow: bool = True,
) -> torch.Tensor:
    """What rank 1 must get, row by row; the keywords plant faults. ``narrow``: what travels is rounded
    to the output's dtype."""
    inputs = [case.inputs(source, WORLD, ITERATION) for source in range(WORLD)]
    kind = getattr(torch, case.out_dtype)
    tokens, weights = SIZES["tokens"], inputs[RANK]["topk_weights"]
    slots = torch.zeros(tokens, SIZES["top_k"], SIZES["hidden"])
    sums = torch.zeros(WORLD, tokens, SIZES["hidden"])
    for rank, given in enumerate(inputs):
        rows = places(inputs, rank)
        last = max((row for row, place in enumerate(rows) if place[1] == RANK), default=-1)
        for row, (expert, source, token, slot) in enumerate(rows):
            if source != RANK or (drop_tail and row == last):
                continue
            w2 = given["w2"][(expert + expert_off) % OWN].float()
            y = given["h"][row].float() @ w2
            slots[token, slot] = y
            sums[rank, token] += weights[(token + token_off) % tokens, slot] * y
    if returns == "ranks":
        return (sums.to(kind).float() if narrow else sums).sum(0).to(kind)
    slots = slots.to(kind).float() if narrow else slots
    return (slots * weights.roll(-token_off, 0)[..., None]).sum(1).to(kind)


def passes(case: Case, out: torch.Tensor) -> bool:
    return not wrong(case, {"out": out}, RANK, WORLD, ITERATION)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_right_results_pass(routing: str) -> None:
    case = made(routing=routing, partial_dtype="float32")
    assert passes(case, right(case, narrow=False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("returns", ["slots", "ranks"])
def test_results_that_were_rounded_on_their_way_pass(dtype: DtypeName, returns: str) -> None:
    case = made(dtype)
    assert case.rounds_partials
    assert not made(dtype, partial_dtype="float32").rounds_partials
    assert passes(case, right(case, returns=returns))
    sizes = case.partials(RANK, WORLD, ITERATION)["out"]
    assert bool((sizes >= case.reference(RANK, WORLD, ITERATION)["out"].abs()).all())


FAULTS: dict[str, Callable[[Case], torch.Tensor]] = {
    "the next expert's weight": lambda case: right(case, expert_off=1),
    "the next token's weights": lambda case: right(case, token_off=1),
    "a tail row that is dropped": lambda case: right(case, drop_tail=True),
    "the previous iteration's row": lambda case: torch.cat(
        [
            right(case)[:-1],
            case.reference(RANK, WORLD, ITERATION - 1)["out"][-1:].to(
                getattr(torch, case.out_dtype)
            ),
        ]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_fail(fault: str) -> None:
    assert not passes(made(), FAULTS[fault](made()))
