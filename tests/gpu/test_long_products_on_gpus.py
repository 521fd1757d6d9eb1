"""Products whose last terms cuBLAS leaves out are right by the ops all the same."""

from __future__ import annotations

from typing import Any

import calls
import hopper_ranks
import kept_ranks
import pytest
import torch
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import OPS, Shape

M, N, K = 6, 264, 12808
SHAPES = [
    Shape(op, M, N, K, dtype=dtype, path="library", bias=bias)
    for op in OPS
    for dtype in ("bfloat16", "float16")
    for bias in (False, True)
]


def right(fn: Any, *arguments: Any, accelerator: str = "hopper") -> None:
    found = kept_ranks.run(fn, *arguments, ranks_per_node=2, accelerator=accelerator)
    failures = [text for each in found for text in each]
    assert not failures, "; ".join(failures[:5])


@takes_ranks(2)
def test_every_op() -> None:
    right(calls.judged, SHAPES, 1)


@takes_ranks(2)
def test_every_op_of_streams() -> None:
    """They are torch's products, told to add parts of them in float32."""
    shapes = [Shape(op, M, N, K, dtype=dtype) for op in OPS for dtype in ("bfloat16", "float16")]
    right(calls.judged, shapes, 1, accelerator="streams")


@takes_ranks(2)
def test_graphs() -> None:
    right(calls.replayed, SHAPES[::4], 10)


@takes_ranks(2)
def test_calls_that_native_code_starts() -> None:
    right(hopper_ranks.known, SHAPES[::4], 8)


@needs_gpus(1)
@pytest.mark.skipif(torch.version.cuda != "13.0", reason="other versions leave out others")
def test_torch_leaves_terms_out() -> None:
    """Of this product. Once none is found any more, ``long_products.py`` has nothing to do."""
    draw = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(s, generator=draw, device="cuda").bfloat16() for s in ((M, K), (K, N)))
    truth = a.double() @ b.double()
    assert float(((a @ b).double() - truth).norm() / truth.norm()) > 0.01
