"""GPU memory through the NIC contract: two ranks, on GPUs of their own or on one, and between them the
software device, which reaches their memory by the CUDA mover alone. That is no GPUDirect."""

from __future__ import annotations

import mover_ranks
import pytest
import torch
from device_buffers import needs_gpus

from mkernel.backends.accelerators.cuda.mover import nic_access
from mkernel.harness.nic_ranks import NicSubject

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    *(1, 2, 7, 8, 9, 63, 64, 65, 255, 1000, 1023, 1024, 1025, 4096),
    *(65535, 65536, 65537, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1),
    *(MIB, MIB + 1, 3 * MIB + 5, 40 * MIB + 3),
]
KINDS = {"device": (True, True), "from-host": (False, True), "to-host": (True, False)}
pytestmark = needs_gpus(1)
both = pytest.mark.parametrize("nic", ["cx7", "efa"])


def subject(nic: str) -> NicSubject:
    return NicSubject(nic, "soft", timeout_s=40.0)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_every_size_arrives(nic: str, kind: str) -> None:
    found = subject(nic).run(mover_ranks.exact, 2, SIZES, KINDS[kind], 0)
    assert found == [len(SIZES)] * 2


@both
def test_256_mib_arrive(nic: str) -> None:
    subject(nic).run(mover_ranks.exact, 2, [256 * MIB], KINDS["device"], 0)


@both
def test_nothing_goes_around_the_nic(nic: str) -> None:
    """The device changes each byte that it carries, in GPU memory too."""
    environment = {"MKERNEL_SOFTVERBS_SCRAMBLE": "90"}
    subject(nic).run(
        mover_ranks.exact, 2, [1, 1000, 65537, MIB], KINDS["device"], 90, environment=environment
    )


@both
@pytest.mark.parametrize("flush", [True, False])
def test_a_flush_that_is_left_out_is_seen(nic: str, flush: bool) -> None:
    environment = {"MKERNEL_SOFTVERBS_UNFLUSHED": "1"}
    found = subject(nic).run(mover_ranks.unflushed, 2, flush, environment=environment)
    assert found[1] == flush


@both
def test_many_puts_both_ways(nic: str) -> None:
    """Over a rail of 400 Gb/s and 3 us; `efa` reorders and repeats."""
    environment = {
        "MKERNEL_SOFTVERBS_BANDWIDTH_MBPS": "400000",
        "MKERNEL_SOFTVERBS_LATENCY_NS": "3000",
    }
    found = subject(nic).run(mover_ranks.many, 2, 2000, 20_000, environment=environment)
    assert found == [2000] * 2


@pytest.mark.alone
@both
def test_copies_pass_kernels_that_run(nic: str) -> None:
    found = subject(nic).run(mover_ranks.beside_a_busy_device, 2, 4 * MIB)
    seconds, still_busy = found[1]
    assert still_busy, f"the puts came after {seconds:.3f} s, when the GPU was idle again"


def test_the_device_says_what_nics_can_do_with_it() -> None:
    found = nic_access(torch.cuda.current_device())
    assert found.usable, found
