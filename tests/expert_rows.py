"""Routings and rows of experts, and what their copies, activations and sums must be."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from mkernel.harness.contenders import expert_rows
from mkernel.harness.contenders.experts import Sorted

TOKENS, TOP_K, EXPERTS, OWN = 96, 3, 8, 5


def drawn(device: str, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids of which some are padding, and weights."""
    chance = torch.Generator().manual_seed(5)
    ids = torch.rand(TOKENS, EXPERTS, generator=chance).topk(TOP_K).indices
    ids[torch.rand(ids.shape, generator=chance) < 0.1] = -1
    tokens = torch.randn(TOKENS, columns, generator=chance).to(torch.bfloat16)
    weights = torch.rand(TOKENS, TOP_K, generator=chance) + 0.5
    return tokens.to(device), ids.to(device), weights.to(device)


def check(device: str, columns: int, capacity: int | None) -> None:
    """Rows come by expert, token and slot; padding of a capacity adds nothing, whatever it holds."""
    tokens, ids, weights = drawn(device, columns)
    routing = Sorted(ids, OWN, capacity)
    slots = [
        (expert, token, slot)
        for token, of_token in enumerate(ids.tolist())
        for slot, expert in enumerate(of_token)
        if 0 <= expert < OWN
    ]
    slots.sort()
    count = len(slots)
    assert routing.counts.tolist() == [
        sum(each == expert for each, *_ in slots) for expert in range(OWN)
    ]
    rows = routing.copied(tokens)
    assert len(rows) == (count if capacity is None else capacity)
    assert torch.equal(rows[:count], tokens[[token for _, token, _ in slots]])
    rows[count:] = float("nan")
    truth = torch.zeros(TOKENS, columns, dtype=torch.float64, device=device)
    for row, (_, token, slot) in enumerate(slots):
        truth[token] += rows[row].double() * weights[token, slot].double()
    found = routing.summed(rows, weights)
    assert found.dtype == rows.dtype
    torch.testing.assert_close(found.double(), truth, rtol=2**-8, atol=1e-5)
    even = columns // 2
    both = rows[:count, : 2 * even].contiguous()
    wanted = silu(both[:, :even].double()) * both[:, even:].double()
    done = expert_rows.gated(both, routing.count).double()
    torch.testing.assert_close(done, wanted, rtol=2**-6, atol=1e-5)
