"""The sizes of all ops as command-line options; each op takes its own and refuses the others."""

from __future__ import annotations

from typing import Annotated

import typer


def _size(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel="Sizes")
    return option


M = Annotated[int | None, _size("GEMM: rows of A (AllGather: all ranks together)")]
N = Annotated[int | None, _size("GEMM: columns of B")]
K = Annotated[
    int | None, _size("GEMM: columns of A, rows of B (ReduceScatter, AllReduce: a rank's)")
]
Tokens = Annotated[int | None, _size("MoE: tokens of each rank")]
Hidden = Annotated[int | None, _size("MoE: width of a token")]
Features = Annotated[int | None, _size("MoE: width of an expert's result")]
Experts = Annotated[int | None, _size("MoE: experts of all ranks together")]
TopK = Annotated[int | None, _size("MoE: experts a token goes to")]
Batch = Annotated[int | None, _size("attention: batch")]
Heads = Annotated[int | None, _size("attention: query heads")]
KvHeads = Annotated[int | None, _size("attention: key and value heads")]
Sequence = Annotated[int | None, _size("attention: positions of all ranks together")]
HeadDim = Annotated[int | None, _size("attention: width of a head")]
Causal = Annotated[bool, _size("attention: causal, with zigzag split")]
