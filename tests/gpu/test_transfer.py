"""Copies by each engine between each kind of memory, byte-exact, nothing else written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from device_buffers import Buffer, needs_gpus, random_bytes

ENGINES = ("copy_engine", "bulk", "plain")
KINDS = {  # source, destination; the copy runs on GPU 0
    "local": ("local", "local"),
    "put": ("local", "peer"),
    "get": ("peer", "local"),
    "to_host": ("local", "host"),
    "from_host": ("host", "local"),
}
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 127, 4095, 4096, 65_536, 300_001, 1 << 20, (64 << 20) + 7)
GUARD = 64

pytestmark = needs_gpus(1)
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=needs_gpus(2) if "peer" in v else ()) for k, v in KINDS.items()],
)


@dataclass
class Place:
    """Memory of a kind: its bytes, and its address for kernels of GPU 0."""

    bytes: torch.Tensor
    address: int
    keep: object = None


def place(kind: str, nbytes: int) -> Place:
    if kind == "host":
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return Place(pinned, pinned.data_ptr())
    if kind == "peer":
        buffer = Buffer(1, (0,), nbytes)
        return Place(buffer.bytes(), buffer.address(0), buffer)
    local = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    return Place(local, local.data_ptr())


class Pair:
    """A source and a destination of one kind, and the check of copies between them."""

    def __init__(self, kind: str, nbytes: int) -> None:
        source, destination = KINDS[kind]
        self.src = place(source, nbytes + 2 * GUARD)
        self.dst = place(destination, nbytes + 2 * GUARD)
        self._seed = 0

    def refresh(self) -> None:
        """New random bytes on both sides."""
        for side in (self.src, self.dst):
            self._seed += 1
            device = "cuda:1" if side.bytes.device.index == 1 else "cuda:0"
            side.bytes.copy_(random_bytes(side.bytes.numel(), device, self._seed))
        synchronize()

    def copy(
        self,
        engine: str,
        nbytes: int,
        src_at: int = GUARD,
        dst_at: int = GUARD,
        *,
        copied: int | None = None,
        blocks: int = 8,
        stage_bytes: int = 0,
    ) -> bool:
        """Whether the destination is what a copy of ``nbytes`` leaves. ``copied``: copy only so
        many, to see the check notice it."""
        from mkernel.backends.accelerators.cuda import _kernels

        before = self.dst.bytes.to("cuda:0", copy=True)
        stream = torch.cuda.current_stream(0)
        _kernels.copy(
            self.dst.address + dst_at,
            self.src.address + src_at,
            nbytes if copied is None else copied,
            getattr(_kernels.Engine, engine),
            blocks,
            stage_bytes,
            stream=stream.cuda_stream,
        )
        stream.synchronize()
        before[dst_at : dst_at + nbytes] = self.src.bytes[src_at : src_at + nbytes].to("cuda:0")
        return torch.equal(before, self.dst.bytes.to("cuda:0"))


def synchronize() -> None:
    for device in range(min(2, torch.cuda.device_count())):
        torch.cuda.synchronize(device)


@every_engine
@every_kind
def test_sizes(kind: str, engine: str) -> None:
    pair = Pair(kind, max(SIZES))
    for nbytes in SIZES:
        pair.refresh()
        assert pair.copy(engine, nbytes), f"{nbytes} bytes"


@every_engine
@every_kind
def test_misalignments(kind: str, engine: str) -> None:
    pair = Pair(kind, 80_000)
    for nbytes in (1, 16, 47, 1000, 70_001):
        pair.refresh()
        for src_off in range(17):
            for dst_off in range(17):
                # The bytes that the last copy left differ from what this one brings.
                good = pair.copy(engine, nbytes, GUARD + src_off, GUARD + dst_off)
                assert good, f"{nbytes} bytes from {src_off} to {dst_off} past an aligned address"


@pytest.mark.parametrize("engine", ["bulk", "plain"])
@every_kind
def test_blocks_and_stages(kind: str, engine: str) -> None:
    pair = Pair(kind, 3_000_013)
    for blocks in (1, 2, 7, 64, 300):
        for stage_bytes in (16, 48, 4096, 24_576) if engine == "bulk" else (0,):
            pair.refresh()
            nbytes = 200_013 if stage_bytes < 4096 else 3_000_013
            good = pair.copy(engine, nbytes, blocks=blocks, stage_bytes=stage_bytes)
            assert good, f"{blocks} blocks, {stage_bytes} bytes a stage"


@pytest.mark.timeout(300)
@every_engine
@every_kind
def test_more_than_4_gib(kind: str, engine: str) -> None:
    nbytes = (4 << 30) + 4097
    pair = Pair(kind, nbytes)
    pair.refresh()
    assert pair.copy(engine, nbytes, GUARD + 3, GUARD + 3, blocks=32)
    if engine != "copy_engine":
        pair.refresh()
        assert pair.copy(engine, nbytes, GUARD + 3, GUARD + 8, blocks=32)


@every_engine
def test_graph_replay(engine: str) -> None:
    from mkernel.backends.accelerators.cuda import _kernels

    src = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
    dst = torch.empty_like(src)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _kernels.copy(
            dst.data_ptr(),
            src.data_ptr(),
            src.numel(),
            getattr(_kernels.Engine, engine),
            stream=torch.cuda.current_stream().cuda_stream,
        )
    for seed in range(20):
        src.copy_(random_bytes(src.numel(), "cuda:0", seed))
        graph.replay()
        assert torch.equal(src, dst)


def test_the_check_notices_a_missing_byte_and_a_byte_too_many() -> None:
    pair = Pair("local", 10_000)
    pair.refresh()
    assert not pair.copy("plain", 5000, copied=4992)
    pair.refresh()
    assert not pair.copy("plain", 5000, copied=5008)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("blocks", (0, 0)),
        ("blocks", (65_536, 0)),
        ("stage_bytes", (8, 8)),
        ("stage_bytes", (8, 1 << 17)),
    ],
)
def test_an_effort_out_of_range_is_refused(argument: str, values: tuple[int, int]) -> None:
    from mkernel.backends.accelerators.cuda import _kernels

    with pytest.raises(ValueError, match=argument):
        _kernels.copy(16, 32, 3, _kernels.Engine.bulk, *values, stream=0)
