"""Input files that lie about what they hold are refused before anything of that size is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mkernel.errors import ArgumentError, InputFileError
from mkernel.harness.footprint import available_bytes, check_fits, least_bytes
from mkernel.harness.inputs import load


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


GEMM = {"m": 64, "n": 16, "k": 32}


def test_a_run_that_cannot_fit_is_refused_and_says_by_how_much() -> None:
    least = least_bytes("all_gather_gemm", GEMM, 4, "float16", "float32")
    assert least == 2 * (64 * 32 + 4 * 32 * 16) + 4 * 64 * 16 * (4 + 8)
    check_fits("all_gather_gemm", GEMM, 4, "float16", "float32", available=least)
    with pytest.raises(ArgumentError, match=r"--m, --n, --k = 64, 16, 32 .* 56 KiB .* 4 ranks"):
        check_fits("all_gather_gemm", GEMM, 4, "float16", "float32", available=least - 1)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("gemm_reduce_scatter", GEMM),
        ("gemm_all_reduce", GEMM),
        ("moe_dispatch_gemm", {"tokens": 8, "hidden": 4, "features": 4, "experts": 4, "top_k": 2}),
        ("moe_combine", {"tokens": 8, "features": 4, "experts": 4, "top_k": 2}),
        ("ring_attention", {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 16, "head_dim": 8}),
    ],
)
def test_every_op_takes_memory_that_grows_with_it(op: str, sizes: dict[str, int]) -> None:
    least = least_bytes(op, sizes, 2, "float16", "float16")
    assert 0 < least < least_bytes(op, sizes, 4, "float16", "float16")


def test_available_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert available_bytes(tmp_path) == 8192
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert available_bytes(tmp_path) == 4096
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 8192
