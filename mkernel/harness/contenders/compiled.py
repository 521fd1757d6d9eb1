"""Steps beside libraries' products and sums, compiled by torch as their users compile them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

_MOST_SHAPES = 1024
"""Shapes for which torch compiles a step in one process; its own limit is 8."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def compiled(step: Callable[_P, _R], dynamic: bool | None = False) -> Callable[_P, _R]:
    """Compile a step of tensors into one kernel a shape, in this process: others would disturb the
    turns. ``dynamic``: as torch.compile takes it."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.recompile_limit = _MOST_SHAPES
    dynamo.accumulated_recompile_limit = _MOST_SHAPES
    inductor.compile_threads = 1
    return torch.compile(step, fullgraph=True, dynamic=dynamic)
