"""Gradients of attention over all ranks' keys by torch and torch.distributed alone: the library's
backward on each rank's part, with the results and log-sum-exps of all keys.

What a part gives to keys and values goes home by a reduce-scatter; gradients of queries are added in
float32. Who sees what is as in :mod:`.library_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mkernel.harness import library_attention
from mkernel.harness.collectives import reduce_scatter
from mkernel.harness.library_attention import gathered, order, own
from mkernel.harness.library_moe import kept
from mkernel.harness.problem import Inputs, Problem, Tensors


class Given(NamedTuple):
    """Queries [B, H, R, D], the gradients of their results, and these with their log-sum-exps
    [B, H, R], over all keys."""

    q: torch.Tensor
    of_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, first: int) -> Given:
        """Those from ``first`` on."""
        return Given(*(each[:, :, first:] for each in self)) if first else self


class Part(NamedTuple):
    """What one rank's keys give to the gradient of the queries from ``first`` on, [B, H, R, D], and
    these to those of as many of its keys and values as they see, [B, Hkv, R, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    first: int


def forward(problem: Problem, inputs: Inputs) -> None:
    """Keeps the library's ``out`` and ``lse`` beside the inputs. Collective; not timed."""
    for name, each in library_attention.call(problem, inputs).items():
        kept(inputs, name, each)


def gradients(
    given: Given, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch's backward: on a CPU its own, elsewhere cuDNN's."""
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


def part(problem: Problem, given: Given, kv: torch.Tensor, source: int) -> Part:
    """What ``kv`` [2, B, Hkv, R, D], keys and values of rank ``source``, and this rank's queries give
    each other."""
    causal, rank = bool(problem.case.sizes.get("causal")), problem.rank
    k, v = kv
    if not causal or source == rank:
        return Part(*gradients(given, k, v, causal), 0)
    half = given.q.shape[2] // 2
    if source < rank:
        return Part(*gradients(given, k[:, :, :half], v[:, :, :half], causal=False), 0)
    return Part(*gradients(given.rows(half), k, v, causal=False), half)


def parts(problem: Problem, inputs: Inputs, kv: torch.Tensor) -> list[Part]:
    """One for each rank's keys, in the order in which they are taken."""
    given = Given(*(inputs[name] for name in ("q", "grad_out", "out", "lse")))
    return [part(problem, given, kv[source], source) for source in order(problem)]


def summed(problem: Problem, inputs: Inputs, found: list[Part]) -> Tensors:
    """The gradients, of the parts of all ranks. Collective."""
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


def call(problem: Problem, inputs: Inputs) -> Tensors:
    """All keys and values gathered, the backward on the parts, and the sums."""
    return summed(problem, inputs, parts(problem, inputs, gathered(problem, inputs)))


def alone(problem: Problem, inputs: Inputs) -> Tensors:
    """The backward on parts that are there, ``kv`` of all ranks; nothing is added up."""
    return {
        f"{name} {number}": getattr(each, name)
        for number, each in enumerate(parts(problem, inputs, inputs["kv"]))
        for name in "qkv"
    }


def merged_alone(problem: Problem, inputs: Inputs, found: Tensors) -> Tensors:
    """What :func:`alone` found, added up. Collective."""
    rows = inputs["q"].shape[2]
    made = []
    for number in range(problem.world):
        of_q, of_k, of_v = (found[f"{name} {number}"] for name in "qkv")
        made.append(Part(of_q, of_k, of_v, rows - of_q.shape[2]))
    return summed(problem, inputs, made)
