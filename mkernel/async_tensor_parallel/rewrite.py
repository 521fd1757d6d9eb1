"""Replacement of collectives and the products next to them by calls of ``torch.ops.mkernel``.

A call takes matrices whose rows are in the order of ranks. If a program gathers or scatters along
another dimension than the first, rows are put in that order before the call, or back after it, by
ops that the compiler fuses with those around them.

Several layers of one input add up what they give it: a sum over ranks of a sum of products, or a sum
of sums over ranks. Both become one call of a product of wider K, unless that moves more memory than it
saves; else each product is a call, and their results are added.

``torch.autocast`` casts between a collective and a product. What all products cast is cast before it is
gathered, so that it travels in 16 bits; sums of products that are widened first are taken in float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

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
from mkernel.ops.around import Scaled
from mkernel.ops.gemm import GemmCall, GemmOp
from mkernel.ops.gemm_all_reduce import OP as REDUCE_OP
from mkernel.ops.gemm_reduce_scatter import OP as SCATTER_OP
from mkernel.ops.symm_mem import dtype_of_sum
from mkernel.world.lifecycle import current
from mkernel.world.world import World


class _Left(Exception):
    """The reason why a collective is left as it is."""


def rewrite(graph: Graph, report: Report) -> None:
    """Rewrite what can be rewritten, in the graph's order, which is the same on all ranks. Gathers
    of scales, which are rewritten with those of the scaled operands, come after the others."""
    patterns.join_waits(graph)
    patterns.narrow_gathers(graph, _ranks)
    for start in sorted(patterns.collectives(graph), key=patterns.gathers_scales):
        if start._erased:
            continue
        name, group = patterns.name(start), patterns.group_name(start)
        beside = patterns.beside_product(start)
        try:
            found = _rewritten(graph, start, group)
        except _Left as why:
            report.left_one(Decision(name, group, why=str(why)), beside)
        else:
            replaced = [found.calls, *[0] * (found.collectives - 1)]
            report.decisions += [Decision(name, group, found.op, calls=each) for each in replaced]
    graph.eliminate_dead_code()  # views made for collectives that were left in the end


def _ranks(group: str) -> int | None:
    """Return the number of ranks of a group; None: it has no world."""
    try:
        return current(group).size
    except NotInitialized:
        return None


class _Calls(NamedTuple):
    """Calls of an op, which replaced one or more collectives."""

    op: str
    calls: int = 1
    collectives: int = 1


def _rewritten(graph: Graph, start: Node, group: str) -> _Calls:
    """Return the calls that replaced a collective. Raises _Left."""
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
        return _Calls(_products_of_gather(graph, world, gathered))
    total = patterns.reduction(start, world.size)
    if total is None:
        raise _Left("something else uses it before it has ended")
    result, sums = patterns.added(total, world.size)
    if len(sums) > 1:
        with suppress(_Left):  # another of them is left, when it comes to that
            every = [each for one in sums for each in _products_of_sum(one)]
            if _joins(every):
                found = _sum_of_products(graph, world, total, every, result)
                return found._replace(collectives=len(sums))
    return _sum_of_products(graph, world, total, _products_of_sum(total), total.result)


# ---- nodes -----------------------------------------------------------------------------------------


def _call(graph: Graph, target: Any, *arguments: Any, **keywords: Any) -> Node:
    """Return a new node, with the fake tensor that it stands for."""
    node = graph.call_function(target, arguments, keywords)
    inputs, options = torch.fx.node.map_arg((arguments, keywords), value)
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves((inputs, options)))
    with mode or FakeTensorMode():
        node.meta["val"] = target(*inputs, **options)
    return node


def _reshaped(graph: Graph, node: Node, shape: Sequence[Any]) -> Node:
    """Return the node in another shape; ``shape`` has one symbolic size at most."""
    if value(node).dim() == len(shape) and all(map(patterns.equal, value(node).shape, shape)):
        return node
    sizes = [each if isinstance(each, int) else -1 for each in shape]
    return _call(graph, aten.reshape.default, node, sizes)


def _require_few_symbols(*nodes: Node) -> None:
    """Raise _Left if a graph has no way to write down the shape of a tensor like one of them."""
    for node in nodes:
        if sum(not isinstance(size, int) for size in value(node).shape) > 1:
            raise _Left("more than one of its sizes is symbolic")


def _erase(graph: Graph, node: Node) -> None:
    """Remove a node without users from the graph, and with it the nodes that only it used."""
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
    """Return ``node`` in row-major memory."""
    if value(node).is_contiguous():
        return node
    return _call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)


def _right(graph: Graph, b: Node) -> Node:
    """Return ``b`` in memory that ops take: row-major or column-major."""
    return b if value(b).t().is_contiguous() else _packed(graph, b)


def _rows_by_program(graph: Graph, rows: Node, shard: Sequence[Any], dim: int, ranks: int) -> Node:
    """Return ``rows`` [W * rows of a shard, N], given in the order of ranks, in the order of the
    program, which gathers shards of shape [*shard, _] along ``dim``."""
    columns = value(rows).shape[1]
    if dim == 0:
        return rows
    by_rank = _reshaped(graph, rows, [ranks, *shard, columns])
    order = list(range(1, len(shard) + 2))
    order.insert(dim, 0)
    return _reshaped(graph, _permuted(graph, by_rank, order), [ranks * math.prod(shard), columns])


def _rows_by_rank(graph: Graph, rows: Node, whole: Sequence[Any], dim: int, ranks: int) -> Node:
    """Return ``rows`` [M, K] of a tensor [*whole, K], in the order of the ranks that keep them when
    it is scattered along ``dim``."""
    if dim == 0:
        return rows
    columns = value(rows).shape[1]
    cut = [*whole[:dim], ranks, whole[dim] // ranks, *whole[dim + 1 :], columns]
    order = list(range(len(cut)))
    order.remove(dim)
    moved = _permuted(graph, _reshaped(graph, rows, cut), [dim, *order])
    return _reshaped(graph, moved, [math.prod(whole), columns])


def _expected(size: Any) -> Any:
    """Return the size that the compiler expects, if it is symbolic."""
    return getattr(getattr(size, "node", None), "hint", size)


def _check(
    world: World,
    op: GemmOp,
    a: Node,
    b: Node,
    out_dtype: torch.dtype | None,
    scales: NodeScales | None,
) -> None:
    """Plan the call, for the sizes that the compiler expects if they are symbolic. Raises _Left if
    the world does not take it."""

    def expected(node: Node) -> Tensor:
        tensor = value(node)
        sizes, strides = (list(map(_expected, many)) for many in (tensor.shape, tensor.stride()))
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)

    try:
        with FakeTensorMode():
            scaled = None
            if scales is not None:
                scaled = Scaled(expected(scales.a), expected(scales.b), scales.use_fast_accum)
            call = GemmCall(expected(a), expected(b), out_dtype=out_dtype, scaled=scaled)
            op.check(world, call)
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
    """Add a call of an op, or of its variant for e4m3 operands; return the name of the called op
    and the node."""
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
    """Return the sum of the ranks' biases, to be added to a sum of products. DTensor lets each rank
    add its share of a bias that all have. It is one row, and the graph does not show whether it is
    the same everywhere."""
    reduce_op, group = (patterns.argument(like, name) for name in ("reduce_op", "group_name"))
    started = _call(graph, REDUCE, bias, reduce_op, group)
    return _call(graph, patterns.WAIT, started)


# ---- gathers ---------------------------------------------------------------------------------------


def _products_of_gather(graph: Graph, world: World, gather: Gather) -> str:
    """Replace a gather by AllGather+GEMM for its widest product. All other uses, other products
    included, get the gathered tensor from the same call."""
    if gather.dim == value(gather.result).dim() - 1:
        raise _Left("it gathers along the last dimension: each product needs all of that at once")
    views = list(patterns.flattened(gather.result))
    users = [user for view in views for user in view.users if user not in views]
    products = [found for user in users if (found := _product_of(user, views)) is not None]
    if not products:
        raise _Left("no matrix product has what it gathers as its left side")
    order = {node: place for place, node in enumerate(graph.nodes)}
    earliest = min((*views[1:], *users), key=lambda each: order[each])
    if len(products) == len(users) and _share_columns(products):
        late = _late_views([each.b for each in products], earliest, order, gather.result)
        if late is not None:
            return _one_product_of_gather(graph, world, gather, products, earliest, late)
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
        a, b = _own_rows(graph, gather), _right(graph, widest.b)
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


def _share_columns(products: Sequence[Product]) -> bool:
    """Return whether products of what is gathered are to be computed as one of more columns: if their
    weights, which are joined for that, have no more columns than there are rows that need not be copied
    out of the workspace then."""
    return all(each.bias is None for each in products) and _worth_joining(products, 1, 1)


def _worth_joining(products: Sequence[Product], dim: int, saved: int) -> bool:
    """Return whether several weights, joined along ``dim``, are no larger than ``saved`` of the
    matrices that they multiply: the other sizes of both are the same."""
    if len(products) == 1 or any(each.scales is not None for each in products):
        return False
    rows = _expected(value(products[0].a).shape[0])
    joined = sum(_expected(value(each.b).shape[dim]) for each in products)
    alike = len({value(each.a).dtype for each in products}) == 1
    return alike and joined <= saved * rows


def _one_product_of_gather(
    graph: Graph,
    world: World,
    gather: Gather,
    products: Sequence[Product],
    before: Node,
    late: Sequence[Node],
) -> str:
    """Replace a gather, and all products of what it gathers, by one AllGather+GEMM with the columns of
    all weights."""
    _require_few_symbols(gather.shard, gather.result)
    shard = value(gather.shard).shape
    with graph.inserting_before(before):
        for each in late:
            before.prepend(each)
        a = _own_rows(graph, gather)
        weights = [_packed(graph, _permuted(graph, each.b, [1, 0])) for each in products]
        b = _permuted(graph, _call(graph, aten.cat.default, weights), [1, 0])
        _check(world, GATHER_OP, a, b, None, None)
        name, c = _called(graph, GATHER_OP.name, a, b, None, None, world.name)
        c = _rows_by_program(graph, c, shard[:-1], gather.dim, world.size)
        for product, part in zip(products, _columns_of(graph, c, products), strict=True):
            product.mm.replace_all_uses_with(part)
    for product in products:
        _erase(graph, product.mm)
    return name


def _own_rows(graph: Graph, gather: Gather) -> Node:
    """Return what a rank gives to a gather as a matrix in row-major memory."""
    shard = value(gather.shard).shape
    return _packed(graph, _reshaped(graph, gather.shard, [math.prod(shard[:-1]), shard[-1]]))


def _columns_of(graph: Graph, c: Node, products: Sequence[Product]) -> list[Node]:
    """Return the columns of ``c``, in which the products are beside each other, as one node each."""
    sizes = [value(each.b).shape[1] for each in products]
    parts = _call(graph, aten.split_with_sizes.default, c, sizes, 1)
    return [_call(graph, operator.getitem, parts, place) for place in range(len(sizes))]


def _gathered(
    graph: Graph, a: Node, b: Node, scales: NodeScales | None, group: str
) -> tuple[str, Node, Node]:
    """Add a call that also returns what it gathered; return the op's name, the product, and the
    gathered rows."""
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
    """Return the nodes from which :func:`_scales_of_gather` makes scales: for A, a single scale, or
    those of this rank's rows, which the program gathers too; and those of B. Raises _Left if the
    program does not gather them."""
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
    """Return the scales that the op takes: for A those of this rank's rows.

    If A has a single one, the program multiplies everything that it gathers by this rank's scale.
    That belongs to this rank's products, with B's.
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
    """Return the number of columns of a product; 0 if it is symbolic."""
    columns = value(product.b).shape[1]
    return columns if isinstance(columns, int) else 0


def _product_of(user: Node, views: list[Node]) -> Product | None:
    """Return the product that a use of the gathered tensor is, with that tensor on its left side."""
    found = patterns.product(user)
    return found if found is not None and found.a in views and found.b not in views else None


def _late_views(
    nodes: Sequence[Node], before: Node, order: dict[Node, int], gathered: Node
) -> list[Node] | None:
    """Return the nodes that must be moved up for ``nodes`` to be available ``before`` another, in
    order; None: more than views would have to move, or they depend on the gathered tensor."""
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


def _products_of_sum(total: Sum) -> list[Product]:
    """Return the products whose sum the ranks add. Raises _Left."""
    reduce_op = patterns.argument(total.start, "reduce_op")
    if reduce_op not in ("sum", "avg"):
        raise _Left(f"its reduce op is {reduce_op}, which is neither sum nor avg")
    if total.dim == value(total.summand).dim() - 1:
        raise _Left("it scatters along the last dimension, which is the product's columns")
    nodes, alone = patterns.terms(total.summand)
    found = [each for node in nodes if (each := patterns.product(node)) is not None]
    if not found:
        raise _Left("what it sums is no matrix product")
    if len(found) < len(nodes):
        raise _Left("it sums another tensor with a matrix product")
    if len({each.scales is None for each in found}) > 1:
        raise _Left("it sums products of e4m3 operands and of others")
    if not (alone and total.alone):
        raise _Left("the product that it sums is used elsewhere too")
    return found


def _joins(products: Sequence[Product]) -> bool:
    """Return whether products are to be computed as one of wider K: if their weights, which are joined
    for that, have no more rows than all the sums but one, which need not travel then."""
    return _worth_joining(products, 0, len(products) - 1)


def _joined(graph: Graph, products: Sequence[Product]) -> Product:
    """Return the product that is the sum of all, but for their biases."""
    a = _call(graph, torch.ops.mkernel.joined_columns.default, [each.a for each in products])
    b = _call(graph, aten.cat.default, [each.b for each in products])
    return products[0]._replace(a=a, b=b)


def _sum_of_products(
    graph: Graph, world: World, total: Sum, products: Sequence[Product], result: Node
) -> _Calls:
    """Replace ``result``, which is the sum over ranks of all these products, by GEMM+ReduceScatter or
    GEMM+AllReduce of one that is their sum, or of each."""
    mean = patterns.argument(total.start, "reduce_op") == "avg"
    _require_few_symbols(total.summand, total.result)
    with graph.inserting_before(total.start if result is total.result else result):
        factors = [_joined(graph, products)] if _joins(products) else products
        # All are checked before the first call, which would stay in the graph if another one is left.
        summed = [_operands(graph, world, total, each, mean) for each in factors]
        calls = [_called(graph, op, *each) for op, *each in summed]
        c = _added(graph, [each for _, each in calls])
        if mean:
            c = _mean(graph, c, world.size, value(total.summand).dtype)
        biases = [each.bias for each in products if each.bias is not None]
        if biases:
            bias = _summed(graph, _added(graph, biases), total.start)
            c = _call(graph, aten.add.Tensor, c, bias)
        c = _reshaped(graph, c, value(result).shape)
    result.replace_all_uses_with(c)
    _erase(graph, result)
    return _Calls(calls[0][0], len(calls))


def _added(graph: Graph, nodes: Sequence[Node]) -> Node:
    found = nodes[0]
    for each in nodes[1:]:
        found = _call(graph, aten.add.Tensor, found, each)
    return found


def _operands(
    graph: Graph, world: World, total: Sum, product: Product, mean: bool
) -> tuple[Any, ...]:
    """Return the op that computes one of the products that ranks sum, and what else :func:`_called`
    takes. Raises _Left."""
    summand = value(total.summand)
    op = REDUCE_OP if total.dim is None else SCATTER_OP
    out_dtype = dtype_of_sum(world, summand.dtype) if mean else None
    if out_dtype is None and summand.dtype != value(product.mm).dtype:  # the program widens it
        out_dtype = summand.dtype
    a, scales = product.a, product.scales
    if total.dim is not None:
        a = _rows_by_rank(graph, a, summand.shape[:-1], total.dim, world.size)
        if scales is not None and not scales.single:
            rows = _rows_by_rank(graph, scales.a, summand.shape[:-1], total.dim, world.size)
            scales = scales._replace(a=_packed(graph, rows))
    a, b = _packed(graph, a), _right(graph, product.b)
    dtype = out_dtype if scales is None else out_dtype or scales.out_dtype
    _check(world, op, a, b, dtype, scales)
    return op.name, a, b, scales, out_dtype, world.name
