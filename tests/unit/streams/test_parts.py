"""Parts of the `streams` backend that need no world: products, scratch, claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.accelerators.streams import device as device_module
from mkernel.backends.accelerators.streams.call_streams import Scratch
from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.accelerators.streams.matmul import Factor, float32_sums
from mkernel.backends.accelerators.streams.schedule import GatherSchedule
from mkernel.backends.contracts.status import Status
from mkernel.errors import ArgumentError
from mkernel.plan.ops import BACKWARD
from mkernel.plan.shapes import SHAPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_round_once(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b = torch.randn(9, 4096).to(dtype), torch.randn(4096, 11).to(dtype)
    out = torch.full((9, 11), float("nan"), dtype=out_dtype)
    factor = Factor(b, out_dtype)
    factor.product(a[:0], out[:0])
    factor.product(a, out)
    wanted = a.double() @ b.double()
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[out_dtype]
    assert float((out.double() - wanted).norm() / wanted.norm()) <= limit


def test_scratch_is_kept_grows_and_is_dropped() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    first = scratch.take("a", (4, 6), torch.float32, cpu)
    smaller = scratch.take("a", (3, 5), torch.bfloat16, cpu)
    assert first.data_ptr() == smaller.data_ptr()
    assert smaller.shape == (3, 5)
    assert smaller.is_contiguous()
    assert scratch.take("b", (4,), torch.int64, cpu).data_ptr() != first.data_ptr()
    assert scratch.take("a", (0, 5), torch.float16, cpu).shape == (0, 5)
    first.fill_(1.0)
    scratch.take("a", (400,), torch.float32, cpu).fill_(2.0)
    assert bool((first == 1.0).all())  # who still holds the old one keeps it
    scratch.drop()
    assert scratch._kept == {}


@pytest.mark.parametrize("before", [True, False])
def test_sums_in_half_precision_are_off_during_a_product_only(before: bool) -> None:
    switches: Any = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    found = [getattr(switches, name) for name in names]
    try:
        for name in names:
            setattr(switches, name, before)
        with float32_sums():
            assert [getattr(switches, name) for name in names] == [False, False]
        assert [getattr(switches, name) for name in names] == [before, before]
    finally:
        for name, value in zip(names, found, strict=True):
            setattr(switches, name, value)


def test_what_it_claims() -> None:
    backend = StreamsAccelerator("cpu")
    claims = backend.capabilities()
    assert backend.status().usable
    assert set(claims.ops) == {*SHAPES, *BACKWARD.values()}
    assert claims.process_group
    assert backend.collectives == "gloo"
    assert [device.kind for device in backend.probe()] == ["cpu"]
    assert claims.constants is not None
    assert claims.constants.name == "streams"


@pytest.mark.parametrize(
    ("device", "constants", "cores"),
    [
        ("cpu", "streams", 1),
        ("cuda", "streams-cuda", 132),
        ("npu", "ascend 910b, never measured", 24),
    ],
)
def test_plans_know_the_device(device: str, constants: str, cores: int) -> None:
    claims = StreamsAccelerator(device).capabilities()
    assert (claims.constants and claims.constants.name, claims.compute_cores) == (constants, cores)
    assert claims.torch_device == device


def test_on_a_gpu_a_chunk_fills_it() -> None:
    """8192 x 2048 x 8192 on four: 128 of 132 multiprocessors work on 2048 rows, 32 on 512 rows."""
    sizes = {"m": 8192, "n": 2048, "k": 8192}
    made = gpu_plan(StreamsAccelerator("cuda"), "all_gather_gemm", 4, sizes, dtype="bfloat16")
    assert made.part(GatherSchedule).rows_per_chunk == 2048
    assert made.prediction.constants == "streams-cuda"


def test_devices_that_are_not_there() -> None:
    if not torch.cuda.is_available():
        backend = StreamsAccelerator("cuda")
        assert not backend.status().usable
        assert "MKERNEL_STREAMS_DEVICE" in backend.status().remedy
        assert backend.probe() == ()
    assert Device("npu").collectives == "hccl"
    with pytest.raises(ArgumentError, match="MKERNEL_STREAMS_DEVICE"):
        Device("toaster")


@pytest.mark.parametrize(
    ("known", "clock_mhz", "memory_gbs"),
    [
        (
            {"clock_rate": 1440000, "memory_clock_rate": 1215000, "memory_bus_width": 3072},
            1440,
            933.12,
        ),
        ({}, None, None),
    ],
)
def test_a_gpu_has_its_clock_and_its_memorys_rate_where_torch_knows_them(
    known: dict[str, int], clock_mhz: float | None, memory_gbs: float | None, monkeypatch: Any
) -> None:
    """As an A30 has them, in kHz and bits; torch 2.6 does not know them."""
    for name, value in {
        "is_available": True, "is_initialized": False, "device_count": 1,
        "get_device_name": "NVIDIA A30", "get_device_capability": (8, 0),
        "get_device_properties": SimpleNamespace(multi_processor_count=56, **known),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (one,) = Device("cuda").probe()
    assert (one.cores, one.clock_mhz) == (56, clock_mhz)
    assert one.memory_gbs == (memory_gbs and pytest.approx(memory_gbs))


def test_puts_are_for_devices_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, not without the native module, not where the user says no."""
    monkeypatch.setattr(device_module.native, "missing", lambda: None)
    assert Device("cuda").copies
    assert "p2p" in StreamsAccelerator("cuda").capabilities().transfer_paths
    assert not Device("cpu").copies
    assert not StreamsAccelerator("cpu").capabilities().peer_access
    with monkeypatch.context() as without:
        without.setattr(device_module.native, "missing", lambda: Status(False, "not built"))
        assert not Device("cuda").copies
    monkeypatch.setenv("MKERNEL_STREAMS_COPIES", "0")
    assert not Device("cuda").copies


def test_the_device_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cuda")
    assert StreamsAccelerator().device == "cuda"
