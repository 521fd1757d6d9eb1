"""Calls of ring attention and of its gradients on a rank, for :mod:`calls`, and faults beneath them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import calls
import torch
from calls import Tensors

import mkernel
from mkernel.backends.accelerators.cuda.attention import backward as attention_backward
from mkernel.backends.accelerators.cuda.attention import in_parts as attention
from mkernel.backends.accelerators.cuda.attention import in_pieces as attention_in_pieces
from mkernel.backends.accelerators.cuda.attention import merge as attention_merge
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention import tuning as attention_tuning
from mkernel.backends.accelerators.cuda.attention.documents import Bounds, Documents
from mkernel.backends.accelerators.cuda.attention.library import attend
from mkernel.backends.accelerators.cuda.attention.ring import Source
from mkernel.backends.accelerators.cuda.schedule import (
    AttentionInPiecesSchedule,
    AttentionSchedule,
    KeysSchedule,
)
from mkernel.backends.accelerators.hopper.attention import core as attention_core
from mkernel.backends.accelerators.hopper.attention import kernel as attention_kernel
from mkernel.backends.accelerators.hopper.attention import tuning as kernel_tuning
from mkernel.backends.accelerators.hopper.schedule import AttentionKernelSchedule
from mkernel.cases import Case, case_of
from mkernel.cases.comparison import compare
from mkernel.plan.model import AttentionLayout, DtypeName, LaunchPlan

INPUTS = ("q", "k", "v")
PIECE_ROWS = 64
EXTREMES = ("large", "equal", "one", "NaN in a query", "NaN in a key", "NaN in a value")
"""Scores of some thousands, all alike, or with one that outweighs all others; and what is not a number,
which comes out where the truth has it."""


@dataclass(frozen=True)
class Attention:
    """One size; ``rows`` are a rank's. ``lies``: how tensors lie in memory. ``documents``: where those
    begin that are packed into the sequence, and its end; told on ``told_on``. ``way``: by which ring
    attention runs, the same in all calls of a process. ``extreme``: one of :data:`EXTREMES`."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    width: int = 128
    causal: bool = False
    dtype: DtypeName = "bfloat16"
    lies: AttentionLayout = "heads"
    scale: float | None = None
    documents: tuple[int, ...] | None = None
    told_on: str = "cuda"
    way: str = "auto"
    extreme: str | None = None

    def work(self, seed: int = 0) -> Work:
        """Make its tensors on this rank."""
        return Work(self, self.case(seed))

    def case(self, seed: int = 0, op: str = "ring_attention") -> Any:
        """Return the op's case in this rank's world."""
        options = {"scale": self.scale, "lies": self.lies, "cu_seqlens": self.documents}
        if self.extreme is not None:
            options["tensors"] = self._extremes(seed)
        return case_of(op)(
            self.sizes(), self.dtype, self.dtype, "row", seed=seed, options=options,
            device=calls.DEVICE,
        )  # fmt: skip

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the whole call."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "sequence": self.rows * mkernel.world().size,
            "head_dim": self.width,
            "causal": self.causal,
        }

    def planned(self) -> LaunchPlan:
        """Plan its call."""
        layout = {} if self.lies == "heads" else {"layout": self.lies}
        return mkernel.plan("ring_attention", **self.sizes(), dtype=self.dtype, **layout)

    def _extremes(self, seed: int) -> Tensors:
        whole: Tensors = replace(self, extreme=None).case(seed)._whole(0)
        at = whole["q"].shape[2] // 3
        name = {"query": "q", "key": "k", "value": "v"}.get(str(self.extreme).split()[-1])
        if name is not None:
            whole[name][0, 0, at, 0] = torch.nan
        elif self.extreme == "one":
            whole["k"][:, :, at] *= 30
        else:
            whole["q"] *= 30 * (self.extreme == "large")
            whole["k"] *= 30
        return whole


def drawn(chance: random.Random, world: int = 1) -> Attention:
    """Draw any legal size: from one step of positions to a few tiles, edges everywhere."""
    causal, kv_heads = chance.random() < 0.5, chance.randint(1, 4)
    steps = chance.choice((1, 2, 3, chance.randint(4, 12), chance.randint(12, 40)))
    return Attention(
        batch=chance.randint(1, 3),
        heads=kv_heads * chance.randint(1, 4),
        kv_heads=kv_heads,
        rows=16 * steps * (2 if causal else 1),
        width=chance.choice((64, 128, 256)),
        causal=causal,
        dtype=chance.choice(("bfloat16", "float16")),
        lies=chance.choice(("heads", "positions")),
        scale=chance.choice((None, None, 0.05, 0.3, -0.1)),
    )


def drawn_packed(chance: random.Random, world: int) -> Attention:
    """Draw any legal size with documents: some of one position, some empty, some over ranks."""
    shape = drawn(chance)
    length = shape.rows * world
    seam = length // (2 * world) * chance.randint(0, 2 * world)
    inner = [chance.randint(0, length) for _ in range(chance.choice((0, 1, 3, 30)))]
    inner += [min(length, max(0, seam + by)) for by in chance.sample((-1, 0, 0, 1), 2)]
    bounds = (0, *sorted(inner), length)
    return replace(shape, documents=bounds, told_on=chance.choice(("cuda", "cpu")))


def drawn_for_core(chance: random.Random, world: int) -> Attention:
    """Draw any size of our own kernel for parts."""
    return replace(drawn(chance), width=128, way="parts")


def drawn_for_kernel(chance: random.Random, world: int) -> Attention:
    """Draw any size of one kernel: from one step to a few tiles, more of them than a device has
    blocks."""
    steps, made = chance.choice((1, 2, 3, chance.randint(4, 12))), drawn(chance)
    return replace(made, rows=128 * steps * (2 if made.causal else 1), width=min(made.width, 128),
                   way="kernel")  # fmt: skip


class Work(calls.Work):
    """A size's tensors on this rank."""

    turns = 2

    def __init__(self, shape: Attention, case: Case) -> None:
        os.environ["MKERNEL_HOPPER_ATTENTION"] = shape.way
        self.bounds = None
        if shape.documents is not None:
            self.bounds = torch.tensor(shape.documents, dtype=torch.int32, device=shape.told_on)
        if shape.way == "kernel" and mkernel.world().size > 1:
            schedule = shape.planned().schedule
            assert isinstance(schedule, AttentionKernelSchedule), schedule
        super().__init__(shape, case)

    def call(self) -> Tensors:
        """Call the public op."""
        out, lse = mkernel.ring_attention(
            *(self.given[name] for name in INPUTS),
            causal=self.shape.causal,
            scale=self.shape.scale,
            cu_seqlens=self.bounds,
            return_lse=True,
        )
        assert out.stride() == self.given["q"].stride()
        self.found = {"out": out, "lse": lse}
        return self.found

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say what is wrong with the results of a turn; a NaN's sums are not promised."""
        if "NaN" in str(self.shape.extreme):
            found = {"out": found["out"]}
        return super().wrong(turn, found)


@dataclass(frozen=True)
class Trained:
    """The gradients of a size's call. ``by_op``: by the op, which a graph can hold, not by autograd.
    ``of_sums``: of log-sum-exps too. ``deterministic``: under torch's deterministic algorithms."""

    shape: Attention
    by_op: bool = False
    of_sums: bool = False
    deterministic: bool = False

    def work(self, seed: int = 0) -> Gradients:
        """Make its tensors on this rank."""
        return Gradients(self, self.shape.case(seed, "ring_attention_backward"))


class Gradients(calls.Work):
    """The gradients of a size's call on this rank."""

    turns = 2

    def fill(self, turn: int, results: Tensors | None = None) -> None:
        """Draw fresh inputs and gradients of results."""
        super().fill(turn, results)
        mine = self.case.positions(self.rank, self.world).to(calls.DEVICE)
        self.of_lse = self._of_sums(turn)[:, :, mine]

    def _of_sums(self, turn: int) -> torch.Tensor:
        sizes = (self.case.sizes[name] for name in ("batch", "heads", "sequence"))
        draw = self.case.generator(turn, 7, -1)
        return torch.randn(*sizes, generator=draw, device=calls.DEVICE)

    def call(self) -> Tensors:
        """Call the op and its backward."""
        torch.use_deterministic_algorithms(self.shape.deterministic)
        try:
            found = self._by_op() if self.shape.by_op else self._by_autograd()
        finally:
            torch.use_deterministic_algorithms(False)  # products of the truth need no fixed order
        self.found = {f"grad_{name}": each for name, each in zip(INPUTS, found, strict=True)}
        return self.found

    def _by_autograd(self) -> Sequence[torch.Tensor]:
        shape = self.shape.shape
        leaves = [self.given[name].detach().requires_grad_() for name in INPUTS]
        results = mkernel.ring_attention(
            *leaves, causal=shape.causal, scale=shape.scale, return_lse=True
        )
        of = [self.given["grad_out"], self.of_lse]
        count = 2 if self.shape.of_sums else 1
        return torch.autograd.grad(results[:count], leaves, of[:count])

    def _by_op(self) -> Sequence[torch.Tensor]:
        shape, given = self.shape.shape, [self.given[name] for name in INPUTS]
        out, lse = mkernel.ring_attention(*given, causal=shape.causal, return_lse=True)
        found: Sequence[torch.Tensor] = torch.ops.mkernel.ring_attention_backward(
            self.given["grad_out"], None, *given, None, out, lse, causal=shape.causal,
            group=mkernel.world().name,
        )  # fmt: skip
        return found

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say what is wrong with the gradients of a turn. Those of log-sum-exps, which the op's case
        does not have, are autograd's of the forward's case."""
        if not self.shape.of_sums:
            return super().wrong(turn, found)
        case = self.shape.shape.case(self.case.seed)
        whole = self.case._whole(turn)
        leaves = {name: whole[name].double().requires_grad_() for name in INPUTS}
        case = case.with_(options={**case.options, "tensors": leaves})
        total = torch.zeros(())
        for rank in range(self.world):
            at = case.positions(rank, self.world).to(calls.DEVICE)
            truth = case.reference(rank, self.world, turn)
            total = total + (truth["out"] * whole["grad_out"][:, :, at]).sum()
            total = total + (truth["lse"] * self._of_sums(turn)[:, :, at]).sum()
        total.backward()
        mine = case.positions(self.rank, self.world).to(calls.DEVICE)
        wrong = []
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            one = compare(found[f"grad_{name}"], leaf.grad[:, :, mine])
            if not one.error <= self.case.tolerances()[f"grad_{name}"]:
                wrong.append(f"grad_{name} is off by {one.error:.2e} {one.why}")
        return wrong


def trained_in_lots(shapes: Sequence[Attention], seed: int) -> list[str]:
    """Return failures of gradients that travel in two lots of heads, whatever is predicted to be
    fastest."""
    right = attention_tuning.predicted_backward

    def predicted(plan: Any, lots: int, constants: Any) -> Any:
        return right(plan, lots, constants).model_copy(update={"pipelined_us": 1.0 / lots})

    with mock.patch.object(attention_tuning, "predicted_backward", predicted):
        work = [Trained(shape) for shape in shapes]
        return calls.judged(work, seed) + calls.queued(work[:4], 12, seed)


def other_boundaries(shape: Attention, replays: int) -> list[str]:
    """Return failures of a captured call of packed documents, which begin elsewhere before every
    replay."""
    assert shape.documents is not None
    work = shape.work()
    graph, (result,) = calls.captured([work.call])
    found = []
    for turn in range(1, replays + 1):
        inner = sorted(
            random.Random(turn).sample(range(shape.documents[-1]), len(shape.documents) - 2)
        )
        bounds = (0, *inner, shape.documents[-1])
        work.case = work.case.with_(options={**work.case.options, "cu_seqlens": bounds})
        assert work.bounds is not None
        work.bounds.copy_(torch.tensor(bounds, dtype=torch.int32))
        work.fill(turn, result)
        graph.replay()
        found += work.failure(turn, result, f"replayed with {bounds}")
    mkernel.synchronize()
    return found


@contextmanager
def _constants(**changes: Any) -> Iterator[None]:
    machine = attention_tuning._MACHINE
    how = machine.attention.model_copy(update=changes)
    other = machine.model_copy(update={"attention": how})
    with (
        mock.patch.object(attention_tuning, "_MACHINE", other),
        mock.patch.object(kernel_tuning, "_MACHINE", other),
    ):
        yield


def in_pieces(shapes: Sequence[Attention], fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``fn`` finds of shapes whose keys travel in pieces of few rows, through few slots.
    For a process of its own."""
    few = {"whole_bytes": 0, "pieces_bytes": 0, "slots": 2}
    with _constants(**few), mock.patch.object(attention_tuning, "_FEWEST_ROWS", PIECE_ROWS):
        for shape in shapes:
            schedule = shape.planned().schedule
            assert isinstance(schedule, AttentionInPiecesSchedule), schedule
        return fn(shapes, *arguments)


def by_core(shapes: Sequence[Attention], fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``fn`` finds of shapes whose parts, of any length, our own kernel computes. For a
    process of its own."""
    os.environ["MKERNEL_HOPPER_ATTENTION"] = "parts"
    with _constants(core_rows=1):
        schedule = Attention(1, 2, 2, 256).planned().schedule
        assert isinstance(schedule, AttentionSchedule)
        assert schedule.library == "mkernel"
        return fn(shapes, *arguments)


def in_chunks(shapes: Sequence[Attention], fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``fn`` finds of shapes whose keys cross between nodes 128 rows at a time. For a
    process of its own."""
    with _constants(far_bytes=1):
        for shape in shapes:
            schedule = shape.planned().schedule
            assert isinstance(schedule, KeysSchedule)
            assert schedule.far_rows == 128
        return fn(shapes, *arguments)


def a_million(causal: bool) -> dict[str, Any]:
    """Return of one call with 2^20 positions, 32 heads of queries and 8 of keys what it took of the
    device's memory beside its tensors, and errors of some rows of queries."""
    shape = Attention(1, 32, 8, (1 << 20) // mkernel.world().size, causal=causal)
    work = shape.work(3)
    small = torch.zeros(1, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    attend(small, small, small, 0, causal, 1.0)  # loads the library
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    found = work.call()
    mkernel.synchronize()
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - sum(each.nbytes for each in found.values())
    torch.cuda.empty_cache()
    rows = torch.randperm(shape.rows, generator=torch.Generator().manual_seed(5))[:24].sort().values
    compared = work.case.compared(
        found, work.rank, work.world, 0, rows=lambda count: rows.cuda()
    )  # fmt: skip
    return {
        "taken": taken,
        "errors": {name: one.error for name, one in compared.items()},
        "limits": work.case.tolerances(),
    }


FAULTS = {
    way: tuple(f"{way}: {fault}" for fault in faults)
    for way, faults in {
        "parts": ("no weights", "seam", "wrong head", "stale", "early flag"),
        "documents": ("boundary",),
        "kernel": (
            "seam", "one key late", "stale", "early flag", "skipped", "unmasked", "wrong head",
        ),
        "pieces": ("forgets", "slot not waited for", "early flag"),
        "gradients": ("wrong head", "own sums", "stale", "early flag", "not added"),
    }.items()
}  # fmt: skip
"""By the way on which they are planted."""


def planted(fault: str, work: Any) -> AbstractContextManager[object]:
    """Plant a fault, which is named by the way on which it lies and by itself."""
    way, _, name = fault.partition(": ")
    return _PLANTED[way](name, work)


def _sent(fault: str, given: Tensors) -> list[torch.Tensor]:
    """Return the keys and values that are sent in the place of the right ones: those of the call
    before, or zeros, as if flags came before their data."""
    return [
        given[name].clone() if fault == "stale" else torch.zeros_like(given[name]) for name in "kv"
    ]


def _keys_crossing(native: Any, wrong: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return what describes a crossing between nodes of the wrong keys and values."""

    def keys_crossing(tensors: Any, *rest: Any) -> Any:
        return native.KeysCrossing([(each.data_ptr(), each.stride()[:3]) for each in wrong], *rest)

    return keys_crossing


def _in_parts(fault: str, work: Any) -> AbstractContextManager[object]:
    native, right, wrong = attention_ring.native(), attention.attend, _sent(fault, work.given)

    def attending(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Any:
        if fault == "seam" and not causal:  # the last key is not seen
            k, v = k[:, :, :-1], v[:, :, :-1]
        seen = right(q, k, v, first, causal, scale)
        if fault == "no weights":
            seen = seen._replace(lse=torch.zeros_like(seen.lse))
        if fault == "wrong head":
            seen = seen._replace(lse=seen.lse.roll(1, 1).contiguous())
        return seen

    def push_keys(device: int, world: Any, k: int, v: int, *rest: Any) -> None:
        native.push_keys(device, world, *(each.data_ptr() for each in wrong), *rest)

    if fault in ("stale", "early flag"):
        crossing = _keys_crossing(native, wrong)
        return calls.native_with(attention_ring, push_keys=push_keys, KeysCrossing=crossing)
    return mock.patch.object(attention, "attend", attending)


class LateKeys(Documents):
    """Every document but the first begins one key late."""

    def keys(self, source: Source) -> Bounds:
        at = super().keys(source).at.clone()
        at[1:-1] = (at[1:-1] + 1).clamp(max=at[-1])
        return Bounds(at, int(at.diff().max()))


def _in_documents(fault: str, work: Any) -> AbstractContextManager[object]:
    return mock.patch.object(attention, "Documents", LateKeys)


def _in_pieces(fault: str, work: Any) -> AbstractContextManager[object]:
    native, wrong = attention_in_pieces.native(), _sent(fault, work.given)

    def running(out: int, lse: int, read: bool, write: bool) -> Any:
        return native.Running(out, lse, read and fault != "forgets", write)

    def await_part(device: int, world: Any, source: int, flag: int, stream: int) -> None:
        arrival = stream == torch.cuda.current_stream().cuda_stream
        if arrival or fault != "slot not waited for":
            native.await_part(device, world, source, flag, stream)

    def push_piece(device: int, world: Any, peer: int, k: int, v: int, *rest: Any) -> None:
        if fault == "early flag":
            k, v = (each.data_ptr() for each in wrong)
        native.push_piece(device, world, peer, k, v, *rest)

    return calls.native_with(
        attention_in_pieces, attention_merge, Running=running, await_part=await_part,
        push_piece=push_piece,
    )  # fmt: skip


def _in_kernel(fault: str, work: Any) -> AbstractContextManager[object]:
    """The kernel sees a step too few or too many at a seam of the zigzag, or each key of a part one
    place late, leaves a part out, has no mask, or the keys of the next head."""
    native, wrong = attention_kernel.native(), _sent(fault, work.given)

    def ring_part(source: int, first: int, keys: int) -> Any:
        # Of a part that all queries see, the last step is not seen; of another one, a step more does.
        if fault == "seam":
            first, keys = (first - 128, keys) if first else (first, keys - 128)
        return native.RingPart(source, first, keys)

    def core(tensors: Any, lse: int, counters: int, shape: Any, scale: float, causal: bool,
             half: bool) -> Any:  # fmt: skip
        if fault == "wrong head":
            (at, strides) = tensors[1]
            tensors = [tensors[0], (at + 2 * strides[1], strides), *tensors[2:]]
            shape = (shape[0], shape[1], shape[2] - 1, *shape[3:])
        return native.Core(
            tensors, lse, counters, shape, scale, causal and fault != "unmasked", half
        )

    def ring(core: Any, parts: Any, slots: Any, *rest: Any) -> Any:
        if fault == "one key late":
            slots = (slots[0] + 2 * slots[1][2], slots[1])
        return native.Ring(core, parts[1:] if fault == "skipped" else parts, slots, *rest)

    def push_keys(device: int, world: Any, k: int, v: int, *rest: Any) -> None:
        if fault in ("stale", "early flag"):
            k, v = (each.data_ptr() for each in wrong)
        native.push_keys(device, world, k, v, *rest)

    sent = {"push_keys": push_keys}
    if fault in ("stale", "early flag"):
        sent["KeysCrossing"] = _keys_crossing(native, wrong)
    return calls.native_with(
        attention_kernel, attention_core, attention_ring, RingPart=ring_part, Core=core, Ring=ring,
        **sent,
    )  # fmt: skip


def _in_gradients(fault: str, work: Any) -> AbstractContextManager[object]:
    right, native = attention_backward.gradients, attention_backward.native()
    wrong = _sent(fault, work.given)

    def gradients(given: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Any:
        if fault == "wrong head":
            given = given._replace(lse=given.lse.roll(1, 1))
        if fault == "own sums":  # the log-sum-exp of this part's keys alone
            lse = given.lse.clone()
            lse[:, :, first:] = attend(given.q, k, v, first, causal, scale).lse
            given = given._replace(lse=lse)
        return right(given, k, v, first, causal, scale)

    def push_gradients(device: int, world: Any, owner: int, k: int, v: int, *rest: Any) -> None:
        if fault in ("stale", "early flag"):
            k, v = (each.data_ptr() for each in wrong)
        native.push_gradients(device, world, owner, k, v, *rest)

    def sum_of(given: Any, *rest: Any) -> Any:
        return native.Sum(given[:1] if fault == "not added" else given, *rest)

    stack = ExitStack()
    stack.enter_context(
        calls.native_with(attention_backward, push_gradients=push_gradients, Sum=sum_of)
    )
    stack.enter_context(mock.patch.object(attention_backward, "gradients", gradients))
    return stack


_PLANTED: dict[str, Callable[[str, Any], AbstractContextManager[object]]] = {
    "parts": _in_parts,
    "documents": _in_documents,
    "kernel": _in_kernel,
    "pieces": _in_pieces,
    "gradients": _in_gradients,
}


def runs_on(widths: Sequence[int]) -> list[str]:
    """Return the accelerators of calls with heads of these widths, after a right call of each."""
    shapes = [Attention(1, 2, 1, 64, width=width, dtype="float16") for width in widths]
    assert calls.judged(shapes, 0) == []
    return [shape.planned().accelerator for shape in shapes]
