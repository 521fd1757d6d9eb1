"""Input files: what is read, how each bad one is refused, and those that lie about what they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mkernel.cases import case_of
from mkernel.errors import ArgumentError, DtypeError, InputFileError, ShapeError
from mkernel.harness.inputs import load, opened, sizes

OP = "all_gather_gemm"
A, B = torch.arange(32.0).reshape(8, 4).half(), torch.arange(24.0).reshape(4, 6).half()


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "x.safetensors"
    save_file(tensors, path)
    return path


def test_safetensors_and_npy_give_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", A.numpy())
    np.save(tmp_path / "b.npy", np.asfortranarray(B.numpy()))
    for files in ((written(tmp_path, a=A, b=B),), (tmp_path / "a.npy", tmp_path / "b.npy")):
        for op in (OP, "gemm_reduce_scatter", "gemm_all_reduce"):
            found = load(op, files)
            assert torch.equal(found["a"], A)
            assert torch.equal(found["b"], B)


def test_a_job_opens_its_files(tmp_path: Path) -> None:
    for replicate in (False, True):
        each = sizes(OP, {"a": A, "b": B}, 2, replicate_b=replicate)
        assert each == {"m": 8, "n": 6 if replicate else 3, "k": 4}
        case = case_of(OP)(each, "float16", "float32", options={"replicate_b": replicate})
        job = opened(case, (written(tmp_path, a=A, b=B),))
        parts = [job.inputs(rank, 2, 1) for rank in range(2)]
        assert torch.equal(torch.cat([part["a"] for part in parts]), A)
        assert all(tensor.is_contiguous() for part in parts for tensor in part.values())
        b = [part["b"] for part in parts]
        assert torch.equal(b[1] if replicate else torch.cat(b, 1), B)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no such file"):
        load(OP, (tmp_path / "absent.safetensors",))


def test_wrong_keys(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"keys \['a', 'weight'\]"):
        load(OP, (written(tmp_path, a=A, weight=B),))


@pytest.mark.parametrize("name", ["x.safetensors", "x.npy", "x.txt"])
def test_unreadable(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"this is no tensor file")
    with pytest.raises(InputFileError):
        load(OP, (path, path) if name.endswith("npy") else (path,))


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (A, B[:3], ShapeError),
        (A, B.float(), DtypeError),
        (A.int(), B.int(), DtypeError),
        (A.reshape(-1), B, ShapeError),
        (A[:0], B, ShapeError),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error):
        load(OP, (written(tmp_path, a=a.contiguous(), b=b.contiguous()),))


X, IDS = torch.ones(8, 4), torch.tensor([[0, 5], [1, 2], [3, 3], [4, 0]] * 2)
MOE = {"x": X, "topk_ids": IDS, "w": torch.ones(6, 4, 3), "topk_weights": torch.ones(8, 2)}
Q = torch.ones(1, 4, 16, 8)
ATTENTION = {"q": Q, "k": Q[:, :2].clone(), "v": Q[:, 2:].clone()}


def test_moe_and_attention_files(tmp_path: Path) -> None:
    for op, tensors in (("moe_dispatch_gemm", MOE), ("ring_attention", ATTENTION)):
        found = load(op, (written(tmp_path, more=X.sum(), **tensors),))
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)


def test_sizes_of_files() -> None:
    assert sizes("gemm_reduce_scatter", {"a": A, "b": B}, 2) == {"m": 8, "n": 6, "k": 2}
    assert sizes("moe_dispatch_gemm", MOE, 4) == {
        "tokens": 2, "hidden": 4, "features": 3, "experts": 6, "top_k": 2,
    }  # fmt: skip
    assert sizes("ring_attention", ATTENTION, 4, causal=True) == {
        "batch": 1, "heads": 4, "kv_heads": 2, "sequence": 16, "head_dim": 8, "causal": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "tensors", "part"),
    [
        (OP, {"a": A, "b": B}, "--replicate-b"),
        ("gemm_reduce_scatter", {"a": A, "b": B}, "k = 4"),
        ("moe_dispatch_gemm", MOE, "x = 8"),
    ],
)
def test_what_does_not_divide(op: str, tensors: dict[str, torch.Tensor], part: str) -> None:
    with pytest.raises(ShapeError, match=part):
        sizes(op, tensors, 5)


@pytest.mark.parametrize(
    ("op", "change", "error", "part"),
    [
        ("moe_dispatch_gemm", {"topk_ids": IDS.float()}, DtypeError, "int32 or torch.int64"),
        ("moe_dispatch_gemm", {"topk_ids": IDS + 1}, ArgumentError, r"\.\.\. 6 \.\.\."),
        ("moe_dispatch_gemm", {"topk_ids": IDS - 1}, ArgumentError, r"\.\.\. -1 \.\.\."),
        ("moe_dispatch_gemm", {"topk_ids": IDS[:4]}, ShapeError, "8 rows"),
        ("moe_dispatch_gemm", {"w": torch.ones(6, 5, 3)}, ShapeError, "H = 4"),
        ("moe_dispatch_gemm", {"w": torch.ones(6, 4)}, ShapeError, r"\[E, H, I\]"),
        ("moe_dispatch_gemm", {"w": torch.ones(6, 4, 3).half()}, DtypeError, "dtype of x"),
        ("moe_dispatch_gemm", {"topk_weights": torch.ones(8, 3)}, ShapeError, "as topk_ids"),
        ("moe_dispatch_gemm", {"topk_weights": IDS + 0}, DtypeError, "floating"),
        ("ring_attention", {"k": Q[:, :, :8].clone()}, ShapeError, "as q and k say"),
        ("ring_attention", {"v": Q.clone()}, ShapeError, "as q and k say"),
        ("ring_attention", {"v": Q[:, :2].half()}, DtypeError, "dtype of q"),
    ],
)
def test_moe_and_attention_tensors_that_do_not_fit(
    tmp_path: Path,
    op: str,
    change: dict[str, torch.Tensor],
    error: type[Exception],
    part: str,
) -> None:
    tensors = {**(MOE if op.startswith("moe") else ATTENTION), **change}
    with pytest.raises(error, match=part):
        load(op, (written(tmp_path, **tensors),))


def test_only_gemms_come_as_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", Q.numpy())
    with pytest.raises(InputFileError, match=r"one \.safetensors file with keys 'q'"):
        load("ring_attention", (tmp_path / "q.npy", tmp_path / "q.npy"))


def test_a_combine_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="moe_combine"):
        load("moe_combine", (tmp_path / "x.safetensors",))


def _npy(header: str) -> bytes:
    text = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


ARRAYS = {
    "petabytes": _npy("{'descr': '<f2', 'fortran_order': False, 'shape': (1000000000000, 1000), }"),
    "negative": _npy("{'descr': '<f2', 'fortran_order': False, 'shape': (-1, -8), }"),
    "objects": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }") + b"x" * 8,
    "truncated": _npy("{'descr': '<f2', 'fortran_order': False, 'shape': (8, 8), }") + b"x" * 127,
    "names": _npy("{'descr': '<U8', 'fortran_order': False, 'shape': (1, 1), }") + b"x" * 32,
    "no_header": b"\x93NUMPY\x01\x00\xff\xff",
    "code": _npy("__import__('os').system('true')"),
    "zip": b"PK\x03\x04" + b"\0" * 200,
    "no_end": _npy("{'descr': '<f2', 'fortran_order': False, 'shape': (4, 8"),
    "version": b"\x93NUMPY\x09\x00" + b"\0" * 200,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_lie_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.npy"
    file.write_bytes(ARRAYS[name])
    with pytest.raises(InputFileError, match=f"--input .*{name}.npy"):
        load("all_gather_gemm", (file, file))


TENSORS = {
    "length": (1 << 62).to_bytes(8, "little") + b"{}",
    "large_header": (8 << 20).to_bytes(8, "little") + b" " * (8 << 20),
    "short": b"\1",
    "keys": (100).to_bytes(8, "little") + b'{"\x1b[31m": 0}'.ljust(100),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_lie_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.safetensors"
    file.write_bytes(TENSORS[name])
    with pytest.raises(InputFileError, match=f"--input .*{name}.safetensors"):
        load("all_gather_gemm", (file,))


def test_keys_of_a_file_are_shown_as_escapes_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "keys.safetensors"
    save_file({f"\x1b[31m{i}": torch.zeros(1) for i in range(1000)}, file)
    with pytest.raises(InputFileError, match=r"x1b\[31m0") as error:
        load("all_gather_gemm", (file,))
    assert len(str(error.value)) < 1500
