"""Async tensor parallelism: functional collectives of compiled programs, fused with their products.

``enable``: the switch. ``inductor_pass``: the pass that it adds to Inductor. ``patterns``:
collectives next to products in a graph. ``rewrite``: their replacements. ``report``: what was
rewritten, what was left, and why.
"""

from mkernel.async_tensor_parallel.enable import AsyncTensorParallel, enable_async_tensor_parallel
from mkernel.async_tensor_parallel.report import Decision, Report

__all__ = ["AsyncTensorParallel", "Decision", "Report", "enable_async_tensor_parallel"]
