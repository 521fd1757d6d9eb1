"""torch's product of two matrices, of e4m3 ones with their scales, and where it has none."""

from __future__ import annotations

import torch

from mkernel.backends.contracts.scaled import block_product, padded_blocks
from mkernel.harness.problem import Inputs, Problem


def product(a: torch.Tensor, inputs: Inputs, out: torch.Tensor, *, fast: bool) -> None:
    """Compute out = a @ b of the inputs, by torch; of e4m3 ones with their scales, and with
    ``use_fast_accum`` where ``fast``."""
    if "a_scale" not in inputs:
        torch.matmul(a, inputs["b"], out=out)
        return
    of_a, of_b = inputs["a_scale"], inputs["b_scale"]
    if of_b.numel() > 1 and of_b.shape != (1, out.shape[1]):  # by blocks
        block_product(a, inputs["b"], of_a, padded_blocks(of_b), out)
        return
    if len(of_a) > 1 and of_b.numel() == 1:  # ranks' single scales, by rows
        of_b = of_b.expand(1, out.shape[1]).contiguous()
    torch._scaled_mm(
        a, inputs["b"], scale_a=of_a, scale_b=of_b.flatten()[None], out_dtype=out.dtype,
        use_fast_accum=fast, out=out,
    )  # fmt: skip


def scales_without_product(problem: Problem) -> str | None:
    """Return why there is no product of torch's for the problem, or None."""
    if problem.case.options.get("scales") != "block":
        return None
    return (
        "torch has no product with scales by blocks here" if problem.device.type != "cuda" else None
    )
