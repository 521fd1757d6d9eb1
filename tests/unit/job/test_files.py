"""Input files: what is read, and how each bad one is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mkernel.errors import DtypeError, InputFileError, ShapeError
from mkernel.job.inputs import FileInputs, load
from mkernel.job.spec import JobSpec

A, B = torch.arange(32.0).reshape(8, 4).half(), torch.arange(24.0).reshape(4, 6).half()


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "x.safetensors"
    save_file(tensors, path)
    return path


def test_safetensors_and_npy_give_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", A.numpy())
    np.save(tmp_path / "b.npy", np.asfortranarray(B.numpy()))
    for files in ((written(tmp_path, a=A, b=B),), (tmp_path / "a.npy", tmp_path / "b.npy")):
        a, b = load(files)
        assert torch.equal(a, A)
        assert torch.equal(b, B)


def test_shards(tmp_path: Path) -> None:
    for replicate in (False, True):
        n = 6 if replicate else 3
        spec = JobSpec("all_gather_gemm", 8, n, 4, "float16", "float32", replicate, None, (), None,
                       0, 1, 1)  # fmt: skip
        inputs = FileInputs(spec, A, B, 2)
        assert torch.equal(torch.cat([inputs.a(0, 1), inputs.a(1, 1)]), A)
        parts = [inputs.b(0, 1), inputs.b(1, 1)]
        assert all(part.is_contiguous() for part in parts)
        assert torch.equal(parts[1] if replicate else torch.cat(parts, 1), B)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no such file"):
        load((tmp_path / "absent.safetensors",))


def test_wrong_keys(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"keys \['a', 'weight'\]"):
        load((written(tmp_path, a=A, weight=B),))


@pytest.mark.parametrize("name", ["x.safetensors", "x.npy", "x.txt"])
def test_unreadable(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"this is no tensor file")
    with pytest.raises(InputFileError):
        load((path, path) if name.endswith("npy") else (path,))


def test_pickled_npy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"not": "numbers"}], dtype=object), allow_pickle=True)
    with pytest.raises(InputFileError):
        load((path, path))


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (A, B[:3], ShapeError),
        (A, B.float(), DtypeError),
        (A.double(), B.double(), DtypeError),
        (A.reshape(-1), B, ShapeError),
        (A[:0], B, ShapeError),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error):
        load((written(tmp_path, a=a.contiguous(), b=b.contiguous()),))
