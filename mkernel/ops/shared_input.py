"""Products of column-parallel layers that are called with the same input, as q, k and v are.

The layers know nothing of each other; they are called one after another, with one tensor. The first one
gathers it, and the others multiply what it gathered:

    y_i = AG(x) @ w_i^T    dx = RS([dy_0 | dy_1 ..] @ [w_0; w_1; ..])    dw_i = dy_i^T @ AG(x)

Where all ranks have x, nothing is gathered, and dx is the AllReduce of that product.

In backward each layer leaves its term (dy_i, w_i) with the node of the input, which torch runs after
all layers that the loss depends on. An edge without elements leads there from each of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import linear
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mkernel.errors import DtypeError
from mkernel.ops import autocast, validate
from mkernel.ops.around import as_rows, shaped
from mkernel.ops.derivatives import own_product
from mkernel.ops.registration import group_name, ops, register_composite
from mkernel.plan.invariance import resolved
from mkernel.world.lifecycle import current
from mkernel.world.torch_state import dispatch_modes, stream_of

_NO_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def shared_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, split: int | None, group: str, layer: object
) -> Tensor:
    """Compute x @ weight^T + bias of the gathered x, with this rank's ``weight`` and ``bias``.

    Collective; whether it communicates depends on the calls before, which are the same on all ranks.

    Args:
        x: this rank's part, or a DTensor of which it is.
        split: the dimension along which ranks have parts of x; None: each has all of it.
        layer: whose product it is. When it multiplies the same x again, it gathers again: what is run
            twice (a checkpointed region, a captured graph) communicates as it did before.

    Raises:
        The errors of :func:`mkernel.all_gather_gemm`.
    """
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.mkernel.shared_product(x, weight, bias, split, group_name(group))
        return made
    return _product(x, weight, bias, split, group, layer)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: int | None,
    group: str,
    layer: object = None,
) -> Tensor:
    cast = autocast.enabled()
    if cast:
        weight, bias = autocast.cast([weight, bias])
    shared = _shared(x, split, group, layer)
    if cast:
        x = shared.cast(x)
    given = (x, weight, bias)
    try:
        if torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in given
        ):
            gradient = shared.gradient(x) if x.requires_grad else None
            edge = None if gradient is None else gradient.edge
            found: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                edge, weight, bias, lambda: shared.product(*given), gradient, split
            )
            return found
        if split is None or shared.key:
            return shared.product(*given)[0]
        alone: Tensor = ops.all_gather_gemm(
            _local(x), weight.t(), bias, gather_dim=split, group=group
        )
        return alone
    except DtypeError as error:
        if not cast:
            raise
        raise autocast.explained(error, "shared_product", {"x": x}) from None


# ---- what layers share ---------------------------------------------------------------------------


class _Terms(dict[int, list[tuple[Tensor, Tensor]]]):
    """The terms of an input's gradient, by pass of backward: one may run inside another."""

    def of_this_pass(self) -> list[tuple[Tensor, Tensor]]:
        """Return the terms of the pass that runs, with which they go."""
        task = torch._C._current_graph_task_id()
        if task not in self:
            self[task] = []
            Variable._execution_engine.queue_callback(lambda: self.__delitem__(task))
        return self[task]


class _Gradient:
    """The gradient of an input. ``edge``: a tensor without elements, whose node computes it."""

    def __init__(self, x: Tensor, split: int | None, group: str) -> None:
        self.terms = _Terms()
        self.edge: Tensor = _Input.apply(x, self.terms, split, group)  # type: ignore[no-untyped-call]


class _Shared:
    """An input that a layer has multiplied, as the next ones find it.

    It holds neither the input nor its graph: layers' nodes hold the gradient. What was gathered lives
    no longer than the input, or until layers multiply another one.

    Attributes:
        key: of the input as it is now; empty: nothing is shared of it.
        layers: weak references to those that have multiplied it.
        alive: a weak reference to it.
        whole: all ranks' parts of it, once they are gathered, or autocast has cast them.
    """

    def __init__(self, key: tuple[Any, ...], split: int | None, group: str) -> None:
        self.key = key
        self.layers: list[Any] = []
        self.alive: Any = None
        self._split, self._group = split, group
        self.whole: Tensor | None = None
        self._gradient: Callable[[], _Gradient | None] = lambda: None

    def cast(self, x: Tensor) -> Tensor:
        """Return the input as autocast has it, if anything of it is still to be read."""
        differentiated = x.requires_grad and torch.is_grad_enabled()
        if self.whole is not None and (not differentiated or self._gradient() is not None):
            return x
        made: Tensor = autocast.cast(_local(x))
        return made

    def gradient(self, x: Tensor) -> _Gradient:
        found = self._gradient()
        if found is None:
            found = _Gradient(_local(x), self._split, self._group)
            self._gradient = weakref.ref(found)
        return found

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute a layer's product; return it with the gathered input."""
        dim, whole, cast = self._split or 0, self.whole, autocast.enabled()
        # Not views for torch: programs may write to what a layer returns.
        with torch._C._ExcludeDispatchKeyGuard(_NO_VIEWS), autocast.off():
            if whole is None and self._split is not None:
                c, self.whole = ops.all_gather_gemm_gathered(
                    _local(x), weight.t(), bias, gather_dim=dim, group=self._group
                )
                return c, self.whole
            whole = _local(x) if whole is None else whole
            if cast:
                self.whole = whole.detach()
            validate.same_dtype("weight.dtype", weight, "x", whole)
            promised = resolved(None, current(self._group).settings) is not None
            y = _linear(as_rows(whole, dim), weight, bias, promised)
            return _from_rows(y, whole.shape, dim), whole


_LAST = threading.local()
"""The last input that a thread's layers multiplied."""


def _shared(x: Tensor, split: int | None, group: str, layer: object) -> _Shared:
    """Return what this thread's layers share if they are called with ``x`` now."""
    plain = getattr(x, "_local_tensor", x)
    stream, capturing = stream_of(plain.device)
    # A graph may be replayed without that of another layer, which gathered what both multiply.
    capture = current(group).capture() if capturing else 0
    if plain.is_inference() or (capturing and capture == 0):  # torch counts no changes of the first
        return _Shared((), split, group)
    modes = _get_current_dispatch_mode_stack() if dispatch_modes() else ()
    around = stream, capture, [weakref.ref(mode) for mode in modes]
    dtype = autocast.dtype_of(plain) if autocast.enabled() else None
    key = (id(x), plain._version, split, group, dtype, *around)
    mine = None if layer is None else weakref.ref(layer)
    found: _Shared | None = getattr(_LAST, "shared", None)
    if found is None or found.key != key or (mine is not None and mine in found.layers):
        found = _LAST.shared = _Shared(key, split, group)
        found.alive = weakref.ref(x, partial(_forget, weakref.ref(found)))
    found.layers.append(mine)
    return found


def _forget(shared: Callable[[], _Shared | None], gone: object) -> None:
    """Forget an input that is gone, perhaps in another thread."""
    found = shared()
    if found is not None:
        found.key, found.whole = (), None


def _local(x: Any) -> Tensor:
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, promised: bool) -> Tensor:
    """Compute a product with float32 sums, rounded once, and again with a bias where results are
    promised to be invariant, as the op has it that gathers. Selective checkpointing may save what
    torch's op returns, so that it has no ``out``."""
    if promised:
        y = own_product(rows, weight.t(), promised)
        return y if bias is None else y + bias
    if rows.dtype != torch.float16 or rows.device.type != "cpu":
        return linear(rows, weight, bias)
    return linear(rows.float(), weight.float(), None if bias is None else bias.float()).half()


def _from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Return rows, ``dim`` outermost, as a tensor of a shape but for its last dimension."""
    return shaped(rows, [shape[dim], *shape[:dim], *shape[dim + 1 : -1]], dim)


# ---- derivatives ---------------------------------------------------------------------------------


class _Product(Function):
    """The product of a layer, whose derivative leaves that of the input to :class:`_Input`."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        multiply: Callable[[], tuple[Tensor, Tensor]],
        gradient: _Gradient | None,
        split: int | None,
    ) -> Tensor:
        y, whole = multiply()
        ctx.set_materialize_grads(False)
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(weight if of_x else None, whole if of_weight else None)
        ctx.gradient, ctx.dim, ctx.dtype = gradient, split or 0, weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor | None) -> Any:
        nothing = (None,) * 6
        if of_y is None:
            return nothing
        weight, whole = ctx.saved_tensors
        rows = as_rows(of_y.to(ctx.dtype), ctx.dim)
        if weight is not None:
            ctx.gradient.terms.of_this_pass().append((rows, weight))
        of_weight = None
        if whole is not None:
            with autocast.off():
                of_weight = rows.t() @ as_rows(whole, ctx.dim)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, of_weight, of_bias, *nothing[3:]


class _Input(Function):
    """The input of layers. Its derivative is one sum over ranks of what they left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: _Terms, split: int | None, group: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.terms, ctx.split, ctx.group, ctx.shape = terms, split, group, x.shape
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_edge: Tensor | None) -> Any:
        terms = ctx.terms.of_this_pass()
        if not terms:  # gradients of all products are undefined
            return (None,) * 4
        left, right = ([*each] for each in zip(*terms, strict=True))
        terms.clear()
        a = left[0] if len(left) == 1 else torch.cat(left, 1)
        b = right[0] if len(right) == 1 else torch.cat(right)
        with autocast.off():
            if ctx.split is None:
                of_x = ops.gemm_all_reduce(a, b, group=ctx.group)
            else:
                of_x = ops.gemm_reduce_scatter(a, b, group=ctx.group)
        return _from_rows(of_x, ctx.shape, ctx.split or 0), None, None, None


register_composite(
    "shared_product(Tensor x, Tensor weight, Tensor? bias, int? split, str group) -> Tensor",
    _product,
)
