"""A job's tensors: random and fresh in every iteration, or the user's own from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from mkernel.errors import DtypeError, InputFileError, ShapeError
from mkernel.job.spec import JobSpec
from mkernel.ops.validate import DTYPES, describe, dtype_name

_WHOLE_B = -1


class Inputs(Protocol):
    """Where a rank gets its tensors, and those of all ranks for the reference."""

    def a(self, rank: int, iteration: int) -> torch.Tensor:
        """A's rows of ``rank``, [m/W, k]."""

    def b(self, rank: int, iteration: int) -> torch.Tensor:
        """B as ``rank`` uses it, [k, n]."""


@dataclass(frozen=True)
class RandomInputs:
    """Standard normal data; any rank can make any rank's tensors from (seed, iteration, rank)."""

    spec: JobSpec
    world_size: int

    def a(self, rank: int, iteration: int) -> torch.Tensor:
        """A's rows of ``rank``, [m/W, k]."""
        return self._draw(iteration, 0, rank, (self.spec.m // self.world_size, self.spec.k))

    def b(self, rank: int, iteration: int) -> torch.Tensor:
        """B as ``rank`` uses it, [k, n]."""
        part = _WHOLE_B if self.spec.replicate_b else rank
        return self._draw(iteration, 1, part, (self.spec.k, self.spec.n))

    def _draw(self, iteration: int, which: int, part: int, shape: tuple[int, int]) -> torch.Tensor:
        seed = np.random.SeedSequence((self.spec.seed, iteration, which, part - _WHOLE_B))
        generator = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        data = torch.randn(shape, generator=generator, dtype=torch.float32)
        return data.to(DTYPES[self.spec.dtype])


@dataclass(frozen=True)
class FileInputs:
    """The user's tensors; the same in every iteration."""

    spec: JobSpec
    whole_a: torch.Tensor
    whole_b: torch.Tensor
    world_size: int

    def a(self, rank: int, iteration: int) -> torch.Tensor:
        """A's rows of ``rank``, [m/W, k]."""
        rows = self.spec.m // self.world_size
        return self.whole_a[rank * rows : (rank + 1) * rows]

    def b(self, rank: int, iteration: int) -> torch.Tensor:
        """B as ``rank`` uses it, [k, n]."""
        if self.spec.replicate_b:
            return self.whole_b
        return self.whole_b[:, rank * self.spec.n : (rank + 1) * self.spec.n].contiguous()


def open_inputs(spec: JobSpec, world_size: int) -> Inputs:
    """The tensors of a job. InputFileError, ShapeError, DtypeError."""
    if not spec.files:
        return RandomInputs(spec, world_size)
    a, b = load(spec.files)
    return FileInputs(spec, a, b, world_size)


def load(files: tuple[Path, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K] and B [K, N] from one .safetensors (keys ``a``, ``b``) or two .npy files (A, B).

    Raises:
        InputFileError: a file is missing, unreadable, or has other keys.
        ShapeError, DtypeError: the tensors do not fit together.
    """
    for file in files:
        if not file.is_file():
            raise InputFileError(
                f"--input {file}: no such file; give an existing .safetensors or .npy"
            )
    suffixes = [file.suffix for file in files]
    if suffixes == [".safetensors"]:
        a, b = _from_safetensors(files[0])
    elif suffixes == [".npy", ".npy"]:
        a, b = (_from_npy(file) for file in files)
    else:
        raise InputFileError(
            f"--input {' '.join(map(str, files))}: expected one .safetensors file with keys 'a' "
            "and 'b', or two .npy files (--input a.npy --input b.npy)"
        )
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2 or 0 in tensor.shape:
            raise ShapeError(name, describe(tensor), "a matrix with at least 1 row and 1 column")
        dtype_name(f"{name}.dtype", tensor.dtype, tuple(DTYPES))
    if a.dtype != b.dtype:
        raise DtypeError("b.dtype", b.dtype, f"{a.dtype}, the dtype of a")
    if a.shape[1] != b.shape[0]:
        raise ShapeError("b", describe(b), f"[K, N] with K = {a.shape[1]}, the columns of a")
    return a, b


def _from_safetensors(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as content:
            keys = sorted(content.keys())
            if not {"a", "b"} <= set(keys):
                raise InputFileError(
                    f"--input {file}: has keys {keys}; expected 'a' [M, K] and 'b' [K, N]"
                )
            return content.get_tensor("a"), content.get_tensor("b")
    except (SafetensorError, OSError) as error:
        raise InputFileError(f"--input {file}: not readable as safetensors: {error}") from error


def _from_npy(file: Path) -> torch.Tensor:
    try:
        array = np.load(file, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array))
    except (ValueError, OSError, TypeError) as error:
        raise InputFileError(f"--input {file}: not readable as .npy: {error}") from error
