"""The native module for tests of parts on the host: copies, flags and sums as host/gemm/parts.hpp,
kernels/gemm/sum_parts.hpp and device/call.cuh say; and torch's products of e4m3 operands as cuBLAS has
them."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from library_fabric import DATA_OFFSET, Fabric, width

from mkernel.backends.contracts.scaled import dequantised

MAIN, BESIDE = 5, 6
BYTES = 1 << 20
"""Of a rank's data area."""


@dataclass(frozen=True)
class Here:
    """Stands for DeviceWorld."""

    rank: int
    number: int = 0
    timeout_s: float = 0.0

    def of_call(self, number: int, timeout_s: float) -> Here:
        return replace(self, number=number, timeout_s=timeout_s)


class Order:
    """Stands for one rank's CallOrder. ``told``: what it was asked for, in turn with native calls."""

    def __init__(self, told: list[Any]) -> None:
        self.told, self.open = told, 0

    def fork(self, stream: int) -> int:
        assert stream == MAIN
        self.told.append("fork")
        self.open = 1
        return BESIDE

    def join(self, stream: int) -> None:
        assert (stream, self.open) == (MAIN, 1)
        self.told.append("join")
        self.open = 0


class PartsFabric(Fabric):
    """Stands for ``_kernels`` in all ranks. ``told``: what each rank did, in its order. A flag holds
    the number of its call, and no call is over before all ranks have ended it."""

    NO_FLAG, MAX_FLAGS = -1, 114_688

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.memory = [torch.full((BYTES,), 0xFF, dtype=torch.uint8) for _ in range(world)]
        self.told: list[list[Any]] = [[] for _ in range(world)]
        self._flags: dict[tuple[int, int], int] = {}
        self._raised = threading.Condition()
        self._ends = threading.Barrier(world)

    def workspace(self, rank: int) -> int:
        return self.memory[rank].data_ptr() - DATA_OFFSET

    def DeviceWorld(self, workspaces: list[int], rank: int, *_: Any) -> Any:
        assert workspaces == [self.workspace(each) for each in range(self.world)]
        return Here(rank)

    def Collective(self, here: Any, staging_bytes: int, blocks: int, by_mail: bool) -> Any:
        return super().Collective(here.rank, staging_bytes, blocks, by_mail)

    def push_part(
        self, device: int, here: Here, peer: int, src: int, nbytes: int, to: int, flag: int,
        stream: int,
    ) -> None:  # fmt: skip
        assert peer != here.rank
        self.told[here.rank].append(("push", peer, nbytes, flag, stream))
        ctypes.memmove(to, src, nbytes)
        if flag == self.NO_FLAG:
            return
        with self._raised:
            self._flags[peer, flag] = here.number
            self._raised.notify_all()

    def await_part(self, device: int, here: Here, source: int, flag: int, stream: int) -> None:
        assert stream == MAIN
        assert source != here.rank
        self.told[here.rank].append(("await", source, flag))
        with self._raised:
            come = self._raised.wait_for(
                lambda: self._flags.get((here.rank, flag), 0) >= here.number, 30
            )
        assert come, f"rank {here.rank} waits for flag {flag} of {source}"

    def PartsProgram(self, *how: Any) -> Program:
        return Program(*how)

    def parts_starter(self, device: int, order: Any, program: Program) -> Program:
        assert device == 0
        return program

    def sum_parts(
        self, device: int, here: Here, element: Any, parts: list[int], elements: int, out: int,
        blocks: int, ends: bool, stream: int, bias: int, columns: int,
    ) -> None:  # fmt: skip
        assert stream == MAIN
        assert len(parts) == self.world
        self.told[here.rank].append(("sum", elements, blocks, ends))
        sent, result = (getattr(torch, name) for name in element)
        total = torch.zeros(elements)
        for at in parts:
            flat = bytearray(ctypes.string_at(at, elements * width(element[0])))
            total += torch.frombuffer(flat, dtype=sent).float()
        if bias:
            row = torch.frombuffer(bytearray(ctypes.string_at(bias, columns * 2)), dtype=result)
            total = (total.view(-1, columns) + row.float()).view(-1)
        rounded = total.to(result)
        ctypes.memmove(out, rounded.data_ptr(), elements * 2)
        if ends:
            self._end()

    def rendezvous(
        self, device: int, here: Here, copies: list[tuple[int, int, int]], stream: int
    ) -> None:
        assert stream == MAIN
        for to, at, nbytes in copies:
            ctypes.memmove(to, at, nbytes)
        self.told[here.rank].append("end")
        self._end()

    def _end(self) -> None:
        self._ends.wait(30)


class Program:
    """Stands for PartsProgram: the steps of a call, by name."""

    def __init__(self, *how: Any) -> None:
        names = ("world", "product", "partial", "element", "blocks", "columns")
        self.how = dict(zip(names, how, strict=True))
        self.steps: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.steps.append((name, *given))


def started(
    program: Program, fabric: PartsFabric, order: Order, number: int, given: dict[str, torch.Tensor]
) -> None:
    """One call as native code starts it (``host/gemm/bind_parts_starter.cpp``)."""
    how = program.how
    here = how["world"].of_call(number, 1.0)
    tensors, streams = dict(given), {"copies": MAIN}
    if how["partial"] is not None:
        (shape, _, dtype) = how["partial"][1]
        tensors["partial"] = torch.full(shape, torch.nan, dtype=dtype)

    def address(place: tuple[str, int]) -> int:
        base, offset = place
        return offset + (0 if base == "here" else tensors[base].data_ptr())

    def fork() -> None:
        streams["copies"] = order.fork(MAIN)

    def push(peer: int, place: tuple[str, int], nbytes: int, to: int, flag: int) -> None:
        fabric.push_part(0, here, peer, address(place), nbytes, to, flag, streams["copies"])

    def multiply(
        rows: torch.Tensor | None,
        first: int,
        count: int,
        to: int,
        place: tuple[str, int],
        into: tuple[str, int],
    ) -> None:
        rows = tensors["a"][first : first + count] if rows is None else rows
        assert len(rows) == count
        out = tensors["partial" if "partial" in tensors else "out"][to : to + count]
        assert (address(place), address(into)) == (rows.data_ptr(), out.data_ptr())
        mm(rows, tensors["b"], out)
        if "partial" not in tensors and "bias" in tensors:
            out += tensors["bias"]

    def add(parts: list[tuple[str, int]], elements: int, out: tuple[str, int], ends: bool) -> None:
        row = tensors["bias"].data_ptr() if "bias" in tensors else 0
        fabric.sum_parts(
            0, here, how["element"], [address(each) for each in parts], elements, address(out),
            how["blocks"], ends, MAIN, row, how["columns"],
        )  # fmt: skip

    take = {
        "fork": fork, "push": push, "multiply": multiply, "sum": add,
        "wait": lambda source, flag: fabric.await_part(0, here, source, flag, MAIN),
        "copy": lambda at, to, size: ctypes.memmove(address(to), address(at), size),
        "normalise": lambda sums: None,
        "join": lambda: order.join(MAIN),
        "end": lambda copies: fabric.rendezvous(
            0, here, [(address(to), address(at), size) for at, to, size in copies], MAIN
        ),
    }  # fmt: skip
    for name, *what in program.steps:
        take[name](*what)


def flat_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Of 16-bit operands; torch has float32 results of these on devices alone."""
    out.copy_(a.double() @ b.double())


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    of_a: torch.Tensor,
    of_b: torch.Tensor,
    out: torch.Tensor,
    fast: bool,
) -> None:
    """As torch asks of scales for a whole tensor, or for rows and columns."""
    (rows, _), columns = a.shape, b.shape[1]
    by_rows = (tuple(of_a.shape), tuple(of_b.shape)) == ((rows, 1), (1, columns))
    assert by_rows or of_a.numel() == of_b.numel() == 1
    assert of_a.is_contiguous()
    assert of_b.is_contiguous()
    _product(a, b, dequantised(a, of_a), dequantised(b, of_b), out)


def scale_results(
    unscaled: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, out: torch.Tensor
) -> None:
    """As kernels/gemm/scale_results.hpp says."""
    assert unscaled.dtype == torch.float32
    assert tuple(of_rows.shape) == (len(out), 1)
    assert tuple(of_columns.shape) == (1, out.shape[1])
    for one in (unscaled, of_rows, of_columns, out):
        assert one.is_contiguous()
        assert one.data_ptr() % 16 == 0 or one is of_rows
    out.copy_(unscaled * of_rows * of_columns)


def block_mm(
    a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, out: torch.Tensor
) -> None:
    """As cuBLAS reads scales by blocks: what lies elsewhere is not what the caller meant."""
    (rows, k), columns = a.shape, b.shape[1]
    padded = -(-k // 128 // 4) * 4
    assert rows % 4 == 0
    assert tuple(of_a.shape) == (rows, k // 128)
    assert of_a.stride(0) == 1
    assert of_a.stride(1) == rows or k == 128
    assert tuple(of_b.shape) == (padded, -(-columns // 128))
    assert of_b.stride(0) == 1
    assert of_b.stride(1) == padded or columns <= 128
    assert of_a.data_ptr() % 16 == of_b.data_ptr() % 16 == 0
    _product(a, b, dequantised(a, of_a), dequantised(b, of_b[: k // 128]), out)


def _product(
    a: torch.Tensor, b: torch.Tensor, wide_a: torch.Tensor, wide_b: torch.Tensor, out: torch.Tensor
) -> None:
    for operand in (a, b.t()):
        assert operand.stride(1) == 1
        assert operand.data_ptr() % 16 == operand.stride(0) % 16 == 0
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0
    out.copy_(wide_a.double() @ wide_b.double())
