"""Collectives and the products beside them, made calls of ``torch.ops.mkernel``.

A call takes matrices whose rows are in the order of ranks. Where a program gathers or scatters along
another dimension than the first, rows are put in that order before the call, or back after it, by ops
that the compiler fuses with those around them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from mkernel.async_tensor_parallel import patterns
from mkernel.async_tensor_parallel.patterns import (
    GATHER,
    REDUCE,
    SCATTER,
    Gather,
    NodeScales,
    Product,
    Sum,
    aten,
    value,
)
from mkernel.async_tensor_parallel.report import Decision, Report
from mkernel.errors import MkernelError, NotInitialized
from mkernel.ops.all_gather_gemm import OP as GATHER_OP
from mkernel.ops.gemm import GemmOp
from mkernel.ops.gemm_all_reduce import OP as REDUCE_OP
from mkernel.ops.gemm_reduce_scatter import OP as SCATTER_OP
from mkernel.ops.scales import Scaled
from mkernel.ops.symm_mem import dtype_of_sum
from mkernel.world.lifecycle import current
from mkernel.world.world import World


class _Left(Exception):
    """Why a collective is left as it is."""


def rewrite(graph: Graph, report: Report) -> None:
    """Rewrite what can be rewritten, in the graph's order, which is the same on all ranks; gathers of
    scales, which go with those of what they scale, after that."""
    patterns.join_waits(graph)
    for start in sorted(patterns.collectives(graph), key=patterns.gathers_scales):
        if start._erased:
            continue
        name, group = patterns.name(start), patterns.group_name(start)
        try:
            op = _rewritten(graph, start, group)
        except _Left as why:
            report.decisions.append(Decision(name, group, why=str(why)))
        else:
            report.decisions.append(Decision(name, group, op))
    graph.eliminate_dead_code()  # views for collectives that were left after all


def _rewritten(graph: Graph, start: Node, group: str) -> str:
    """The op that a collective became. _Left."""
    if start.target not in (GATHER, SCATTER, REDUCE):
        raise _Left("it is of another kind than functional collectives of one tensor")
    try:
        world = current(group)
    except NotInitialized:
        raise _Left("its group has no world: mkernel.init(group) before the compilation") from None
    if start.target is GATHER:
        gathered = patterns.gather(start, world.size)
        if gathered is None:
            raise _Left("something else uses it before it has ended")
        return _products_of_gather(graph, world, gathered)
    total = patterns.reduction(start, world.size)
    if total is None:
        raise _Left("something else uses it before it has ended")
    return _sum_of_products(graph, world, total)


# ---- nodes -----------------------------------------------------------------------------------------


def _call(graph: Graph, target: Any, *arguments: Any, **keywords: Any) -> Node:
    """A new node, with the fake tensor that it stands for."""
    node = graph.call_function(target, arguments, keywords)
    inputs, options = torch.fx.node.map_arg((arguments, keywords), value)
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves((inputs, options)))
    with mode or FakeTensorMode():
        node.meta["val"] = target(*inputs, **options)
    return node


def _reshaped(graph: Graph, node: Node, shape: Sequence[Any]) -> Node:
    """``shape`` has one symbolic size at most."""
    if value(node).dim() == len(shape) and all(map(patterns.equal, value(node).shape, shape)):
        return node
    sizes = [each if isinstance(each, int) else -1 for each in shape]
    return _call(graph, aten.reshape.default, node, sizes)


def _require_few_symbols(*nodes: Node) -> None:
    """_Left: a graph has no way to write down the shape of a tensor like one of them."""
    for node in nodes:
        if sum(not isinstance(size, int) for size in value(node).shape) > 1:
            raise _Left("more than one of its sizes is symbolic")


def _erase(graph: Graph, node: Node) -> None:
    """Take a node without users off the graph, and with it what was there for that node alone."""
    waiting, gone = [node], set()
    while waiting:
        each = waiting.pop()
        if each.op == "call_function" and not each.users and each not in gone:
            waiting.extend(each.all_input_nodes)
            graph.erase_node(each)
            gone.add(each)


def _permuted(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    same = list(order) == sorted(order)
    return node if same else _call(graph, aten.permute.default, node, list(order))


def _packed(graph: Graph, node: Node) -> Node:
    """``node`` in row-major memory."""
    if value(node).is_contiguous():
        return node
    return _call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)


def _right(graph: Graph, b: Node) -> Node:
    """``b`` in memory that ops take: row-major or column-major."""
    return b if value(b).t().is_contiguous() else _packed(graph, b)


def _rows_by_program(graph: Graph, rows: Node, shard: Sequence[Any], dim: int, ranks: int) -> Node:
    """``rows`` [W * rows of a shard, N], in the order of ranks, as the program orders them, which
    gathers shards of shape [*shard, _] along ``dim``."""
    columns = value(rows).shape[1]
    if dim == 0:
        return rows
    by_rank = _reshaped(graph, rows, [ranks, *shard, columns])
    order = list(range(1, len(shard) + 2))
    order.insert(dim, 0)
    return _reshaped(graph, _permuted(graph, by_rank, order), [ranks * math.prod(shard), columns])


def _rows_by_rank(graph: Graph, rows: Node, whole: Sequence[Any], dim: int, ranks: int) -> Node:
    """``rows`` [M, K] of a tensor [*whole, K], in the order of the ranks that keep them when it is
    scattered along ``dim``."""
    if dim == 0:
        return rows
    columns = value(rows).shape[1]
    cut = [*whole[:dim], ranks, whole[dim] // ranks, *whole[dim + 1 :], columns]
    order = list(range(len(cut)))
    order.remove(dim)
    moved = _permuted(graph, _reshaped(graph, rows, cut), [dim, *order])
    return _reshaped(graph, moved, [math.prod(whole), columns])


def _check(
    world: World,
    op: GemmOp,
    a: Node,
    b: Node,
    out_dtype: torch.dtype | None,
    scales: NodeScales | None,
) -> None:
    """Plan the call, of the sizes that the compiler expects where they are symbolic. _Left: the world
    does not take it."""

    def expected(node: Node) -> Tensor:
        tensor = value(node)
        sizes, strides = (
            [getattr(getattr(each, "node", None), "hint", each) for each in many]
            for many in (tensor.shape, tensor.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)

    try:
        with FakeTensorMode():
            scaled = None
            if scales is not None:
                scaled = Scaled(expected(scales.a), expected(scales.b), scales.use_fast_accum)
            op.check(world, expected(a), expected(b), out_dtype=out_dtype, scaled=scaled)
    except MkernelError as error:
        raise _Left(f"{op.name} does not take it: {error}") from None


def _called(
    graph: Graph,
    name: str,
    a: Node,
    b: Node,
    scales: NodeScales | None,
    out_dtype: torch.dtype | None,
    group: str,
) -> tuple[str, Node]:
    """A call of an op, or of the one of e4m3 operands; the name of what is called."""
    if scales is None:
        op = getattr(torch.ops.mkernel, name).default
        return name, _call(graph, op, a, b, out_dtype=out_dtype, group=group)
    op = getattr(torch.ops.mkernel, f"{name}_scaled").default
    options: dict[str, Any] = {"use_fast_accum": scales.use_fast_accum, "group": group}
    dtype = out_dtype or scales.out_dtype
    c = _call(graph, op, a, b, scales.a, scales.b, out_dtype=dtype, **options)
    return f"{name}_scaled", c


def _biased(graph: Graph, rows: Node, product: Product) -> Node:
    return rows if product.bias is None else _call(graph, aten.add.Tensor, rows, product.bias)


def _mean(graph: Graph, total: Node, ranks: int, dtype: torch.dtype) -> Node:
    mean = _call(graph, aten.div.Tensor, total, ranks)
    if value(mean).dtype == dtype:
        return mean
    return _call(graph, torch.ops.prims.convert_element_type.default, mean, dtype)


def _summed(graph: Graph, bias: Node, like: Node) -> Node:
    """What the ranks' biases add to a sum of products. DTensor has each rank add its part of one that
    all have. It is one row, and no graph tells whether it is the same everywhere."""
    reduce_op, group = (patterns.argument(like, name) for name in ("reduce_op", "group_name"))
    started = _call(graph, REDUCE, bias, reduce_op, group)
    return _call(graph, patterns.WAIT, started)


# ---- gathers ---------------------------------------------------------------------------------------


def _products_of_gather(graph: Graph, world: World, gather: Gather) -> str:
    """AllGather+GEMM for the widest product of what is gathered. All else that the program does with
    it, other products among that, has it from the same call."""
    if gather.dim == value(gather.result).dim() - 1:
        raise _Left("it gathers along the last dimension: each product needs all of that at once")
    views = list(patterns.flattened(gather.result))
    users = [user for view in views for user in view.users if user not in views]
    products = [found for user in users if (found := _product_of(user, views)) is not None]
    if not products:
        raise _Left("no matrix product has what it gathers as its left side")
    order = {node: place for place, node in enumerate(graph.nodes)}
    earliest = min((*views[1:], *users), key=lambda each: order[each])
    for widest in sorted(products, key=_columns, reverse=True):
        sources = _scale_sources(graph, world, gather, widest.scales)
        late = _late_views([widest.b, *sources], earliest, order, gather.result)
        if late is not None:
            break
    else:
        raise _Left("what it gathers is used before the right side of a product is there")
    _require_few_symbols(gather.shard, gather.result)
    shard, group = value(gather.shard).shape, world.name
    with graph.inserting_before(earliest):
        for each in late:
            earliest.prepend(each)
        rows = _reshaped(graph, gather.shard, [math.prod(shard[:-1]), shard[-1]])
        a, b = _packed(graph, rows), _right(graph, widest.b)
        scales = _scales_of_gather(graph, widest.scales, sources)
        _check(world, GATHER_OP, a, b, None if scales is None else scales.out_dtype, scales)
        if len(users) == 1:
            name, c = _called(graph, GATHER_OP.name, a, b, scales, None, group)
        else:
            name, c, whole = _gathered(graph, a, b, scales, group)
            by_program = _rows_by_program(graph, whole, shard[:-1], gather.dim, world.size)
            gathered = _reshaped(graph, by_program, value(gather.result).shape)
            gather.result.replace_all_uses_with(gathered)
            _erase(graph, gather.result)
        c = _rows_by_program(graph, c, shard[:-1], gather.dim, world.size)
        widest.mm.replace_all_uses_with(_biased(graph, c, widest))
    _erase(graph, widest.mm)
    return name


def _gathered(
    graph: Graph, a: Node, b: Node, scales: NodeScales | None, group: str
) -> tuple[str, Node, Node]:
    """A call that also gives what it gathered: the op's name, the product, the gathered rows."""
    if scales is None:
        name = "all_gather_gemm_gathered"
        op = torch.ops.mkernel.all_gather_gemm_gathered.default
        both = _call(graph, op, a, b, group=group)
        c, whole = (_call(graph, operator.getitem, both, place) for place in range(2))
        return name, c, whole
    op = torch.ops.mkernel.all_gather_gemms_scaled.default
    options: dict[str, Any] = {"use_fast_accum": scales.use_fast_accum, "group": group}
    both = _call(graph, op, a, [b], scales.a, [scales.b], [], out_dtype=scales.out_dtype, **options)
    products, whole = (_call(graph, operator.getitem, both, place) for place in range(2))
    return "all_gather_gemms_scaled", _call(graph, operator.getitem, products, 0), whole


def _scale_sources(
    graph: Graph, world: World, gather: Gather, scales: NodeScales | None
) -> list[Node]:
    """What :func:`_scales_of_gather` is made of: of A, a single scale, or those of this rank's rows,
    which the program gathers too; those of B. _Left: it does not."""
    if scales is None:
        return []
    if scales.single:
        return [scales.a, scales.b]
    node, _ = patterns.producer(scales.a)
    rows = value(gather.shard).shape[:-1]
    for start in (each for each in graph.nodes if each.target is GATHER):
        found = patterns.gather(start, world.size)
        if found is None or found.result is not node or found.dim != gather.dim:
            continue
        same = patterns.group_name(start) == patterns.group_name(gather.start)
        if same and list(value(found.shard).shape[:-1]) == list(rows):
            return [found.shard, scales.b]
    raise _Left("the scales of what it gathers are not gathered from those of each rank's rows")


def _scales_of_gather(
    graph: Graph, scales: NodeScales | None, sources: list[Node]
) -> NodeScales | None:
    """Those that the op takes: of A those of this rank's rows.

    Where A has a single one, the program multiplies all that it gathers by this rank's: that belongs
    to this rank's products, with B's.
    """
    if scales is None:
        return None
    of_a, of_b = sources
    shape: Sequence[int] = value(of_a).shape
    if not scales.single:
        rows = _reshaped(graph, of_a, [math.prod(shape[:-1]), shape[-1]])
        return scales._replace(a=_packed(graph, rows))
    one = _call(graph, aten.ones_like.default, of_a)
    alike = _reshaped(graph, of_a, value(of_b).shape)
    return scales._replace(a=one, b=_call(graph, aten.mul.Tensor, of_b, alike))


def _columns(product: Product) -> int:
    """How many a product has; 0 where that is symbolic."""
    columns = value(product.b).shape[1]
    return columns if isinstance(columns, int) else 0


def _product_of(user: Node, views: list[Node]) -> Product | None:
    """The product that a use of what is gathered is, with that on its left side."""
    found = patterns.product(user)
    return found if found is not None and found.a in views and found.b not in views else None


def _late_views(
    nodes: Sequence[Node], before: Node, order: dict[Node, int], gathered: Node
) -> list[Node] | None:
    """What has to be moved up for ``nodes`` to be there ``before`` another, in order; None: more than
    views would have to be moved, or they are made of what is gathered."""
    late: set[Node] = set()
    waiting = [*nodes]
    while waiting:
        each = waiting.pop()
        if each is gathered:
            return None
        if order[each] >= order[before]:
            if each.target not in patterns.VIEWS and each.target is not aten.permute.default:
                return None
            late.add(each)
            waiting.extend(each.all_input_nodes)
    return sorted(late, key=lambda each: order[each])


# ---- sums ------------------------------------------------------------------------------------------


def _sum_of_products(graph: Graph, world: World, total: Sum) -> str:
    """GEMM+ReduceScatter or GEMM+AllReduce for a product that ranks sum."""
    reduce_op = patterns.argument(total.start, "reduce_op")
    if reduce_op not in ("sum", "avg"):
        raise _Left(f"its reduce op is {reduce_op}, which is neither sum nor avg")
    summand = value(total.summand)
    if total.dim == summand.dim() - 1:
        raise _Left("it scatters along the last dimension, which is the product's columns")
    node, alone = patterns.producer(total.summand)
    product = patterns.product(node)
    if product is None:
        raise _Left("what it sums is no matrix product")
    if not (alone and total.alone):
        raise _Left("the product that it sums is used elsewhere too")
    _require_few_symbols(total.summand, total.result)
    op = REDUCE_OP if total.dim is None else SCATTER_OP
    out_dtype = dtype_of_sum(world, summand.dtype) if reduce_op == "avg" else None
    with graph.inserting_before(total.start):
        a = product.a
        if total.dim is not None:
            a = _rows_by_rank(graph, a, summand.shape[:-1], total.dim, world.size)
        a, b = _packed(graph, a), _right(graph, product.b)
        scales = product.scales
        if scales is not None and not scales.single and total.dim is not None:
            rows = _rows_by_rank(graph, scales.a, summand.shape[:-1], total.dim, world.size)
            scales = scales._replace(a=_packed(graph, rows))
        dtype = out_dtype if scales is None else out_dtype or scales.out_dtype
        _check(world, op, a, b, dtype, scales)
        name, c = _called(graph, op.name, a, b, scales, out_dtype, world.name)
        if reduce_op == "avg":
            c = _mean(graph, c, world.size, summand.dtype)
        if product.bias is not None:
            c = _call(graph, aten.add.Tensor, c, _summed(graph, product.bias, total.start))
        c = _reshaped(graph, c, value(total.result).shape)
    total.result.replace_all_uses_with(c)
    _erase(graph, total.result)
    return name
