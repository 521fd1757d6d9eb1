"""What ptxas makes of kernels with products: nothing on a CPU shows that a product waits for itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPILLED_BYTES = {
    "all_gather_gemm_bf16": 8,
    "gemm_reduce_bf16": 8,
    "moe/grouped_bf16": 8,
    "moe/push_wanted": 0,
    "few_rows_bf16": 48,
    "few_rows_e4m3_bf16": 48,
    "all_gather_gemm_e4m3_bf16": 8,
    "gemm_reduce_e4m3_bf16": 32,
    "attention_core": 0,
    "ring_attention": 20,
}
"""At most. Of few rows the one kernel that spills is that of 256; sums of e4m3 products spill once a
tile, where they are scaled; of ring attention the thread that loads does, not those that multiply."""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", list(SPILLED_BYTES))
def test_products_overlap_and_stay_in_registers(kernels: str, tmp_path: Path) -> None:
    """ptxas serialises wgmma (remark C7515) where other instructions write sums on some path to it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source = ROOT / f"backends/accelerators/hopper/kernels/{kernels}.cu"
    done = subprocess.run(
        [
            nvcc, "-I", str(ROOT), "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v",
            "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", str(tmp_path / "kernel"),
            str(source),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "C7515" not in said, said
    assert "serialized" not in said, said
    spilled = [int(each) for each in re.findall(r"(\d+) bytes spill stores", said)]
    assert spilled, said
    assert max(spilled) <= SPILLED_BYTES[kernels], said
