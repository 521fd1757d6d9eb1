"""The tensors that an op takes: those whose memory a kernel may read and write by its address alone.

Kernels see addresses. What a tensor carries besides its memory (a graph for gradients, a subclass's
own behaviour, a transform, a mode that stands in for the data) would be lost without a word, or the
address would be null, so such calls are refused until the ops are registered with torch.

Of a DTensor a rank's part is taken where it is sharded as an op takes it. An op's arguments are each
rank's own part, and so are its results. Gradients go back through ``DTensor.to_local``: that of a
sharded argument is sharded alike, that of a replicated one the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mkernel.errors import ArgumentError, Unsupported
from mkernel.world.groups import Group, global_ranks
from mkernel.world.lifecycle import current
from mkernel.world.torch_state import dispatch_modes, function_modes, tracing, transforms

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_USUAL_FUNCTIONS = (
    getattr_static(Tensor, "__torch_function__"),
    torch._C._disabled_torch_function_impl,
)
_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def plain(op: str, names: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check the arguments of a call, and return each as a plain tensor, or as it is if it is none.

    A result of a functional collective that is still under way (``AsyncCollectiveTensor``) is awaited.

    Raises:
        ArgumentError: a tensor that requires grad (in grad mode) or has a forward-mode tangent; one of
            a subclass with a ``__torch_function__`` or ``__torch_dispatch__`` of its own, fake tensors
            and DTensor among them; one without dense memory of its own.
        Unsupported: the call is inside a mode or transform that has to see or trace what it does.
    """
    if just_computing() and _usual(values):  # in nearly every call; it costs a microsecond
        return values
    _refuse_surroundings(op)
    with torch._C.DisableTorchFunction():  # a default device is a mode, which each look would enter
        if forward_ad._current_level < 0 and _usual(values):
            return values
        return tuple(
            _examined(name, value) if isinstance(value, Tensor) else value
            for name, value in zip(names, values, strict=True)
        )


_TRANSFORM = "a transform of torch.func (grad, vmap, jvp, functionalize, ...)"


def seen_by_torch(*values: Any) -> bool:
    """Return whether torch has to see the call of a registered op: it records a graph for gradients, or
    it traces, or a mode of it stands in for the data.

    Raises:
        Unsupported: a transform of torch.func differentiates, for which no op is registered.
    """
    if torch.compiler.is_compiling() or dispatch_modes() or tracing():
        return True
    if torch.is_grad_enabled():
        for value in values:  # in every call: a generator would double the time
            if isinstance(value, Tensor) and value.requires_grad:
                if transforms() is not None:
                    raise _refused("a derivative of an op", _TRANSFORM, "call backward instead")
                return True
    return False


def refuse_transform(op: str) -> NoReturn:
    """Raise Unsupported: a transform of torch.func came upon a registered op, for which it knows no
    rule. It would call the kernel with the values alone, and take derivatives along them for zero."""
    raise _refused(op, _TRANSFORM, "call the op outside of it")


def just_computing() -> bool:
    """Return whether no mode, trace, transform or forward-mode derivative of torch is active."""
    return (
        not (dispatch_modes() or function_modes() or tracing())
        and transforms() is None
        and forward_ad._current_level < 0
    )


def _usual(values: tuple[Any, ...]) -> bool:
    """Return whether none of the arguments needs a closer look."""
    try:
        for value in values:
            if value is None or value is False or value is True:
                continue
            kind = type(value)
            if (
                (kind is not Tensor and kind is not Parameter)
                or (value.requires_grad and torch.is_grad_enabled())
                or not value.data_ptr()
                or value.is_nested
                or value.is_neg()
            ):
                return False
    except RuntimeError:  # without a storage there is no address
        return False
    return True


def _examined(name: str, value: Tensor) -> Tensor:
    """Return a ``value`` that an op takes; else raise what is wrong with it, and what to do."""
    kind = type(value)
    if _is_batch(value):
        raise ArgumentError(
            name,
            "a batch of gradients (is_grads_batched=True, or a vectorized Jacobian)",
            "one gradient: call torch.autograd.grad for each by itself",
            why="an op is one call on every rank, and knows no batches of calls",
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            name,
            f"a {kind.__name__} that requires grad",
            f"a tensor without gradient: call under torch.no_grad(), or pass {name}.detach(); where "
            "out= is given, leave it away",
            why="called like this, the op has no backward: the gradient would be lost",
        )
    if _has_own_behaviour(kind):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(value, AsyncCollectiveTensor):
            return _examined(name, value.trigger_wait())  # type: ignore[no-untyped-call]
        raise ArgumentError(
            name,
            f"a {kind.__module__}.{kind.__qualname__}",
            f"a plain torch.Tensor: {_remedy(value)}",
            why="kernels would bypass its __torch_function__ or __torch_dispatch__",
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise ArgumentError(
            name,
            "a tensor of a torch.func transform",
            "a plain tensor: call outside of torch.func.grad, vmap and the like",
            why="it has no memory of its own",
        )
    if value.layout is not torch.strided or value.is_nested:
        found = "nested" if value.is_nested else str(value.layout)
        raise ArgumentError(
            name, f"a {found} tensor", f"a dense one: pass {name}.to_dense(), or a padded copy"
        )
    if value.is_neg():
        raise ArgumentError(
            name,
            "a negated view",
            f"pass {name}.resolve_neg()",
            why="its memory holds other signs than it shows",
        )
    if _has_tangent(value):
        raise ArgumentError(
            name,
            "a tensor with a forward-mode tangent",
            f"a tensor without one: pass {name}.detach()",
            why="mkernel has no forward-mode derivatives yet: the tangent would be lost",
        )
    if not _has_memory(value):
        raise ArgumentError(name, "a tensor without memory", "one with data of its own")
    return value


def _has_tangent(value: Tensor) -> bool:
    """Return whether torch would differentiate along ``value`` in forward mode.

    Where torch calls a kernel it hides tangents: inside an ``autograd.Function``, which records an
    operand that requires grad, forward mode is off, and torch looks for tangents when the kernel is
    over; a compiled graph excludes the dispatch keys that unpack them.
    """
    if forward_ad._current_level < 0:
        return False
    with (
        forward_ad._set_fwd_grad_enabled(not torch.is_inference_mode_enabled()),
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _NO_KEYS),
    ):
        return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


_is_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda value: False)
"""Tells whether a tensor is one that torch differentiates a batch of gradients with."""


def _has_own_behaviour(kind: type[Tensor]) -> bool:
    """Return whether a subclass changes what torch does with its tensors. ``nn.Parameter`` does not."""
    return (
        getattr_static(kind, "__torch_function__") not in _USUAL_FUNCTIONS
        or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    )


def _has_memory(value: Tensor) -> bool:
    if value.is_meta or not value.numel():
        return True  # refused later, as what they are: by device or shape
    try:
        return value.data_ptr() != 0
    except RuntimeError:  # no storage
        return False


def _remedy(value: Tensor) -> str:
    if hasattr(value, "to_local"):
        return "pass its local shard, .to_local()"
    if hasattr(value, "fake_mode"):
        return "fake tensors have no data; call with real ones, outside of FakeTensorMode"
    return "pass the tensor inside of it"


def _refuse_surroundings(op: str) -> None:
    """Raise Unsupported where torch is not just computing."""
    where = None
    if dispatch_modes():
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        where = type(modes[-1]).__name__
    elif transforms() is not None:
        where = _TRANSFORM
    elif tracing():
        where = "torch.jit.trace"
    else:  # torch.set_default_device and `with torch.device(...)` are such modes, and harmless
        for mode in torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if not isinstance(mode, torch.utils._device.DeviceContext):
                where = type(mode).__name__
    if where is not None:
        raise _refused(op, where, "call the op outside of it")


def _refused(what: str, where: str, remedy: str) -> Unsupported:
    return Unsupported(
        f"{what} inside {where} is not supported, because kernels compute without its knowledge; "
        f"{remedy}"
    )


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


def local(name: str, value: Any, dim: int | None, group: Group) -> Any:
    """Return ``value``, or the part of a DTensor that is on this rank.

    Args:
        dim: along which the op takes it sharded, as torch counts them; None: it takes it replicated.

    Raises:
        ArgumentError: a DTensor that is placed otherwise, or on other ranks than the group's.
    """
    kind = type(value)
    if kind is Tensor or kind is Parameter or not isinstance(value, Tensor):
        return value
    if not (hasattr(value, "placements") and hasattr(value, "device_mesh")):
        return value  # of another subclass, which is refused where it is examined
    sharded: Any = value
    mesh, placements = sharded.device_mesh, sharded.placements
    if mesh.ndim != 1 or not _is_of_group(mesh, group):
        raise ArgumentError(
            name,
            f"a DTensor on {mesh}",
            "one on a 1-D mesh of the ranks of the group, in their order; else pass its local part, "
            ".to_local()",
        )
    if dim is not None and dim < 0:
        dim += value.dim()
    fits = placements[0].is_replicate() if dim is None else placements[0].is_shard(dim)
    if not fits:
        wanted = "Replicate()" if dim is None else f"Shard({dim})"
        raise ArgumentError(
            name,
            f"a DTensor placed {tuple(placements)}",
            f"{wanted}: call .redistribute(placements=[{wanted}]), or pass what is this rank's part "
            "in the op's sense, .to_local()",
        )
    part = sharded.to_local()
    if dim is not None and part.shape[dim] * mesh.size() != value.shape[dim]:
        raise ArgumentError(
            name,
            f"a DTensor of {tuple(value.shape)}",
            f"one that {mesh.size()} ranks can share evenly along dimension {dim}",
        )
    return part


def _is_of_group(mesh: DeviceMesh, group: Group) -> bool:
    """Return whether a mesh of one dimension has the ranks of a group's world."""
    world = current(group)
    if mesh.size() != world.size or mesh.get_local_rank() != world.rank:
        return False
    names = torch.distributed.distributed_c10d._world.pg_names.values()
    if world.name not in names:  # it was made of all ranks
        return mesh.size() == torch.distributed.get_world_size()
    name: Any = world.name
    of_world = torch.distributed.distributed_c10d._resolve_process_group(name)
    return global_ranks(mesh.get_group()) == global_ranks(of_world)


_is_of_group.__dict__["_dynamo_marked_constant"] = True  # meshes and worlds stay what they are
