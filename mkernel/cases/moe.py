"""Cases of MoE: dispatch+GEMM followed by the combine, the dispatch alone, the combine alone on rows of
its own.

Option ``routing`` says which experts tokens go to:
  ``uniform``     random, an expert at most once in a token's list
  ``one_expert``  every slot of every token on every rank goes to one expert, another each iteration
  ``some_empty``  about two thirds of the experts get no token
  ``duplicates``  every second token has its first expert twice (top-k of 2 and more)
  ``padded``      ranks have unlike numbers of tokens, down to one; the rest of their rows is padding
                  (ids of -1), and so is a fifth of the other slots
  ``zipf``        random, an expert at most once in a token's list; how often experts are drawn falls as
                  the power 1.2 of their place in an order of their own in each iteration
  ``empty_ranks`` every second rank has no token, and the experts of the upper half of ranks get none
Option ``activation`` of a dispatch: as the op takes it; ``features`` is then the width of its outputs.
Option ``scales``, ``block``: those of e4m3 operands; neighbours' and those of the next call are others.
Option ``handle`` of both dispatches: they use the routing of one that was called before them, which is
not the latest one.
Option ``id_dtype``: of ``topk_ids``, ``int64`` (default) or ``int32``. Option ``tensors``: the user's
whole ``x`` [T·W, H], ``topk_ids`` [T·W, k], ``w`` [E, H, I] and ``topk_weights`` [T·W, k]; tokens are
cut by rows, experts by their number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.base import (
    EVERY_RANK,
    NOWHERE,
    Case,
    Memory,
    Onto,
    Outcome,
    Rows,
    Tensors,
    every_row,
    times,
)
from mkernel.ops import moe
from mkernel.ops.common import Done, Execution
from mkernel.ops.moe_dispatch import dispatch_rows
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.invariance import encoded
from mkernel.plan.model import E4M3, sums_of
from mkernel.world.lifecycle import current

ROUTINGS = ("uniform", "one_expert", "some_empty", "duplicates", "padded", "empty_ranks")
"""The routings that the kit tries; it does not need ``zipf``, with which figures are taken."""
ZIPF = 1.2
"""The exponent of the routing of that name."""

_X, _IDS, _W, _WEIGHTS, _Y = range(5)
_X_SCALE, _W_SCALE = 9, 10  # after the tensors of the other cases
E4M3_SUMS = 5e-3
"""The error of an element of products of e4m3 experts, relative to their root mean square. Matrix units
add a block's products with 14 bits: emulated sums are off by up to 3.9e-3
(``tests/unit/cases/test_fast_accumulation.py``)."""


class MoeCase(Case):
    """Tokens, their routing and weights; the order of rows."""

    def _hidden(self) -> int:
        return self.sizes["hidden"]

    def _features(self) -> int:
        return self.sizes["features"]

    def _columns(self) -> int:
        """Return how many columns the weights of the dispatch have."""
        return self._features()

    def _x(self, rank: int, iteration: int) -> torch.Tensor:
        tokens = self.sizes["tokens"]
        if self.given is not None:
            return self.given["x"][rank * tokens : (rank + 1) * tokens]
        return self.normal(iteration, _X, rank, tokens, self._hidden())

    def _ids(self, rank: int, iteration: int) -> torch.Tensor:
        tokens, top_k = self.sizes["tokens"], self.sizes["top_k"]
        if self.given is not None:
            return self.given["topk_ids"][rank * tokens : (rank + 1) * tokens]
        dtype = getattr(torch, self.options.get("id_dtype", "int64"))
        return self._routed(rank, iteration, tokens, top_k).to(dtype)

    def _routed(self, rank: int, iteration: int, tokens: int, top_k: int) -> torch.Tensor:
        experts = self.sizes["experts"]
        routing = self.options.get("routing", "uniform")
        shared = self.generator(iteration, _IDS, EVERY_RANK)
        own = self.generator(iteration, _IDS, rank)
        if routing == "one_expert":
            return self._integers(experts, (1, 1), shared).repeat(tokens, top_k)
        if routing == "some_empty":
            used = torch.randperm(experts, generator=shared, device=self.device)
            used = used[: max(1, experts // 3)]
            return used[self._integers(len(used), (tokens, top_k), own)]
        chances = torch.rand(tokens, experts, generator=own, device=self.device)
        if routing == "zipf":  # drawn one after another without return: exponential races
            places = torch.randperm(experts, generator=shared, device=self.device) + 1
            chances = chances.log() * places.double() ** ZIPF
        ids = chances.topk(top_k, dim=1).indices
        if routing == "duplicates":
            ids[::2, 1:2] = ids[::2, 0:1]
        elif routing == "padded":
            ids[torch.rand(ids.shape, generator=own, device=self.device) < 0.2] = -1
            ids[int(self._integers(tokens, (1, 1), own)) + 1 :] = -1
        elif routing == "empty_ranks":
            ids = torch.full_like(ids, -1) if (rank + iteration) % 2 else ids % -(-experts // 2)
        elif routing not in ("uniform", "zipf"):
            raise ValueError(f"routing {routing!r} is none of {', '.join(ROUTINGS)}")
        return ids

    def _integers(
        self, below: int, shape: tuple[int, int], chance: torch.Generator
    ) -> torch.Tensor:
        return torch.randint(below, shape, generator=chance, device=self.device)

    def _w(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        experts = self.sizes["experts"] // world_size
        if self.given is not None:
            return self.given["w"][rank * experts : (rank + 1) * experts]
        shape = (experts, self._hidden(), self._columns())
        return self.normal(iteration, _W, rank, *shape)

    def _weights(self, rank: int, iteration: int) -> torch.Tensor:
        """Draw weights of 0.5 to 1.5, not normalised: that they are ignored must show with top-k of 1
        too."""
        tokens = self.sizes["tokens"]
        if self.given is not None:
            return self.given["topk_weights"][rank * tokens : (rank + 1) * tokens]
        own = self.generator(iteration, _WEIGHTS, rank)
        return torch.rand(tokens, self.sizes["top_k"], generator=own, device=self.device) + 0.5

    def _rows(self, owner: int, world_size: int, iteration: int) -> tuple[torch.Tensor, ...]:
        """Return where the rows of an owner's experts come from, in the documented order: their source
        ranks, tokens and slots; and how many rows each expert has. Stable sorting by expert keeps the
        order of source, token and slot."""
        tokens, top_k = self.sizes["tokens"], self.sizes["top_k"]
        own = self.sizes["experts"] // world_size
        ids = torch.cat([self._ids(source, iteration) for source in range(world_size)])
        local = ids.reshape(-1).to(torch.int64) - owner * own
        here = ((local >= 0) & (local < own)).nonzero().squeeze(1)
        here = here[local[here].argsort(stable=True)]
        source, within = here // (tokens * top_k), here % (tokens * top_k)
        counts = torch.bincount(local[here], minlength=own)
        return source, within // top_k, within % top_k, counts

    def _dispatch_inputs(
        self, rank: int, world_size: int, iteration: int
    ) -> dict[str, torch.Tensor]:
        """Return x, topk_ids, w, topk_weights of ``rank``, and the scales of e4m3 operands."""
        return {
            "x": self._x(rank, iteration),
            "topk_ids": self._ids(rank, iteration),
            "w": self._laid_out(self._w(rank, world_size, iteration)),
            "topk_weights": self._weights(rank, iteration),
        } | self._dispatch_scales(rank, world_size, iteration)

    def _dispatch_scales(
        self, rank: int, world_size: int, iteration: int
    ) -> dict[str, torch.Tensor]:
        found = self.scales_of((iteration, _X_SCALE, rank), self.sizes["tokens"], self._hidden())
        if not found:
            return {}
        experts = self.sizes["experts"] // world_size
        of_w = self.scales_of((iteration, _W_SCALE, rank), experts, self._hidden(), self._columns())
        return {"x_scale": found[0], "w_scale": of_w[0]}

    def scales_of(self, whose: tuple[int, int, int], rows: int, *sizes: int) -> list[torch.Tensor]:
        """Draw the scales of so many rows of K, or of so many experts' weights [K, N]; none, where the
        case has none. ``whose``: as of :meth:`generator`."""
        if self.options.get("scales") is None:
            return []
        of_rows, of_w = scale_sizes("block", rows, sizes[-1], sizes[0])
        if len(sizes) == 1:
            return [self.drawn_scale(*whose, *of_rows)]
        k, n = of_w
        return [self.drawn_scale(*whose, rows * n, k).view(rows, n, k).transpose(1, 2)]

    def _wide_x(self, rank: int, iteration: int) -> torch.Tensor:
        """Return a rank's x; in float64, times its scales, where it has some."""
        x = self._x(rank, iteration)
        scales = self.scales_of((iteration, _X_SCALE, rank), len(x), self._hidden())
        return dequantised(x, scales[0], torch.float64) if scales else x

    def _wide_w(self, rank: int, world_size: int, iteration: int) -> Iterator[torch.Tensor]:
        """Yield the weight of each of a rank's experts; in float64, times its scales, where it has
        some."""
        scale = self._dispatch_scales(rank, world_size, iteration).get("w_scale")
        return wide(self._w(rank, world_size, iteration), scale)

    def _dispatched(
        self, call: Callable[..., Done], tensors: Tensors, execution: Execution
    ) -> Done:
        """Run a dispatch of tensors; with the option, after one of other tokens for its handle and one
        of another routing, and without ids."""
        if not self.options.get("handle"):
            return call(tensors, **execution)
        first = call({**tensors, "x": tensors["x"].flip(0)}, wait=execution["wait"])
        ids = tensors["topk_ids"]
        others = torch.where(ids < 0, ids, (ids + 1) % self.sizes["experts"])
        call({**tensors, "topk_ids": others}, wait=execution["wait"])
        without = {**tensors, "topk_ids": torch.full_like(ids, -1)}
        return call(without, **first.outputs["handle"]._asdict(), **execution)

    def _laid_out(self, w: torch.Tensor) -> torch.Tensor:
        """Return the experts' weights in the case's layout."""
        return w.transpose(1, 2).contiguous().transpose(1, 2) if self.layout == "column" else w


def dispatched(tensors: Tensors, **options: Any) -> Done:
    """Dispatch a case's tokens."""
    given = (tensors["x"], tensors["topk_ids"], tensors["w"])
    of_x, of_w = tensors.get("x_scale"), tensors.get("w_scale")
    return moe.dispatch(*given, x_scale=of_x, w_scale=of_w, **options)


class MoeDispatchCase(MoeCase):
    """Dispatch+GEMM, then the combine of its outputs.

    Outputs: ``outputs`` (grouped rows, in the documented order), ``counts`` (exact), ``out`` (the
    combined tokens, of ``out_dtype`` too). Plan and record are the dispatch's; what came ``then`` is
    the combine's.

    The combine gets outputs that were rounded once, as the API promises, so the reference of ``out``
    combines in float64 the float64 outputs *rounded once to out_dtype*. What remains is one rounding,
    judged like any other, and an error of the combine's own sums is not hidden behind the outputs'
    rounding. A float32 sum may fall on the other side of a rounding step than the exact one: one
    element in a thousand, by one step, adds less than a tenth of the tolerance of all of them, and
    ``near_ties`` says which elements these may be and by how much.
    """

    op = "moe_dispatch_gemm"

    @property
    def _activated(self) -> bool:
        return self.options.get("activation") is not None

    def _columns(self) -> int:
        return 2 * self._features() if self._activated else self._features()

    def _activate(self, product: torch.Tensor) -> torch.Tensor:
        if not self._activated:
            return product
        return gated(product)

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        return self._dispatch_inputs(rank, world_size, iteration)

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return those of outputs and out; the counts are small."""
        dtype = getattr(torch, self.out_dtype)
        tokens, width = self.sizes["tokens"], self.sizes["features"]
        rows = tokens * self.sizes["top_k"]
        return {"outputs": ((rows, width), dtype), "out": ((tokens, width), dtype)}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the dispatch and the combine."""
        dtype, promise = getattr(torch, self.out_dtype), encoded(self.invariant)
        call = partial(
            dispatched, activation=self.options.get("activation"), out_dtype=dtype,
            chunk=self.chunk, invariant=promise,
        )  # fmt: skip
        sent = self._dispatched(call, tensors, execution)
        grouped, handle = sent.outputs["outputs"], sent.outputs["handle"]
        weights = tensors["topk_weights"]
        if "moe_combine" not in current().engine("moe_combine").claims.invariant_ops:
            promise = None
        home = moe.combine(
            grouped, handle, weights, out_dtype=dtype, invariant=promise, **execution
        )
        found = {"outputs": grouped, "counts": sent.outputs["counts"], "out": home.outputs["out"]}
        return Outcome(found, sent.plan, sent.record, then=home.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute outputs [R, I], counts [E/W] int64, out [T, I]."""
        out = self._combined(rank, world_size, iteration, rows)
        return {**self._grouped(rank, world_size, iteration, rows, onto), "out": out}

    def projects(self, names: Collection[str]) -> bool:
        """Return whether these are the results of a dispatch that has no activation."""
        return not self._activated and "out" not in names

    def truths(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        promised: Collection[str] | None = None,
        rows: Rows = every_row,
        onto: Onto = None,
    ) -> dict[str, torch.Tensor]:
        """Leave combined tokens, which take most of the time, out where they are not promised."""
        if promised is None or "out" in promised:
            return super().truths(rank, world_size, iteration, promised, rows, onto)
        found = self._grouped(rank, world_size, iteration, rows, onto)
        return {name: each for name, each in found.items() if name in promised}

    def _grouped(
        self, rank: int, world_size: int, iteration: int, rows: Rows, onto: Onto
    ) -> dict[str, torch.Tensor]:
        """Compute outputs and counts."""
        source, token, _, counts = self._rows(rank, world_size, iteration)
        at = rows(len(source))
        expert = torch.arange(len(counts), device=self.device).repeat_interleave(counts)[at]
        source, token = source[at], token[at]
        x = torch.stack([self._wide_x(each, iteration) for each in range(world_size)])
        columns = onto and onto(self._features())
        width = self._features() if columns is None else columns.shape[1]
        outputs = torch.empty(len(expert), width, device=self.device, dtype=torch.float64)
        for number, w in enumerate(self._wide_w(rank, world_size, iteration)):
            here = expert == number
            product = x[source[here], token[here]].double() @ times(w.double(), columns)
            outputs[here] = self._activate(product)
        return {"outputs": outputs, "counts": counts}

    def _combined(self, rank: int, world_size: int, iteration: int, rows: Rows) -> torch.Tensor:
        sent = self._rounded(self._activate(self._sent(rank, world_size, iteration, rows)))
        weights = self._weights(rank, iteration)[rows(self.sizes["tokens"])].float().double()
        return torch.einsum("tk,tki->ti", weights, sent)

    def _rounded(self, sent: torch.Tensor) -> torch.Tensor:
        return sent.to(getattr(torch, self.out_dtype)).double()

    def _sent(
        self, rank: int, world_size: int, iteration: int, rows: Rows, *, sizes_only: bool = False
    ) -> torch.Tensor:
        """Compute the product of each slot, zero where nobody wants one: [T, k, columns] in float64.
        ``sizes_only``: the sum of the sizes of its terms."""
        at = rows(self.sizes["tokens"])
        x, ids = self._wide_x(rank, iteration)[at].double(), self._ids(rank, iteration)[at]
        x = x.abs() if sizes_only else x
        sent = torch.zeros(*ids.shape, self._columns(), device=self.device).double()
        own = self.sizes["experts"] // world_size
        for owner in range(world_size):
            for expert, w in enumerate(self._wide_w(owner, world_size, iteration)):
                token, slot = (ids == owner * own + expert).nonzero(as_tuple=True)
                sent[token, slot] = x[token] @ (w.abs() if sizes_only else w).double()
        return sent

    def near_ties(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return what the rounded results of a token's slots may differ by, weighted. Each of the
        ``hidden`` additions of a sum, in whatever order, is off by at most eps of the sizes of its
        terms (an eps is two roundings, or one that cuts off); a sum of e4m3 products by more."""
        sums = torch.finfo(getattr(torch, sums_of(self.dtype, self.out_dtype)))
        sent = self._sent(rank, world_size, iteration, every_row)
        sizes = self._sent(rank, world_size, iteration, every_row, sizes_only=True)
        off = self._hidden() * sums.eps * sizes
        if self.dtype == E4M3:
            off = off.clamp(min=E4M3_SUMS * float(sent.square().mean().sqrt()))
        result = self._activate(sent)
        if self._activated:
            off = self._activated_error(sent, off, sums.eps)
        least, most = self._rounded(result - off), self._rounded(result + off)
        here = self._rounded(result)
        weights = self._weights(rank, iteration).float().double().abs()
        return {
            "out": torch.einsum("tk,tki->ti", weights, torch.maximum(most - here, here - least))
        }

    def _activated_error(self, sent: torch.Tensor, off: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the error of silu(gate) * up, whose factors are off by ``off``; the slope of silu is
        below 1.1. What it is computed with is good to 8 eps."""
        gate, up = sent.chunk(2, dim=-1)
        of_gate, of_up = (1.1 * off).chunk(2, dim=-1)
        silu = gate * gate.sigmoid()
        return of_gate * (up.abs() + of_up) + of_up * silu.abs() + 8 * eps * (silu * up).abs()

    def tolerances(self) -> dict[str, float]:
        """Allow one rounding each, of an invariant sum its own; counts must be equal."""
        return {"outputs": self.tolerance, "out": self.rounding_of_sum}


class MoeRowsCase(MoeCase):
    """The dispatch alone: ``rows`` and the ``scales`` of e4m3 ones, moved and not rounded, and counts.

    Sizes: tokens, hidden, experts, top_k.
    """

    op = "moe_dispatch"

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x, topk_ids and topk_weights, which some peers send too, and the scales of x."""
        return {
            "x": self._x(rank, iteration),
            "topk_ids": self._ids(rank, iteration),
            "topk_weights": self._weights(rank, iteration),
        } | self._x_scales(rank, iteration)

    def _x_scales(self, rank: int, iteration: int) -> dict[str, torch.Tensor]:
        scales = self.scales_of((iteration, _X_SCALE, rank), self.sizes["tokens"], self._hidden())
        return {"x_scale": scales[0]} if scales else {}

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of rows; counts and scales are small."""
        rows = self.sizes["tokens"] * self.sizes["top_k"]
        return {"rows": ((rows, self._hidden()), getattr(torch, self.out_dtype))}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the dispatch."""

        def call(given: Tensors, **options: Any) -> Done:
            return dispatch_rows(
                given["x"], given["topk_ids"], given.get("x_scale"), chunk=self.chunk,
                num_experts=self.sizes["experts"], invariant=encoded(self.invariant), **options,
            )  # fmt: skip

        sent = self._dispatched(call, tensors, execution)
        found = {name: each for name, each in sent.outputs.items() if name != "handle"}
        return Outcome(found, sent.plan, sent.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute rows [R, H], counts [E/W] int64, and scales [R, H / 128] of e4m3 rows."""
        source, token, _, counts = self._rows(rank, world_size, iteration)
        at, columns, everyone = rows(len(source)), onto and onto(self._hidden()), range(world_size)
        x = torch.stack([times(self._x(each, iteration).double(), columns) for each in everyone])
        found = {"rows": x[source[at], token[at]], "counts": counts}
        if self.options.get("scales") is not None:
            scales = [self._x_scales(each, iteration)["x_scale"] for each in everyone]
            found["scales"] = torch.stack(scales)[source, token]
        return found

    def projects(self, names: Collection[str]) -> bool:
        """Return True: rows are moved alone."""
        return True

    def tolerances(self) -> dict[str, float]:
        """Allow what float64 loses where rows are compared by their products with columns."""
        return {"rows": 1e-12}


def gated(both: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, given the gates' columns, then the ups'."""
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def wide(w: torch.Tensor, scale: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield the weight of each expert; in float64, times its scales, where there are some."""
    if scale is None:
        yield from w
        return
    for one, its in zip(w, scale, strict=True):
        yield dequantised(one, its, torch.float64)


RankIteration = tuple[int, int, int]
"""The rank whose data it is, the number of ranks, and the iteration."""


class Wanted(NamedTuple):
    """The rows of an owner's experts that a rank wants: their numbers, experts and tokens."""

    of: RankIteration
    at: torch.Tensor
    expert: torch.Tensor
    x: torch.Tensor


class HomeCase(MoeCase):
    """Results of experts that come home: ``out`` [T, columns], each token's weighted sum."""

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out."""
        shape = self.sizes["tokens"], self._hidden()
        return {"out": (shape, getattr(torch, self.out_dtype))}

    @abstractmethod
    def made(self, rows: Wanted, columns: torch.Tensor | None) -> torch.Tensor:
        """Compute what experts make of these rows, times columns where there are some, in float64."""

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute out; the columns multiply each row's last factor."""
        return {"out": self._summed(rank, world_size, iteration, rows, onto)}

    def projects(self, names: Collection[str]) -> bool:
        """Return True: the sum is linear in the last factor of what experts made."""
        return True

    def _summed(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        rows: Rows,
        onto: Onto = None,
        *,
        sizes_only: bool = False,
    ) -> torch.Tensor:
        """Add up the weighted results of each token; ``sizes_only``: their absolute values."""
        x, weights = self._wide_x(rank, iteration), self._weights(rank, iteration).float().double()
        columns = onto and onto(self._hidden())
        place = torch.full((len(weights),), -1, device=self.device)  # in out, of each token there
        at = rows(len(weights))
        place[at] = torch.arange(len(place[at]), device=self.device)
        width = self._hidden() if columns is None else columns.shape[1]
        out = torch.zeros(len(place[at]), width, device=self.device, dtype=torch.float64)
        for owner in range(world_size):
            of = owner, world_size, iteration
            source, token, slot, counts = self._rows(*of)
            expert = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
            here = ((source == rank) & (place[token] >= 0)).nonzero().squeeze(1)
            token, slot = token[here], slot[here]
            y = self.made(Wanted(of, here, expert[here], x[token]), columns)
            y = y * weights[token, slot, None]
            out.index_add_(0, place[token], y.abs() if sizes_only else y)
        return out


class MoeCombineCase(HomeCase):
    """The combine alone: random rows ``y`` come home through the handle of a dispatch.

    Sizes: tokens, features, experts, top_k. The dispatch is of the same case (hidden = features) and
    its outputs are not judged.
    """

    op = "moe_combine"

    def _hidden(self) -> int:
        return self.sizes["features"]

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x, topk_ids, w, topk_weights, y of ``rank``."""
        y = self._y(rank, world_size, iteration)
        return {**self._dispatch_inputs(rank, world_size, iteration), "y": y}

    def _y(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        rows = len(self._rows(rank, world_size, iteration)[0])
        return self.normal(iteration, _Y, rank, rows, self._features())

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call a pipelined dispatch for its handle, then the combine, whose record it is."""
        sent = moe.dispatch(tensors["x"], tensors["topk_ids"], tensors["w"], wait=execution["wait"])
        done = moe.combine(
            tensors["y"],
            sent.outputs["handle"],
            tensors["topk_weights"],
            out_dtype=getattr(torch, self.out_dtype),
            invariant=encoded(self.invariant),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def made(self, rows: Wanted, columns: torch.Tensor | None) -> torch.Tensor:
        return times(self._y(*rows.of)[rows.at].double(), columns)
