"""Host memory as tensors: they see the pages, and keep them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from mkernel.backends.runtime.host_memory import HostMemory


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mkernel")


def test_a_tensor_sees_what_a_peer_writes() -> None:
    memory = HostMemory.create(4096)
    peer = HostMemory.attach(memory.export())
    tensor = memory.tensor(64, (3, 5), torch.bfloat16)
    assert tensor.data_ptr() == memory.address + 64
    peer.tensor(64, (15,), torch.bfloat16).copy_(torch.arange(15))
    assert torch.equal(tensor, torch.arange(15).bfloat16().view(3, 5))
    memory.close()
    peer.close()


def test_a_tensor_keeps_closed_memory() -> None:
    before = _mapped()
    memory = HostMemory.create(1 << 20)
    tensor = memory.tensor(0, (1 << 18,), torch.float32)
    tensor.fill_(3)
    part = tensor[1000:].view(-1, 4)
    memory.close()
    memory.close()
    del tensor, memory
    gc.collect()
    assert _mapped() == before + 1
    assert float(part.sum()) == 3 * part.numel()
    del part
    gc.collect()
    assert _mapped() == before
    closed = HostMemory.create(16)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.tensor(0, (1,), torch.uint8)


@pytest.mark.parametrize(
    ("offset", "count"), [(-4, 1), (2, 1), (0, 5), (16, 1), (1 << 40, 1), (0, 0)]
)
def test_what_does_not_fit_is_refused(offset: int, count: int) -> None:
    memory = HostMemory.create(16)
    with pytest.raises(ValueError, match="do not fit 16 bytes"):
        memory.tensor(offset, (count,), torch.float32)
    memory.close()
