"""The registration of an op with torch, as ``torch.ops.mkernel.NAME``: schema, kernel, fake kernel
and derivative.

An op communicates: whether its outputs are used on a rank or not, it must run there, once, and in the
order in which the program calls ops, since its peers wait for it. Torch's compilers know such ops as
*effectful*: a token goes from each to the next, so that none is removed, merged with another or moved.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import effects
from torch.autograd.function import Function
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from mkernel.backends.contracts.output_memory import in_torchs
from mkernel.ops import checkpointing, inductor
from mkernel.ops.plain import just_computing, refuse_transform
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class EagerOp:
    """An op that was registered, called by position and keyword as its schema says, past torch's
    dispatcher where nothing needs it.

    The dispatcher calls Python twice for an op with a derivative, which takes longer than all the rest
    of such a call. Where torch just computes (no tracing, mode, transform or subclass of a tensor), an
    op's kernel can be called as it is, and a graph for gradients recorded by a
    :class:`torch.autograd.Function` of the same derivative.
    """

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


_LIBRARY = torch.library.Library("mkernel", "FRAGMENT")  # type: ignore[no-untyped-call]
ops = SimpleNamespace()
"""The ops by their names, as the package calls them: like ``torch.ops.mkernel``, and faster where torch
need not see the call."""
_ORDERED = getattr(effects, "EffectType", None) or effects._EffectType  # the name before torch 2.9
# Before torch 2.7 compilers keep no more than the order of strides.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    *,
    flops: Callable[..., int] | None = None,
    communicates: bool = True,
) -> None:
    """Define an op.

    Args:
        schema: torch's, without a namespace: ``name(Tensor a, ...) -> Tensor``.
        kernel: runs the op, on plain tensors. fake: gives its outputs' shapes and dtypes.
        save, backward: as :func:`torch.library.register_autograd` takes them; without them a tensor
            that requires grad is an error of torch's.
        flops: of its products on one rank (:mod:`mkernel.ops.flops`); None: it multiplies nothing.
        communicates: whether peers wait for its kernel.
    """
    name = schema.partition("(")[0]
    qualified = f"mkernel::{name}"
    _LIBRARY.define(schema, tags=(_STRIDES,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(  # type: ignore[no-untyped-call]
        name, in_torchs(kernel) if communicates else kernel, "CompositeExplicitAutograd"
    )
    _LIBRARY.impl(  # type: ignore[no-untyped-call]
        name, lambda *_, **__: refuse_transform(name), "FuncTorchDynamicLayerFrontMode"
    )
    torch.library.register_fake(qualified, _asked(fake) if communicates else fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=save, lib=_LIBRARY)
    registered = getattr(torch.ops.mkernel, name)
    if flops is not None:
        register_flop_formula(registered)(flops)
    op = registered.default
    takes_lists = any("List" in str(each.type) for each in op._schema.arguments)
    quick = registered if takes_lists else EagerOp(registered, kernel, save, backward)
    setattr(ops, name, quick)
    if communicates:
        effects._register_effectful_op(op, _ORDERED.ORDERED)
        inductor.keep_order(op, _ORDERED.ORDERED)
        checkpointing.save_outputs(op, _LIBRARY)


def _asked(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``fake``, since who asks may be Inductor, or trace a checkpointed region."""

    def asked(*arguments: Any, **keywords: Any) -> Any:
        inductor.teach()
        checkpointing.refuse_tagged()
        return fake(*arguments, **keywords)

    return asked


def group_name(group: Group) -> str:
    """Return the name by which registered ops know the world of a group. NotInitialized."""
    if torch.compiler.is_compiling():
        inductor.teach(load=True)
    return current(group).name


group_name.__dict__["_dynamo_marked_constant"] = (
    True  # a compiled function calls into the world it saw
)
