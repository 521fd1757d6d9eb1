"""Invariant results of MoE on ``streams``: a token and its experts have the same bits in any batch, any
order of tokens, chunk, way home, exchange and number of ranks, which are those of the tree over groups
of experts as this file adds it up; so have gradients of tokens, rows and weights of routing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import kept_ranks
import pytest
import torch
from rounded_tree import rounded, tree
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.errors import ArgumentError, DtypeError
from mkernel.nn import ExpertParallelMLP
from mkernel.ops import moe_gemm_combine

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

T, H, WIDTH, E, K, SEGMENTS = 40, 128, 128, 16, 4, 8
WORLDS = [(1, 2, 0), (2, 1, 0), (1, 4, 0), (2, 2, 1), (1, 8, 0)]
LONG = [pytest.param(*world, marks=pytest.mark.long) for world in ((2, 2, 0), (2, 4, 1), (4, 2, 1))]
"""Nodes, ranks of each, and whether these relay."""
NAMES = ("rows", "out", "combined", "of x", "of h", "of weights")
Tensors = dict[str, Tensor]


class Draw(NamedTuple):
    """A layer's two calls. ``exact``: every sum is exact in float32, in any order."""

    number: int
    dtype: torch.dtype
    scaled: bool
    partial: Any
    exact: bool
    activation: Any

    @property
    def how(self) -> Invariant:
        return Invariant(SEGMENTS, self.partial)


def draws() -> Iterator[Draw]:
    silu = "silu_and_mul"
    for number, kind in enumerate((
        (torch.bfloat16, False, None, True, None),
        (torch.float32, False, "float16", True, None),
        (torch.bfloat16, False, "float32", False, silu),
        (torch.float16, False, None, False, silu),
        (torch.float32, False, None, False, None),
        (torch.bfloat16, True, None, False, silu),
        (torch.float8_e4m3fn, True, "float16", False, silu),
    )):  # fmt: skip
        yield Draw(number, *kind)


def tensors(draw: Draw) -> Tensors:
    """The whole tensors, the same in every process. Some experts have many rows, some hardly any;
    slots may name one expert twice, or none."""
    chance = torch.Generator().manual_seed(draw.number)

    def some(*sizes: int) -> Tensor:
        if draw.exact:
            return torch.randint(-2, 3, sizes, generator=chance).float()
        return torch.randn(sizes, generator=chance)

    columns = WIDTH if draw.activation is None else 2 * WIDTH
    of_w = torch.float8_e4m3fn if draw.scaled else draw.dtype
    popular = torch.arange(E) + 1.0
    ids = torch.multinomial(1 / popular, T * K, True, generator=chance).view(T, K)
    ids[torch.rand(T, K, generator=chance) < 0.1] = -1
    weights = torch.exp2(torch.randint(-1, 2, (T, K), generator=chance).float())
    if not draw.exact:
        weights = torch.rand(T, K, generator=chance) + 0.5
    found = {
        "x": some(T, H).to(draw.dtype),
        "ids": ids,
        "w": some(E, columns, H).to(of_w).transpose(1, 2),
        "w2": some(E, H, WIDTH).to(of_w).transpose(1, 2),
        "weights": weights,
        "of_rows": some(T, K, columns),
        "of_out": some(T, H),
    }
    if draw.scaled:
        found |= {"w_scale": torch.ones(E, 1, columns // 128), "w2_scale": torch.ones(E, 1, 1)}
    if draw.dtype == torch.float8_e4m3fn:
        found["x_scale"] = torch.ones(T, 1)
    return found


def mine(whole: Tensor) -> Tensor:
    world = mkernel.world()
    part = whole.chunk(world.size)[world.rank]
    return part.clone(memory_format=torch.preserve_format)


def place_of_rows(ids: Tensor) -> Tensor:
    """The token times K plus the slot of each row of this rank's experts, in the documented order."""
    world = mkernel.world()
    own = E // world.size
    local = ids.flatten() - world.rank * own
    here = ((local >= 0) & (local < own)).nonzero()[:, 0]
    return here[local[here].argsort(stable=True)]


def called(draw: Draw, given: Tensors, tokens: Tensor, chance: random.Random) -> list[Any]:
    """Both calls and their gradients on a batch, in a way drawn for it. What rows have comes with their
    places in the batch."""
    batch = {name: each[tokens] for name, each in given.items() if len(each) == T}
    x, weights = (mine(batch[name]).requires_grad_(not draw.scaled) for name in ("x", "weights"))
    scales = {name: mine(given[name]) for name in ("w_scale",) if name in given}
    if "x_scale" in batch:
        scales["x_scale"] = mine(batch["x_scale"])
    options: Any = {"invariant": draw.how}
    places = place_of_rows(batch["ids"])
    sent = mkernel.moe_dispatch_gemm(
        x, mine(batch["ids"]), mine(given["w"]), activation=draw.activation,
        chunk=chance.choice([None, 1, 3]), capacity=chance.choice([None, len(tokens) * K]),
        **scales, **options,
    )  # fmt: skip
    rows = len(places)
    h = sent.outputs[:, :WIDTH].detach().contiguous()
    more = {"w2_scale": mine(given["w2_scale"])} if draw.scaled else {}
    options["returns"] = chance.choice(["slots", "ranks"])
    h.requires_grad_(not draw.scaled)
    w2 = mine(given["w2"])
    out = mkernel.moe_gemm_combine(h, w2, sent.handle, weights, **more, **options)
    combined = mkernel.moe_combine(
        sent.outputs.detach(), sent.handle, weights.detach(), invariant=draw.how
    )
    found: list[Any] = [(places, sent.outputs[:rows].detach()), out.detach(), combined]
    if not draw.scaled:
        of_out = mine(batch["of_out"]).to(out.dtype)
        of_h, of_weights = torch.autograd.grad(out, (h, weights), of_out)
        found += [None, (places, of_h[:rows]), of_weights]
        if draw.activation is None:
            of_rows = torch.zeros_like(sent.outputs)
            of_rows[:rows] = batch["of_rows"].view(len(tokens) * K, -1)[places]
            (found[3],) = torch.autograd.grad(sent.outputs, x, of_rows)
    plan = moe_gemm_combine.gemm_combine(
        h.detach(), w2, sent.handle, weights.detach(), **more,
        invariant=f"{SEGMENTS} {draw.partial or ''}",
    ).plan  # fmt: skip
    assert plan.invariant is not None
    assert plan.shape.partial_dtype == plan.invariant.partial_dtype
    return [*found, getattr(plan.schedule, "relays", None)]


def every_token(nodes: int, ranks: int) -> list[tuple[list[Tensor], list[list[Any]]]]:
    """For each draw the tokens of some batches, drawn for this world alone, and what this rank got."""
    chance = random.Random(f"{nodes} x {ranks}")
    size, found = nodes * ranks, []
    for draw in draws():
        given = tensors(draw)
        order = torch.tensor(chance.sample(range(T), T))
        cut = size * chance.randrange(1, T // size)
        batches = [order[:cut], order[cut:]]
        found.append((batches, [called(draw, given, batch, chance) for batch in batches]))
    return found


def joined(every: list[Any], number: int) -> dict[str, Tensor]:
    """All tokens' results of a draw, in their order, from what ranks got of batches."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for at, tokens in enumerate(every[0][number][0]):
        parts = [each[number][1][at][:-1] for each in every]
        for name, results in zip(NAMES, zip(*parts, strict=True), strict=False):
            if isinstance(results[0], tuple):
                places, rows = (torch.cat(each) for each in zip(*results, strict=True))
                found.setdefault(name, []).append((tokens[places // K] * K + places % K, rows))
            elif results[0] is not None:
                found.setdefault(name, []).append((tokens, torch.cat(results)))
    made = {}
    for name, each in found.items():
        which, rows = (torch.cat(part) for part in zip(*each, strict=True))
        made[name] = rows[which.argsort()]
    return made


def run(nodes: int, ranks: int) -> list[Any]:
    return kept_ranks.run(
        every_token, nodes, ranks, nodes=nodes, ranks_per_node=ranks, accelerator="streams"
    )


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Tensor]]:
    """The results of every draw on one rank."""
    found = run(1, 1)
    return [joined(found, number) for number, _ in enumerate(draws())]


@pytest.mark.parametrize(("nodes", "ranks", "relays"), WORLDS + LONG)
def test_a_token_has_the_same_bits_in_every_world_and_batch(
    nodes: int, ranks: int, relays: int, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nodes > 1 and ranks > 1:
        monkeypatch.setenv("MKERNEL_EXCHANGE", "hierarchical" if relays else "direct")
    every = run(nodes, ranks)
    for number, draw in enumerate(draws()):
        assert all(part[-1] == bool(relays) for part in every[0][number][1])
        found = joined(every, number)
        assert found.keys() == alone[number].keys()
        assert len(found) == (3 if draw.scaled else 6 if draw.activation is None else 5)
        for name, result in found.items():
            wanted = alone[number][name].view(torch.uint8)
            assert torch.equal(result.view(torch.uint8), wanted), (draw, name)


def multiplied(draw: Draw, row: Tensor, dtype: torch.dtype) -> Tensor:
    """A row of that dtype as it is multiplied: beside e4m3 weights it is quantised."""
    if not draw.scaled or dtype == torch.float8_e4m3fn:
        return row
    scale = row.abs().max().float() / 448
    return (row.float() / scale).to(torch.float8_e4m3fn).double() * scale


def test_the_bits_are_those_of_the_tree(alone: list[dict[str, Tensor]]) -> None:
    """And of a float64 reference within their roundings, where sums are not exact."""
    for draw, found in zip(draws(), alone, strict=True):
        given, out = tensors(draw), found["out"].dtype
        partial = getattr(torch, draw.partial) if draw.partial else out
        x, w, w2 = (given[name].double() for name in ("x", "w", "w2"))
        leaves = torch.zeros(SEGMENTS, T, H, dtype=torch.float64)
        truth = torch.zeros(T, H, dtype=torch.float64)
        row = 0
        for token in range(T):
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
                y = multiplied(draw, made[:WIDTH].double(), made.dtype) @ w2[expert]
                weight = given["weights"][token, slot].double()
                leaves[expert * SEGMENTS // E, token] += weight * rounded(y, partial)
                truth[token] += weight * y
        assert (found["out"].double() - truth).norm() < 0.02 * truth.norm(), draw
        if draw.exact:
            total = rounded(tree(list(rounded(leaves, partial)), partial), out)
            assert torch.equal(found["out"].double(), total), draw


def layer(ranks: int, compiled: bool) -> list[Tensor]:
    """A layer in 16 bits, or e4m3, on batches of two sizes, without and with gradients."""
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn)[: 1 if compiled else 2]:
        torch.manual_seed(5)
        whole = torch.nn.Module()
        for name, shape in (("gate_up_proj", (E, 2 * WIDTH, H)), ("down_proj", (E, H, WIDTH))):
            value = torch.randn(shape).div(8).bfloat16()
            whole.register_parameter(name, torch.nn.Parameter(value))
        x = torch.randn(T, H).bfloat16()
        ids, weights = torch.randint(0, E, (T, K)), torch.rand(T, K)
        made: Any = ExpertParallelMLP.from_experts(
            whole, transposed=True, max_tokens=T // ranks, capacity=T * K, invariant=True,
            dtype=dtype,
        )  # fmt: skip
        if compiled:
            made = torch.compile(made, fullgraph=True, backend="aot_eager")
        for count in (T, 8):
            own = [mine(each[:count]) for each in (x, ids, weights)]
            with torch.no_grad():
                found.append(made(*own))
            if dtype == torch.bfloat16:
                own[0].requires_grad_()
                trained = made(*own)
                assert torch.equal(trained, found[-1]), "training has other bits than inference"
                if compiled:
                    continue
                twice = [torch.autograd.grad(made(*own).sum(), own[0])[0] for _ in range(2)]
                assert torch.equal(*twice)
    return found


@pytest.mark.parametrize(("ranks", "compiled"), [(2, True), (4, False)])
def test_layers(ranks: int, compiled: bool) -> None:
    (one,) = kept_ranks.run(layer, 1, False, ranks_per_node=1, accelerator="streams")
    every = kept_ranks.run(layer, ranks, compiled, ranks_per_node=ranks, accelerator="streams")
    for wanted, few, whole in zip(one[::2], one[1::2], range(0, len(every[0]), 2), strict=False):
        assert torch.equal(wanted[:8], few)
        for at, result in ((whole, wanted), (whole + 1, few)):
            assert torch.equal(torch.cat([each[at] for each in every]), result)


def refusals() -> list[str]:
    x, ids = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    w = torch.ones(1, 8, 8)
    sent = mkernel.moe_dispatch_gemm(x, ids, w, invariant=True)
    found = []
    for dtype, partial, error in (
        (torch.float32, None, ArgumentError),
        (torch.float64, None, DtypeError),
        (torch.float32, torch.float16, DtypeError),
    ):
        how = Invariant(8) if partial else Invariant(1)
        with pytest.raises(error) as refused:
            mkernel.moe_gemm_combine(
                sent.outputs.to(dtype), w.to(dtype), sent.handle, torch.ones(3, 1),
                partial_dtype=partial, invariant=how,
            )  # fmt: skip
        found.append(str(refused.value))
    return found


def test_refusals_name_what_is_legal() -> None:
    few, wide, partial = kept_ranks.run(refusals, ranks_per_node=2, accelerator="streams")[0]
    assert "segments = 1" in few
    assert "2 ranks divide" in few
    assert "dtype = float64" in wide
    assert "partial_dtype = 'float16' is not legal; expected float32" in partial
