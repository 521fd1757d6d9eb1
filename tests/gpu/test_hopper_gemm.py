"""The product alone, of one rank: every tiling, dtype and layout, odd sizes, with and without bias."""

from __future__ import annotations

import pytest
import torch
from device_buffers import needs_gpus
from few_elements import EPS_OF_SUMS, rounded_once

from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.cases.base import TOLERANCE
from mkernel.cases.comparison import FEW

pytestmark = needs_gpus(1)

BLOCKS = 132
SIZES = [
    (1, 8, 8),
    (8, 8, 8),
    (128, 256, 64),
    (129, 264, 72),
    (300, 776, 2056),
    (1000, 1000, 1000),
    (4096, 1024, 4096),
]


@pytest.mark.parametrize("kernel", ["all_gather_gemm", "gemm_reduce"])
@pytest.mark.parametrize("tiling", ["wide", "medium", "narrow"])
@pytest.mark.parametrize("n_major", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gaps", [False, True], ids=["packed", "gaps"])
def test_product(gaps: bool, dtype: str, n_major: bool, tiling: str, kernel: str) -> None:
    made = native()
    memory, control = DeviceMemory.create(made.DATA_OFFSET, 0), made.ControlBlock()
    for offset in made.epoch_offsets():
        memory.write_word(offset, 1)
    world = made.DeviceWorld([memory.address], 0, control.address, 5.0, 1)
    stream = torch.cuda.current_stream().cuda_stream
    for m, n, k in SIZES:
        for bias in (False, True):
            a, b = _random(m, k, dtype), _random(k, n, dtype)
            stored = b if n_major else b.t().contiguous()
            if gaps:
                a, stored = _with_gaps(a), _with_gaps(stored)
            row = _random(1, n, dtype) * 10
            guarded = torch.full((m + 2, n), float("nan"), device="cuda", dtype=a.dtype)
            out = guarded[1:-1]
            product = made.Product(
                n=n,
                k=k,
                half=dtype == "float16",
                n_major=n_major,
                tiling=getattr(made.Tiling, tiling),
                band=3,
                blocks=BLOCKS,
            )
            product = product.of(
                made.GemmTensors(
                    a.data_ptr(),
                    stored.data_ptr(),
                    out.data_ptr(),
                    row.data_ptr() if bias else 0,
                    a_pitch=a.stride(0),
                    b_pitch=stored.stride(0),
                )
            )
            if kernel == "all_gather_gemm":
                made.all_gather_gemm(0, world, product, made.AllGatherSchedule(m, m), False, stream)
            else:
                schedule = made.ReduceSchedule(
                    m=m, rows=m, panel_rows=2, panel_columns=2, everywhere=False
                )
                made.gemm_reduce(0, world, product, schedule, stream)
            torch.cuda.synchronize()
            truth = a.double() @ b.double() + (row.double() if bias else 0)
            error = float((out.double() - truth).norm() / truth.norm())
            sizes = a.double().abs() @ b.double().abs() + (row.double().abs() if bias else 0)
            few = m * n <= FEW and rounded_once(out, truth, sizes * k * EPS_OF_SUMS)
            assert error <= TOLERANCE[dtype] or few, (
                f"{m} x {n} x {k}, bias {bias}: error {error:.1e}"
            )
            assert guarded[0].isnan().all(), f"{m} x {n} x {k}: wrote before the output"
            assert guarded[-1].isnan().all(), f"{m} x {n} x {k}: wrote behind the output"


def _with_gaps(matrix: torch.Tensor) -> torch.Tensor:
    """The same in the middle of a larger one, with NaN around it."""
    rows, columns = matrix.shape
    larger = matrix.new_full((rows + 2, columns + 24), float("nan"))
    larger[1:-1, 8:-16] = matrix
    return larger[1:-1, 8:-16]


def _random(rows: int, columns: int, dtype: str) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").to(getattr(torch, dtype))
