"""Collectives next to matrix products in a graph, in the form that functional collectives and
DTensor have after Inductor's decompositions.

    gather, along dimension 0     wait(all_gather_into_tensor(shard)) [W * d0, ...]
    gather, along another one     cat(the W parts of that along dimension 0, dim)
    scatter, along dimension 0    wait(reduce_scatter_tensor(x))
    scatter, along another one    wait(reduce_scatter_tensor(cat(the W parts of x along dim, 0)))
    reduce                        wait(all_reduce(x))

What is summed may itself be a sum of what several layers give their common input; sums over ranks are
added where each of these layers has its own. Linear layers flatten their activations to matrices:
``reshape → mm → reshape``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
REDUCE = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default
SCALED_MM = aten._scaled_mm.default
CAST = torch.ops.prims.convert_element_type.default
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_NARROW = (torch.bfloat16, torch.float16)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def value(node: Node) -> Tensor:
    """Return the fake tensor that a node stands for."""
    found: Tensor = node.meta["val"]
    return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are known to be equal, without a guard on symbolic ones."""
    return bool(statically_known_true(one == other))


def collectives(graph: Graph) -> list[Node]:
    """List gathers, scatters and reductions, in the graph's order."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and name(node).startswith(kinds)
    ]


def name(node: Node) -> str:
    """Return the name of the op that a node calls, without namespace and overload."""
    target: Any = node.target
    found: str = target._opname
    return found


def argument(node: Node, wanted: str) -> Any:
    """Return an argument of an op by its name in the schema, whether positional, keyword or
    default."""
    target: Any = node.target
    for place, each in enumerate(target._schema.arguments):
        if each.name == wanted:
            if place < len(node.args):
                return node.args[place]
            return node.kwargs.get(wanted, each.default_value)
    raise KeyError(wanted)


def group_name(node: Node) -> str:
    """Return torch's name of a collective's group."""
    group = argument(node, "group_name")
    found: str = group if isinstance(group, str) else group.group_name
    return found


def awaited(collective: Node) -> Node | None:
    """Return the wait for a collective, if nothing else uses the collective."""
    users = list(collective.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def join_waits(graph: Graph) -> None:
    """Keep one wait for each collective, and one of the equal views of its result: torch 2.14
    writes them once for each product that reads it."""
    for start in collectives(graph):
        if len(start.users) > 1 and all(user.target is WAIT for user in start.users):
            _join_equal_users(graph, start)


def _join_equal_users(graph: Graph, node: Node) -> None:
    """Keep only the first of those users that move the node's elements in the same way."""
    first: dict[tuple[Any, str, str], Node] = {}
    for user in [each for each in graph.nodes if each in node.users]:
        if user.target not in (WAIT, operator.getitem, aten.cat.default, *_SPLITS, *VIEWS):
            continue
        kept = first.setdefault((user.target, repr(user.args), repr(user.kwargs)), user)
        if kept is not user:
            user.replace_all_uses_with(kept)
            graph.erase_node(user)
    for kept in first.values():
        _join_equal_users(graph, kept)


# ---- products ------------------------------------------------------------------------------------


class NodeScales(NamedTuple):
    """The scales of a product of e4m3 operands, and the other options of ``aten._scaled_mm``."""

    a: Node
    b: Node
    out_dtype: torch.dtype
    use_fast_accum: bool

    @property
    def single(self) -> bool:
        """True if each operand has one scale for all of it."""
        return value(self.a).numel() == 1 and value(self.b).numel() == 1


class Product(NamedTuple):
    """A matrix product. ``mm``: an ``aten.mm``, or an ``aten.addmm`` with ``bias``, which is added
    to each row; or an ``aten._scaled_mm``, with ``scales`` and perhaps a bias."""

    mm: Node
    a: Node
    b: Node
    bias: Node | None
    scales: NodeScales | None = None


def product(node: Node) -> Product | None:
    """Return the product that a node is; None: it is none."""
    if node.target is aten.mm.default:
        a, b = node.args[:2]
        return Product(node, a, b, None)  # type: ignore[arg-type]
    if node.target is aten.addmm.default:
        bias, a, b = node.args[:3]
        plain = argument(node, "beta") == 1 and argument(node, "alpha") == 1
        if plain and isinstance(bias, Node) and value(bias).dim() == 1:
            return Product(node, a, b, bias)  # type: ignore[arg-type]
    return _scaled_product(node) if node.target is SCALED_MM else None


def _scaled_product(node: Node) -> Product | None:
    """Return the product of an ``aten._scaled_mm``; None: its result is e4m3 too."""
    a, b, of_a, of_b = (argument(node, name) for name in ("self", "mat2", "scale_a", "scale_b"))
    out_dtype = argument(node, "out_dtype")
    narrow = out_dtype in (None, value(a).dtype) or argument(node, "scale_result") is not None
    if narrow or value(a).dtype != torch.float8_e4m3fn:
        return None
    scales = NodeScales(of_a, of_b, out_dtype, bool(argument(node, "use_fast_accum")))
    return Product(node, a, b, argument(node, "bias"), scales)


def flattened(node: Node) -> Iterator[Node]:
    """Yield a node and its views of other leading dimensions, whose rows are its own in the same
    order."""
    yield node
    for user in node.users:
        if user.target in VIEWS and _same_rows(user, node):
            yield from flattened(user)


def _same_rows(one: Node, other: Node) -> bool:
    rows, others = value(one).shape, value(other).shape
    return len(rows) > 0 and len(others) > 0 and equal(rows[-1], others[-1])


def producer(node: Node) -> tuple[Node, bool]:
    """Return the node of which a node is a view, as :func:`flattened` follows views, and whether
    nothing else uses it."""
    alone = True
    while node.target in VIEWS:
        source = node.args[0]
        assert isinstance(source, Node)
        if not _same_rows(node, source):
            break
        node = source
        alone = alone and len(node.users) == 1
    return node, alone


def terms(node: Node) -> tuple[list[Node], bool]:
    """Return the nodes whose sum a node is, which may be one; and whether nothing else uses them, or
    what lies between. They may be narrower: autocast widens gradients before they are added."""
    source, alone = producer(node)
    widens = _widens(source)
    if not (widens or _adds(source)):
        return [source], alone
    found: list[Node] = []
    for each in source.args[:1] if widens else source.args:
        assert isinstance(each, Node)
        more, others = terms(each)
        alone = alone and others and len(each.users) == 1
        found += more
    return found, alone


def _widens(node: Node) -> bool:
    """Return whether a node casts a floating-point tensor to a dtype that has all of its values."""
    if node.target is not CAST:
        return False
    (given, _), dtype = node.args, value(node).dtype
    assert isinstance(given, Node)
    narrow = value(given).dtype
    return narrow.is_floating_point and torch.promote_types(narrow, dtype) == dtype != narrow


def narrow_gathers(graph: Graph, ranks: Callable[[str], int | None]) -> None:
    """Cast what ranks gather for products before they gather it, where all uses cast it to 16 bits, as
    autocast does. ``ranks``: of a group, by its name; None: it has no world."""
    for start in collectives(graph):
        size = ranks(group_name(start)) if start.target is GATHER else None
        found = None if size is None else gather(start, size)
        if found is None or not beside_product(start):
            continue
        views = list(flattened(found.result))
        casts = [user for view in views for user in view.users if user not in views]
        dtypes = {value(each).dtype for each in casts if each.target is CAST}
        given = value(found.shard)
        alike = len(dtypes) == 1 and all(each.target is CAST for each in casts)
        dtype = dtypes.pop() if alike else None
        if dtype not in _NARROW or given.dtype.itemsize <= dtype.itemsize:
            continue
        with graph.inserting_before(start):
            cast = graph.call_function(CAST, (found.shard, dtype))
        cast.meta["val"] = given.to(dtype)
        start.replace_input_with(found.shard, cast)
        narrowed = partial(Tensor.to, dtype=dtype)
        moved = [start, *_between(start, found.result), *views[1:]]
        for each in moved:
            each.meta["val"] = tree_map_only(Tensor, narrowed, each.meta["val"])
        for each in casts:
            source = each.args[0]
            assert isinstance(source, Node)
            each.replace_all_uses_with(source)
            graph.erase_node(each)


def _between(start: Node, result: Node) -> list[Node]:
    """Return the nodes from a collective's wait to the result of its gather."""
    found, waiting = [], [result]
    while waiting:
        each = waiting.pop()
        if each is not start and each not in found:
            found.append(each)
            waiting += each.all_input_nodes
    return found


def _adds(node: Node) -> bool:
    """Return whether a node adds two tensors of its own shape and dtype, as they are."""
    if node.target is not aten.add.Tensor or argument(node, "alpha") != 1:
        return False
    this = value(node)
    return all(
        isinstance(each, Node)
        and value(each).dtype == this.dtype
        and value(each).dim() == this.dim()
        and all(map(equal, value(each).shape, this.shape))
        for each in node.args[:2]
    )


# ---- parts ---------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The tensor ``whole`` cut along ``dim`` into equal parts, which are ``pieces`` of the graph,
    in order."""

    whole: Node
    dim: int
    pieces: tuple[Node, ...]

    def used_once(self) -> bool:
        """Return whether the whole is used only for its parts, and each of them once."""
        cuts = {p if p.target is aten.slice.Tensor else p.args[0] for p in self.pieces}
        return set(self.whole.users) == cuts and all(len(p.users) == 1 for p in self.pieces)


def parts(cat: Node, count: int) -> Parts | None:
    """Return the parts of one tensor that a concatenation joins, each once and in order."""
    pieces = cat.args[0]
    if not isinstance(pieces, (list, tuple)) or len(pieces) != count:
        return None
    found: set[tuple[Node, int]] = set()
    for place, piece in enumerate(pieces):
        part = _part(piece, place, count) if isinstance(piece, Node) else None
        if part is None:
            return None
        found.add(part)
    if len(found) != 1:
        return None
    ((whole, dim),) = found
    return Parts(whole, dim, tuple(pieces))  # type: ignore[arg-type]


def _part(piece: Node, place: int, count: int) -> tuple[Node, int] | None:
    """Return the tensor of which ``piece`` is part number ``place`` of ``count`` equal ones, and
    the dimension along which it is cut."""
    if piece.target is operator.getitem:
        split, index = piece.args
        if index != place or not isinstance(split, Node) or split.target not in _SPLITS:
            return None
        whole, dim = split.args[0], argument(split, "dim")
    elif piece.target is aten.slice.Tensor:
        whole, dim = piece.args[0], argument(piece, "dim")
        size = value(piece).shape[dim]
        begins = argument(piece, "start") or 0
        if not equal(begins, place * size) or argument(piece, "step") != 1:
            return None
    else:
        return None
    assert isinstance(whole, Node)
    dim = dim % value(whole).dim()
    even = equal(value(piece).shape[dim] * count, value(whole).shape[dim])
    return (whole, dim) if even else None


# ---- collectives with their surroundings -----------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """An all-gather. ``result``: all ranks' ``shard``, one after another along ``dim``."""

    start: Node
    shard: Node
    result: Node
    dim: int


def gather(start: Node, ranks: int) -> Gather | None:
    """Return the gather that a collective starts; None: something else uses it before it has ended."""
    wait = awaited(start)
    shard = start.args[0]
    if wait is None or not isinstance(shard, Node):
        return None
    for cat in [user for cut in wait.users for part in (cut, *cut.users) for user in part.users]:
        found = parts(cat, ranks) if cat.target is aten.cat.default else None
        if found is not None and found.whole is wait and found.dim == 0 and found.used_once():
            return Gather(start, shard, cat, argument(cat, "dim") % value(cat).dim())
    return Gather(start, shard, wait, 0)


@dataclass(frozen=True)
class Sum:
    """A reduction over ranks. ``result`` is the sum, or this rank's part of it along ``dim``
    (``dim`` None: all of it). ``summand`` is the tensor that each rank adds; ``alone``: nothing
    else uses it, or what lies between."""

    start: Node
    summand: Node
    result: Node
    dim: int | None
    alone: bool


def gathers_scales(start: Node) -> bool:
    """Return whether a collective gathers scales of rows for a product."""
    wait = awaited(start) if start.target is GATHER else None
    if wait is None:
        return False
    near = [
        wait,
        *(user for cut in wait.users for part in (cut, *cut.users) for user in part.users),
    ]
    return any(
        user.target is SCALED_MM and argument(user, "scale_a") is view
        for one in near
        for view in flattened(one)
        for user in view.users
    )


def added(total: Sum, ranks: int) -> tuple[Node, list[Sum]]:
    """Return the node in which a sum over ranks is added to others of its kind, and all of these; where
    there are none, its own result, and itself."""
    node, sums = total.result, [total]
    above = node
    while len(above.users) == 1:
        (above,) = above.users
        if above.target in VIEWS:
            continue
        found, alone = terms(above) if _adds(above) else ([], False)
        others = [
            reduction(start, ranks)
            for each in found
            if each.target is WAIT and isinstance(start := each.args[0], Node)
        ]
        alike = [each for each in others if each is not None and _alike(each, total)]
        if not alone or len({each.start for each in alike}) != len(found):
            break
        node, sums = above, alike
    return node, sums


def _alike(one: Sum, other: Sum) -> bool:
    """Return whether ranks get the same rows of both sums, by the same reduction."""
    names = ("reduce_op", "group_name")
    lead, others = (value(each.summand).shape[:-1] for each in (one, other))
    if one.dim and not (len(lead) == len(others) and all(map(equal, lead, others))):
        return False  # parts of an inner dimension are other rows where the sizes before it differ
    return (
        one.start.target is other.start.target
        and one.dim == other.dim
        and all(argument(one.start, name) == argument(other.start, name) for name in names)
    )


def beside_product(start: Node) -> bool:
    """Return whether a collective gathers an operand of a product, or sums products."""
    if name(start).startswith("all_gather"):
        return any(
            node in (found.a, found.b)
            for node in _moved(start, lambda node: list(node.users), _MOVES)
            for user in node.users
            if (found := product(user)) is not None
        )
    return any(
        product(each) is not None
        for node in _moved(start, lambda node: node.all_input_nodes, {*_MOVES, aten.add.Tensor})
        for each in node.all_input_nodes
    )


_MOVES = {WAIT, CAST, operator.getitem, aten.cat.default, aten.slice.Tensor, *_SPLITS, *VIEWS}


def _moved(start: Node, near: Callable[[Node], list[Node]], moves: set[Any]) -> list[Node]:
    """Return a node and all that nodes which move its elements make of it, or it of them."""
    found = [start]
    for node in found:
        found += [each for each in near(node) if each.target in moves and each not in found]
    return found


def reduction(start: Node, ranks: int) -> Sum | None:
    """Return the sum that a collective starts; None: something else uses it before it has ended."""
    wait = awaited(start)
    summand = start.args[0]
    if wait is None or not isinstance(summand, Node):
        return None
    if start.target is REDUCE:
        return Sum(start, summand, wait, None, len(summand.users) == 1)
    if summand.target is aten.cat.default and argument(summand, "dim") == 0:
        found = parts(summand, ranks)
        if found is not None:
            alone = found.used_once() and len(summand.users) == 1
            return Sum(start, found.whole, wait, found.dim, alone)
    return Sum(start, summand, wait, 0, len(summand.users) == 1)
