"""Whether a run fits into memory is known before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.errors import ArgumentError
from mkernel.harness.footprint import available_bytes, check_fits, least_bytes

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
        ("moe_gemm_combine", {"tokens": 8, "hidden": 4, "features": 4, "experts": 4, "top_k": 2}),
        ("ring_attention", {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 16, "head_dim": 8}),
        (
            "ring_attention_backward",
            {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 16, "head_dim": 8},
        ),
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
