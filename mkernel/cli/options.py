"""The options that several commands have: the sizes of all ops, of which each takes its own and refuses
the others; scales; backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, get_args

import typer

from mkernel.errors import ArgumentError
from mkernel.plan import ops
from mkernel.plan.arguments import SCALED_EXPERTS
from mkernel.plan.model import E4M3, OpName, ScaleMode
from mkernel.plan.shapes import GEMMS

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

# ---- options that several commands have, with the same help --------------------------------------

Accelerator = Annotated[
    str | None,
    typer.Option(help="Use this accelerator backend. [the most preferred that runs here]"),
]
Nic = Annotated[str | None, typer.Option(help="Use this NIC backend between nodes. [MKERNEL_NIC]")]
Verbs = Annotated[
    str | None,
    typer.Option(
        help="Use this verbs provider: soft, system, a library's path, or auto. [MKERNEL_VERBS]"
    ),
]
Scaling = Annotated[
    str | None,
    typer.Option(
        help="Scale float8_e4m3 inputs by tensor, row or block; MoE: by block. [row; MoE: block]"
    ),
]
FastAccum = Annotated[
    bool,
    typer.Option(
        "--fast-accum",
        help="Add products of float8_e4m3 inputs with fewer bits than float32, where the device can.",
    ),
]
Chunk = Annotated[
    int | None, typer.Option(help="Send so many tiles or rows in a chunk. [planner's choice]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


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


NAMES = ("float8_e4m3", E4M3)
"""The names of the dtype."""
_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)


def scales_of(
    dtype: str | None, scales: str | None, *ops: OpName, fast: bool = False
) -> ScaleMode | None:
    """Return the mode of e4m3 inputs, by default by rows, beside experts by blocks; None: the inputs
    have another dtype. ArgumentError.

    ``fast``: ``--fast-accum`` was given, which other inputs do not support.
    """
    if dtype not in NAMES:
        for option, given in (("--scales", scales), ("--fast-accum", fast or None)):
            if given is not None:
                raise ArgumentError(option, given, f"nothing, or --dtype {NAMES[0]} beside it")
        return None
    for op in ops:
        if op not in GEMMS and op not in SCALED_EXPERTS:
            raise ArgumentError("--dtype", dtype, f"another one: {op} takes no e4m3 inputs here")
    experts = [op for op in ops if op in SCALED_EXPERTS]
    found = scales or ("block" if experts else "row")
    if found not in _MODES:
        raise ArgumentError("--scales", repr(scales), f"one of: {', '.join(_MODES)}")
    if experts and found != "block":
        raise ArgumentError("--scales", scales, f"block: {experts[0]} has no other scales")
    if experts and fast:
        raise ArgumentError("--fast-accum", fast, f"nothing: sums of {experts[0]} are float32")
    return found


def layout_of(layout: str | None, scales: ScaleMode | None) -> Literal["row", "column"]:
    """Return the layout of B in memory: the requested one, by default row; for e4m3 column.
    ArgumentError."""
    if scales is not None and layout == "row":
        raise ArgumentError("--layout", layout, "column, as e4m3 matrices lie")
    return "column" if scales is not None or layout == "column" else "row"
