"""The user's own tensors: whole ones from files, checked, and the sizes of the op they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.lib import format as numpy_format
from safetensors import SafetensorError, safe_open

from mkernel.cases import Case
from mkernel.errors import ArgumentError, DtypeError, InputFileError, ShapeError
from mkernel.ops.validate import DTYPES, describe, dtype_name
from mkernel.printable import printable
from mkernel.user_files import open_file

_MOST_HEADER = 1 << 20
_MOST_SHOWN = 400

_GEMM = {"a": "[M, K]", "b": "[K, N]"}
KEYS: dict[str, dict[str, str]] = {
    "all_gather_gemm": _GEMM,
    "gemm_reduce_scatter": _GEMM,
    "gemm_all_reduce": _GEMM,
    "moe_dispatch_gemm": {
        "x": "[T·W, H]",
        "topk_ids": "[T·W, k]",
        "w": "[E, H, I]",
        "topk_weights": "[T·W, k]",
    },
    "ring_attention": {"q": "[B, Hq, S, D]", "k": "[B, Hkv, S, D]", "v": "[B, Hkv, S, D]"},
}
"""The tensors that a file holds for each op, whole: the job gives every rank its part."""


def load(op: str, files: tuple[Path, ...]) -> dict[str, torch.Tensor]:
    """Read an op's whole tensors (:data:`KEYS`) from one .safetensors; for the GEMMs also from two .npy
    files (A, B).

    Raises:
        InputFileError: a file is missing, unreadable, or has other keys; or the op takes none.
        ShapeError, DtypeError, ArgumentError: the tensors do not fit together.
    """
    if op not in KEYS:
        raise InputFileError(f"--input: {op} takes no files; it runs on random data only")
    keys = KEYS[op]
    for file in files:
        if not file.exists():
            raise InputFileError(
                f"--input {file}: no such file; give an existing .safetensors or .npy"
            )
        open_file(file, "--input").close()
    suffixes = [file.suffix for file in files]
    if suffixes == [".safetensors"]:
        tensors = _from_safetensors(files[0], keys)
    elif suffixes == [".npy", ".npy"] and keys is _GEMM:
        tensors = {name: _from_npy(file) for name, file in zip(keys, files, strict=True)}
    else:
        pair = ", or two .npy files (--input a.npy --input b.npy)" if keys is _GEMM else ""
        raise InputFileError(
            f"--input {' '.join(map(str, files))}: expected one .safetensors file with keys "
            f"{_listed(keys)}{pair}"
        )
    for name, tensor in tensors.items():
        if tensor.dim() != keys[name].count(",") + 1 or 0 in tensor.shape:
            raise ShapeError(name, describe(tensor), f"{keys[name]}, all at least 1")
    _CHECKS[next(iter(keys))](tensors)
    return tensors


def opened(case: Case, files: tuple[Path, ...]) -> Case:
    """Return the case with the files' tensors, where there are files. Raises what :func:`load`
    raises."""
    if not files:
        return case
    return case.with_(options={**case.options, "tensors": load(case.op, files)})


def sizes(
    op: str,
    tensors: Mapping[str, torch.Tensor],
    world_size: int,
    *,
    replicate_b: bool = False,
    causal: bool = False,
) -> dict[str, int]:
    """Return the op's sizes where the tensors are cut as it asks.

    AllGather+GEMM: A by rows, B by columns unless ``replicate_b``; the other GEMMs: A by columns, B
    by rows (K); MoE: tokens by rows, experts by number; attention: by positions.

    Raises:
        ShapeError: a dimension does not divide by the ranks.
    """
    if op == "moe_dispatch_gemm":
        x, w = tensors["x"], tensors["w"]
        return {
            "tokens": share("x", "rows", len(x), world_size),
            "hidden": x.shape[1],
            "features": w.shape[2],
            "experts": len(w),
            "top_k": tensors["topk_ids"].shape[1],
        }
    if op == "ring_attention":
        batch, heads, sequence, width = tensors["q"].shape
        return {
            "batch": batch,
            "heads": heads,
            "kv_heads": tensors["k"].shape[1],
            "sequence": sequence,
            "head_dim": width,
            "causal": causal,
        }
    m, n, k = len(tensors["a"]), tensors["b"].shape[1], tensors["a"].shape[1]
    if op != "all_gather_gemm":
        return {"m": m, "n": n, "k": share("k", "columns of A and rows of B", k, world_size)}
    return {"m": m, "n": n if replicate_b else columns_of_b(n, world_size), "k": k}


def columns_of_b(n: int, world_size: int) -> int:
    """Return a rank's columns of a sharded B. ShapeError."""
    if n % world_size:
        raise ShapeError(
            "n",
            n,
            f"a multiple of {world_size} ranks",
            why="B is sharded by columns; --replicate-b keeps it whole",
        )
    return n // world_size


def share(name: str, what: str, whole: int, world_size: int) -> int:
    """Return a rank's part of a dimension that the op cuts. ShapeError."""
    if whole % world_size:
        raise ShapeError(name, whole, f"a multiple of {world_size} ranks", why=f"{what} are cut")
    return whole // world_size


def _check_gemm(tensors: Mapping[str, torch.Tensor]) -> None:
    a, b = tensors["a"], tensors["b"]
    _same_dtypes(tensors, ("a", "b"))
    if a.shape[1] != b.shape[0]:
        raise ShapeError("b", describe(b), f"[K, N] with K = {a.shape[1]}, the columns of a")


def _check_moe(tensors: Mapping[str, torch.Tensor]) -> None:
    x, ids, w = tensors["x"], tensors["topk_ids"], tensors["w"]
    weights = tensors["topk_weights"]
    _same_dtypes(tensors, ("x", "w"))
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("topk_ids.dtype", ids.dtype, "torch.int32 or torch.int64")
    if not weights.dtype.is_floating_point:
        raise DtypeError("topk_weights.dtype", weights.dtype, "a floating-point dtype")
    if w.shape[1] != x.shape[1]:
        raise ShapeError("w", describe(w), f"[E, H, I] with H = {x.shape[1]}, the columns of x")
    if len(ids) != len(x):
        raise ShapeError("topk_ids", describe(ids), f"{len(x)} rows, as in x")
    if weights.shape != ids.shape:
        raise ShapeError("topk_weights", describe(weights), f"{tuple(ids.shape)}, as topk_ids")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= len(w):
        wrong = low if low < 0 else high
        raise ArgumentError("topk_ids", f"... {wrong} ...", f"expert numbers 0 to {len(w) - 1}")


def _check_attention(tensors: Mapping[str, torch.Tensor]) -> None:
    q, k = tensors["q"], tensors["k"]
    _same_dtypes(tensors, ("q", "k", "v"))
    legal = (q.shape[0], k.shape[1], *q.shape[2:])
    for name in ("k", "v"):
        if tuple(tensors[name].shape) != legal:
            raise ShapeError(name, describe(tensors[name]), f"{legal}, as q and k say")


_CHECKS = {"a": _check_gemm, "x": _check_moe, "q": _check_attention}  # by an op's first key


def _same_dtypes(tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> None:
    first = tensors[names[0]]
    for name in names:
        dtype_name(f"{name}.dtype", tensors[name].dtype, tuple(DTYPES))
        if tensors[name].dtype != first.dtype:
            raise DtypeError(
                f"{name}.dtype", tensors[name].dtype, f"{first.dtype}, the dtype of {names[0]}"
            )


def _listed(keys: Mapping[str, str]) -> str:
    *most, last = (f"{name!r} {shape}" for name, shape in keys.items())
    return f"{', '.join(most)} and {last}"


def _from_safetensors(file: Path, wanted: Mapping[str, str]) -> dict[str, torch.Tensor]:
    _check_header(file)
    try:
        with safe_open(file, framework="pt") as content:
            keys = sorted(content.keys())
            if not set(wanted) <= set(keys):
                shown = printable(str(keys), _MOST_SHOWN)
                raise InputFileError(
                    f"--input {file}: has keys {shown}; expected {_listed(wanted)}"
                )
            return {name: content.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError) as error:
        raise InputFileError(f"--input {file}: not readable as safetensors: {error}") from error


def _check_header(file: Path) -> None:
    """Check the header's length before the library maps the file and parses the header."""
    with open_file(file, "--input") as content:
        length = int.from_bytes(content.read(8), "little")
        size = os.fstat(content.fileno()).st_size
    if length > min(_MOST_HEADER, size - 8):
        raise InputFileError(
            f"--input {file}: not readable as safetensors: its header of {length} bytes is longer "
            f"than {'the file' if length > size - 8 else '1 MiB'}"
        )


def _from_npy(file: Path) -> torch.Tensor:
    try:
        with open_file(file, "--input") as content:
            _check_size(content)
            content.seek(0)
            array = numpy_format.read_array(content, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array))
    except Exception as error:  # numpy reads headers with Python's own parser, which raises much
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"--input {file}: not readable as .npy: {error}") from error


def _check_size(content: BinaryIO) -> None:
    """Raise ValueError where a header declares another array than the file holds, which numpy would
    allocate before it reads."""
    version = numpy_format.read_magic(content)
    readers = {
        (1, 0): numpy_format.read_array_header_1_0,
        (2, 0): numpy_format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"format version {version[0]}.{version[1]}; expected 1.0 or 2.0")
    shape, _, dtype = readers[version](content)
    if dtype.hasobject or any(size < 0 for size in shape):
        raise ValueError(f"an array of shape {shape} and dtype {dtype}")
    declared = prod(shape) * dtype.itemsize
    held = os.fstat(content.fileno()).st_size - content.tell()
    if declared != held:
        raise ValueError(f"shape {shape} of {dtype} takes {declared} bytes, the file holds {held}")
