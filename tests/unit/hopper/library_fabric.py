"""The library path's native module for tests on the host: ranks are threads, and collectives
stand-ins on host memory that do as kernels/collectives/collectives.hpp says."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from mkernel.backends.accelerators.cuda import long_products

DATA_OFFSET = 1 << 20
STREAM = 5


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@dataclass(frozen=True)
class Told:
    """Stands for Collective."""

    rank: int
    staging_bytes: int
    by_mail: bool
    number: int = 0
    timeout_s: float = 0.0
    landings: Any = None

    def of_call(self, number: int, timeout_s: float, landings: Any = None) -> Told:
        return replace(self, number=number, timeout_s=timeout_s, landings=landings)


@dataclass(frozen=True)
class Outputs:
    """What calls tell of their outputs: the memory, and where in it; None: nothing."""

    memory: Any = None
    world: int = 1
    nbytes: int = 0

    def landings(self, out: int) -> tuple[Any, int] | None:
        return None if self.memory is None else (self.memory, out)


class Fabric:
    """Stands for ``_kernels`` in all ranks. ``called``: what rank 0 started; ``numbers``: in which
    call of the world; ``landings``: what it told of its output."""

    DATA_OFFSET = DATA_OFFSET
    Outputs = Outputs
    Element = SimpleNamespace(
        bfloat16=("bfloat16", "bfloat16"),
        float16=("float16", "float16"),
        float32_to_bfloat16=("float32", "bfloat16"),
        float32_to_float16=("float32", "float16"),
    )
    Way = SimpleNamespace(one_shot="one_shot", two_shot="two_shot")

    def __init__(self, world: int) -> None:
        self.world = world
        self.called: list[tuple[Any, ...]] = []
        self.numbers: list[int] = []
        self.timeouts_s: list[float] = []
        self.landings: list[Any] = []
        self._barrier = threading.Barrier(world)
        self._sent: dict[int, bytes] = {}

    def DeviceWorld(
        self,
        workspaces: list[int],
        rank: int,
        control: int,
        timeout_s: float,
        call: int,
        network: object,
    ) -> int:
        assert network is None
        assert workspaces == [workspace_of(each) for each in range(self.world)]
        assert control == 64
        return rank

    def Collective(self, rank: int, staging_bytes: int, blocks: int, by_mail: bool) -> Told:
        assert blocks == 0  # as many as the device has
        return Told(rank, staging_bytes, by_mail)

    def all_gather_staging(
        self, world: int, shard_bytes: int, symmetric: bool, beside_bytes: int = 0
    ) -> int:
        return 0 if symmetric else world * (shard_bytes + beside_bytes)

    def reduce_scatter_staging(self, world: int, element: Any, part_elements: int) -> int:
        return world * part_elements * width(element[0])

    def all_reduce_staging(
        self, world: int, element: Any, elements: int, way: str, symmetric: bool
    ) -> int:
        nbytes = elements * width(element[0])
        return world * nbytes if way == "one_shot" else (1 if symmetric else 2) * nbytes

    def all_gather(
        self, call: Any, src: int, nbytes: int, out: list[int], stream: int, *beside: int
    ) -> None:
        self._start(call, "all_gather", len(out) > 1, stream)
        more, size, to = beside or (0, 0, 0)
        assert not (size and len(out) > 1)
        needed = self.all_gather_staging(self.world, nbytes, len(out) > 1, size)
        assert call.staging_bytes >= needed
        whole = b"".join(self._exchange(call.rank, bytes_at(src, nbytes)))
        ctypes.memmove(out[call.rank] if len(out) > 1 else out[0], whole, len(whole))
        if size:
            whole = b"".join(self._exchange(call.rank, bytes_at(more, size)))
            ctypes.memmove(to, whole, len(whole))

    def reduce_scatter(
        self, call: Any, element: Any, src: int, part: int, out: int, stream: int, **row: int
    ) -> None:
        self._start(call, "reduce_scatter", element, stream)
        assert call.staging_bytes >= self.reduce_scatter_staging(self.world, element, part)
        sums = self._sum(call.rank, element, src, part * self.world, **row)
        own = sums[call.rank * part : (call.rank + 1) * part].contiguous()
        ctypes.memmove(out, own.data_ptr(), own.numel() * 2)

    def all_reduce(
        self,
        call: Any,
        element: Any,
        src: int,
        elements: int,
        out: list[int],
        way: str,
        stream: int,
        **row: int,
    ) -> None:
        symmetric = len(out) > 1
        self._start(call, way, element, symmetric, stream)
        assert not (symmetric and way == "one_shot")
        needed = self.all_reduce_staging(self.world, element, elements, way, symmetric)
        assert call.staging_bytes >= needed
        sums = self._sum(call.rank, element, src, elements, **row)
        ctypes.memmove(out[call.rank] if symmetric else out[0], sums.data_ptr(), elements * 2)

    def torch_product(self, mm: Any, *how: Any) -> dict[str, Any]:
        """What native code multiplies with: names of the arguments and their values."""
        known = (torch.mm, torch.addmm), (long_products.mm, long_products.addmm)
        assert (mm, how[0]) in known
        assert how[1] is torch.add
        return dict(zip(("addmm", "add", "more", "whole"), how, strict=True))

    def scaled_product(self, function: Any) -> dict[str, Any]:
        """The same of operands with scales."""
        return {"scaled": function}

    def open_cublas(self, device: int, library: str, allocate: Any, workspace: int) -> Any:
        """There is none: all products are torch's."""
        return None

    def RowsOfSums(self, **rows: Any) -> dict[str, Any]:
        """The rows of sums."""
        return rows

    def SummedRows(self, rows: dict[str, Any], eps: float | None) -> tuple[dict[str, Any], Any]:
        """The same and their norm."""
        return rows, eps

    def library_starter(self, device: int, order: Any, product: dict[str, Any], *how: Any) -> Any:
        """What native code is to do, likewise."""
        assert device == 0
        names = ("scratch", "scales", "together", "element", "way", "op", "elements", "columns",
                 "shard_bytes", "scale_bytes", "outs", "outputs", "sums", "inside")  # fmt: skip
        return product | dict(zip(names, how, strict=True))

    def _start(self, call: Any, *what: Any) -> None:
        *rest, stream = what
        assert stream == STREAM
        if call.rank == 0:
            self.called.append(tuple(rest))
            self.numbers.append(call.number)
            self.timeouts_s.append(call.timeout_s)
            self.landings.append(call.landings)

    def _sum(
        self, rank: int, element: Any, src: int, elements: int, bias: int, columns: int
    ) -> torch.Tensor:
        sent, result = (getattr(torch, name) for name in element)
        parts = self._exchange(rank, bytes_at(src, elements * width(element[0])))
        total = torch.zeros(elements)
        for part in parts:
            total += torch.frombuffer(bytearray(part), dtype=sent).float()
        if bias:
            row = torch.frombuffer(bytearray(bytes_at(bias, columns * 2)), dtype=result)
            total = (total.view(-1, columns) + row.float()).view(-1)
        return total.to(result)

    def _exchange(self, rank: int, mine: bytes) -> list[bytes]:
        self._sent[rank] = mine
        self._barrier.wait(60)
        everyone = [self._sent[each] for each in range(self.world)]
        self._barrier.wait(60)
        return everyone


def width(name: str) -> int:
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


def workspace_of(rank: int) -> int:
    return (rank + 1) << 30
