"""A training step of a mixture-of-experts layer, forward and backward, beside torch's.

    python bench/moe_training.py [--sizes qwen:8192] [--json FILE]
    python bench/moe_training.py --accelerator streams --sizes tiny:64      on a CPU

A size is WIDTH:TOKENS, as many tokens a rank. Gate and up are one product. What computes a step:
  mkernel      moe_dispatch_gemm, a compiled activation, moe_gemm_combine
  recomputed   the activation in moe_dispatch_gemm, which keeps no product: the backward makes it again
  all-to-all   torch's grouped products between all_to_all_single of every copy of a token
  gather       torch's grouped products between an all-gather of tokens and a reduce-scatter of sums
Peers move rows by the kernels of ``mkernel.harness.contenders.expert_rows``, in the backward too, and
have the same compiled activation. All take turns in one run; a turn's time is the slowest rank's. The
output and gradients of each are compared with float32's. ``of_peer`` is the better of the first two's
time over the better of the peers'. Exit code 1 where a result is wrong or the bar is missed; times
count on GPUs only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import turns
from experts import WIDTHS
from torch import Tensor, distributed
from torch.autograd import Function
from turns import Call, Place

import mkernel
from mkernel.cases.moe import gated
from mkernel.harness.contenders import expert_rows
from mkernel.harness.contenders.collectives import all_gather, reduce_scatter
from mkernel.harness.contenders.experts import Sorted

OURS, PEERS = ("mkernel", "recomputed"), ("all-to-all", "gather")
NAMES = ("out", "x", "w", "w2", "weights")
BAR, SEED = 0.7, 20261130


class Moved(Function):
    """Copies of tokens, one for each place, and sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return expert_rows.copied(tokens, way.places, way.count, way.top_k)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> Any:
        way = ctx.way
        ones = torch.ones((len(way.home) // way.top_k, way.top_k), device=of_rows.device)
        return expert_rows.summed(of_rows, ones, way.home, way.count), None


class Summed(Function):
    """Weighted sums of rows by token, and their derivative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, way: Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(rows, weights)
        return expert_rows.summed(rows, weights, way.home, way.count)

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor) -> Any:
        way, (rows, weights) = ctx.way, ctx.saved_tensors
        of_rows = expert_rows.copied(of_sums, way.places, way.count, way.top_k)
        of_weights = torch.zeros_like(weights)
        products = (of_rows * rows).sum(1, dtype=weights.dtype)
        of_weights.view(-1).index_put_((way.places,), products)
        return of_rows.mul_(weights.view(-1)[way.places, None]), of_weights, None


class Exchanged(Function):
    """An all-to-all of rows, and of their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return _exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> Any:
        sent, received = ctx.sizes
        return _exchanged(of_rows.contiguous(), received, sent), None, None


class Whole(Function):
    """An all-gather of shares, or a reduce-scatter into them: each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathers: bool) -> Tensor:
        ctx.gathers = gathers
        return _gathered(rows) if gathers else _reduced(rows)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> Any:
        of_rows = of_rows.contiguous()
        return _reduced(of_rows) if ctx.gathers else _gathered(of_rows), None


class Way(NamedTuple):
    """Rows of tokens: as ``mkernel.harness.contenders.experts.Sorted`` has them."""

    places: Tensor
    home: Tensor
    count: Tensor
    top_k: int


def way(places: Tensor, top_k: int) -> Way:
    """Return the way of as many rows as there are places."""
    rows = torch.arange(len(places), dtype=torch.int32, device=places.device)
    home = torch.empty_like(rows).scatter_(0, places, rows)
    return Way(places, home, torch.full_like(home[:1], len(places)), top_k)


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: gloo has no all-to-all of every dtype.
    distributed.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), received, sent)
    return out


def _gathered(share: Tensor) -> Tensor:
    whole = share.new_empty(distributed.get_world_size() * share.shape[0], *share.shape[1:])
    all_gather(whole, share)
    return whole


def _reduced(whole: Tensor) -> Tensor:
    share = whole.new_empty(len(whole) // distributed.get_world_size(), *whole.shape[1:])
    reduce_scatter(share, whole)
    return share


class Layer:
    """A rank's part of a layer of random weights, and what float32 says of one step."""

    def __init__(self, width: str, tokens: int, place: Place) -> None:
        hidden, features, experts, top_k = WIDTHS[width]
        self.place, self.tokens, self.top_k = place, tokens, top_k
        self.own = experts // place.ranks
        chance = torch.Generator(place.device).manual_seed(SEED + place.rank)
        drawn = partial(torch.randn, generator=chance, device=place.device, dtype=torch.bfloat16)
        scores = torch.rand(tokens, experts, generator=chance, device=place.device)
        best = scores.topk(top_k)
        self.ids = best.indices.int()
        x, self.of_out = drawn(tokens, hidden), drawn(tokens, hidden)
        w = drawn(self.own, hidden, 2 * features).mul_(hidden**-0.5)
        w2 = drawn(self.own, features, hidden).mul_(features**-0.5)
        self.leaves = [each.requires_grad_() for each in (x, w, w2, best.values.softmax(1))]
        self.activated: Callable[[Tensor], Tensor] = gated
        if place.cuda:
            self.activated = torch.compile(gated, dynamic=True)
        self.wanted = self._reference()

    def step(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        """Return the output and the gradients of x, w, w2 and the weights."""
        out = forward(*self.leaves)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.of_out)]

    def mkernel(self, x: Tensor, w: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        sent = mkernel.moe_dispatch_gemm(x, self.ids, w, group=self.place.mesh)
        h = self.activated(sent.outputs)
        return mkernel.moe_gemm_combine(h, w2, sent.handle, weights, group=self.place.mesh)

    def recomputed(self, x: Tensor, w: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        sent = mkernel.moe_dispatch_gemm(
            x, self.ids, w, activation="silu_and_mul", group=self.place.mesh
        )
        return mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, weights, group=self.place.mesh
        )

    def all_to_all(self, x: Tensor, w: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        ranks, ids = self.place.ranks, self.ids.flatten().long()
        first = way(ids.argsort(stable=True), self.top_k)
        sent = torch.bincount(ids, minlength=ranks * self.own)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        sizes = [each.view(ranks, self.own).sum(1).tolist() for each in (sent, received)]
        experts = torch.arange(self.own, device=ids.device).repeat(ranks)
        then = way(experts.repeat_interleave(received).argsort(stable=True), 1)
        rows = Moved.apply(Exchanged.apply(Moved.apply(x, first), *sizes), then)
        rows = self._experts(rows, w, w2, received.view(ranks, self.own).sum(0))
        back = then._replace(places=then.home.long(), home=then.places.int())
        return Summed.apply(Exchanged.apply(Moved.apply(rows, back), *sizes[::-1]), weights, first)  # type: ignore[no-any-return]

    def gather(self, x: Tensor, w: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        ids = _gathered(self.ids) - self.place.rank * self.own
        found = Sorted(ids, self.own, None)
        these = Way(found.places, found.home, found.count, self.top_k)
        rows = self._experts(Moved.apply(Whole.apply(x, True), these), w, w2, found.counts)
        sums = Summed.apply(rows, Whole.apply(weights, True), these)
        return Whole.apply(sums, False)  # type: ignore[no-any-return]

    def _experts(self, rows: Tensor, w: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        h = self.activated(torch._grouped_mm(rows, w, offs=ends))
        return torch._grouped_mm(h, w2, offs=ends)  # type: ignore[no-any-return]

    def _reference(self) -> list[Tensor]:
        ids = _gathered(self.ids) - self.place.rank * self.own
        x, weights = (_gathered(self.leaves[at].detach()).float().requires_grad_() for at in (0, 3))
        w, w2 = (self.leaves[at].detach() for at in (1, 2))
        of_out = _gathered(self.of_out).float()
        out, of_experts = torch.zeros_like(x), [torch.empty_like(each) for each in (w, w2)]
        for expert in range(self.own):  # one after the other: all at once do not fit in float32
            token, slot = (ids == expert).nonzero(as_tuple=True)
            both = [each[expert].float().requires_grad_() for each in (w, w2)]
            rows = gated(x[token] @ both[0]) @ both[1] * weights[token, slot, None]
            rows.backward(of_out[token])
            out.index_add_(0, token, rows.detach())
            for all_of, one in zip(of_experts, both, strict=True):
                all_of[expert] = one.grad
        assert x.grad is not None
        assert weights.grad is not None
        return [_reduced(out), _reduced(x.grad), *of_experts, _reduced(weights.grad)]


def of_one_row(width: str, tokens: int, count: int, place: Place) -> dict[str, Any]:
    """Check and time all contenders at one size, ``count`` turns of each. Collective."""
    layer = Layer(width, tokens, place)
    makers = {name: partial(_checked, layer, name) for name in (*OURS, *PEERS)}
    entries = turns.of_contenders(makers, count, place)
    best = [
        min(entries[name].get("median_us", float("inf")) for name in names)
        for names in (OURS, PEERS)
    ]
    of_peer = best[0] / best[1]
    missed = [f"{name}: {each['failed']}" for name, each in entries.items() if "failed" in each]
    if place.cuda and width == "qwen" and not of_peer <= BAR:
        missed.append(f"{of_peer:.2f} of the peer, bar {BAR}")
    return {"width": width, "tokens": tokens, "cuda": place.cuda, "contenders": entries,
            "of_peer": of_peer, "missed": missed}  # fmt: skip


def _checked(layer: Layer, name: str) -> tuple[Call, dict[str, Any]]:
    call = partial(layer.step, getattr(layer, name.replace("-", "_")))
    pairs = zip(NAMES, call(), layer.wanted, strict=True)
    errors = {part: turns.off(one, other) for part, one, other in pairs}
    wrong = {part: each for part, each in errors.items() if not each <= turns.LIMIT[torch.bfloat16]}
    if wrong:
        raise turns.Unfit(f"wrong: {wrong}")
    return call, {"errors": errors}


def shown(row: dict[str, Any]) -> str:
    """Return a row as lines of text."""
    return "\n".join([
        f"{row['width']}, {row['tokens']} tokens a rank",
        *turns.shown(row, lambda _, entry: f"  {max(entry['errors'].values()):.1e}"),
        f"  -> {row['of_peer']:.3f} of the peer; {row['missed'] or 'nothing missed'}",
    ])  # fmt: skip


def rows(place: Place, sizes: Sequence[tuple[str, int]], count: int) -> Iterator[dict[str, Any]]:
    """Measure all sizes."""
    for width, tokens in sizes:
        yield of_one_row(width, tokens, count, place)


def main() -> int:
    """Print each row as it is done; 1 where a result is wrong or the bar is missed."""
    given = turns.parser(__doc__, "qwen:8192", partial(turns.size_of, widths=WIDTHS)).parse_args()
    found = turns.launched("moe_training", given, rows, given.sizes, given.turns, text=shown)
    return turns.exit_code(found, len(given.sizes))


if __name__ == "__main__":
    sys.exit(main())
