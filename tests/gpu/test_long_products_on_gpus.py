"""Products whose last terms cuBLAS leaves out are right by the ops all the same, beside
``test_calls_on_gpus``: where native code starts them."""

from __future__ import annotations

import hopper_ranks
import pytest
import torch
from device_buffers import needs_gpus, takes_ranks
from families import LONG
from kept_ranks import right


@takes_ranks(2)
def test_calls_that_native_code_starts() -> None:
    right(2, hopper_ranks.known, LONG[::4], 8)


@needs_gpus(1)
@pytest.mark.skipif(torch.version.cuda != "13.0", reason="other versions leave out others")
def test_torch_leaves_terms_out() -> None:
    """Of this product. Once none is found any more, ``long_products.py`` has nothing to do."""
    draw = torch.Generator("cuda").manual_seed(1)
    m, n, k = LONG[0].m, LONG[0].n, LONG[0].k
    a, b = (torch.randn(s, generator=draw, device="cuda").bfloat16() for s in ((m, k), (k, n)))
    truth = a.double() @ b.double()
    assert float(((a @ b).double() - truth).norm() / truth.norm()) > 0.01
