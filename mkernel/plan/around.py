"""Steps that an op does on its own rank before and after a launch."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

from mkernel.errors import ArgumentError
from mkernel.plan.model import Copied, OpName, Scales
from mkernel.plan.shapes import MAX_DIMENSION, check_integer

_GEMMS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
NORMALISES: tuple[OpName, ...] = ("gemm_all_reduce", "all_reduce")
"""Ops that give every rank whole rows of a sum over ranks, which can be normalised."""


class Norm(NamedTuple):
    """The normalisation of the rows of a sum over ranks: ``residual`` says whether a residual is
    added before it, and ``eps`` is added to the mean of squares."""

    residual: bool
    eps: float


class Around(NamedTuple):
    """The steps around a launch, from which :class:`mkernel.plan.model.CommonPart` is made.

    Attributes:
        copies: tensors that the op copies: operands before, results after the launch.
        bias: whether a bias is added.
        norm: the normalisation, for ops that give every rank whole rows; None: there is none.
        products: columns of each B where AllGather+GEMM is given several; the most of these are N.
        scales: scales of e4m3 operands; None: the operands have another dtype.
    """

    copies: tuple[Copied, ...] = ()
    bias: bool = False
    products: tuple[int, ...] = ()
    norm: Norm | None = None
    scales: Scales | None = None


NOTHING = Around()


def check_around(op: OpName, around: Around, columns: int | None) -> None:
    """Raise ArgumentError for steps that an op does not do.

    Args:
        columns: columns of the product that is launched.
    """
    _check_norm(op, around.norm)
    if op not in _GEMMS:
        for argument, value in around._replace(norm=None)._asdict().items():
            if value:
                raise ArgumentError(argument, repr(value), f"nothing: {op} has no such step")
        return
    legal = [one for one in get_args(Copied) if one != "gathered" or op == "all_gather_gemm"]
    if not around.bias:
        legal.remove("bias")
    if around.scales is None:
        legal = [one for one in legal if not one.endswith("_scale")]
    for name in around.copies:
        if name not in legal:
            raise ArgumentError("copies", repr(name), f"of {', '.join(legal)}")
    products = around.products
    if products and op != "all_gather_gemm":
        raise ArgumentError("products", products, f"(): {op} has one product")
    for each in products:
        check_integer(ArgumentError, "products", each, MAX_DIMENSION)
    if products and max(products) != columns:
        raise ArgumentError(
            "products", products, f"at most {columns} columns, those of the launched one"
        )


def _check_norm(op: OpName, norm: Norm | None) -> None:
    if norm is None:
        return
    if op not in NORMALISES:
        raise ArgumentError("norm", repr(norm), f"nothing: {op} has no such step")
    if not 0 < norm.eps < math.inf:
        raise ArgumentError("eps", norm.eps, "a finite number above 0")
