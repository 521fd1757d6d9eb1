"""Bodies of NIC ranks whose regions are memory of GPUs, as :class:`NicSubject` runs them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch

from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.mover import offer_mover
from mkernel.backends.contracts.nic import SELF
from mkernel.harness.nic_ranks import Port, Rank
from mkernel.harness.outcome import CheckFailed

REGION = 1
GUARD = 512


class Side:
    """A rank's region: memory of its GPU, or of the host, as torch sees it."""

    def __init__(self, me: Rank, port: Port, nbytes: int, on_device: bool, flush: bool) -> None:
        self.memory: DeviceMemory | None = None
        if on_device:
            self.memory = DeviceMemory.create(nbytes, torch.cuda.current_device())
            self.bytes = self.memory.tensor(0, (nbytes,), torch.uint8)
            dmabuf = self.memory.dmabuf()
            key = port.session.register_device(
                REGION, self.memory.address, nbytes, dmabuf, flush=self.memory.flush() * flush
            )
            os.close(dmabuf)
        else:
            self.bytes = torch.from_numpy(port.memory.bytes)
            key = port.session.register(REGION, port.memory.address, nbytes)
        keys = me.exchange(key)
        for peer in me.peers:
            port.session.bind(REGION, peer, keys[peer])
        me.exchange()


@contextlib.contextmanager
def joined(
    me: Rank, nbytes: int, devices: tuple[bool, bool] = (True, True), flush: bool = True
) -> Iterator[tuple[Port, Side]]:
    """A session with such a region on every rank; ``devices``: whose is on a GPU."""
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    offer_mover()
    on_device = devices[me.rank]
    with me.open(64 if on_device else nbytes) as port:
        assert port.session.capabilities().reaches_device(exports_dmabuf=True)
        side = Side(me, port, nbytes, on_device, flush)
        yield port, side
        port.flush()
        me.exchange()
        port.session.deregister(REGION, 10.0)


def window(seed: int, nbytes: int) -> torch.Tensor:
    """Random bytes, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8 + 1,), generator=generator)
    return words.view(torch.uint8)[:nbytes]


def exact(me: Rank, sizes: list[int], devices: tuple[bool, bool], mask: int) -> int:
    """Puts from rank 0 to rank 1, misaligned at both ends; bytes beside them stay."""
    most = max(sizes)
    with joined(me, most + 4 * GUARD, devices) as (port, side):
        for step, nbytes in enumerate(sizes, start=1):
            local, remote = step * 3 % 61, GUARD + step * 7 % 59
            payload = window(step, nbytes)
            if me.rank == 0:
                side.bytes[local : local + nbytes] = payload.to(side.bytes.device)
                torch.cuda.synchronize()
                me.exchange()
                port.session.put(1, REGION, local, remote, nbytes, 0, 1)
            else:
                wanted = (payload ^ mask).to(side.bytes.device)
                side.bytes.fill_(0xEE)
                side.bytes[remote : remote + nbytes] = ~wanted
                torch.cuda.synchronize()
                me.exchange()
                port.exactly(0, step, f"a put of {nbytes} bytes")
                came = side.bytes[remote : remote + nbytes]
                if not torch.equal(came, wanted):
                    wrong = int((came != wanted).sum())
                    raise CheckFailed(f"{wrong} of {nbytes} bytes are wrong")
                around = (side.bytes[:remote], side.bytes[remote + nbytes :])
                if any(bool((each != 0xEE).any()) for each in around):
                    raise CheckFailed(f"a put of {nbytes} bytes wrote beside them")
            me.exchange()
    return len(sizes)


def unflushed(me: Rank, flush: bool) -> bool:
    """Whether what rank 0 put was there when rank 1 saw the signal."""
    nbytes = 100_000
    with joined(me, nbytes, flush=flush) as (port, side):
        payload = window(3, nbytes)
        if me.rank == 0:
            side.bytes.copy_(payload)
        torch.cuda.synchronize()
        me.exchange()
        if me.rank == 0:
            port.session.put(1, REGION, 0, 0, nbytes, 0, 1)
            return True
        port.exactly(0, 1, "a put")
        return torch.equal(side.bytes.cpu(), payload)


def beside_a_busy_device(me: Rank, nbytes: int) -> tuple[float, bool]:
    """Seconds until puts had come while rank 1's GPU computed on all multiprocessors, and whether it
    still did then."""
    with joined(me, nbytes) as (port, side):
        busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        ended = torch.cuda.Event()
        if me.rank == 0:
            side.bytes.copy_(window(5, nbytes))
        torch.mm(busy, busy)
        torch.cuda.synchronize()
        if me.rank == 1:
            for _ in range(600):  # most of a second
                torch.mm(busy, busy)
            ended.record()
        me.exchange()
        began = time.monotonic()
        if me.rank == 0:
            for _ in range(8):
                port.session.put(1, REGION, 0, 0, nbytes, 0, 1)
            port.session.put(SELF, 0, 0, 0, 0, 5, 1)
            port.wait(5, 1, "the completion")
        else:
            port.wait(0, 8, "puts to a busy GPU")
        seconds, still = time.monotonic() - began, not ended.query()
        me.exchange()
        torch.cuda.synchronize()
        if me.rank == 1 and not torch.equal(side.bytes.cpu(), window(5, nbytes)):
            raise CheckFailed("the bytes are wrong")
    return seconds, still


def many(me: Rank, puts: int, nbytes: int) -> int:
    """Puts both ways at once; every signal promises its own bytes."""
    half = puts * nbytes
    with joined(me, 2 * half) as (port, side):
        mine, theirs = window(10 + me.rank, half), window(11 - me.rank, half)
        side.bytes[:half] = mine.cuda()
        torch.cuda.synchronize()
        me.exchange()
        peer = me.peers[0]
        for i in range(puts):
            port.session.put(peer, REGION, i * nbytes, half + i * nbytes, nbytes, i % 400, 1)
        for i in range(puts):
            port.wait(i % 400, i // 400 + 1, f"put {i}")
        if not torch.equal(side.bytes[half:].cpu(), theirs):
            raise CheckFailed("bytes of puts both ways are wrong")
    return puts
