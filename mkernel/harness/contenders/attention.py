"""Attention over all ranks' keys, and its gradients, by torch and torch.distributed alone.

The library's attention is called on each rank's part, and the results are merged in float32. Its
backward is called on each part with the results and log-sum-exps of all keys; the gradients of queries
are added in float32, those of keys and values go home by a reduce-scatter. Scores are scaled by D^-0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed

from mkernel.harness.contenders import Contender
from mkernel.harness.contenders.collectives import all_gather, reduce_scatter
from mkernel.harness.contenders.experts import kept
from mkernel.harness.problem import Inputs, Problem, Tensors


class Seen(NamedTuple):
    """The part of one rank's keys that this rank's queries see: the queries from ``first`` on, the keys
    up to ``keys`` (None: all); ``causal``: each query those up to its own position."""

    first: int
    keys: int | None
    causal: bool


def seen(problem: Problem, source: int, rows: int) -> Seen:
    """Return what this rank's ``rows`` queries see of rank ``source``.

    Where causal, sequences are split in zigzag: of an earlier rank's keys all queries see the first
    half, and of a later rank's the second half of the queries sees all.
    """
    causal = bool(problem.case.sizes.get("causal"))
    if not causal or source == problem.rank:
        return Seen(0, None, causal)
    return Seen(0, rows // 2, False) if source < problem.rank else Seen(rows // 2, None, False)


class Part(NamedTuple):
    """The results of the queries from ``first`` on for one rank's keys: ``out`` [B, H, R, D], ``lse``
    [B, H, R]."""

    out: torch.Tensor
    lse: torch.Tensor
    first: int


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Part:
    """Call torch's attention: on a CPU its own, elsewhere cuDNN's."""
    aten = torch.ops.aten
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        return Part(out, lse.reshape(q.shape[:3]), 0)
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return Part(out, lse, 0)


def part(problem: Problem, q: torch.Tensor, kv: torch.Tensor, source: int) -> Part:
    """Attend this rank's queries to ``kv`` [2, B, H, R, D], keys and values of rank ``source``."""
    first, keys, causal = seen(problem, source, q.shape[2])
    k, v = kv[:, :, :, :keys]
    return attend(q[:, :, first:], k, v, causal)._replace(first=first)


def merged(parts: list[Part], dtype: torch.dtype) -> Tensors:
    """Merge the parts' results into one attention's; the first part is of all queries."""
    out, lse = parts[0].out.float(), parts[0].lse.clone()
    for each in parts[1:]:
        rows = slice(each.first, None)
        both = torch.logaddexp(lse[:, :, rows], each.lse)
        kept, added = ((one - both).exp()[..., None] for one in (lse[:, :, rows], each.lse))
        out[:, :, rows] = out[:, :, rows] * kept + each.out.float() * added
        lse[:, :, rows] = both
    return {"out": out.to(dtype), "lse": lse}


def order(problem: Problem) -> list[int]:
    """Return whose keys come when: this rank's first, then those of the ranks before it."""
    return [(problem.rank - step) % problem.world for step in range(problem.world)]


def own(inputs: Inputs) -> torch.Tensor:
    """Stack this rank's keys and values, [2, B, H, R, D]."""
    return torch.stack((inputs["k"], inputs["v"]))


def gathered_keys(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Gather all ranks' keys and values, [W, 2, B, H, R, D]. Collective."""
    mine = own(inputs)
    whole = mine.new_empty(problem.world, *mine.shape)
    all_gather(whole.flatten(0, 1), mine)
    return whole


def call(problem: Problem, inputs: Inputs) -> Tensors:
    """Gather all keys and values, attend to the parts, and merge the results."""
    kv = gathered_keys(problem, inputs)
    parts = [part(problem, inputs["q"], kv[source], source) for source in order(problem)]
    return merged(parts, inputs["q"].dtype)


def alone(problem: Problem, inputs: Inputs) -> Tensors:
    """Attend to parts that are there, ``kv`` of all ranks; nothing is merged."""
    found: Tensors = {}
    for source in order(problem):
        each = part(problem, inputs["q"], inputs["kv"][source], source)
        found |= {f"out {source}": each.out, f"lse {source}": each.lse}
    return found


def merged_alone(problem: Problem, found: Tensors) -> Tensors:
    """Merge the results of :func:`alone`."""
    parts: list[Part] = []
    for source in order(problem):
        out, lse = found[f"out {source}"], found[f"lse {source}"]
        rows = parts[0].out.shape[2] if parts else out.shape[2]
        parts.append(Part(out, lse, rows - out.shape[2]))
    return merged(parts, parts[0].out.dtype)


class Given(NamedTuple):
    """Queries [B, H, R, D], the gradients of their results, and these with their log-sum-exps
    [B, H, R], over all keys."""

    q: torch.Tensor
    of_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, first: int) -> Given:
        """Return those from ``first`` on."""
        return Given(*(each[:, :, first:] for each in self)) if first else self


class Gradients(NamedTuple):
    """The parts of gradients that one rank's keys give: of the queries from ``first`` on, [B, H, R, D],
    and of as many of its keys and values as these see, [B, Hkv, R, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    first: int


def forward(problem: Problem, inputs: Inputs) -> None:
    """Keep the library's ``out`` and ``lse`` beside the inputs. Collective; not timed."""
    for name, each in call(problem, inputs).items():
        kept(inputs, name, each)


def gradients(
    given: Given, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call torch's backward: on a CPU its own, elsewhere cuDNN's."""
    aten, q, lse = torch.ops.aten, given.q, given.lse.contiguous()
    if q.device.type != "cpu":
        none = torch.empty(
            (), dtype=torch.int64, device=q.device
        )  # of a generator that drops nothing
        sizes = q.shape[2], k.shape[2]
        of_q, of_k, of_v = aten._scaled_dot_product_cudnn_attention_backward(
            given.of_out, q, k, v, given.out, lse[..., None], none, none, None, None, None, *sizes,
            0.0, causal,
        )  # fmt: skip
        return of_q, of_k, of_v
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        given.of_out, q, k, v, given.out, lse, 0.0, causal
    )
    of_k, of_v = (each.unflatten(1, (-1, groups)).sum(2) for each in (of_k, of_v))
    return of_q, of_k, of_v


def parts_of_gradients(problem: Problem, inputs: Inputs, kv: torch.Tensor) -> list[Gradients]:
    """Compute one for each rank's keys and values, ``kv`` [W, 2, B, Hkv, R, D], in their order."""
    given, found = Given(*(inputs[name] for name in ("q", "grad_out", "out", "lse"))), []
    for source in order(problem):
        first, keys, causal = seen(problem, source, given.q.shape[2])
        k, v = kv[source, :, :, :, :keys]
        found.append(Gradients(*gradients(given.rows(first), k, v, causal), first))
    return found


def summed(problem: Problem, inputs: Inputs, found: list[Gradients]) -> Tensors:
    """Add up the gradients of all ranks' parts. Collective."""
    of_q = found[0].q.float()
    of_kv = torch.zeros(
        problem.world, *own(inputs).shape, dtype=inputs["k"].dtype, device=of_q.device
    )
    for source, each in zip(order(problem), found, strict=True):
        if each is not found[0]:
            of_q[:, :, each.first :] += each.q
        for place, of in zip(of_kv[source], (each.k, each.v), strict=True):
            place[:, :, : of.shape[2]] = of
    home = torch.empty_like(of_kv[0])
    reduce_scatter(home, of_kv.flatten(0, 1))
    return {"grad_q": of_q.to(inputs["q"].dtype), "grad_k": home[0], "grad_v": home[1]}


def backward(problem: Problem, inputs: Inputs) -> Tensors:
    """Gather all keys and values, call the backward on the parts, and add up its results."""
    kv = gathered_keys(problem, inputs)
    return summed(problem, inputs, parts_of_gradients(problem, inputs, kv))


def backward_alone(problem: Problem, inputs: Inputs) -> Tensors:
    """Call the backward on parts that are there, ``kv`` of all ranks; nothing is added up."""
    return {
        f"{name} {number}": getattr(each, name)
        for number, each in enumerate(parts_of_gradients(problem, inputs, inputs["kv"]))
        for name in "qkv"
    }


def gradients_merged_alone(problem: Problem, inputs: Inputs, found: Tensors) -> Tensors:
    """Add up the results of :func:`backward_alone`. Collective."""
    rows = inputs["q"].shape[2]
    made = []
    for number in range(problem.world):
        of_q, of_k, of_v = (found[f"{name} {number}"] for name in "qkv")
        made.append(Gradients(of_q, of_k, of_v, rows - of_q.shape[2]))
    return summed(problem, inputs, made)


CALLS: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    "ring_attention": call,
    "ring_attention_backward": backward,
}
ALONE: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    "ring_attention": alone,
    "ring_attention_backward": backward_alone,
}
"""The same on parts that are there."""


class Ring(Contender):
    """A ring: keys and values travel on while the library attends to those before; results are
    merged."""

    name = "ring"
    ops, ops_text = ("ring_attention",), "for attention"
    library = True

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        problem, q = self.problem, inputs["q"]
        here, parts = own(inputs), []
        for source in order(problem):
            coming, under_way = here, []
            if source != (problem.rank + 1) % problem.world:  # the last to come
                coming = torch.empty_like(here)
                under_way = self._passed_on(here, coming)
            parts.append(part(problem, q, here, source))
            for each in under_way:
                each.wait()
            here = coming
        return self.merged(parts, q.dtype)

    def merged(self, parts: list[Part], dtype: torch.dtype) -> Tensors:
        """Merge the parts' results into one attention's."""
        return merged(parts, dtype)

    def _passed_on(self, here: torch.Tensor, coming: torch.Tensor) -> list[Any]:
        rank, world = self.problem.rank, self.problem.world
        found: list[Any] = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, here, (rank + 1) % world),
                distributed.P2POp(distributed.irecv, coming, (rank - 1) % world),
            ]
        )
        return found
