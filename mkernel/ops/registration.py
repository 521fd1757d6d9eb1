"""The registration of an op with torch, as ``torch.ops.mkernel.NAME``: schema, kernel, fake kernel
and derivative.

An op communicates: whether its outputs are used on a rank or not, it must run there, once, and in the
order in which the program calls ops, since its peers wait for it. Torch's compilers know such ops as
*effectful*: a token goes from each to the next, so that none is removed, merged with another or moved.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import effects
from torch._library import autograd
from torch.autograd import profiler
from torch.autograd.function import Function
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from mkernel.backends.contracts.output_memory import in_torchs
from mkernel.backends.runtime._calls import Op
from mkernel.ops import autocast, checkpointing, inductor
from mkernel.ops.plain import refuse_transform, seen_by_torch
from mkernel.ops.steps import Steps
from mkernel.world import profiling
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.registry import worlds
from mkernel.world.torch_state import dispatch_modes, function_modes, native_functions

Local = Callable[[dict[str, Any]], dict[str, Any]]
USER, AUTOGRAD, TORCH, GRAPH = range(4)
"""The callers of an op, as native code numbers them (``backends/runtime/calls/op.hpp``)."""
_BY_TORCH = {TORCH: "*"}
native_ops: dict[str, Op] = {}
"""The ops that :func:`native_op` made, by name, with ``*`` behind those that torch's dispatcher calls:
native code knows the calls of a user and of autograd by one name, and those of torch by another."""


def native_op(
    name: str,
    parameters: Sequence[str],
    defaults: Sequence[Any],
    kernel: Callable[..., Any],
    caller: int = USER,
    *,
    range_name: str = "",
    registered: Any = None,
    local: Local | None = None,
    any_rows: Sequence[str] = (),
    family: Sequence[str] = (),
) -> Op:
    """Make what one of its callers calls an op by: native code, which makes the calls that it knows,
    and leaves all others to Python.

    Args:
        defaults: of the last parameters.
        kernel: makes a call on plain tensors, with the parameters as keywords; its steps go through
            ``steps``, one more.
        range_name: of calls as profilers show them; default: ``name``.
        registered: called where torch has to see the user's call, with the parameters as keywords;
            None: the kernel refuses such calls.
        local: replaces DTensors among the arguments by this rank's parts.
        any_rows: parameters whose number of rows differs between calls that are otherwise alike.
        family: parameters by whose number of rows calls may differ that ``kernel`` need not check
            anew; no other tensor of the caller's has these rows. Its ``steps`` name the family.
    """

    def python(values: tuple[Any, ...], signature: object, like: bytes | None) -> Any:
        given = dict(zip(parameters, values, strict=True))
        group = given["group"]
        if group is not None and not isinstance(group, str):
            return made(**given | {"group": group_name(group)})
        if local is not None and not _USUAL.issuperset(map(type, values)):
            given |= local(given)
        if caller == AUTOGRAD:
            current(group).check_gradients(name)
        if signature is None and autocasts and autocast.enabled():
            if caller == TORCH:
                with autocast.off():
                    return made(**given)
            if registered is None or not function_modes():  # which see a call as it is written
                return autocast.run(made, name, given)
        if signature is None and registered is not None and _seen(given.values()):
            return registered(**given | {"group": group_name(group)})
        steps = Steps(None if signature is None else values, like)
        run = in_torchs(kernel) if caller == TORCH else kernel
        result = run(**given, steps=steps)
        if signature is not None:
            steps.learn(signature, result)
            steps.note(name + _BY_TORCH.get(caller, ""), given, result)
        return result

    def named(values: tuple[Any, ...]) -> Any:
        if not profiling.wanted():
            return NotImplemented
        with profiling.named(range_name or name):
            return made(*values)

    # Below torch's dispatcher nothing is left of autocast.
    autocasts = caller == USER or registered is not None
    functions = _BESIDE_AUTOCAST if autocasts else _FUNCTIONS
    made = _op(name, parameters, defaults, caller, python, named, any_rows, family, functions)
    if caller in (USER, TORCH):
        native_ops[name + _BY_TORCH.get(caller, "")] = made
    return made


def _op(
    name: str,
    parameters: Sequence[str],
    defaults: Sequence[Any],
    caller: int,
    python: Callable[..., Any],
    named: Callable[..., Any] = lambda values: NotImplemented,
    any_rows: Sequence[str] = (),
    family: Sequence[str] = (),
    functions: dict[str, Any] | None = None,
) -> Op:
    return Op(
        name=name,
        parameters=tuple(parameters),
        defaults=tuple(defaults),
        group=[*parameters].index("group"),
        caller=caller,
        functions=functions or _FUNCTIONS,
        paths=worlds.paths,
        python=python,
        profiler=profiler.__dict__,
        profiling=profiling.__dict__,
        named=named,
        any_rows=frozenset(map([*parameters].index, any_rows)),
        family=frozenset(map([*parameters].index, family)),
    )


_FUNCTIONS = native_functions("cpu")
_BESIDE_AUTOCAST = {**_FUNCTIONS, "quiet": (*_FUNCTIONS["quiet"], (autocast.enabled, False))}
"""The same for callers that autocast may reach: the native path is taken where it is off."""


_USUAL = frozenset((Tensor, Parameter, type(None), bool, int, float, str, torch.dtype))
"""Types of arguments none of which is a tensor of a subclass."""


def _seen(values: Iterable[Any]) -> bool:
    """Return whether torch has to see a call, functions' modes among it. Unsupported: a transform
    differentiates."""
    unfolded = [x for each in values for x in (each if isinstance(each, list) else (each,))]
    return seen_by_torch(*unfolded) or bool(function_modes())


def _function(
    name: str, op: Op, positional: int, keywords: Sequence[str], save: Any, backward: Any
) -> type[Function]:
    """Make the class that records a call for gradients. ``save`` and ``backward`` find what
    :func:`torch.library.register_autograd` would show them.

    Args:
        op: makes the call. keywords: names of the arguments behind the first ``positional`` ones.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(keywords, inputs[positional:], strict=True))
        save(ctx, inputs=inputs[:positional], keyword_only_inputs=given, output=output)

    def differentiate(ctx: Any, *of_outputs: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:positional]
        try:
            with autocast.off():
                found = backward(ctx, *of_outputs)
        finally:
            ctx.needs_input_grad = needs
        found = found if isinstance(found, tuple) else (found,)
        return (*found, *(None,) * (len(needs) - len(found)))

    members = {
        "forward": staticmethod(op),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(differentiate),
    }
    return types.new_class(name, (Function,), exec_body=lambda names: names.update(members))


_LIBRARY = torch.library.Library("mkernel", "FRAGMENT")  # type: ignore[no-untyped-call]
ops = SimpleNamespace()
"""The ops by their names, as the package calls them outside of compiled functions: like
``torch.ops.mkernel``, and faster where torch need not see the call."""
_KERNELS = SimpleNamespace()
torch.ops.mkernel.__dict__["kernels"] = _KERNELS  # as Inductor's code names it
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
    range_name: str = "",
    local: Local | None = None,
    any_rows: Sequence[str] = (),
    family: Sequence[str] = (),
) -> None:
    """Define an op.

    Args:
        schema: torch's, without a namespace: ``name(Tensor a, ...) -> Tensor``.
        kernel: of :func:`native_op`, where it communicates; else runs the op on plain tensors.
        fake: gives its outputs' shapes and dtypes.
        save, backward: as :func:`torch.library.register_autograd` takes them; without them a tensor
            that requires grad is an error of torch's.
        flops: of its products on one rank (:mod:`mkernel.ops.flops`); None: it multiplies nothing.
        communicates: whether peers wait for its kernel.
        range_name, local, any_rows, family: as :func:`native_op` takes them.
    """
    name = schema.partition("(")[0]
    qualified = f"mkernel::{name}"
    _LIBRARY.define(schema, tags=(_STRIDES,))  # type: ignore[no-untyped-call]
    registered = getattr(torch.ops.mkernel, name)
    op = registered.default
    arguments = op._schema.arguments
    parameters = [each.name for each in arguments]
    positional = sum(not each.kwarg_only for each in arguments)
    # Torch's schema has no default of the group, which comes last; the user's is the default world.
    defaults = [*(each.default_value for each in arguments if each.has_default_value()), None]

    def made(caller: int, **more: Any) -> Op:
        return native_op(
            name, parameters, defaults, kernel, caller,
            range_name=range_name, any_rows=any_rows, family=family, **more,
        )  # fmt: skip

    quick: Any = registered
    differentiable = save is not None and backward is not None
    derivative = None if backward is None else _derivative(backward)
    if communicates:
        _LIBRARY.impl(name, made(TORCH), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        setattr(_KERNELS, name, made(TORCH, registered=registered))
        quick = made(USER, registered=registered, local=local)
    if communicates and differentiable:
        # What torch itself would register: it sees to what is not just computed.
        make = autograd.make_autograd_impl(op, autograd.Info(derivative, save))

        def records(*values: Any, **given: Any) -> Any:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*values):
                current(given.get("group")).check_gradients(name)
            return make(*values, **given)

        graph = _op(name, parameters, defaults, GRAPH, records, any_rows=any_rows)
        _LIBRARY.impl(name, graph, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        if not any("List" in str(each.type) for each in arguments):
            function = _function(
                name, made(AUTOGRAD), positional, parameters[positional:], save, backward
            )
            for each in (quick, graph):
                each.records(super(Function, function).apply)  # type: ignore[misc]
    elif derivative is not None:
        torch.library.register_autograd(qualified, derivative, setup_context=save, lib=_LIBRARY)
    if not communicates:
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(  # type: ignore[no-untyped-call]
        name, lambda *_, **__: refuse_transform(name), "FuncTorchDynamicLayerFrontMode"
    )
    for key in autocast.KEYS:
        _LIBRARY.impl(name, _cast_call(op, parameters), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, _asked(fake) if communicates else fake, lib=_LIBRARY)
    if flops is not None:
        register_flop_formula(registered)(flops)
    setattr(ops, name, quick)
    if communicates:
        effects._register_effectful_op(op, _ORDERED.ORDERED)
        inductor.keep_order(op, _ORDERED.ORDERED)
        checkpointing.save_outputs(op, _LIBRARY)


def _cast_call(op: Any, parameters: Sequence[str]) -> Callable[..., Any]:
    """Make the kernel of an op that torch's dispatcher calls where autocast is on."""

    def call(*positional: Any, **keywords: Any) -> Any:
        given = dict(zip(parameters, positional, strict=False)) | keywords
        return autocast.run(op, op._opname, given)

    return call


def _derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a derivative compute in the dtypes of its forward, whether autocast is on or off."""

    def differentiate(ctx: Any, *of_outputs: Any) -> Any:
        with autocast.off():
            return backward(ctx, *of_outputs)

    return differentiate


def register_composite(schema: str, function: Callable[..., Any]) -> None:
    """Define an op that is a function of tensors which calls other ops: torch's compilers call the
    function, where they would else read its code."""
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


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


def called(group: Group) -> tuple[Any, str | Group]:
    """Return the ops as a call from here must name them, and the world's name as they take it:
    ``torch.ops.mkernel`` where torch traces the call, else :data:`ops`."""
    if torch.compiler.is_compiling() or dispatch_modes():
        return torch.ops.mkernel, group_name(group)
    return ops, group


group_name.__dict__["_dynamo_marked_constant"] = (
    True  # a compiled function calls into the world it saw
)
