"""The sizes of all ops as command-line options; each op takes its own and refuses the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from mkernel.plan import ops

_HELP = {
    "m": "Set the rows of A of a GEMM (AllGather: of all ranks together).",
    "n": "Set the columns of B of a GEMM.",
    "k": "Set the columns of A, which are the rows of B (ReduceScatter, AllReduce: of a rank).",
    "tokens": "Set the tokens of each rank of MoE.",
    "hidden": "Set the width of a token of MoE.",
    "features": "Set the width of an expert's result of MoE.",
    "experts": "Set the experts of all ranks together of MoE.",
    "top_k": "Set how many experts a token goes to in MoE.",
    "batch": "Set the batch of attention.",
    "heads": "Set the query heads of attention.",
    "kv_heads": "Set the key and value heads of attention.",
    "sequence": "Set the positions of all ranks together of attention.",
    "head_dim": "Set the width of a head of attention.",
    "causal": "Make attention causal, with a zigzag split.",
}

OP_HELP = f"Name one of: {ops.named()}."
"""The help of the argument of a command that takes one op."""

Given = dict[str, int | bool | None]
"""Sizes by name; None for an option that was not passed."""


def with_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap the command with an option for each size; it gets them all as its argument ``given``."""
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
