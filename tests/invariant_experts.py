"""Invariant results of MoE, of any accelerator: drawn layers, both their calls and gradients on a rank,
in ways drawn for each batch, and what these results are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rounded_tree import rounded, tree
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.ops import moe_gemm_combine

E, SEGMENTS = 16, 8
NAMES = ("rows", "out", "combined", "of x", "of h", "of weights")
Tensors = dict[str, Tensor]


class Draw(NamedTuple):
    """A layer's two calls. ``exact``: every sum is exact in float32, in any order; else what the first
    slot and the last one give is large, and cancels. ``trained``: with gradients."""

    number: int
    dtype: torch.dtype
    scaled: bool
    partial: Any
    exact: bool
    activation: Any
    tokens: int = 40
    hidden: int = 128
    width: int = 128
    top_k: int = 4
    trained: bool = True
    device: str = "cpu"

    @property
    def how(self) -> Invariant:
        return Invariant(SEGMENTS, self.partial)


def tensors(draw: Draw) -> Tensors:
    """The whole tensors, the same in every process. Some experts have many rows, some hardly any;
    slots may name one expert twice, or none."""
    chance = torch.Generator().manual_seed(draw.number)
    count, k, hidden, width = draw.tokens, draw.top_k, draw.hidden, draw.width

    most = 2 if hidden == 128 else 1  # float16 would not hold larger sums

    def some(*sizes: int) -> Tensor:
        if draw.exact:
            return torch.randint(-most, most + 1, sizes, generator=chance).float()
        return torch.randn(sizes, generator=chance) * (most / 2)

    columns = width if draw.activation is None else 2 * width
    of_w = torch.float8_e4m3fn if draw.scaled else draw.dtype
    popular = torch.arange(E) + 1.0
    ids = torch.multinomial(1 / popular, count * k, True, generator=chance).view(count, k)
    ids[torch.rand(count, k, generator=chance) < 0.1] = -1
    weights = torch.exp2(torch.randint(-1, 2, (count, k), generator=chance).float())
    if not draw.exact:
        weights = torch.rand(count, k, generator=chance) + 0.5
        ids[:, -1] = ids[:, 0]
        weights[:, -1] = weights[:, 0] * 2**12
        weights[:, 0] = -weights[:, -1]
    found = {
        "x": some(count, hidden).to(draw.dtype),
        "ids": ids,
        "w": some(E, columns, hidden).to(of_w).transpose(1, 2),
        "w2": some(E, hidden, width).to(of_w).transpose(1, 2),
        "weights": weights,
        "of_rows": some(count, k, columns),
        "of_out": some(count, hidden),
    }
    if draw.scaled:
        found |= {"w_scale": torch.ones(E, hidden // 128, columns // 128)}
        found |= {"w2_scale": torch.ones(E, width // 128, hidden // 128)}
    if draw.dtype == torch.float8_e4m3fn:
        found["x_scale"] = torch.ones(count, hidden // 128)
    return {name: each.to(draw.device) for name, each in found.items()}


def mine(whole: Tensor) -> Tensor:
    world = mkernel.world()
    part = whole.chunk(world.size)[world.rank]
    return part.clone(memory_format=torch.preserve_format)


def place_of_rows(ids: Tensor) -> Tensor:
    """The token times k plus the slot of each row of this rank's experts, in the documented order."""
    world = mkernel.world()
    own = E // world.size
    local = ids.flatten() - world.rank * own
    here = ((local >= 0) & (local < own)).nonzero()[:, 0]
    return here[local[here].argsort(stable=True)]


def called(draw: Draw, given: Tensors, tokens: Tensor, chance: random.Random) -> list[Any]:
    """Both calls and their gradients on a batch, in a way drawn for it. What rows have comes with their
    places in the batch."""
    tokens = tokens.to(draw.device)
    batch = {name: each[tokens] for name, each in given.items() if len(each) == draw.tokens}
    trained = draw.trained and not draw.scaled
    x, weights = (mine(batch[name]).requires_grad_(trained) for name in ("x", "weights"))
    scales = {name: mine(given[name]) for name in ("w_scale",) if name in given}
    if "x_scale" in batch:
        scales["x_scale"] = mine(batch["x_scale"])
    options: Any = {"invariant": draw.how}
    places = place_of_rows(batch["ids"])
    slots = len(tokens) * draw.top_k
    sent = mkernel.moe_dispatch_gemm(
        x, mine(batch["ids"]), mine(given["w"]), activation=draw.activation,
        chunk=chance.choice([None, 1, 3]), capacity=chance.choice([None, slots]),
        **scales, **options,
    )  # fmt: skip
    rows = len(places)
    h = sent.outputs[:, : draw.width].detach().contiguous()
    more = {"w2_scale": mine(given["w2_scale"])} if draw.scaled else {}
    options["returns"] = chance.choice(["slots", "ranks"])
    if mkernel.world().identity.nodes > 1 and x.is_cuda:
        options["returns"] = "ranks"  # the one way there
    h.requires_grad_(trained)
    w2 = mine(given["w2"])
    out = mkernel.moe_gemm_combine(h, w2, sent.handle, weights, **more, **options)
    combined = mkernel.moe_combine(
        sent.outputs.detach(), sent.handle, weights.detach(), invariant=draw.how
    )
    found: list[Any] = [(places, sent.outputs[:rows].detach()), out.detach(), combined]
    if trained:
        found += [None] * 3
        if draw.device == "cpu":  # elsewhere torch multiplies for these
            of_out = mine(batch["of_out"]).to(out.dtype)
            of_h, of_weights = torch.autograd.grad(out, (h, weights), of_out)
            found[4:] = [(places, of_h[:rows]), of_weights]
        if draw.activation is None:
            of_rows = torch.zeros_like(sent.outputs)
            of_rows[:rows] = batch["of_rows"].view(slots, -1)[places]
            (found[3],) = torch.autograd.grad(sent.outputs, x, of_rows)
    plan = moe_gemm_combine.gemm_combine(
        h.detach(), w2, sent.handle, weights.detach(), **more,
        invariant=f"{SEGMENTS} {draw.partial or ''}",
    ).plan  # fmt: skip
    assert plan.invariant is not None
    assert plan.shape.partial_dtype == plan.invariant.partial_dtype
    return [*map(on_host, found), getattr(plan.schedule, "exchange", "direct") == "hierarchical"]


def on_host(found: Any) -> Any:
    """A result, or one with its places."""
    if isinstance(found, tuple):
        return tuple(each.cpu() for each in found)
    return None if found is None else found.cpu()


def batches(draw: Draw, size: int, chance: random.Random) -> list[Tensor]:
    """All tokens in two batches, in an order of their own."""
    order = torch.tensor(chance.sample(range(draw.tokens), draw.tokens))
    cut = size * chance.randrange(1, draw.tokens // size)
    return [order[:cut], order[cut:]]


def every_token(
    draws: Iterable[Draw], nodes: int, ranks: int
) -> list[tuple[list[Tensor], list[list[Any]]]]:
    """Return for each draw the tokens of some batches, drawn for this world, and what this rank got."""
    chance = random.Random(f"{nodes} x {ranks}")
    found = []
    for draw in draws:
        given, some = tensors(draw), batches(draw, nodes * ranks, chance)
        found.append((some, [called(draw, given, batch, chance) for batch in some]))
    return found


def joined(draw: Draw, every: list[Any], number: int) -> dict[str, Tensor]:
    """All tokens' results of a draw, in their order, from what ranks got of batches."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    k = draw.top_k
    for at, tokens in enumerate(every[0][number][0]):
        parts = [each[number][1][at][:-1] for each in every]
        for name, results in zip(NAMES, zip(*parts, strict=True), strict=False):
            if isinstance(results[0], tuple):
                places, rows = (torch.cat(each) for each in zip(*results, strict=True))
                found.setdefault(name, []).append((tokens[places // k] * k + places % k, rows))
            elif results[0] is not None:
                found.setdefault(name, []).append((tokens, torch.cat(results)))
    made = {}
    for name, each in found.items():
        which, rows = (torch.cat(part) for part in zip(*each, strict=True))
        made[name] = rows[which.argsort()]
    return made


def differences(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of results that have other bits."""
    assert found.keys() == right.keys()
    return [
        name
        for name, each in found.items()
        if not torch.equal(each.view(torch.uint8), right[name].view(torch.uint8))
    ]


def multiplied(draw: Draw, row: Tensor, dtype: torch.dtype) -> Tensor:
    """A row of that dtype as it is multiplied: beside e4m3 weights it is quantised."""
    if not draw.scaled or dtype == torch.float8_e4m3fn:
        return row
    scale = row.view(-1, 128).abs().amax(1, keepdim=True).float() / 448
    scaled = (row.view(-1, 128).float() / scale).to(torch.float8_e4m3fn).double() * scale
    return scaled.view(-1)


def expect_tree(draw: Draw, found: dict[str, Tensor]) -> None:
    """Assert that results are those of the tree, where sums are exact; others are within the roundings
    of a float64 reference."""
    given, out = tensors(draw._replace(device="cpu")), found["out"].dtype
    partial = getattr(torch, draw.partial) if draw.partial else out
    x, w, w2 = (given[name].double() for name in ("x", "w", "w2"))
    leaves = torch.zeros(SEGMENTS, draw.tokens, draw.hidden, dtype=torch.float64)
    truth = torch.zeros(draw.tokens, draw.hidden, dtype=torch.float64)
    row = 0
    for token in range(draw.tokens):
        for slot, expert in enumerate(given["ids"][token].tolist()):
            if expert < 0:
                continue
            made, row = found["rows"][row], row + 1
            product = multiplied(draw, x[token], draw.dtype) @ w[expert]
            if draw.activation is not None:
                gate, up = product.chunk(2)
                product = torch.nn.functional.silu(gate) * up
            assert (made.double() - product).norm() <= 0.01 * product.norm()
            if draw.exact:
                assert torch.equal(made, product.float().to(made.dtype))
            y = multiplied(draw, made[: draw.width].double(), made.dtype) @ w2[expert]
            weight = given["weights"][token, slot].double()
            leaves[expert * SEGMENTS // E, token] += weight * rounded(y, partial)
            truth[token] += weight * y
    assert (found["out"].double() - truth).norm() < 0.02 * truth.norm(), draw
    if draw.exact:
        total = rounded(tree(list(rounded(leaves, partial)), partial), out)
        assert torch.equal(found["out"].double(), total), draw


def each_of(kinds: Sequence[tuple[Any, ...]], **sizes: Any) -> Iterator[Draw]:
    """Number draws of these kinds."""
    for number, kind in enumerate(kinds):
        yield Draw(number, *kind, **sizes)
