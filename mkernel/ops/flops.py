"""Counts the floating-point operations that an op's products take on one rank, by which torch's
``FlopCounterMode`` counts registered ops.

Torch's conventions hold: a multiplication and its addition are two operations, and attention is
counted as if every query saw every key. Sums over ranks, norms, softmax and biases do not count, and
neither does a product that is made only because a kernel takes no fewer columns. Each formula is called
with the shapes of the op's arguments, and with those of its outputs as ``out_shape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mkernel.world.lifecycle import current

Sizes = Sequence[int]


def _of(rows: Sizes, b: Sizes) -> int:
    """Count the operations of a product of [.., K] with ``b`` [K, N], whose rows are those of
    ``rows``."""
    return 2 * prod(rows[:-1]) * b[0] * b[1]


def gather(a: Sizes, b: Sizes, *_: Any, out_shape: Sizes, **options: Any) -> int:
    """Count AllGather+GEMM: all ranks' rows times this rank's b."""
    return _of(out_shape, b)


def gather_and_keep(a: Sizes, b: Sizes, *_: Any, out_shape: Sequence[Sizes], **options: Any) -> int:
    """Count AllGather+GEMM that also returns the gathered A."""
    return _of(out_shape[0], b)


def gather_many(a: Sizes, b: Sequence[Sizes], *_: Any, out_shape: Any, **options: Any) -> int:
    """Count AllGather+GEMM with several b."""
    return sum(map(_of, out_shape[0], b))


def own_rows(a: Sizes, b: Sizes, *_: Any, **options: Any) -> int:
    """Count GEMM+ReduceScatter, GEMM+AllReduce and the product of replicated rows: a times b."""
    return _of(a, b)


def dispatch(x: Sizes, topk_ids: Sizes, w: Sizes, *_: Any, out_shape: Any, **options: Any) -> int:
    """Count MoE dispatch+GEMM: the rows of the outputs, of which some are empty where a capacity says
    how many there are."""
    return _of(out_shape[0], w[1:])


def dispatch_backward(of_outputs: Sizes, x: Sizes, w: Sizes, *_: Any, **options: Any) -> int:
    """Count its two gradients, of x and of w."""
    return 2 * _of(of_outputs, w[1:])


def combine(h: Sizes, w2: Sizes, *_: Any, **options: Any) -> int:
    """Count MoE GEMM+combine."""
    return _of(h, w2[1:])


def combine_backward(of_out: Sizes, h: Sizes, w2: Sizes, *_: Any, **options: Any) -> int:
    """Count its gradients: that of out times the weights, and that of the weights."""
    return 2 * _of(h, w2[1:])


def attention(q: Sizes, k: Sizes, *_: Any, group: str, **options: Any) -> int:
    """Count ring attention: scores and their product with the values, of this rank's queries with all
    ranks' keys."""
    return 2 * _of_scores(q, k, group)


def attention_backward(
    of_out: Sizes, of_lse: Any, q: Sizes, k: Sizes, *_: Any, **options: Any
) -> int:
    """Count its derivative: the scores again, and two products for each of the two of the forward."""
    return 5 * _of_scores(q, k, options["group"])


def _of_scores(q: Sizes, k: Sizes, group: str) -> int:
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * current(group).size * width
