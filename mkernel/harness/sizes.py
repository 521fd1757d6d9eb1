"""The sizes of a modelled run: any op's, from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from mkernel.errors import ArgumentError
from mkernel.harness.shapes import TARGETS, shapes
from mkernel.plan.model import OpName
from mkernel.plan.shapes import size_names, sizes_or_defaults
from mkernel.topology.model import Model

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


class Sized(Model):
    """An op at one size: all that its plan takes, by name."""

    op: OpName
    sizes: dict[str, int]

    @property
    def text(self) -> str:
        """``M x N x K``; for ops of other sizes ``name=value ...``."""
        if self.op in GEMMS:
            return " x ".join(str(self.sizes[name]) for name in ("m", "n", "k"))
        return " ".join(f"{name}={int(value)}" for name, value in self.sizes.items())


def sized(text: str | None, ops: Sequence[OpName], ranks: int) -> tuple[Sized, ...]:
    """Every op at every size that it is given.

    Args:
        text: for the GEMMs what :func:`mkernel.harness.shapes.shapes` reads; for any op
            ``name=value name=value ...``, several separated by commas, what is not named being what
            ``mkernel run`` takes. None: the shipped list for the GEMMs, ``mkernel run``'s sizes for the
            others.

    Raises:
        ArgumentError, InputFileError: naming what is wrong.
    """
    if text is not None and "=" in text:
        parts = [_named(part) for part in text.split(",")]
        return tuple(
            Sized(op=op, sizes=sizes_or_defaults(op, dict(part))) for op in ops for part in parts
        )
    gemms = tuple(op for op in ops if op in GEMMS)
    others = tuple(op for op in ops if op not in GEMMS)
    if text is not None and others:
        names = "; ".join(f"{op}: {', '.join(size_names(op))}" for op in others)
        raise ArgumentError("--shapes", repr(text), f"'name=value name=value' ({names})")
    found = shapes(text or TARGETS, gemms, ranks) if gemms else ()
    return (
        *(Sized(op=each.op, sizes={"m": each.m, "n": each.n, "k": each.k}) for each in found),
        *(Sized(op=op, sizes=sizes_or_defaults(op, {})) for op in others),
    )


def _named(part: str) -> dict[str, int]:
    sizes = {}
    for pair in part.split():
        name, _, value = pair.partition("=")
        if not value.isdecimal():
            raise ArgumentError("--shapes", repr(pair), "name=value, the value an integer")
        sizes[name] = int(value)
    return sizes
