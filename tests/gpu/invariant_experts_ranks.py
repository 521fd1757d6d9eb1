"""Calls of MoE whose results are invariant, on a rank, for ``test_invariant_experts_on_gpus``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from calls import Decisions, deciding
from capture_ranks import captures
from invariant_experts import SEGMENTS, Draw, E, batches, called, mine, on_host, tensors
from torch import Tensor

import mkernel
from mkernel.backends.accelerators.cuda.moe import executors

KINDS = (
    (torch.bfloat16, False, None, True, None),
    (torch.float16, False, None, True, None),
    (torch.bfloat16, False, None, False, "silu_and_mul"),
    (torch.float16, False, None, False, "silu_and_mul"),
    (torch.bfloat16, True, None, False, "silu_and_mul"),
    (torch.float8_e4m3fn, True, None, False, "silu_and_mul"),
)
FAULTS = ("slots", "turned", "ungrouped")


def way(draw: Draw, chance: random.Random) -> Decisions:
    """Draw the tiling and what precedes the product, and in one node how tokens travel."""
    world = mkernel.world()
    made: dict[str, Any] = {"permutes": chance.random() < 0.5}
    if not draw.scaled:
        made["reads_weights"] = chance.random() < 0.5
        if made["permutes"] or not made["reads_weights"]:
            made["tiling"] = chance.choice(["deep", "wide"])
    if world.size > 1 and world.identity.nodes == 1:
        made["push_blocks"] = (chance.choice([0, 8]), ())
        made |= {"early_rows": 64, "early_tiles": chance.choice([0, 1 << 20])}
    return {"moe.tuning": made}


def every_token(
    draws: Sequence[Draw], nodes: int, ranks: int
) -> list[tuple[list[Tensor], list[list[Any]]]]:
    """As that of ``invariant_experts``, in more ways."""
    chance = random.Random(f"{nodes} x {ranks}")
    found = []
    for draw in draws:
        given, some = tensors(draw), batches(draw, nodes * ranks, chance)
        results = []
        for batch in some:
            with deciding(way(draw, chance)):
                results.append(called(draw, given, batch, chance))
        found.append((some, results))
    mkernel.synchronize()
    return found


def one_batch(draw: Draw, tokens: Sequence[int], fault: str | None) -> Tensor:
    """The combined results of these tokens here, with a fault: of ``slots`` the last one is added
    first; the tree is ``turned`` by a group; slots are ``ungrouped``."""
    given, which = tensors(draw), torch.tensor(tokens, device=draw.device)
    if fault == "slots":
        given |= {name: given[name].roll(1, 1) for name in ("ids", "weights")}
    if fault == "turned":
        by = E // SEGMENTS
        given["ids"] = torch.where(given["ids"] < 0, -1, (given["ids"] + by) % E)
        for name in ("w", "w2"):
            given[name] = given[name].transpose(1, 2).roll(by, 0).transpose(1, 2)
    ordered = executors.MoeExecutor._home

    def without_groups(self: Any, *given: Any, **how: Any) -> Any:
        with mock.patch.object(self, "_plan", self._plan.model_copy(update={"invariant": None})):
            return ordered(self, *given, **how)

    broken = mock.patch.object(executors.MoeExecutor, "_home", without_groups)
    with broken if fault == "ungrouped" else nullcontext():
        sent = mkernel.moe_dispatch_gemm(
            mine(given["x"][which]), mine(given["ids"][which]), mine(given["w"]),
            activation=draw.activation, invariant=draw.how,
        )  # fmt: skip
        out = mkernel.moe_gemm_combine(
            sent.outputs, mine(given["w2"]), sent.handle, mine(given["weights"][which]),
            invariant=draw.how,
        )  # fmt: skip
    mkernel.synchronize()
    return on_host(out)  # type: ignore[no-any-return]


def replayed(draw: Draw) -> tuple[Tensor, ...]:
    """All tokens' combined results here, by a call and by a replay of its graph, in either way home."""
    given, found = tensors(draw), []
    x, ids, w, weights, w2 = (mine(given[name]) for name in ("x", "ids", "w", "weights", "w2"))
    for returns in ("slots", "ranks"):

        def call(returns: Any = returns) -> Tensor:
            sent = mkernel.moe_dispatch_gemm(
                x, ids, w, activation=draw.activation, capacity=draw.tokens * draw.top_k,
                invariant=draw.how,
            )  # fmt: skip
            return mkernel.moe_gemm_combine(
                sent.outputs, w2, sent.handle, weights, returns=returns, invariant=draw.how
            )

        kept: list[Tensor] = []
        found.append(on_host(call()))
        graph = captures(lambda: kept.append(call()))  # noqa: B023
        kept[0].fill_(torch.nan)
        graph.replay()
        found.append(on_host(kept[0]))
    mkernel.synchronize()
    return tuple(found)


def rows_home(draw: Draw) -> tuple[Tensor, Tensor]:
    """Every token's rows, combined as they are, on a backend without kernels of products."""
    given = tensors(draw)
    x, ids, weights = (mine(given[name]) for name in ("x", "ids", "weights"))
    x *= 61  # so that sums need more bits than the tree's nodes have
    sent = mkernel.moe_dispatch(x, ids, num_experts=E, invariant=draw.how)
    home = mkernel.moe_combine(sent.rows, sent.handle, weights, invariant=draw.how)
    mkernel.synchronize()
    return on_host((home, x))  # type: ignore[no-any-return]
