"""Peers of products of experts that `mkernel bench` on CPU ranks does not run: DeepEP, for which a
stand-in exchanges by torch.distributed, products alone where libraries are barred, and e4m3 experts,
whose product by torch a stand-in computes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peer_turns import SCALED_SIZES, SIZES, scaled_errors, wrong
from torch import Tensor, distributed

import mkernel
from mkernel.cases import case_of
from mkernel.cases.moe import gated
from mkernel.harness.contenders import Contender, experts
from mkernel.harness.contenders.collectives import all_gather
from mkernel.harness.contenders.deep_ep import DeepEp
from mkernel.harness.contenders.deep_gemm import DeepGemm
from mkernel.harness.contenders.experts import (
    DequantisedExperts,
    GatheredExperts,
    ScaledGroupedExperts,
)
from mkernel.harness.contenders.library import Gemm, GlooMatmul, NcclCublas
from mkernel.harness.problem import Inputs, Problem

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

OPS = ("moe_dispatch_gemm", "moe_gemm_combine", "moe_layer", "moe_dispatch")


def gathered(share: Tensor) -> Tensor:
    whole = share.new_empty(distributed.get_world_size() * len(share), *share.shape[1:])
    all_gather(whole.view(torch.uint8), share.contiguous().view(torch.uint8))
    return whole


class Buffer:
    """As DeepEP's, by all-gathers. ``shifts``: tokens arrive in each other's places."""

    shifts = False

    def __init__(self, group: Any, nbytes: int, *, explicitly_destroy: bool) -> None:
        self.rank, self.world = group.rank(), group.size()
        assert nbytes > 0
        assert explicitly_destroy

    def get_dispatch_layout(self, ids: Tensor, experts: int) -> tuple[Any, ...]:
        self.experts, self.own = experts, experts // self.world
        owner = torch.where(ids < 0, -1, ids // self.own)
        wanted = torch.stack([(owner == rank).any(1) for rank in range(self.world)], 1)
        of_experts = torch.bincount(ids[ids >= 0], minlength=experts)
        return wanted.sum(0).int(), None, of_experts.int(), wanted, None

    def dispatch(self, x: Tensor | tuple[Tensor, Tensor], **told: Any) -> tuple[Any, ...]:
        ids, room = told["topk_idx"], told["num_worst_tokens"]
        assert int(told["num_tokens_per_expert"].sum()) == int((ids >= 0).sum())
        local = gathered(ids) - self.rank * self.own
        local[(local < 0) | (local >= self.own)] = -1
        came = (local >= 0).any(1).nonzero().squeeze(1)
        tokens = [gathered(each) for each in (x if isinstance(x, tuple) else (x,))]
        *tokens, local, weights = (
            self._in_room(each, came, room, -1 if each is local else float("nan"))
            for each in (*tokens, local, gathered(told["topk_weights"]))
        )
        if self.shifts:
            tokens[0][: len(came)] = (
                tokens[0][: len(came)].view(torch.uint8).roll(1, 0).view(tokens[0].dtype)
            )
        source = torch.full((room,), -1)
        source[: len(came)] = came
        handle = (source, *(torch.zeros(1) for _ in range(5)))
        came_in = tuple(tokens) if isinstance(x, tuple) else tokens[0]
        return came_in, local, weights, [], handle, None

    @staticmethod
    def _in_room(each: Tensor, came: Tensor, room: int, poison: float) -> Tensor:
        whole = torch.full((room, *each.shape[1:]), poison).to(each.dtype)
        whole[: len(came)] = each[came]
        return whole

    def combine(self, x: Tensor, handle: tuple[Tensor, ...], config: Any) -> tuple[Tensor, None]:
        assert x.dtype == torch.bfloat16
        tokens = len(x) // self.world
        home = torch.zeros(self.world * tokens, x.shape[1])
        source = handle[0][handle[0] >= 0]
        home[source] = x[: len(source)].float()
        distributed.all_reduce(home)
        return home[self.rank * tokens : (self.rank + 1) * tokens].bfloat16(), None

    def destroy(self) -> None:
        self.world = 0


def stand_in(shifts: bool) -> None:
    """A module ``deep_ep`` in this process."""
    Buffer.shifts = shifts
    made: Any = ModuleType("deep_ep")
    made.Buffer, made.topk_idx_t = Buffer, torch.int64
    made.Config = lambda *sizes: SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 1)
    sys.modules["deep_ep"] = made


def deep_ep_errors(op: str, shifts: bool) -> list[str]:
    stand_in(shifts)
    found = []
    for options in ({}, {"capacity": 240}, {"routing": "padded", "id_dtype": "int32"}):
        found += wrong(DeepEp, op, options)
    return found + scaled_errors(DeepEp, op)


def errors_alone(op: str) -> list[str]:
    barred: dict[str, Any] = {"nodes": 2, "bars_libraries": "would go past the NIC"}
    case = case_of(op)(SIZES, "bfloat16", "bfloat16")
    problem = Problem(case, 0, 2, torch.device("cuda"), **barred)
    assert Gemm.unusable(problem) is None
    return wrong(Gemm, op, {}, **barred) + wrong(Gemm, op, {"capacity": 240}, **barred)


@pytest.mark.parametrize("op", OPS)
def test_deep_ep_is_right_and_shifted_tokens_are_seen(op: str) -> None:
    right, shifted = (
        mkernel.launch(deep_ep_errors, op, shifts, ranks_per_node=2, accelerator="streams")
        for shifts in (False, True)
    )
    assert right == [[], []]
    for scaled in (False, True):
        seen = [one for each in shifted for one in each if ("scales" in one) == scaled]
        assert bool(seen) == (op != "moe_gemm_combine")  # whose rows are given


@pytest.mark.parametrize("op", OPS[:3])
def test_products_alone_are_timed_where_libraries_are_barred(op: str) -> None:
    """So that overlap between nodes has a T_c."""
    assert mkernel.launch(errors_alone, op, ranks_per_node=2, accelerator="streams") == [[], []]


class OfTheNextExpert(DeepGemm):
    name = "scales_of_the_next_expert"

    def routed(self, ids: Tensor) -> Any:
        made = super().routed(ids)
        made.experts = torch.where(
            made.experts < 0, -1, (made.experts + 1) % len(made.counts)
        ).int()
        self._experts = made.experts
        return made


class ScalesOfOtherTokens(GatheredExperts):
    name = "scales_of_other_tokens"

    def call(self, inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "rows_scale" if self.op == "moe_gemm_combine" else "x_scale"
        return super().call({**inputs, name: inputs[name].roll(1, 0)}, outputs)


class ScalesOfOtherExperts(GlooMatmul):
    name = "scales_of_other_experts"

    def call(self, inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "w2_blocks" if self.op == "moe_gemm_combine" else "w_blocks"
        rolled = inputs[name].transpose(1, 2).roll(1, 0).transpose(1, 2)
        return super().call({**inputs, name: rolled}, outputs)


class ScalesOfOtherColumns(ScaledGroupedExperts):
    name = "scales_of_other_columns"

    def call(self, inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "w2_columns" if self.op == "moe_gemm_combine" else "w_columns"
        return super().call({**inputs, name: inputs[name].roll(1, 0)}, outputs)


class NothingBetween(DequantisedExperts):
    name = "scales_of_nothing_between"

    def call(self, inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts.expert_blocks, "_rounded", gated)
            return super().call(inputs, outputs)


@pytest.mark.parametrize("op", OPS[:3])
@pytest.mark.parametrize(
    "kind",
    [GlooMatmul, GatheredExperts, DequantisedExperts, ScaledGroupedExperts, DeepGemm, Gemm,
     ScalesOfOtherTokens, ScalesOfOtherExperts, ScalesOfOtherColumns, OfTheNextExpert],
)  # fmt: skip
def test_peers_with_e4m3_experts(kind: type[Contender], op: str) -> None:
    """Rows, their scales and their experts' belong together; what is behind an expert's rows is not."""
    found = mkernel.launch(scaled_errors, kind, op, ranks_per_node=2, accelerator="streams")
    assert [bool(each) for each in found] == [kind.name.startswith("scales_of")] * 2, found


def test_what_is_between_is_quantised() -> None:
    """Else results would be those of another layer."""
    kind, op = NothingBetween, "moe_layer"
    assert all(mkernel.launch(scaled_errors, kind, op, ranks_per_node=2, accelerator="streams"))


@pytest.mark.parametrize(
    "kind", [NcclCublas, GatheredExperts, DequantisedExperts, ScaledGroupedExperts, Gemm]
)
def test_what_has_a_peer_with_e4m3_experts_on_a_device(kind: type[Contender]) -> None:
    for op in OPS[:3]:
        options = {"scales": "block"}
        case = case_of(op)(SCALED_SIZES, "float8_e4m3fn", "bfloat16", "column", options=options)
        assert kind.unusable(Problem(case, 0, 2, torch.device("cuda"))) is None, op
