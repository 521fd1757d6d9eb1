"""The ops' names: the canonical ones, the short aliases users know from elsewhere, and the
companions that are launched only after an op."""

from __future__ import annotations

import difflib
from typing import cast

from mkernel.errors import UnknownOp
from mkernel.plan.model import OpName

ALIASES: dict[str, str] = {
    "ag_gemm": "all_gather_gemm",
    "ar": "all_reduce",
    "gemm_ar": "gemm_all_reduce",
    "gemm_rs": "gemm_reduce_scatter",
    "dispatch_gemm": "moe_dispatch_gemm",
    "gemm_combine": "moe_gemm_combine",
}
OPS: tuple[OpName, ...] = (
    "all_gather_gemm",
    "all_reduce",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "moe_dispatch",
    "moe_dispatch_gemm",
    "ring_attention",
)
COMPANIONS: tuple[OpName, ...] = ("moe_combine", "moe_gemm_combine")
"""Companions are planned and launched like ops, but only after one: they take a dispatch's
handle."""


BACKWARD: dict[OpName, OpName] = {
    "moe_dispatch_gemm": "moe_dispatch_backward",
    "moe_combine": "moe_combine_backward",
    "moe_gemm_combine": "moe_gemm_combine_backward",
    "ring_attention": "ring_attention_backward",
}
"""Ops that compute another's gradients, with its sizes; the GEMM ops are each other's. Autograd
calls them."""
_FORWARD: dict[str, OpName] = {backward: forward for forward, backward in BACKWARD.items()}


READS_OF: dict[str, OpName] = dict.fromkeys(
    (
        "moe_dispatch",
        "moe_combine",
        "moe_gemm_combine",
        "moe_dispatch_backward",
        "moe_combine_backward",
        "moe_gemm_combine_backward",
    ),
    "moe_dispatch_gemm",
)
"""Ops that read what another op's call left in words of its accelerator's own, or leave such words
for the same readers, so all run on the same accelerator."""


def forward(op: str) -> str:
    """Return the op whose gradients this one computes; the op itself if it computes none."""
    return _FORWARD.get(op, op)


def named() -> str:
    """List all ops with their aliases, for messages."""
    short = {full: alias for alias, full in ALIASES.items()}
    return ", ".join(f"{op} ({short[op]})" if op in short else op for op in (*OPS, *COMPANIONS))


def canonical(name: str) -> OpName:
    """Return the op's canonical name, from it or an alias; ``-`` counts as ``_``, case does not matter.

    Raises:
        UnknownOp: no op of that name; the message lists all and suggests the closest.
    """
    plain = name.strip().lower().replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if forward(plain) in (*OPS, *COMPANIONS):
        return cast(OpName, plain)
    close = difflib.get_close_matches(plain, [*OPS, *ALIASES], n=1)
    why = f"did you mean {close[0]!r}?" if close else ""
    raise UnknownOp("op", repr(name), f"one of: {named()}", why=why)
