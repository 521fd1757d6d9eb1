"""The compiler pass: residual and RMSNorm after a row-parallel layer, and products beside the gathers
and scatters of sequence parallelism.

    all-reduced product, fused_add_rms_norm       gemm_all_reduce_norm
    all_gather along tokens, [slice], product     all_gather_gemm, [slice]
    product, [pad], reduce_scatter along tokens   [pad], gemm_reduce_scatter

vLLM cuts the gathered tokens to as many as there are, and pads those to scatter; rows do not depend on
each other, so both move to the other side of the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm.ir.ops  # noqa: F401 - defines torch.ops.vllm_ir
from torch.fx import Graph, Node
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_mkernel import ops

aten = torch.ops.aten


def install(config: VllmConfig | None) -> None:
    """Add the pass to those of a model that is being made, by the entry of vLLM's configuration for a
    pass of the user's. Where it is taken, a warning says so, and the pass does not run."""
    if config is None:
        return
    passes = config.compilation_config.inductor_compile_config
    present = passes.setdefault(current_platform.pass_key, FusesProducts())
    if not isinstance(present, FusesProducts):
        ops.warn_once(
            type(present),
            "%s of inductor_compile_config is %s already: norms, gathers and scatters are not fused",
            current_platform.pass_key,
            type(present).__name__,
        )


class FusesProducts(InductorPass):
    """The pass, which vLLM runs behind its own, on each graph after differentiation."""

    def __call__(self, graph: Graph) -> None:
        matches = VllmPatternMatcherPass.match_table  # which vLLM logs
        for node in list(graph.nodes):
            fuse = _FUSED.get(node.target)
            if fuse is not None:
                matches[fuse.__name__] += fuse(graph, node)

    def uuid(self) -> Any:
        """Return what the compiled code depends on, for caches: the source of pass and ops."""
        return self.hash_source(*(Path(each).read_text() for each in (__file__, ops.__file__)))


def mkernel_norm(graph: Graph, norm: Node) -> bool:
    """Fuse residual and norm with the layer before, if it is one of ours. Return whether it was."""
    total, residual, weight = (_argument(norm, name) for name in ("x", "x_residual", "weight"))
    fits = (
        isinstance(total, Node)
        and total.target is ops.GEMM_ALL_REDUCE
        and len(total.users) == 1
        and isinstance(weight, Node)
        and _argument(norm, "variance_size") is None
        and len({_value(each).dtype for each in (total, residual, weight)}) == 1
    )
    if fits:
        x, b, bias, group = total.args
        given = (x, b, bias, residual, weight, _argument(norm, "epsilon"), group)
        _replace(graph, norm, ops.GEMM_ALL_REDUCE_NORM, given)
        graph.erase_node(total)
    return fits


def mkernel_gather(graph: Graph, gather: Node) -> bool:
    """Fuse a gather of tokens with its product, if it has one alone. Return whether it had."""
    users = list(gather.users)
    cut = users[0] if len(users) == 1 and users[0].target is aten.slice.Tensor else None
    if cut is not None:
        users = list(cut.users)
        starts = _argument(cut, "dim"), _argument(cut, "start"), _argument(cut, "step")
        if starts not in ((0, 0, 1), (0, None, 1)):
            return False
    rows = cut or gather
    product = _product(users[0]) if len(users) == 1 else None
    if product is None or product[0] is not rows or product[1] is rows or not _tokens(gather):
        return False
    _, b, bias = product
    x, ranks, group = (_argument(gather, name) for name in ("tensor", "world_size", "group_name"))
    if cut is None:
        _replace(graph, users[0], ops.ALL_GATHER_GEMM, (x, b, bias, ranks, group))
    else:
        with graph.inserting_before(users[0]):
            whole = graph.call_function(ops.ALL_GATHER_GEMM, (x, b, bias, ranks, group))
        shape = _value(gather).shape[0], _value(b).shape[1]
        whole.meta["val"] = _value(users[0]).new_empty(shape)
        _replace(graph, users[0], aten.slice.Tensor, (whole, *cut.args[1:]))
        graph.erase_node(cut)
    graph.erase_node(gather)
    return True


def mkernel_scatter(graph: Graph, scatter: Node) -> bool:
    """Fuse a scatter of tokens with the product before, if there is one. Return whether there was."""
    rows = _argument(scatter, "tensor")
    pad = rows if rows.target is aten.constant_pad_nd.default else None
    if pad is not None:
        rows, (sides, value) = pad.args[0], (_argument(pad, "pad"), _argument(pad, "value"))
        if list(sides[:3]) != [0, 0, 0] or len(sides) != 4 or value != 0:
            return False
    product = _product(rows)
    alone = len(rows.users) == 1 and (pad is None or len(pad.users) == 1)
    # A bias would be added on every rank here, and once by mkernel; vLLM has no such layer.
    if product is None or product[2] is not None or not alone or not _tokens(scatter):
        return False
    a, b, _ = product
    ranks, group = _argument(scatter, "world_size"), _argument(scatter, "group_name")
    if pad is not None:
        with graph.inserting_before(scatter):
            padded = graph.call_function(pad.target, (a, *pad.args[1:]), pad.kwargs)
        padded.meta["val"] = _value(a).new_empty(_value(pad).shape[0], _value(a).shape[1])
        a = padded
    _replace(graph, scatter, ops.GEMM_REDUCE_SCATTER, (a, b, ranks, group))
    for node in (pad, rows):
        if node is not None:
            graph.erase_node(node)
    return True


_FUSED = {
    torch.ops.vllm_ir.fused_add_rms_norm.default: mkernel_norm,
    torch.ops.vllm.all_gather.default: mkernel_gather,
    torch.ops.vllm.reduce_scatter.default: mkernel_scatter,
}


def _tokens(collective: Node) -> bool:
    """Return whether a collective is along the tokens of a matrix, in a group that has a world."""
    known = ops.knows(_argument(collective, "group_name"))
    return known and _argument(collective, "dim") == 0 and _value(collective).dim() == 2


def _product(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return a, b and bias of a product; None: the node is none."""
    if node.target is aten.mm.default:
        return node.args[0], node.args[1], None
    if node.target is aten.addmm.default:
        bias, a, b = node.args[:3]
        scaled = _argument(node, "beta") != 1 or _argument(node, "alpha") != 1
        return None if scaled or _value(bias).dim() != 1 else (a, b, bias)
    return None


def _replace(graph: Graph, node: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Put a call in the place of a node that has the same results."""
    with graph.inserting_before(node):
        made = graph.call_function(target, args)
    made.meta["val"] = node.meta["val"]  # the rest is of the arguments of the old call
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _value(node: Node) -> torch.Tensor:
    """Return the fake tensor that a node stands for."""
    return node.meta["val"]


def _argument(node: Node, wanted: str) -> Any:
    """Return an argument of an op by its name in the schema."""
    for place, each in enumerate(node.target._schema.arguments):
        if each.name == wanted:
            if place < len(node.args):
                return node.args[place]
            return node.kwargs.get(wanted, each.default_value)
    raise KeyError(wanted)
