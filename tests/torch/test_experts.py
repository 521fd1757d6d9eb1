"""Expert-parallel layers have the results and gradients of unsharded ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, mesh_2x2, ranks
from ranks import close, on_ranks
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import silu

import mkernel
from mkernel.errors import ArgumentError, ShapeError
from mkernel.nn import ExpertParallelMLP, experts

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
T, H, INNER, EXPERTS, TOP_K = 7, 16, 12, 6, 3


def drawn(name: str, *shape: int) -> Tensor:
    """The same in every process."""
    seed = sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(transposed: bool = False) -> dict[str, Tensor]:
    """A state dict of all experts."""
    found = {"gate_up_proj": drawn("up", EXPERTS, H, 2 * INNER) / 4,
             "down_proj": drawn("down", EXPERTS, INNER, H) / 4}  # fmt: skip
    if transposed:
        found = {name: each.transpose(1, 2).contiguous() for name, each in found.items()}
    return found


def inputs(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_ids with padding, topk_weights."""
    chance = torch.Generator().manual_seed(10 + rank)
    ids = torch.rand(tokens, EXPERTS, generator=chance).topk(TOP_K, dim=1).indices
    ids[::3, 0] = -1
    return (
        drawn(f"x {rank}", tokens, H),
        ids,
        torch.rand(tokens, TOP_K, generator=chance),
    )


def unsharded(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """In plain torch, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, inner = (x @ up[expert]).chunk(2, dim=-1)
        y = (silu(gate) * inner) @ down[expert]
        out = out + ((ids == expert) * weights).sum(1, keepdim=True) * y
    return out


def expected(tokens: list[int]) -> list[list[Tensor]]:
    """Each rank's out, and gradients of x, weights and its experts, in float64."""
    up, down = (each.double().requires_grad_() for each in whole().values())
    every = []
    for rank, count in enumerate(tokens):
        x, ids, weights = inputs(rank, count)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        every.append((x, weights, unsharded(x, ids, weights, up, down)))
    sum((out.sin().sum() for *_, out in every), torch.zeros(())).backward()
    parts = [each.grad.chunk(RANKS) for each in (up, down) if each.grad is not None]
    return [
        [out.detach(), x.grad, weights.grad, parts[0][rank], parts[1][rank]]  # type: ignore[list-item]
        for rank, (x, weights, out) in enumerate(every)
    ]


def layer(tokens: list[int], transposed: bool, options: dict[str, Any]) -> list[Tensor]:
    rank = mkernel.world().rank
    made = ExpertParallelMLP(H, INNER, EXPERTS, transposed=transposed, **options)
    made.load_state_dict(whole(transposed))
    again = ExpertParallelMLP(H, INNER, EXPERTS, transposed=transposed, **options)
    again.load_state_dict(made.state_dict())  # of a rank's part
    x, ids, weights = inputs(rank, tokens[rank])
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = again(x.unsqueeze(0), ids.unsqueeze(0), weights.unsqueeze(0)).squeeze(0)
    out.sin().sum().backward()
    gradients = [again.gate_up_proj.grad, again.down_proj.grad]
    if transposed:
        gradients = [each.transpose(1, 2) for each in gradients if each is not None]
    return [out.detach(), x.grad, weights.grad, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("tokens", "transposed", "options"),
    [
        ([T, T], False, {}),
        ([T, T], True, {"capacity": RANKS * T * TOP_K}),
        ([T, 4], True, {"max_tokens": T}),
        ([0, T], False, {"max_tokens": T + 2, "capacity": RANKS * T * TOP_K}),
    ],
)
def test_a_layer_is_the_unsharded_one(
    tokens: list[int], transposed: bool, options: dict[str, Any]
) -> None:
    results = on_ranks(layer, tokens, transposed, options, ranks=RANKS)
    names = ("out", "dx", "dweights", "d gate_up_proj", "d down_proj")
    for rank, (found, wanted) in enumerate(zip(results, expected(tokens), strict=True)):
        for name, one, other in zip(names, found, wanted, strict=True):
            close(one, other, 1e-5, f"rank {rank}, {name}")


class SiLUActivation(Module):
    """transformers' class of this name."""

    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


def fused(activation: Any, train: bool) -> list[Any]:
    """The activations of the first op's calls, one of them compiled as one graph."""
    found = []

    def dispatch(*arguments: Any, **options: Any) -> Any:
        found.append(options["activation"])
        return mkernel.moe_dispatch_gemm(*arguments, **options)

    made = ExpertParallelMLP(H, INNER, EXPERTS, activation=activation, capacity=RANKS * T * TOP_K)
    made.load_state_dict(whole())
    x, ids, weights = inputs(mkernel.world().rank, T)
    x.requires_grad_(train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "moe_dispatch_gemm", dispatch)
        with torch.set_grad_enabled(train):
            # The compiled call is the world's first one, which looks for the op's backend.
            out = torch.compile(made, backend="aot_eager", fullgraph=True)(x, ids, weights)
            close(made(x, ids, weights), out.detach().double(), 1e-6, "the eager layer")
    close(out.detach(), unsharded(x, ids, weights, *whole().values()).detach().double(), 1e-5)
    return found


@pytest.mark.parametrize("activation", [silu, torch.nn.SiLU(), SiLUActivation()])
@pytest.mark.parametrize("train", [False, True])
def test_the_first_op_applies_silu_where_no_gradient_is_needed(
    activation: Any, train: bool
) -> None:
    wanted = None if train else "silu_and_mul"
    assert on_ranks(fused, activation, train, ranks=RANKS) == [[wanted] * 2] * RANKS


class Stock(Module):
    """Weights of experts, whole."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        for name, each in whole(transposed).items():
            self.register_parameter(name, torch.nn.Parameter(each))


def refusals() -> None:
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "num_experts = 7", lambda: ExpertParallelMLP(H, INNER, 7)),
        (ShapeError, "as they are multiplied",
         lambda: ExpertParallelMLP.from_experts(Stock(True), transposed=False)),
        (ShapeError, "max_tokens = 3",
         lambda: ExpertParallelMLP(H, INNER, EXPERTS, max_tokens=3)(*inputs(0, T))),
        (RuntimeError, "size mismatch",
         lambda: ExpertParallelMLP(H, INNER, EXPERTS).load_state_dict(whole(True))),
    ]  # fmt: skip
    for error, said, call in wrong:
        with pytest.raises(error, match=said):
            call()


def test_wrong_layers_are_refused_by_name() -> None:
    on_ranks(refusals, ranks=RANKS)


# ---- several worlds ------------------------------------------------------------------------------


def side_by_side() -> tuple[list[float], list[str]]:
    """Errors of a layer in each group that a rank is in, their calls interleaved; and what is said of
    handles that are brought to the other one."""
    mesh = mesh_2x2()
    worlds = [
        mkernel.init(mesh[name], accelerator="streams", timeout_s=TIMEOUT_S)
        for name in ("dp", "tp")
    ]
    layers = []
    for world in worlds:
        made = ExpertParallelMLP(H, INNER, EXPERTS, group=world.name)
        made.load_state_dict(whole())
        layers.append(made)
    up, down = whole().values()
    errors = []
    with torch.no_grad():
        for turn in range(3):
            for world, made in zip(worlds, layers, strict=True):
                x, ids, weights = inputs(4 * turn + world.rank, T)
                out, true = made(x, ids, weights), unsharded(x, ids, weights, up, down)
                errors.append(float((out - true).norm() / true.norm()))
        sent = [
            mkernel.moe_dispatch_gemm(
                *inputs(world.rank, T)[:2], made.gate_up_proj, group=world.name
            )
            for world, made in zip(worlds, layers, strict=True)
        ]
        said = []
        for (found, *_, handle), other in zip(sent, reversed(worlds), strict=True):
            weights = torch.ones(T, TOP_K)
            w2 = torch.ones(EXPERTS // RANKS, 2 * INNER, H)
            for call in (
                partial(mkernel.moe_combine, found, handle, weights, group=other.name),
                partial(mkernel.moe_gemm_combine, found, w2, handle, weights, group=other.name),
            ):
                with pytest.raises(ArgumentError, match="of another world") as refused:
                    call()
                said.append(str(refused.value))
        for world, (found, *_, handle) in zip(worlds, sent, strict=True):  # and both are still good
            mkernel.moe_combine(found, handle, torch.ones(T, TOP_K), group=world.name)
    return errors, said


def test_layers_of_several_groups_and_handles_of_another_world(tmp_path: Path) -> None:
    for errors, said in ranks(side_by_side, tmp_path):
        assert max(errors) <= 1e-5
        assert len(said) == 4
