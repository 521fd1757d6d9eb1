"""Ranks of a world as the GPUs of one process: workspaces, control blocks, streams, and the sums that
the collectives promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from device_buffers import Buffer

from mkernel.backends.transport import _transport

# Offsets in a workspace, as device/workspace.cuh lays it out.
PEERS_WORDS = slice(512, 768)  # what peers finished and started
FLAGS = slice(64 << 10, 1 << 20)
BRIEF = 16 << 20  # bytes of slots up to which a call is brief
MAIL = slice(34 << 20, 66 << 20)  # of even and of odd calls
MOST_MAIL = 16 << 20  # bytes of one call
DEADLINE_S = 20.0


@dataclass
class Ranks:
    """A world. Calls are launched rank by rank and run at the same time."""

    world: int
    staging_bytes: int = 1 << 20
    timeout_s: float = DEADLINE_S
    workspaces: list[Buffer] = field(init=False)
    controls: list[Any] = field(init=False)
    streams: list[torch.cuda.Stream] = field(init=False)

    def __post_init__(self) -> None:
        from mkernel.backends.accelerators.cuda import _kernels

        everyone = range(self.world)
        nbytes = _kernels.DATA_OFFSET + self.staging_bytes
        self.workspaces = [Buffer(rank, everyone, nbytes) for rank in everyone]
        for workspace in self.workspaces:
            workspace.bytes()[:8].view(torch.int64).fill_(1)  # the epoch
        self.controls = [_kernels.ControlBlock() for _ in everyone]
        self.streams = [torch.cuda.Stream(rank) for rank in everyone]
        # Loaded at its first launch, which must not be while a kernel of that GPU waits.
        self.on_each(lambda rank: self.delay(1))
        self.synchronize()

    @staticmethod
    def delay(cycles: int) -> None:
        """Keep the current stream busy."""
        torch.cuda._sleep(cycles)

    def call(self, rank: int, *, blocks: int = 0, by_mail: bool = False) -> Any:
        """The native handle of one rank's next call."""
        from mkernel.backends.accelerators.cuda import _kernels

        workspaces = [workspace.address(rank) for workspace in self.workspaces]
        world = _kernels.DeviceWorld(
            workspaces, rank, self.controls[rank].address, self.timeout_s, 7
        )
        return _kernels.Collective(world, self.staging_bytes, blocks=blocks, by_mail=by_mail)

    def stream(self, rank: int) -> int:
        return self.streams[rank].cuda_stream

    def on_each(self, launch: Callable[[int], None], only: Sequence[int] | None = None) -> None:
        """``launch(rank)`` with the rank's device and stream current. It must not wait for any."""
        for rank in range(self.world) if only is None else only:
            with torch.cuda.device(rank), torch.cuda.stream(self.streams[rank]):
                launch(rank)

    def synchronize(self) -> None:
        """Fail after the deadline and a bit; kernels give up at the deadline by themselves."""
        end = time.monotonic() + self.timeout_s + 10
        for rank in range(self.world):
            torch.cuda.current_stream(rank).synchronize()
            while not self.streams[rank].query():
                assert time.monotonic() < end, f"rank {rank}: a kernel does not end"
                time.sleep(0.0005)

    def epochs(self) -> list[int]:
        return [
            int(workspace.bytes()[:8].view(torch.int64).item()) for workspace in self.workspaces
        ]

    def check_outcomes(self) -> None:
        """No wait of any rank failed."""
        for rank, control in enumerate(self.controls):
            found = _transport.record_outcome(control.record)
            if found is not None:
                code, who = found
                seen = who.signal, who.peer, who.seen, who.wanted
                raise AssertionError(f"rank {rank}: {code}, {seen}")


def sums(
    sources: list[torch.Tensor],
    owned: int,
    rounded_to: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What reductions promise: float32 sums in the owner's order, and then the bias, rounded once. The
    sources lie on one device. ``owned``: elements of each rank but perhaps the last ones. ``bias``: of
    every row."""
    world, total = len(sources), sources[0].numel()
    parts = []
    for owner in range(world):
        part = slice(min(owner * owned, total), min((owner + 1) * owned, total))
        sum_ = torch.zeros_like(sources[owner][part], dtype=torch.float32)
        for step in range(world):
            sum_ = sum_ + sources[(owner + step) % world][part].float()
        if bias is not None:
            columns = torch.arange(part.start, part.stop, device=bias.device) % len(bias)
            sum_ = sum_ + bias.float()[columns]
        parts.append(sum_.to(rounded_to))
    return torch.cat(parts)


def owned_elements(world: int, elements: int) -> int:
    """Elements that a rank owns in an all_reduce, in whole 16 bytes."""
    return ((elements + world - 1) // world + 7) // 8 * 8


@dataclass
class Work:
    """One collective on all ranks: its inputs, poisoned outputs, and what they must become."""

    ranks: Ranks
    name: str  # all_gather, reduce_scatter, all_reduce
    elements: int  # of a shard, of a part, of the whole
    dtype: torch.dtype = torch.bfloat16
    way: str = "one_shot"  # or two_shot; by mail: mail, or mail_twice
    symmetric: bool = False
    seed: int = 0
    out_offset: int = 0  # elements by which the outs are misaligned
    poison: float = float("nan")
    rounded_to: torch.dtype | None = None  # of the outs, where it is not `dtype`
    columns: int = 0  # of a bias; 0: none
    beside: int = 0  # float32 elements of each rank that a gather carries beside; 0: none
    sources: list[torch.Tensor] = field(init=False)
    outs: list[torch.Tensor] = field(init=False)
    guarded: list[torch.Tensor] = field(init=False)  # the outs and what lies around them
    seen: list[torch.Tensor] = field(init=False)
    biases: list[torch.Tensor] = field(init=False)
    small: list[torch.Tensor] = field(init=False)
    small_outs: list[torch.Tensor] = field(init=False)
    _storage: list[Any] = field(init=False)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.rounded_to or self.dtype

    @property
    def element(self) -> str:
        """The native name of what is added up; none for bytes."""
        names = [str(t).removeprefix("torch.") for t in (self.dtype, self.out_dtype)]
        return "_to_".join(dict.fromkeys(names))

    def __post_init__(self) -> None:
        world = self.ranks.world
        scale = world if self.name == "reduce_scatter" else 1
        self.sources = [
            torch.empty(self.elements * scale, dtype=self.dtype, device=f"cuda:{rank}")
            for rank in range(world)
        ]
        count = self.elements * (world if self.name == "all_gather" else 1)
        nbytes = (count + self.out_offset + 64) * self.out_dtype.itemsize
        self._storage = []
        for rank in range(world):
            if self.symmetric:
                self._storage.append(Buffer(rank, range(world), nbytes))
            else:
                self._storage.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{rank}"))
        self.guarded = [
            (s.bytes() if self.symmetric else s).view(self.out_dtype) for s in self._storage
        ]
        self.outs = [g[self.out_offset : self.out_offset + count] for g in self.guarded]
        self.seen = [torch.empty_like(g) for g in self.guarded]
        row = torch.randn(self.columns, generator=torch.Generator().manual_seed(self.seed))
        self.biases = [(9 * row).to(self.out_dtype).to(f"cuda:{rank}") for rank in range(world)]
        self.small = [torch.empty(self.beside, device=f"cuda:{rank}") for rank in range(world)]
        self.small_outs = [
            torch.empty(world * self.beside, device=each.device) for each in self.small
        ]
        self.refresh(self.seed)

    def refresh(self, seed: int) -> None:
        """New inputs, poisoned outputs."""
        for rank, source in enumerate(self.sources):
            generator = torch.Generator(device=source.device).manual_seed(seed * 64 + rank)
            if self.dtype == torch.uint8:
                source.random_(0, 255, generator=generator)
            else:
                source.normal_(generator=generator)
            self.guarded[rank].fill_(self.poison)
            self.seen[rank].fill_(self.poison)
            self.small[rank].normal_(generator=generator)
            self.small_outs[rank].fill_(torch.nan)
        self.ranks.synchronize()

    def launch(self, rank: int, *, blocks: int = 0) -> None:
        """This rank's call on its stream, and next on the stream a reader of its out."""
        from mkernel.backends.accelerators.cuda import _kernels

        by_mail = self.way in ("mail", "mail_twice")
        call = self.ranks.call(rank, blocks=blocks, by_mail=by_mail)
        stream = torch.cuda.current_stream(rank).cuda_stream
        shift = self.out_offset * self.out_dtype.itemsize
        addresses = (
            [s.address(rank) + shift for s in self._storage]
            if self.symmetric
            else [self.outs[rank].data_ptr()]
        )
        source = self.sources[rank].data_ptr()
        element = getattr(_kernels.Element, self.element, None)
        if self.name == "all_gather":
            nbytes = self.elements * self.dtype.itemsize
            _kernels.all_gather(call, source, nbytes, addresses, stream, **self._beside(rank))
        elif self.name == "reduce_scatter":
            _kernels.reduce_scatter(
                call, element, source, self.elements, addresses[0], stream, **self._row(rank)
            )
        else:
            native_way = {"mail": "one_shot", "mail_twice": "two_shot"}.get(self.way, self.way)
            way = getattr(_kernels.Way, native_way)
            _kernels.all_reduce(
                call, element, source, self.elements, addresses, way, stream, **self._row(rank)
            )
        self.seen[rank].copy_(self.guarded[rank])

    def _beside(self, rank: int) -> dict[str, int]:
        if not self.beside:
            return {}
        source, out = self.small[rank], self.small_outs[rank]
        return {
            "beside_src": source.data_ptr(),
            "beside_bytes": source.nbytes,
            "beside_out": out.data_ptr(),
        }

    def _row(self, rank: int) -> dict[str, int]:
        bias = self.biases[rank]
        return {"bias": bias.data_ptr(), "columns": self.columns} if self.columns else {}

    def wanted(self, rank: int) -> torch.Tensor:
        bias = self.biases[0] if self.columns else None
        home = [s.to("cuda:0") for s in self.sources]
        if self.name == "all_gather":
            return torch.cat(home)
        if self.name == "all_reduce":
            owned = owned_elements(self.ranks.world, self.elements)
            return sums(home, owned, self.out_dtype, bias)
        whole = sums(home, self.elements, self.out_dtype, bias)
        return whole[rank * self.elements : (rank + 1) * self.elements]

    def wrong_ranks(self) -> list[int]:
        """Ranks where the reader saw an out, or bytes around it, that are not what they must be."""
        wrong = []
        for rank in range(self.ranks.world):
            around = torch.full_like(self.seen[rank], self.poison)
            around[self.out_offset : self.out_offset + self.outs[rank].numel()] = self.wanted(
                rank
            ).to(around.device)
            right = torch.equal(around.view(torch.uint8), self.seen[rank].view(torch.uint8))
            small = torch.cat([each.to(around.device) for each in self.small])
            came = torch.equal(small.view(torch.uint8), self.small_outs[rank].view(torch.uint8))
            if not (right and came):
                wrong.append(rank)
        return wrong
