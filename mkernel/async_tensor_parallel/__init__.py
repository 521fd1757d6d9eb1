"""Async tensor parallel: functional collectives of compiled programs, fused with their products.

``enable``: the switch. ``inductor_pass``: what it puts into Inductor. ``patterns``: collectives beside
products in a graph. ``rewrite``: what they become. ``report``: what was rewritten, what was left, why.
"""

from mkernel.async_tensor_parallel.enable import AsyncTensorParallel, enable_async_tensor_parallel
from mkernel.async_tensor_parallel.report import Decision, Report

__all__ = ["AsyncTensorParallel", "Decision", "Report", "enable_async_tensor_parallel"]
