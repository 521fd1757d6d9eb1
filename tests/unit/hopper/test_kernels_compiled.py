"""What ptxas makes of kernels with products: nothing on a CPU shows that a product waits for itself."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

import ptxas_words

ROOT = Path(__file__).parents[3]
BUILT = {"hopper": "mkernel_hopper_kernels", "cuda": "mkernel_base_kernels"}
"""The targets that compile kernels, by the room that these are in."""
SPILLED_BYTES = {
    "gemm/all_gather_gemm_bf16": 136,
    "gemm/gemm_reduce_bf16": 8,
    "moe/grouped_bf16": 8,
    "moe/grouped_e4m3_bf16": 96,
    "moe/push_wanted": 0,
    "gemm/few_rows_bf16": 0,
    "gemm/mailed_tiles_bf16": 0,
    "gemm/few_rows_e4m3_bf16": 48,
    "gemm/all_gather_gemm_e4m3_bf16": 0,
    "gemm/gemm_reduce_e4m3_bf16": 32,
    "attention/core": 0,
    "attention/ring_attention": 20,
}
"""At most. Kernels for few rows may spill in e4m3 alone; sums of e4m3 products spill once a tile,
where they are scaled, those of experts where results are written; of ring attention the thread that
loads does, not those that multiply. Products that add segments of K in registers spill once a
segment, between the loops over K; those that add none do not."""
SPILLS = """
__global__ void __launch_bounds__(1024, 2) spills(float *values) {
    float mine[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) mine[i] = values[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i * 1024 + threadIdx.x] = mine[63 - i] + mine[i] * mine[i ^ 1];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", list(SPILLED_BYTES))
def test_products_overlap_and_stay_in_registers(kernels: str, tmp_path: Path) -> None:
    """ptxas serialises wgmma (remark C7515) where other instructions write sums on some path to it."""
    _judge(_said_of(kernels, tmp_path), SPILLED_BYTES[kernels])


@pytest.mark.slow
def test_what_rows_load_ahead_of_a_wait_stays_in_registers(tmp_path: Path) -> None:
    """Look at threads that have one vector of a row: a spill would wait for a residual on its way."""
    said = _said_of("collectives/sum_rows", tmp_path)
    spilled = dict(
        re.findall(r"entry function '(\S+)'.*?(\d+) bytes spill stores", said, re.DOTALL)
    )
    short = {name: each for name, each in spilled.items() if re.search(r"_kernelI\w+?Li1E", name)}
    assert len(short) == 12, said  # of two dtypes, a norm alone, three sums, and two by the tree
    assert set(short.values()) == {"0"}, said


@pytest.mark.slow
def test_spilled_bytes_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(SPILLS)
    said = _compiled(source, tmp_path)
    assert ptxas_words.words_of(tmp_path / "kernel.o", source) == said
    with pytest.raises(AssertionError, match="bytes spill stores"):
        _judge(said, max(SPILLED_BYTES.values()))


def _said_of(kernels: str, folder: Path) -> str:
    sources = {room: ROOT / f"backends/accelerators/{room}/kernels/{kernels}.cu" for room in BUILT}
    ((room, source),) = ((room, source) for room, source in sources.items() if source.exists())
    objects = ROOT / f"build/native/backends/accelerators/{room}/CMakeFiles/{BUILT[room]}.dir"
    said = ptxas_words.words_of(objects / f"kernels/{kernels}.cu.o", source)
    if said is None:  # not built, or not from the sources that are here now
        said = _compiled(source, folder)
    return said


def _compiled(source: Path, folder: Path) -> str:
    """What ptxas says of kernels that are compiled for it, as the build does."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    done = ptxas_words.compile_kernels(
        [
            nvcc, "-I", str(ROOT), "-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr",
            "-gencode=arch=compute_90a,code=sm_90a", "-c", "-MD", "-MF", str(folder / "kernel.d"),
            "-o", str(folder / "kernel.o"), str(source),
        ]
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def _judge(said: str, most: int) -> None:
    assert "C7515" not in said, said
    assert "serialized" not in said, said
    spilled = [int(each) for each in re.findall(r"(\d+) bytes spill stores", said)]
    assert spilled, said
    assert max(spilled) <= most, said
