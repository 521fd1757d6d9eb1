"""Communicating ops in checkpointed regions of compiled functions: their outputs are saved.

Torch's partitioner would run them again in the backward graph and take the token of their order along,
which no graph of torch 2.13 may save: compiling ends in an assertion. What is saved also spares the
message. A gathered input is saved too where the layer asks for it (``save_gathered``); for one that
does not, the backward graph has a call of its own. Outside of compiled functions checkpointing calls
ops again, as any other.

Torch 2.6 cannot compile such regions, whatever the backend: its partitioner fails over the tokens.
Ops that are traced with such a region's tag refuse there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from mkernel.errors import Unsupported
from mkernel.ops import inductor

_Mode: Any = getattr(checkpoint, "_CachingTorchDispatchMode", None)
"""The mode under which torch traces the forward of such a region; it asks a policy what to save."""


def save_outputs(op: OpOverload, library: torch.library.Library) -> None:
    """Save the outputs of this op from now on."""
    if _Mode is not None:
        torch.library.register_torch_dispatch(op._name, _Mode, _traced, lib=library)


def require_saving() -> None:
    """Raise Unsupported if this torch compiles no checkpointed region in which an op communicates."""
    if not inductor.keeps_order():  # a torch of that age
        raise Unsupported(
            f"torch {torch.__version__} compiles no checkpointed region in which an op communicates; "
            "take a newer torch (2.13 was tried), or leave the region out of the compiled function"
        )


def refuse_tagged() -> None:
    """Raise Unsupported if what is being traced lies in a region that this torch compiles wrongly."""
    if traceback.get_current_meta().get("recompute") is not None:
        require_saving()


def _traced(mode: Any, op: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
    policy = mode.policy_fn
    if get_proxy_mode() is not None:
        mode.policy_fn = _must_save
    try:
        return mode.__torch_dispatch__(op, types, arguments, keywords)
    finally:
        mode.policy_fn = policy


def _must_save(*_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    return checkpoint.CheckpointPolicy.MUST_SAVE
