"""The lowering of ops by Inductor: the order of communicating ones, and what its code calls.

Inductor adds a dependency from each effectful op to the one before. In torch 2.13 it notes it under the
name of the op's buffer and looks it up under that of the operation, so that it is lost, and ops whose
outputs do not depend on each other are launched in any order: on ranks whose programs differ, in
different ones. Here it is noted under the right name; where torch does so too, this adds nothing.

Ops that a pass put into a graph after differentiation have no token there. They take their places among
the others when they are lowered.

The code that Inductor writes in Python calls what an op is registered with
(``torch.ops.mkernel.kernels``) and not torch's dispatcher, which costs the host more than all of ours
before the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from mkernel.errors import Unsupported

_waiting: list[tuple[OpOverload, Any]] = []
_lowerings: list[tuple[OpOverload, Callable[..., Any]]] = []


def keeps_order() -> bool:
    """Return whether Inductor has something to note an order in. That of torch 2.6 has not, so ranks
    would call ops in different orders."""
    from torch._inductor.graph import GraphLowering

    return "additional_star_deps" in GraphLowering.__init__.__code__.co_names


def require_order() -> None:
    """Raise Unsupported if this Inductor keeps no order."""
    if not keeps_order():
        raise Unsupported(
            f"the Inductor of torch {torch.__version__} keeps no order between communicating ops; take "
            "a newer torch (2.13 was tried), compile with backend='aot_eager', or call ops eagerly"
        )


def keep_order(op: OpOverload, effect: Any) -> None:
    """Keep the order of this op's calls too from now on, among those of the same effect."""
    _waiting.append((op, effect))


def lower(op: OpOverload, lowering: Callable[..., Any]) -> None:
    """Have Inductor lower an op that does not communicate by this function of its own values."""
    _lowerings.append((op, lowering))


def teach(*, load: bool = False) -> None:
    """Teach Inductor the ops, before they are lowered. ``load``: import Inductor, which takes seconds;
    else, where nobody has imported it, nothing is being lowered."""
    if (_waiting or _lowerings) and (load or "torch._inductor.lowering" in sys.modules):
        from torch._inductor.lowering import fallback_handler, register_lowering

        while _lowerings:
            op, lowering = _lowerings.pop()
            register_lowering(op, type_promotion_kind=None)(lowering)
        while _waiting:
            op, effect = _waiting.pop()
            lower = fallback_handler(op)  # type: ignore[no-untyped-call]
            register_lowering(op, type_promotion_kind=None)(_ordered(op, effect, lower))
            _refuse_without_order(op)


def _refuse_without_order(op: OpOverload) -> None:
    """Refuse the op where this Inductor keeps no order. Torch 2.6 lowers an op with a token by itself,
    and would merge calls whose inputs are equal."""
    from torch._inductor.lowering import lowerings

    if keeps_order():
        return
    effects = torch.ops.higher_order.with_effects
    lower = lowerings[effects]

    def refused(token: Any, called: OpOverload, *arguments: Any, **keywords: Any) -> Any:
        if called is op:
            require_order()
        return lower(token, called, *arguments, **keywords)

    lowerings[effects] = refused


def _ordered(op: OpOverload, effect: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(*arguments: Any, **keywords: Any) -> Any:
        from torch._inductor.virtualized import V

        require_order()
        graph = V.graph
        first = len(graph.operations)
        result = lower(*arguments, **keywords)
        made: list[Any] = graph.operations[first:]
        _call_kernel(op, made, graph)
        for before in graph.effectful_ops.values():
            for each in made:
                graph.additional_star_deps[each.get_operation_name()].add(before.get_name())
        if graph.current_node.target is op:  # without a token, for which torch would do this
            for each in made:
                each.has_side_effects = lambda: True
            graph.effectful_ops[effect] = made[-1]
        return result

    return lowered


def _call_kernel(op: OpOverload, made: list[Any], graph: Any) -> None:
    """Have the code of these operations call the op's kernel itself, where that code is Python."""
    if graph.cpp_wrapper or getattr(graph, "fx_wrapper", False):
        return
    for each in made:
        if getattr(each, "op_overload", None) is op:
            each.python_kernel_name = f"torch.ops.mkernel.kernels.{op._opname}"
