"""Gathers that a program waits for once for each product that reads them."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from mkernel.async_tensor_parallel.patterns import GATHER, REDUCE, WAIT, aten, join_waits


def gathered(graph: Graph, start: Node, weight: Node, *, noise: bool = False) -> Node:
    """A product of what a collective brings, gathered along dimension 1."""
    whole = graph.call_function(WAIT, (start,))
    split = graph.call_function(aten.split.Tensor, (whole, 4))
    pieces = [graph.call_function(operator.getitem, (split, n)) for n in range(2)]
    rows = graph.call_function(aten.cat.default, (pieces, 1))
    flat = graph.call_function(aten.view.default, (rows, [8, 4]))
    if noise:
        flat = graph.call_function(aten.rand_like.default, (flat,))
    return graph.call_function(aten.mm.default, (flat, weight))


def counts(graph: Graph, target: object) -> int:
    return sum(node.target is target for node in graph.nodes)


def test_products_of_one_gather_read_one_view_of_it() -> None:
    graph = Graph()
    x, one, other = (graph.placeholder(name) for name in ("x", "one", "other"))
    start = graph.call_function(GATHER, (x, 2, "0"))
    products = [gathered(graph, start, weight) for weight in (one, other, other)]
    graph.output(products)
    join_waits(graph)
    graph.lint()
    for target in (WAIT, aten.split.Tensor, aten.cat.default, aten.view.default):
        assert counts(graph, target) == 1, target
    assert counts(graph, operator.getitem) == 2
    assert counts(graph, aten.mm.default) == 3, "products are not merged"
    assert len({product.args[0] for product in products}) == 1


def test_what_computes_is_left_alone() -> None:
    """Two draws of random numbers of the same shape are two, and other collectives are others."""
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    start = graph.call_function(GATHER, (x, 2, "0"))
    again = graph.call_function(REDUCE, (x, "sum", "0"))
    drawn = [gathered(graph, start, weight, noise=True) for _ in range(2)]
    graph.output([*drawn, gathered(graph, again, weight)])
    join_waits(graph)
    graph.lint()
    assert counts(graph, aten.rand_like.default) == 2
    assert counts(graph, WAIT) == 2


def test_a_collective_that_is_used_before_its_end_is_left_as_it_is() -> None:
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    start = graph.call_function(GATHER, (x, 2, "0"))
    early = graph.call_function(torch.ops.aten.neg.default, (start,))
    graph.output([early, *(gathered(graph, start, weight) for _ in range(2))])
    join_waits(graph)
    assert counts(graph, WAIT) == 2
