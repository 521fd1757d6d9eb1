"""The plan by which ``parallelize_module`` makes a model of transformers parallel.

transformers' models name a style for each of their modules (``tp_plan``, and ``ep_plan`` for experts).
This module turns these names into the styles of this package.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import Module, Parameter

from mkernel.errors import ArgumentError
from mkernel.nn.module_styles import ExpertParallel, ReplicatedParallel
from mkernel.nn.styles import ColwiseParallel, RowwiseParallel

_EXPERTS = ("ep_dispatch_experts", "moe_tp_experts")
_WHOLE = "replicate"


def transformers_plan(model: Module) -> dict[str, ParallelStyle]:
    """Return the styles of a transformers model's modules, by name with ``*`` for numbers of layers.

    Linear layers get :class:`ColwiseParallel` and :class:`RowwiseParallel`, experts
    :class:`ExpertParallel`. All ranks have the same tokens. :class:`ReplicatedParallel` is the style of
    all else: norms, routers, modules that share a parameter (an embedding that is tied to the head).

    Args:
        model: a model with ``tp_plan``, of transformers 4.50 or newer.

    Raises:
        ArgumentError: the model has no plan, or one that names a style which has no counterpart here.
    """
    named: dict[str, str] = {**_of(model, "tp_plan"), **_of(model, "ep_plan")}
    if not named:
        raise ArgumentError("model", type(model).__name__, "a model with a tp_plan")
    uses = Counter(id(each) for module in model.modules() for each in _own(module))
    whole = ReplicatedParallel(split_input=False)  # one, for parameters that are shared
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if key in plan:
            continue
        shared = any(uses[id(each)] > 1 for each in _own(module))
        if key in named and not shared and named[key] != _WHOLE:
            plan[key] = _style(key, named[key], module)
        elif _own(module):
            plan[key] = whole
    return plan


def _own(module: Module) -> list[Parameter]:
    return list(module.parameters(recurse=False))


def _of(model: Module, plan: str) -> dict[str, str]:
    return getattr(model, plan, None) or {}


def _style(key: str, name: str, module: Module) -> ParallelStyle:
    if name in _EXPERTS:
        return _experts(key, module)
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
        "replicated_with_grad_allreduce": ReplicatedParallel(split_input=True),
    }
    # The names that older versions have for the same.
    styles["colwise_rep"] = styles["colwise_gather_output"]
    styles["rowwise_rep"] = styles["rowwise_split_input"]
    if name not in styles:
        legal = ", ".join((*styles, *_EXPERTS, _WHOLE))
        raise ArgumentError(f"the style of {key}", name, legal)
    found: ParallelStyle = styles[name]
    return found


def _experts(key: str, module: Module) -> ParallelStyle:
    """Return the style of experts. ArgumentError: they are no gated ones without biases."""
    gated = getattr(module, "has_gate", True) and not getattr(module, "has_bias", False)
    if not gated or not hasattr(module, "gate_up_proj"):
        legal = "experts with gate_up_proj and down_proj, without biases"
        raise ArgumentError(key, type(module).__name__, legal)
    return ExpertParallel(transposed=not getattr(module, "is_transposed", False))
