"""The check that a run fits into this machine's memory, made before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from mkernel.errors import ArgumentError
from mkernel.plan.model import DTYPE_BYTES, DtypeName, OpName
from mkernel.topology.sources.files import read_int, read_text

_REFERENCE_BYTES = 8
"""Bytes of an element of the float64 result that each rank compares with."""
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files of the limit of a container's control group as seen from inside, versions 2 and 1."""


def check_fits(
    op: OpName,
    sizes: Mapping[str, int],
    world_size: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    available: int | None = None,
) -> None:
    """Raise ArgumentError where a checked run of an op on this machine needs more memory than there is.

    ``sizes``: those of the op's plan. ``available``: bytes; None: :func:`available_bytes`.
    """
    available = available_bytes() if available is None else available
    least = least_bytes(op, sizes, world_size, dtype, out_dtype)
    if available is None or least <= available:
        return
    named = {f"--{name.replace('_', '-')}": int(size) for name, size in sizes.items()}
    raise ArgumentError(
        ", ".join(named),
        ", ".join(map(str, named.values())),
        f"what fits into the {_text(available)} that this machine has available",
        why=f"inputs, results and their float64 check take at least {_text(least)} on "
        f"{world_size} ranks",
    )


def least_bytes(
    op: OpName, sizes: Mapping[str, int], world_size: int, dtype: DtypeName, out_dtype: DtypeName
) -> int:
    """Return the bytes of all ranks' inputs, results and references. A lower bound: workspaces and the
    like come on top."""
    match op:
        case "all_gather_gemm":
            m, n, k = (sizes[name] for name in ("m", "n", "k"))
            inputs, results = m * k + world_size * k * n, world_size * m * n
            reference = results
        case "gemm_reduce_scatter" | "gemm_all_reduce":
            m, n, k = (sizes[name] for name in ("m", "n", "k"))
            inputs = world_size * (m * k + k * n)
            results = m * n * (world_size if op == "gemm_all_reduce" else 1)
            reference = world_size * m * n
        case "all_reduce":
            inputs = results = reference = world_size * sizes["m"] * sizes["n"]
        case "moe_dispatch":
            inputs = world_size * sizes["tokens"] * sizes["hidden"]
            results = reference = inputs * sizes["top_k"]
        case "moe_dispatch_gemm":
            rows = world_size * sizes["tokens"] * sizes["top_k"]
            inputs = world_size * sizes["tokens"] * sizes["hidden"]
            inputs += sizes["experts"] * sizes["hidden"] * sizes["features"]
            results = reference = rows * sizes["features"]
        case "moe_gemm_combine":
            inputs = world_size * sizes["tokens"] * sizes["top_k"] * sizes["features"]
            inputs += sizes["experts"] * sizes["hidden"] * sizes["features"]
            results = reference = world_size * sizes["tokens"] * sizes["hidden"]
        case "moe_combine":
            inputs = world_size * sizes["tokens"] * sizes["top_k"] * sizes["features"]
            results = reference = world_size * sizes["tokens"] * sizes["features"]
        case "ring_attention":
            positions = prod(sizes[name] for name in ("batch", "sequence", "head_dim"))
            inputs = world_size * positions * (sizes["heads"] + 2 * sizes["kv_heads"])
            results = reference = positions * sizes["heads"]
        case "ring_attention_backward":
            positions = prod(sizes[name] for name in ("batch", "sequence", "head_dim"))
            heads = sizes["heads"] + 2 * sizes["kv_heads"]
            inputs = world_size * positions * (heads + sizes["heads"])
            results = reference = positions * heads
    bytes_in, bytes_out = DTYPE_BYTES[dtype], DTYPE_BYTES[out_dtype]
    return inputs * bytes_in + results * bytes_out + reference * _REFERENCE_BYTES


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the lesser of this machine's free memory and its container's limit; None: neither is
    known."""
    found = [read_int(root / limit) for limit in _LIMITS]
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split()[:1] and rest.split()[0].isdecimal():
            found.append(int(rest.split()[0]) << 10)
    return min((each for each in found if each is not None), default=None)


def _text(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} PiB"
