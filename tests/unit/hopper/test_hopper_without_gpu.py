"""The hopper backend's host side where there is no GPU: stand-ins for the two native modules."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.backends.accelerators import cuda
from mkernel.backends.accelerators.cuda import backend as backend_module
from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.device_session import DeviceLaunch, StartedCalls
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import FUSED
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.transport import _transport
from mkernel.errors import BackendUnavailable, Unsupported


class CudaError(RuntimeError):
    pass


@dataclass
class FakeDevice:
    index: int
    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multiprocessors: int = 100
    clock_mhz: float = 1980.0
    memory_gbs: float = 0.0
    pci: str = "0000:3B:00.0"
    mps: bool = False
    out_of_reach: tuple[int, ...] = ()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for ``_cuda`` on a host of four devices, and for ``_kernels``."""
    made = SimpleNamespace(
        CudaError=CudaError,
        HOPPER=True,
        versions=lambda: (13000, 13000),
        devices=lambda: [FakeDevice(index) for index in range(4)],
    )
    for module in (native, cuda.native):
        monkeypatch.setattr(module, "native", lambda: made)
    monkeypatch.setattr(backend_module, "cuda", lambda: made)
    return made


def test_fewer_multiprocessors_are_claimed_than_there_are(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_MULTIPROCESSORS", "48")
    claims = HopperAccelerator().capabilities()
    assert (claims.compute_cores, claims.comm_cores) == (48, 48)
    here = claims.with_cores(100)  # of the machine
    assert (here.compute_cores, here.comm_cores) == (48, 48)
    assert claims.with_cores(40).compute_cores == 40


@pytest.mark.parametrize(
    ("mps", "each", "usable", "why"),
    [
        (False, "50", False, "ranks take turns on a shared device"),
        (True, None, False, "would hold multiprocessors that the others need"),
        (True, "51", False, "would hold multiprocessors that the others need"),
        (True, "50", True, "2 ranks share a device under MPS, 50 of 100 multiprocessors each"),
    ],
)
def test_ranks_run_side_by_side_on_multiprocessors_of_their_own(
    fake: Any, monkeypatch: pytest.MonkeyPatch, mps: bool, each: str | None, usable: bool, why: str
) -> None:
    fake.devices = lambda: [FakeDevice(0, mps=mps)]
    if each is not None:
        monkeypatch.setenv("MKERNEL_HOPPER_MULTIPROCESSORS", each)
    found = HopperAccelerator().side_by_side(2)
    assert (found.usable, why in found.detail) == (usable, True), found
    if mps and not usable:
        assert "MKERNEL_HOPPER_MULTIPROCESSORS to 50" in found.remedy


def test_status_names_what_is_missing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HopperAccelerator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.status().usable
    assert "4 x NVIDIA H200 (100 SMs), driver for CUDA 13.0" in backend.status().detail
    assert [device.id for device in backend.probe()] == ["cuda0", "cuda1", "cuda2", "cuda3"]
    rates = {(device.clock_mhz, device.memory_gbs) for device in backend.probe()}
    assert rates == {(1980.0, None)}, "the driver does not know the memory's"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch" in backend.status().detail
    assert backend.probe() == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake.devices = lambda: [FakeDevice(0, major=8)]
    assert "no device of compute capability 9.0" in backend.status().detail
    assert "use accelerator cuda" in backend.status().remedy
    assert CudaAccelerator().status().usable
    fake.devices = lambda: [FakeDevice(0, major=7, minor=5)]
    assert "no device of compute capability 8.0 or later" in CudaAccelerator().status().detail
    fake.devices = lambda: [FakeDevice(0)]
    fake.HOPPER = False
    assert backend.status().detail == "built without its kernels"
    assert CudaAccelerator().status().usable

    def none() -> list[FakeDevice]:
        raise CudaError("cudaGetDeviceCount failed: cudaErrorNoDevice (100)")

    fake.devices = none
    assert "cudaErrorNoDevice" in backend.status().detail
    fake.versions = lambda: (0, 13000)
    assert "no CUDA driver" in backend.status().detail
    assert backend.status().remedy


def test_devices_out_of_reach_are_reported_and_named(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_module, "isolation", lambda: (("MIG", Status(False, "on")),))
    apart = {1: (0,)}  # as one of the two says
    fake.devices = lambda: [
        FakeDevice(index, pci=f"0000:{index}B:00.0", out_of_reach=apart.get(index, ()))
        for index in range(3)
    ]
    backend = CudaAccelerator()
    assert backend.status().usable
    listed = backend.probe()
    assert backend.no_p2p(listed) == (("cuda0", "cuda1"),)
    renamed = [one.model_copy(update={"id": f"gpu{7 - one.index}"}) for one in listed]
    assert backend.no_p2p(renamed) == (("gpu7", "gpu6"),), "they are known by their addresses"
    row, other = backend.details()
    assert row[0] == "peer access"
    assert row[1].usable
    assert "cuda1 is not reached by cuda0" in row[1].detail
    assert "rests in pinned host memory" in row[1].detail
    assert other[0] == "MIG"
    apart.clear()
    assert backend.no_p2p(listed) == ()
    assert [name for name, _ in backend.details()] == ["MIG"]
    monkeypatch.setenv("MKERNEL_CUDA_PEER_ACCESS", "0")
    assert len(backend.no_p2p(listed)) == 3
    assert HopperAccelerator().no_p2p(listed) == ()


def test_a_build_without_nvcc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise BackendUnavailable("the CUDA kernels do not import: No module named '_kernels'")

    monkeypatch.setattr(native, "native", absent)
    status = HopperAccelerator().status()
    assert not status.usable
    assert "not built" in status.detail
    assert "nvcc" in status.remedy


@pytest.mark.usefixtures("fake")
def test_what_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = HopperAccelerator().capabilities()
    assert claimed.ops == tuple(FUSED)
    assert claimed.compute_cores == 100
    assert claimed.stream_ordered
    assert not claimed.multicast
    assert claimed.dtype_pairs() == (("bfloat16", "bfloat16"), ("float16", "float16"))
    plan: Any = SimpleNamespace(
        op="gemm_all_reduce", path="fused", schedule=None, accelerator="hopper"
    )
    monkeypatch.setattr(FUSED["gemm_all_reduce"], "workspace", lambda plan: Workspace((10,)))
    workspace = HopperAccelerator().workspace(plan)
    assert (workspace.areas, workspace.signals) == ((10,), 0)
    plan.op = "moe_combine_backward"
    with pytest.raises(Unsupported, match="no kernel of moe_combine_backward; it has: all_gather"):
        HopperAccelerator().workspace(plan)


def test_outside_of_a_world_nothing_is_there() -> None:
    backend = HopperAccelerator()
    assert backend.record() == 0
    backend.abort(_transport.AbortCode.timeout)
    assert backend.close(0.1)
    with pytest.raises(BackendUnavailable, match="in no world"):
        backend.allocate(10)
    with pytest.raises(BackendUnavailable, match="in no world"):
        backend.launch(Call.__new__(Call))


def test_kernels_record_their_failures_in_the_control_block() -> None:
    backend: Any = HopperAccelerator()
    backend._session = SimpleNamespace(control=SimpleNamespace(record=4096))
    assert backend.record() == 4096


def test_a_launch_is_waited_for_until_the_device_is_past_it() -> None:
    class Order:
        looks = 0

        def finished(self, number: int) -> bool:
            assert number == 5
            self.looks += 1
            return self.looks > 20

    order: Any = Order()
    launch = DeviceLaunch(order, 5, None)
    assert not launch.wait(0.0)
    assert order.looks == 1
    assert launch.wait(60.0)
    assert launch.times().seconds == {}


def test_the_native_modules_load_without_a_driver() -> None:
    try:
        from mkernel.backends.accelerators.cuda import _cuda, _kernels
    except ImportError:
        pytest.skip("built without nvcc")
    driver, runtime = _cuda.versions()
    assert runtime >= 12050
    if driver == 0:
        with pytest.raises(_cuda.CudaError, match=r"cudaGetDeviceCount failed: \w+ \(\d+\)"):
            _cuda.devices()
        with pytest.raises(_cuda.CudaError):
            _kernels.ControlBlock()


def test_the_number_of_the_first_call_is_written_where_native_code_says() -> None:
    """Before any peer maps the memory: the epoch, and each copy of it that copy engines read."""
    try:
        from mkernel.backends.accelerators.cuda import _kernels
    except ImportError:
        pytest.skip("built without nvcc")
    offsets = _kernels.epoch_offsets()
    assert len(set(offsets)) == len(offsets) == 1 + _kernels.MAX_COPIED_CHUNKS
    assert offsets[0] == 0
    assert all(offset % 8 == 0 and offset < 64 << 10 for offset in offsets)


def test_started_calls_are_waited_for_together() -> None:
    class Order:
        latest = 3
        over = 1

        def finished(self, number: int) -> bool:
            return number <= self.over

    order: Any = Order()
    calls = StartedCalls(order)
    assert not calls.wait(0.0)
    assert calls.calls_over() == 1
    order.over = 3
    assert calls.wait(0.0)
    order.latest = 4  # one more was started meanwhile
    assert not calls.wait(0.001)
    assert calls.calls_over() == 3
