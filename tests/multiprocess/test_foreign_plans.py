"""A world refuses plans of other worlds and other tensors before anything is launched, and goes on."""

from __future__ import annotations

import pytest
import torch
from in_world import DEADLINE_S

import mkernel
from mkernel.errors import ArgumentError, DtypeError


def refused() -> list[str]:
    """What is said of each wrong call; a right one follows."""
    world = mkernel.world()
    a, b, out = (torch.ones(8, 16), torch.ones(16, 8), torch.empty(16, 8))
    tensors = {"a": a, "b": b, "out": out}
    plan = mkernel.plan("all_gather_gemm", dtype="float32", m=16, n=8, k=16)
    other = {"accelerator": "cpu7"}
    site = plan.placement.sites[0]
    seats = (site.seats[0].model_copy(update=other), *site.seats[1:])
    moved = plan.placement.model_copy(update={"sites": (site.model_copy(update={"seats": seats}),)})
    said: list[str] = []
    for wrong, given in (
        (plan.model_copy(update={"placement": moved}), tensors),
        (plan.model_copy(update={"carrier": "pigeons"}), tensors),
        (plan, {**tensors, "a": a.to(torch.float16)}),
    ):
        with pytest.raises((ArgumentError, DtypeError)) as error:
            world.run(wrong, given)
        said.append(str(error.value))
    world.run(plan, tensors, wait=True)
    assert torch.equal(out, torch.full((16, 8), 16.0))
    return said


def test_plans_of_other_worlds_and_tensors() -> None:
    for said in mkernel.launch(
        refused, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert len(said) == 3, said
        assert "plan.placement.sites[0].seats[0].accelerator = cpu7" in said[0]
        assert "plan.carrier = pigeons" in said[1]
        assert "a = torch.float16" in said[2]
