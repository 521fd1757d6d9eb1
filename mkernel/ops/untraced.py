"""A mark for functions behind the registered ops, which run as they are under ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def untraced(op: F) -> F:
    """Make a compiled function break its graph at ``op``, instead of tracing the planner in it.

    It does what ``torch.compiler.disable`` does, without the wrapper's time in every call and without
    the import of ``torch._dynamo``, which takes longer than that of torch. A torch without these hooks
    traces until it meets what it cannot, and breaks the graph there.
    """
    op.__dict__["_torchdynamo_disable"] = True
    op.__dict__["_torchdynamo_disable_msg"] = "this call of mkernel has no registered op"
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(op.__code__, frames._FrameExecStrategy(skip, skip))
    return op
