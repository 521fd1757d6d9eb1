"""Layers that are made of a state dict's own tensors (``load_state_dict(assign=True)``) keep no more
than their part of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn import Module

import mkernel
from mkernel.nn import (
    ColumnParallelLinear,
    ExpertParallelMLP,
    MergedColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

H, INNER = 64, 96
_BIG = 4096
"""Bytes of a saved file that are no tensors, at most, for each parameter."""


def of(**sizes: tuple[int, ...]) -> Mapping[str, Tensor]:
    """A state dict of tensors of such sizes."""
    generator = torch.Generator().manual_seed(7)
    return {
        name.replace("__", "."): torch.randn(each, generator=generator)
        for name, each in sizes.items()
    }


LAYERS: tuple[tuple[Callable[[], Module], Mapping[str, Tensor]], ...] = (
    (lambda: ColumnParallelLinear(H, INNER), of(weight=(INNER, H), bias=(INNER,))),
    (lambda: RowParallelLinear(INNER, H), of(weight=(H, INNER), bias=(H,))),
    (
        lambda: MergedColumnParallelLinear(H, {"q": INNER, "k": H}),
        of(weight=(INNER + H, H), bias=(INNER + H,)),
    ),
    (lambda: VocabParallelEmbedding(INNER, H), of(weight=(INNER, H))),
    (
        lambda: ExpertParallelMLP(H, INNER, 4),
        of(gate_up_proj=(4, H, 2 * INNER), down_proj=(4, INNER, H)),
    ),
    (
        lambda: ParallelMLP(H, INNER, bias=True),
        of(
            gate_proj__weight=(INNER, H), gate_proj__bias=(INNER,), up_proj__weight=(INNER, H),
            up_proj__bias=(INNER,), down_proj__weight=(H, INNER), down_proj__bias=(H,),
        ),
    ),
    (
        lambda: ParallelAttention(H, 4, 2),
        of(
            q_proj__weight=(H, H), k_proj__weight=(H // 2, H), v_proj__weight=(H // 2, H),
            o_proj__weight=(H, H),
        ),
    ),
)  # fmt: skip


def assigned() -> list[str]:
    """Return what is wrong with layers made on ``meta`` that got a whole layer's tensors."""
    found = []
    for make, whole in LAYERS:
        usual = make()
        usual.load_state_dict(whole)
        with torch.device("meta"):
            layer = make()
        layer.load_state_dict(whole, assign=True)
        name, wanted = type(layer).__name__, dict(usual.named_parameters())
        for key, each in layer.named_parameters():
            kept = each.untyped_storage().nbytes()
            if not torch.equal(each, wanted[key]) or not each.requires_grad:
                found.append(f"{name}.{key}: other values, or no parameter to train")
            if kept != each.nbytes or not each.is_contiguous():
                found.append(f"{name}.{key}: {kept} bytes for {each.nbytes}, {each.stride()}")
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        own = sum(each.nbytes for each in wanted.values())
        if file.tell() > own + _BIG * len(wanted):
            found.append(f"{name}: {file.tell()} bytes are saved of {own}")
        found += unshared(name, make, usual)
    return found


def unshared(name: str, make: Callable[[], Module], usual: Module) -> list[str]:
    """A state dict of this rank's part is taken as it is, as torch's modules take one."""
    state: dict[str, Any] = usual.state_dict()
    again = make()
    again.load_state_dict(state, assign=True)
    taken = dict(again.named_parameters())
    return [
        f"{name}.{key} is a copy"
        for key, each in state.items()
        if taken[key].data_ptr() != each.data_ptr()
    ]


def test_a_rank_keeps_its_part_alone() -> None:
    assert not any(on_ranks(assigned))


def from_parameters() -> None:
    """Load a whole layer's own parameters, which require grad: the part is a leaf."""
    whole = torch.nn.Linear(H, INNER)
    layer = RowParallelLinear(H, INNER)
    layer.load_state_dict(whole.state_dict(keep_vars=True), assign=True)
    assert layer.weight.is_leaf
    assert layer.weight.shape == (INNER, H // mkernel.world().size)
    assert layer.bias is whole.bias


def test_parameters_of_a_whole_layer() -> None:
    on_ranks(from_parameters)
