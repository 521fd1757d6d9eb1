"""The sizes of all ops as command-line options; each op takes its own and refuses the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

_HELP = {
    "m": "GEMM: rows of A (AllGather: all ranks together)",
    "n": "GEMM: columns of B",
    "k": "GEMM: columns of A, rows of B (ReduceScatter, AllReduce: a rank's)",
    "tokens": "MoE: tokens of each rank",
    "hidden": "MoE: width of a token",
    "features": "MoE: width of an expert's result",
    "experts": "MoE: experts of all ranks together",
    "top_k": "MoE: experts a token goes to",
    "batch": "attention: batch",
    "heads": "attention: query heads",
    "kv_heads": "attention: key and value heads",
    "sequence": "attention: positions of all ranks together",
    "head_dim": "attention: width of a head",
    "causal": "attention: causal, with zigzag split",
}

Given = dict[str, int | bool | None]
"""Sizes by name; None where an option was not passed."""


def with_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each size; it gets them all as its argument ``given``."""
    kinds = {name: bool if name == "causal" else int | None for name in _HELP}
    sizes = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[kind, typer.Option(help=_HELP[name], rich_help_panel="Sizes")],
        )
        for name, kind in kinds.items()
    ]
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()]
    parameters = [each for each in parameters if each.name != "given"] + sizes

    @wraps(command)
    def called(**options: Any) -> None:
        given: Given = {name: options.pop(name) for name in _HELP}
        command(given=given, **options)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called
