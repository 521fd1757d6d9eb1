"""What rank processes on GPUs run of calls with e4m3 operands, beside ``hopper_ranks``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from calls import skewed
from hopper_ranks import Shape

import mkernel
from mkernel.backends.accelerators.cuda.gemm import products
from mkernel.backends.accelerators.cuda.gemm.parts_exchange import Running
from mkernel.backends.accelerators.hopper.gemm import few_rows
from mkernel.backends.accelerators.hopper.gemm import fused as gemm
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule, ReduceSchedule
from mkernel.backends.contracts.scaled import dequantised
from mkernel.ops.gemm import GemmCall
from mkernel.plan.model import LaunchPlan


def planned(shapes: Sequence[Shape]) -> list[str]:
    """The kind of each shape's schedule."""
    found: list[str] = []
    for shape in shapes:
        work = shape.work()
        work.fill(0)
        done = work.case.called(work.given, work.outs, {})
        found.append(done.plan.schedule.kind)
    mkernel.synchronize()
    return found


def fast(shape: Shape) -> list[float]:
    """Errors of calls that may and may not add with fewer bits, and how they differ from torch's
    product of the same rows."""
    found = []
    for quick in (False, True):
        work = shape.work()
        work.fill(1)
        out = work.public(out=work.out, use_fast_accum=quick)
        rows = work.given["a"]
        own = torch._scaled_mm(
            rows, work.given["b"], work.given["a_scale"], work.given["b_scale"].reshape(1, -1),
            out_dtype=out.dtype, use_fast_accum=quick,
        )  # fmt: skip
        first = work.rank * len(rows)
        part = out[first : first + len(rows)].double()
        found += [work.error(1, out), float((part - own.double()).norm() / own.double().norm())]
    mkernel.synchronize()
    return found


def gathered(shape: Shape) -> list[str]:
    """What is wrong of the rows that a call hands out, and of several products of one gather."""
    work, found = shape.work(), []
    world, case = work.world, work.case
    for turn in range(3):
        work.fill(turn)
        given = work.given
        call = GemmCall(
            given["a"], given["b"], scaled=case._scaled(given), gathered=True, path=shape.path
        )
        done = case.gemm.call(call)
        result, whole = done.outputs["out"], done.outputs["gathered"]
        found += work.failure(turn, result, "gathered")
        everyone = [case.inputs(rank, world, turn)["a"] for rank in range(world)]
        if not torch.equal(whole.float(), torch.cat(everyone).float()):
            found.append(f"turn {turn}: other rows were gathered")
    mkernel.synchronize()
    return found


class _Wrong:
    """What a fault makes of rows, or of scales; ``met`` counts how often it was asked."""

    def __init__(self, fault: str) -> None:
        self.fault, self.met = fault, 0
        self._kept: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Return what takes the tensor's place. ``place``: where the results go."""
        self.met += 1
        if "of other" in self.fault:
            return tensor.roll(1, 0)
        if self.fault.endswith("of the call before"):
            before, self._kept[place] = self._kept.get(place, tensor), tensor.clone()
            return before
        if self.fault == "a block of K without its scale":
            tensor = tensor.clone()
            tensor[:, 0] = 1
        return tensor

    def no_wait(self, *_: Any) -> None:
        """Wait for nothing."""
        self.met += 1


@contextmanager
def _planted(way: str, wrong: _Wrong) -> Iterator[None]:
    """Plant it in the rows that products in parts send, in the scales that a library's products get, or
    in those of the fused kernel."""
    send, product = Running.send, products.ScaledFactor.product
    operands = gemm.Operands.of

    def sent(
        self: Running, peer: int, rows: torch.Tensor, to: int, flag: int | None = None
    ) -> None:
        send(self, peer, wrong.of(rows, to), to, flag)

    def multiplied(self: Any, a: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        product(self, a, wrong.of(scale, out.data_ptr()), out)

    def of(call: Any) -> Any:
        found = operands(call)
        columns = found.b_scale
        if wrong.fault == "scales of b left out":
            columns = columns.clone()
            columns[..., :: columns.shape[-1] // 4] = 1
        a_scale = wrong.of(found.a_scale, call.tensors["out"].data_ptr())
        return found._replace(a_scale=a_scale, b_scale=columns)

    where: dict[str, list[tuple[Any, str, Any]]] = {
        "parts": [(Running, "send", sent)],
        "library": [(products.ScaledFactor, "product", multiplied)],
        "fused": [
            (gemm.Operands, "of", of),
            # Native, which asks for no operands.
            (few_rows.FewRowsExecutor, "starter", lambda *_: None),
        ],
        "no wait": [(Running, "wait", wrong.no_wait)],
    }
    with ExitStack() as stack:
        for patch in where["no wait" if wrong.fault == "no wait" else way]:
            stack.enter_context(mock.patch.object(*patch))
        yield


def faulty(way: str, fault: str, shape: Shape) -> int:
    """Wrong results of many calls with a planted fault."""
    wrong = _Wrong(fault)
    with _planted(way, wrong):
        found = len(skewed([shape], 12, 3))
    assert wrong.met >= 12, f"{wrong.met} in 12 calls: they took another path"
    return found


def exact(shapes: Sequence[Shape]) -> list[str]:
    """What is wrong of sums of small integers with scales that are powers of two: however few bits
    products are added with, these sums have no more, and every bit of the results is known."""
    found = [text for shape in shapes for text in _exact(shape)]
    mkernel.synchronize()
    return found


def _exact(shape: Shape) -> list[str]:
    work, found = shape.work(), list[str]()
    case, world, rank = work.case, work.world, work.rank
    for turn in range(3):
        work.fill(turn)
        given = [case.inputs(each, world, turn) for each in range(world)]
        for part, tensors in enumerate(given):
            for number, (name, tensor) in enumerate(sorted(tensors.items())):
                chance = torch.Generator("cuda").manual_seed((turn * world + part) * 8 + number)
                scale = name.endswith("scale")
                most = 1 if scale else 3
                drawn = torch.randint(
                    -most, most + 1, tensor.shape, generator=chance, device="cuda"
                )
                tensor.copy_(torch.exp2(drawn.float()) if scale else drawn.float())
        for name, tensor in given[rank].items():
            work.given[name].copy_(tensor)
        plan = case.called(work.given, work.outs, {}).plan
        if plan.path != "fused":
            return [f"{shape} went by the path {plan.path}"]
        if case.gemm.gathers:
            own = {name: given[rank][name] for name in ("b", "b_scale")}
            right = torch.cat([_product({**each, **own}) for each in given])
        else:
            right = _of_plan(plan, [_product(each) for each in given], work.out.dtype)
            if case.gemm.scatters:
                right = right.chunk(world)[rank]
        wrong = int((work.out != right.to(work.out.dtype)).sum())
        if wrong:
            found.append(f"turn {turn}: {wrong} elements of {shape} have other bits")
    return found


def _product(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wide = (dequantised(given[name], given[f"{name}_scale"], torch.float64) for name in ("a", "b"))
    return torch.matmul(*wide)


def _of_plan(plan: LaunchPlan, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' products as a plan's kernel rounds them before they travel."""
    how = plan.schedule
    if isinstance(how, FewRowsSchedule):  # all of them alike
        return sum(part.to(getattr(torch, how.product)).double() for part in parts)
    return _summed(parts, plan.part(ReduceSchedule).rows, dtype)


def _summed(parts: Sequence[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of each owner's ``rows`` rows: what comes from other ranks was rounded."""
    sums = []
    for owner, first in enumerate(range(0, len(parts[0]), rows)):
        here = [part[first : first + rows] for part in parts]
        rounded = [part.to(dtype).double() for at, part in enumerate(here) if at != owner]
        sums.append(sum(rounded, here[owner]))
    return torch.cat(sums)
