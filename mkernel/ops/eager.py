"""Registered ops, past torch's dispatcher where nothing needs it.

The dispatcher calls Python twice for an op with a derivative, which takes longer than all the rest of
such a call. Where torch just computes (no tracing, mode, transform or subclass of a tensor), an op's
kernel can be called as it is, and a graph for gradients recorded by a
:class:`torch.autograd.Function` of the same derivative.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import Parameter

from mkernel.ops.plain import just_computing


class EagerOp:
    """An op that was registered, called by position and keyword as its schema says."""

    def __init__(
        self,
        registered: Any,
        kernel: Callable[..., Any],
        save: Callable[..., Any] | None,
        backward: Callable[..., Any] | None,
    ) -> None:
        """Wrap a registered op.

        Args:
            registered: of ``torch.ops.mkernel``. Its schema takes no lists of tensors.
            kernel, save, backward: as it was registered with.
        """
        self._registered, self._kernel = registered, kernel
        self._function: Any = None
        if save is not None and backward is not None:
            name = registered.default._schema.name.partition("::")[2]
            self._function = _function(name, registered.default._schema, kernel, save, backward)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the op, with the results of ``torch.ops.mkernel.NAME``."""
        if torch.compiler.is_compiling() or not just_computing():
            return self._registered(*inputs, **keywords)
        records = False
        for value in inputs:
            if isinstance(value, Tensor):
                if type(value) is not Tensor and type(value) is not Parameter:
                    return self._registered(*inputs, **keywords)
                records = records or value.requires_grad
        if not records or not torch.is_grad_enabled():
            return self._kernel(*inputs, **keywords)
        if self._function is None:
            return self._registered(*inputs, **keywords)
        return self._function.apply(keywords, *inputs)


def _function(
    name: str,
    schema: Any,
    kernel: Callable[..., Any],
    save: Callable[..., Any],
    backward: Callable[..., Any],
) -> type[Function]:
    """Make the class that records a call for gradients. ``save`` and ``backward`` find what
    :func:`torch.library.register_autograd` would show them."""
    by_position = [each for each in schema.arguments if not each.kwarg_only]
    rest = [each.default_value for each in by_position]
    defaults = {each.name: each.default_value for each in schema.arguments if each.kwarg_only}

    def forward(ctx: Any, keywords: dict[str, Any], *inputs: Any) -> Any:
        output = kernel(*inputs, **keywords)
        save(
            ctx,
            inputs=(*inputs, *rest[len(inputs) :]),
            keyword_only_inputs={**defaults, **keywords},
            output=output,
        )
        return output

    def differentiate(ctx: Any, *of_outputs: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[1:]  # without that of the keywords
        try:
            found = backward(ctx, *of_outputs)
        finally:
            ctx.needs_input_grad = needs
        return (None, *found) if isinstance(found, tuple) else (None, found)

    members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    return types.new_class(name, (Function,), exec_body=lambda names: names.update(members))
