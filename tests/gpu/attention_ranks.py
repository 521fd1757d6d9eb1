"""What rank processes on GPUs run of ring attention: calls on fresh data, judged in float64."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hopper_ranks
import torch
from hopper_ranks import LATE_S, captured, other_bits, spin

import mkernel
from mkernel.backends.accelerators.hopper import (
    attention,
    attention_backward,
    attention_core,
    attention_in_pieces,
    attention_kernel,
    attention_merge,
    attention_ring,
    attention_tuning,
    capabilities,
)
from mkernel.backends.accelerators.hopper.attention_documents import Bounds, Documents
from mkernel.backends.accelerators.hopper.attention_library import Seen, attend
from mkernel.backends.accelerators.hopper.attention_ring import Source
from mkernel.backends.accelerators.hopper.schedule import (
    AttentionInPiecesSchedule,
    AttentionKernelSchedule,
    AttentionSchedule,
)
from mkernel.cases import case_of, poison
from mkernel.cases.comparison import compare
from mkernel.ops.zigzag import zigzag_positions
from mkernel.plan.model import AttentionLayout, DtypeName

INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class Attention:
    """One size; ``rows`` are a rank's. ``lies``: how tensors lie in memory. ``documents``: where those
    begin that are packed into the sequence, and its end; told on ``told_on``. ``way``: by which ring
    attention runs, the same in all calls of a process."""

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

    def work(self, seed: int) -> Work:
        """Its tensors on this rank."""
        return Work(self, seed)


def drawn(chance: random.Random) -> Attention:
    """Any legal size: from one step of positions to a few tiles, edges everywhere."""
    causal, kv_heads = chance.random() < 0.5, chance.randint(1, 4)
    steps = chance.choice((1, 2, 3, chance.randint(4, 12), chance.randint(12, 40)))
    return Attention(
        batch=chance.randint(1, 3),
        heads=kv_heads * chance.randint(1, 4),
        kv_heads=kv_heads,
        rows=16 * steps * (2 if causal else 1),
        width=chance.choice((64, 128)),
        causal=causal,
        dtype=chance.choice(("bfloat16", "float16")),
        lies=chance.choice(("heads", "positions")),
        scale=chance.choice((None, None, 0.05, 0.3, -0.1)),
    )


class Work:
    """A size's tensors on this rank, refilled in place for every turn."""

    def __init__(self, shape: Attention, seed: int = 0, tensors: Any = None) -> None:
        """``tensors``: whole q, k, v instead of random ones."""
        world = mkernel.world()
        self.rank, self.world = world.rank, world.size
        self.shape = shape
        os.environ["MKERNEL_HOPPER_ATTENTION"] = shape.way
        sizes = {
            "batch": shape.batch,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "sequence": shape.rows * world.size,
            "head_dim": shape.width,
            "causal": shape.causal,
        }
        options = {"scale": shape.scale, "lies": shape.lies, "cu_seqlens": shape.documents}
        self.bounds = None
        if shape.documents is not None:
            self.bounds = torch.tensor(shape.documents, dtype=torch.int32, device=shape.told_on)
        if tensors is not None:
            options["tensors"] = {name: each.cuda() for name, each in tensors.items()}
        if shape.way == "kernel" and world.size > 1:
            plan = mkernel.plan(
                "ring_attention", **sizes, dtype=shape.dtype,
                **({} if shape.lies == "heads" else {"layout": shape.lies}),
            )  # fmt: skip
            assert isinstance(plan.schedule, AttentionKernelSchedule), plan.schedule
        self.case = case_of("ring_attention")(
            sizes, shape.dtype, shape.dtype, "row", seed=seed, options=options, device="cuda"
        )
        self.given = self.case.inputs(self.rank, self.world, 0)

    def fill(self, turn: int) -> None:
        """Fresh inputs where the last ones lie."""
        for name, tensor in self.case.inputs(self.rank, self.world, turn).items():
            self.given[name].copy_(tensor)

    def call(self) -> dict[str, torch.Tensor]:
        """The public op, where freed memory holds poison."""
        if not torch.cuda.is_current_stream_capturing():
            poison.freed(self.case.results(self.world).values(), "cuda")
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

    def failure(self, turn: int) -> list[str]:
        """Of the last call."""
        return self.failures(turn, self.found)

    def failures(self, turn: int, found: dict[str, torch.Tensor], what: str = "") -> list[str]:
        """Empty where both outputs are right."""
        limits = self.case.tolerances()
        compared = self.case.compared(found, self.rank, self.world, turn)
        return [
            f"rank {self.rank} {self.shape} turn {turn} {what}: {name} is off by "
            f"{one.error:.2e} {one.why}"
            for name, one in compared.items()
            if not one.error <= limits[name]
        ]


def judged(shapes: Sequence[Attention], seed: int) -> list[str]:
    """Failures of two calls each."""
    found = []
    for shape in shapes:
        work = Work(shape, seed)
        for turn in range(2):
            work.fill(turn)
            found += work.failures(turn, work.call())
    mkernel.synchronize()
    return found


def skewed(shapes: Sequence[Attention], rounds: int, seed: int) -> list[str]:
    """Failures of many calls that reuse all memory, ranks late by turns, shapes mixed, with GEMMs
    between them."""
    works = [Work(shape, seed) for shape in shapes]
    product = hopper_ranks.Work(hopper_ranks.Shape("all_gather_gemm", 8192, 512, 4096))
    chance = random.Random(seed)  # the same on every rank
    found = []
    for turn in range(rounds):
        work = chance.choice(works)
        late = chance.randrange(work.world + 1)
        work.fill(turn)
        product.fill(turn)
        if late == work.rank:
            spin(LATE_S)
        result = work.call()
        product.call()
        found += work.failures(turn, result, f"with rank {late} late")
        found += product.failure(turn, what="behind attention")
    mkernel.synchronize()
    return found


def queued(shapes: Sequence[Attention], rounds: int, seed: int) -> list[str]:
    """The same without any wait of the host between calls: results are kept and judged at the end."""
    works = [Work(shape, seed) for shape in shapes]
    kept = []
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % work.world == work.rank:
            spin(LATE_S / 10)
        kept.append((work, turn, work.call()))
    mkernel.synchronize()
    return [text for work, turn, found in kept for text in work.failures(turn, found, "queued")]


def replayed(shapes: Sequence[Attention], replays: int) -> list[str]:
    """Failures of a captured graph of all shapes' calls, with new inputs before every replay and plain
    calls between."""
    works = [Work(shape) for shape in shapes]
    graph, results = captured([work.call for work in works])
    found = []
    for turn in range(1, replays + 1):
        for work, outputs in zip(works, results, strict=True):
            work.fill(turn)
            for tensor in outputs.values():
                poison.fill(tensor)
        if turn % (works[0].world + 1) == works[0].rank:
            spin(LATE_S / 4)
        graph.replay()
        for work, outputs in zip(works, results, strict=True):
            found += work.failures(turn, outputs, "replayed")
        if turn % 10 == 0:
            found += works[0].failures(turn, works[0].call(), "between replays")
    mkernel.synchronize()
    return found


def two_streams(shapes: Sequence[Attention], rounds: int) -> list[str]:
    """Failures of calls that are queued on two streams at once, in the same order on all ranks."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    works = [[Work(shape, seed) for shape in shapes] for seed in range(2)]
    torch.cuda.synchronize()
    kept = []
    for turn in range(rounds):
        for number, stream in enumerate(streams):
            work = works[number][turn % len(shapes)]
            with torch.cuda.stream(stream):
                work.fill(turn)
                if (turn + number) % work.world == work.rank:
                    spin(LATE_S / 10)
                kept.append((work, turn, work.call()))
    mkernel.synchronize()
    torch.cuda.synchronize()
    return [text for work, turn, found in kept for text in work.failures(turn, found, "streams")]


def repeated(shape: Attention, times: int) -> list[str]:
    """What differs between calls on the same inputs."""
    return other_bits(Work(shape).call, times)


def extreme(shape: Attention) -> list[str]:
    """Failures on scores of some thousands, all equal, and with one that outweighs all others."""
    world = mkernel.world().size
    length, dtype = shape.rows * world, getattr(torch, shape.dtype)
    random_ = torch.Generator().manual_seed(1)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, length, shape.width, generator=random_).to(dtype)

    q, k, v = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
    one = k.clone()
    one[:, :, length // 3] *= 30
    cases = {
        "large": (q * 30, k * 30, v),
        "equal": (torch.zeros_like(q), k, v),
        "one": (q, one, v),
    }
    found = []
    for name, tensors in cases.items():
        work = Work(shape, tensors=dict(zip(INPUTS, tensors, strict=True)))
        found += work.failures(0, work.call(), name)
    mkernel.synchronize()
    return found


def nan_passes(shape: Attention) -> list[str]:
    """NaN in rank 0's last value must come out where queries see it; it may elsewhere, as in torch's
    own attention, where a weight of 0 times NaN is NaN."""
    work = Work(shape)
    if work.rank == 0:
        work.given["v"][:, :, -1] = torch.nan
    out = work.call()["out"]
    mkernel.synchronize()
    if not shape.causal:
        return [] if bool(out.isnan().all()) else ["a NaN that all see is lost"]
    at = work.shape.rows * work.world
    mine = zigzag_positions(at, work.world, work.rank)
    where = zigzag_positions(at, work.world, 0)[-1]
    wanted = (mine >= where).cuda()
    seen = bool(out[:, :, wanted].isnan().all())
    return [] if seen else [f"rank {work.rank}: a NaN that queries see is lost"]


def other_boundaries(shape: Attention, replays: int) -> list[str]:
    """Failures of a captured call of packed documents, which begin elsewhere before every replay."""
    assert shape.documents is not None
    work = Work(shape)
    work.call()
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work.call()
    found = []
    for turn in range(1, replays + 1):
        inner = sorted(
            random.Random(turn).sample(range(shape.documents[-1]), len(shape.documents) - 2)
        )
        bounds = (0, *inner, shape.documents[-1])
        work.case = work.case.with_(options={**work.case.options, "cu_seqlens": bounds})
        assert work.bounds is not None
        work.bounds.copy_(torch.tensor(bounds, dtype=torch.int32))
        work.fill(turn)
        graph.replay()
        found += work.failures(turn, result, f"replayed with {bounds}")
    mkernel.synchronize()
    return found


def in_pieces(shapes: Sequence[Attention], rows: int, seed: int, late: bool) -> list[str]:
    """Failures where sequences of any length travel in pieces of so many rows at most, ranks late by
    turns where ``late``."""
    _plan_pieces(rows)
    found = []
    for shape in shapes:
        work = Work(shape, seed)
        for turn in range(3):
            work.fill(turn)
            if late and turn % work.world == work.rank:
                spin(LATE_S / 4)
            found += work.failures(turn, work.call(), "in pieces")
        plan = mkernel.plan(
            "ring_attention", **work.case.sizes, dtype=shape.dtype,
            **({} if shape.lies == "heads" else {"layout": shape.lies}),
        )  # fmt: skip
        assert isinstance(plan.schedule, AttentionInPiecesSchedule), plan.schedule
    mkernel.synchronize()
    return found


def replayed_in_pieces(shapes: Sequence[Attention], rows: int, replays: int) -> list[str]:
    """The same of a captured graph."""
    _plan_pieces(rows)
    return replayed(shapes, replays)


def _plan_pieces(rows: int) -> None:
    """Every later plan of this process has pieces of so many rows, and few slots."""
    machine = attention_tuning._MACHINE
    how = machine.attention.model_copy(update={"whole_bytes": 0, "pieces_bytes": 0, "slots": 2})
    attention_tuning._MACHINE = machine.model_copy(update={"attention": how})
    attention_tuning._FEWEST_ROWS = rows


def by_core(judge: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """What ``judge`` finds where our own kernel computes parts of any length."""
    os.environ["MKERNEL_HOPPER_ATTENTION"] = "parts"
    machine = attention_tuning._MACHINE
    how = machine.attention.model_copy(update={"core_rows": 1})
    attention_tuning._MACHINE = machine.model_copy(update={"attention": how})
    capabilities.UNCLAIMED = ()
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "sequence": 256, "head_dim": 128, "causal": 0}
    schedule = mkernel.plan("ring_attention", **sizes, dtype="bfloat16").schedule
    assert isinstance(schedule, AttentionSchedule)
    assert schedule.library == "mkernel"
    return judge(*arguments)


FAULTS_IN_PIECES = ("forgets", "slot not waited for", "early flag")


class FaultyPieces:
    """The native module, which forgets what was found before, does not wait for a slot to be free, or
    sends zeros, as if flags came before their pieces."""

    def __init__(self, native: Any, fault: str, like: torch.Tensor) -> None:
        self._native, self._fault, self._zeros = native, fault, torch.zeros_like(like)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def Running(self, out: int, lse: int, read: bool, write: bool) -> Any:
        return self._native.Running(out, lse, read and self._fault != "forgets", write)

    def await_part(self, device: int, world: Any, source: int, flag: int, stream: int) -> None:
        arrival = stream == torch.cuda.current_stream().cuda_stream
        if arrival or self._fault != "slot not waited for":
            self._native.await_part(device, world, source, flag, stream)

    def push_piece(self, device: int, world: Any, peer: int, k: int, v: int, *rest: Any) -> None:
        if self._fault == "early flag":
            k = v = self._zeros.data_ptr()
        self._native.push_piece(device, world, peer, k, v, *rest)


def faulty_in_pieces(shape: Attention, rows: int) -> dict[str, list[str]]:
    """Failures with each fault of pieces, after a right call. Rank 1 is late: what rank 0 sends without
    waiting lies in slots that it has not read."""
    _plan_pieces(rows)
    native, found = attention_in_pieces.native, {}
    for fault in FAULTS_IN_PIECES:
        work = Work(shape)
        before = work.failures(0, work.call())
        assert not before, before
        wrong = FaultyPieces(native(), fault, work.given["k"])
        for module in (attention_in_pieces, attention_merge):
            module.native = lambda wrong=wrong: wrong  # type: ignore[attr-defined]
        work.fill(1)
        if work.rank == 1:
            spin(LATE_S)
        result = work.call()
        mkernel.synchronize()
        found[fault] = work.failures(1, result)
        for module in (attention_in_pieces, attention_merge):
            module.native = native  # type: ignore[attr-defined]
    return found


def a_million(causal: bool) -> dict[str, Any]:
    """Of one call with 2^20 positions, 32 heads of queries and 8 of keys: what it took of the device's
    memory beside its tensors, the plan's pieces, and errors of some rows of queries."""
    world = mkernel.world()
    shape = Attention(1, 32, 8, (1 << 20) // world.size, causal=causal)
    work = Work(shape, seed=3)
    small = torch.zeros(1, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    attend(small, small, small, 0, causal, 1.0)  # loads the library
    torch.cuda.empty_cache()
    tensors = sum(each.nbytes for each in work.given.values()) + work.given["q"].nbytes
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    out, lse = mkernel.ring_attention(
        *(work.given[name] for name in INPUTS), causal=causal, return_lse=True
    )
    end.record()
    mkernel.synchronize()
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - out.nbytes - lse.nbytes
    torch.cuda.empty_cache()
    rows = torch.randperm(shape.rows, generator=torch.Generator().manual_seed(5))[:24].sort().values
    compared = work.case.compared(
        {"out": out, "lse": lse}, work.rank, work.world, 0, rows=lambda count: rows.cuda()
    )
    return {
        "taken": taken, "tensors": tensors, "seconds": begin.elapsed_time(end) / 1e3,
        "errors": {name: one.error for name, one in compared.items()},
        "limits": work.case.tolerances(),
    }  # fmt: skip


FAULTS = ("no weights", "seam", "stale", "early flag", "wrong head")


class LateKeys(Documents):
    """Every document but the first begins one key late."""

    def keys(self, source: Source) -> Bounds:
        at = super().keys(source).at.clone()
        at[1:-1] = (at[1:-1] + 1).clamp(max=at[-1])
        return Bounds(at, int(at.diff().max()))


def drawn_for_kernel(chance: random.Random) -> Attention:
    """Any size of one kernel: from one step to a few tiles, more of them than a device has blocks."""
    causal = chance.random() < 0.5
    steps = chance.choice((1, 2, 3, chance.randint(4, 12)))
    return replace(drawn(chance), rows=128 * steps * (2 if causal else 1), width=128, causal=causal,
                   way="kernel")  # fmt: skip


KERNEL_FAULTS = (
    "seam", "one key late", "stale", "early flag", "skipped", "unmasked", "wrong head",
)  # fmt: skip


class FaultyKernel:
    """The native module, whose kernel sees a step too few or too many at a seam of the zigzag, or each
    key of a part one place late, leaves a part out, has no mask, or the keys of the next head; or whose
    keys are those of before, or come behind their flags."""

    def __init__(self, native: Any, fault: str, given: dict[str, torch.Tensor]) -> None:
        self._native, self._fault = native, fault
        old = fault == "stale"
        self._sent = [
            given[name].clone() if old else torch.zeros_like(given[name]) for name in "kv"
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def RingPart(self, source: int, first: int, keys: int) -> Any:
        # Of a part that all queries see, the last step is not seen; of another one, a step more does.
        if self._fault == "seam":
            first, keys = (first - 128, keys) if first else (first, keys - 128)
        return self._native.RingPart(source, first, keys)

    def Core(self, tensors: Any, lse: int, counters: int, shape: Any, scale: float, causal: bool,
             half: bool) -> Any:  # fmt: skip
        if self._fault == "wrong head":
            (at, strides) = tensors[1]
            tensors = [tensors[0], (at + 2 * strides[1], strides), *tensors[2:]]
            shape = (shape[0], shape[1], shape[2] - 1, *shape[3:])
        return self._native.Core(tensors, lse, counters, shape, scale,
                                 causal and self._fault != "unmasked", half)  # fmt: skip

    def Ring(self, core: Any, parts: Any, slots: Any, *rest: Any) -> Any:
        if self._fault == "one key late":
            slots = (slots[0] + 2 * slots[1][2], slots[1])
        parts = parts[1:] if self._fault == "skipped" else parts
        return self._native.Ring(core, parts, slots, *rest)

    def push_keys(self, device: int, world: Any, k: int, v: int, *rest: Any) -> None:
        if self._fault in ("stale", "early flag"):
            k, v = (each.data_ptr() for each in self._sent)
        self._native.push_keys(device, world, k, v, *rest)


def faulty_kernel(shape: Attention) -> dict[str, list[str]]:
    """Failures with each fault of the one kernel, after a right call."""
    native, found = attention_kernel.native, {}
    modules = (attention_kernel, attention_core, attention_ring)
    for turn, fault in enumerate(KERNEL_FAULTS):
        work = Work(shape, turn)
        before = work.failures(0, work.call())
        assert not before, before
        wrong = FaultyKernel(native(), fault, work.given)
        for module in modules:
            module.native = lambda wrong=wrong: wrong  # type: ignore[attr-defined]
        work.fill(1)
        result = work.call()
        mkernel.synchronize()
        found[fault] = work.failures(1, result)
        for module in modules:
            module.native = native  # type: ignore[attr-defined]
    return found


def faulty(shape: Attention, fault: str) -> list[str]:
    """Failures with a fault in the backend, after a right call."""
    work = Work(shape)
    found = [f"before the fault: {text}" for text in work.failures(0, work.call())]
    assert not found, found
    right: Callable[..., Seen] = attention.attend
    native = attention_ring.native()

    def wrong(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        if fault == "seam" and not causal:  # the last key is not seen
            k, v = k[:, :, :-1], v[:, :, :-1]
        seen = right(q, k, v, first, causal, scale)
        if fault == "no weights":
            seen = seen._replace(lse=torch.zeros_like(seen.lse))
        if fault == "wrong head":
            seen = seen._replace(lse=seen.lse.roll(1, 1).contiguous())
        return seen

    class Native:
        """The native module, whose keys are those of before, or come behind their flags."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def push_keys(self, device: int, world: Any, k: int, v: int, *rest: Any) -> None:
            tensors = old if fault == "stale" else nothing
            native.push_keys(device, world, *(one.data_ptr() for one in tensors), *rest)

    old = [work.given[name].clone() for name in "kv"]
    nothing = [torch.zeros_like(one) for one in old]
    attention.attend = wrong
    if fault == "boundary":
        attention.Documents = LateKeys  # type: ignore[misc]
    if fault in ("stale", "early flag"):
        attention_ring.native = Native  # type: ignore[assignment]
    work.fill(1)
    result = work.call()
    mkernel.synchronize()
    return work.failures(1, result)


class Trained:
    """A size's gradients on this rank, and their truth: of a weighed sum over outputs, and log-sum-exps
    where ``lse``."""

    def __init__(self, shape: Attention, seed: int = 0, *, lse: bool = False) -> None:
        self.shape, self.work, self.lse = shape, Work(shape, seed), lse

    def weights(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of outputs and log-sum-exps of the whole sequence, in the dtype that they have."""
        case, length = self.work.case, self.shape.rows * self.work.world
        sizes = self.shape.batch, self.shape.heads, length, self.shape.width
        draw = case.generator(turn, 7, -1)
        of_out = torch.randn(sizes, generator=draw, device="cuda")
        of_lse = torch.randn(sizes[:3], generator=draw, device="cuda")
        return of_out.to(getattr(torch, self.shape.dtype)), of_lse

    def call(self, turn: int) -> dict[str, torch.Tensor]:
        """dq, dk, dv by autograd, on fresh inputs."""
        self.work.fill(turn)
        mine = self.work.case.positions(self.work.rank, self.work.world).cuda()
        of_out, of_lse = (each[:, :, mine] for each in self.weights(turn))
        leaves = {name: each.detach().requires_grad_() for name, each in self.work.given.items()}
        out, lse = mkernel.ring_attention(
            *(leaves[name] for name in INPUTS),
            causal=self.shape.causal,
            scale=self.shape.scale,
            return_lse=True,
        )
        outputs, of = ((out, lse), (of_out, of_lse)) if self.lse else ((out,), (of_out,))
        found = torch.autograd.grad(outputs, [leaves[name] for name in INPUTS], of)
        return dict(zip(INPUTS, found, strict=True))

    def truth(self, turn: int) -> dict[str, torch.Tensor]:
        """The same of the whole sequence in float64, at this rank's positions."""
        shape, case = self.shape, self.work.case
        whole = {n: each.double().requires_grad_() for n, each in case._whole(turn).items()}
        k, v = (whole[name].repeat_interleave(shape.heads // shape.kv_heads, 1) for name in "kv")
        scale = shape.width**-0.5 if shape.scale is None else shape.scale
        scores = whole["q"] @ k.transpose(2, 3) * scale
        if shape.causal:
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device="cuda").triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        of_out, of_lse = (each.double() for each in self.weights(turn))
        total = ((scores.softmax(3) @ v) * of_out).sum()
        if self.lse:
            total = total + (scores.logsumexp(3) * of_lse).sum()
        total.backward()
        mine = case.positions(self.work.rank, self.work.world).cuda()
        return {name: each.grad[:, :, mine] for name, each in whole.items()}  # type: ignore[index]

    def failures(self, turn: int, found: dict[str, torch.Tensor], what: str = "") -> list[str]:
        """Empty where all three are right."""
        limit = GRADIENT_LIMIT[self.shape.dtype]
        return [
            f"rank {self.work.rank} {self.shape} turn {turn} {what}: d{name} is off by {error:.2e}"
            for name, truth in self.truth(turn).items()
            if not (error := compare(found[name], truth).error) <= limit
        ]


GRADIENT_LIMIT = {"bfloat16": 1e-2, "float16": 1.5e-3}
"""Relative Frobenius error. What is rounded (``out``, weights, what each part gives, the sum) has one
of up to 2.8e-3 each in bfloat16, of random tensors."""


def trained(shapes: Sequence[Attention], seed: int, lse: bool = False) -> list[str]:
    """Gradients that are off, of two calls each."""
    found = []
    for shape in shapes:
        work = Trained(shape, seed, lse=lse)
        for turn in range(2):
            found += work.failures(turn, work.call(turn))
    mkernel.synchronize()
    return found


def trained_in_lots(shapes: Sequence[Attention], seed: int) -> list[str]:
    """Of gradients that travel in two lots of heads, whatever is predicted to be fastest."""
    right = attention_tuning.predicted_backward

    def predicted(plan: Any, lots: int, constants: Any) -> Any:
        return right(plan, lots, constants).model_copy(update={"pipelined_us": 1.0 / lots})

    attention_tuning.predicted_backward = predicted
    return trained(shapes, seed) + trained_in_any_order(shapes[:4], 12)


def trained_in_any_order(shapes: Sequence[Attention], rounds: int) -> list[str]:
    """Failures of many calls, ranks late by turns, shapes mixed, without a wait of the host."""
    works = [Trained(shape) for shape in shapes]
    kept = []
    for turn in range(rounds):
        if turn % (works[0].work.world + 1) == works[0].work.rank:
            spin(LATE_S / 10)
        work = works[turn % len(works)]
        kept.append((work, turn, work.call(turn)))
    mkernel.synchronize()
    return [text for work, turn, found in kept for text in work.failures(turn, found, "queued")]


def trained_in_a_graph(shapes: Sequence[Attention], replays: int) -> list[str]:
    """Failures of captured backwards, with new inputs before every replay."""
    return [text for shape in shapes for text in _trained_in_a_graph(shape, replays)]


def _trained_in_a_graph(shape: Attention, replays: int) -> list[str]:
    work = Trained(shape)
    static = work.call(0)  # plans, workspaces and libraries are made outside of the capture
    mkernel.synchronize()
    op = torch.ops.mkernel.ring_attention_backward
    given = work.work.given
    of_out = torch.empty_like(given["q"])
    out, lse = torch.empty_like(given["q"]), torch.empty(given["q"].shape[:3], device="cuda")
    group = mkernel.world().name

    def backward() -> dict[str, torch.Tensor]:
        found = op(of_out, None, *(given[n] for n in INPUTS), None, out, lse, causal=shape.causal,
                   group=group)  # fmt: skip
        return dict(zip(INPUTS, found, strict=True))

    mine = work.work.case.positions(work.work.rank, work.work.world).cuda()
    backward()  # by this thread, which has cuDNN handles of its own: autograd called by another
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = backward()
    found = []
    for turn in range(1, replays + 1):
        work.work.fill(turn)
        results = mkernel.ring_attention(
            *(given[n] for n in INPUTS), causal=shape.causal, return_lse=True
        )
        for place, tensor in zip((out, lse), results, strict=True):
            place.copy_(tensor)
        of_out.copy_(work.weights(turn)[0][:, :, mine])
        for tensor in static.values():
            poison.fill(tensor)
        graph.replay()
        found += work.failures(turn, static, "replayed")
    mkernel.synchronize()
    return found


def same_gradients(shapes: Sequence[Attention], times: int) -> list[str]:
    """What differs between calls on the same inputs, under torch's deterministic algorithms."""
    return [text for shape in shapes for text in _same_gradients(shape, times)]


def _same_gradients(shape: Attention, times: int) -> list[str]:
    work = Trained(shape)

    def call() -> dict[str, torch.Tensor]:
        torch.use_deterministic_algorithms(True)
        try:
            return work.call(0)
        finally:
            torch.use_deterministic_algorithms(False)  # products of the truth need no fixed order

    first = call()
    return work.failures(0, first, "deterministic") + other_bits(call, times, first)


GRADIENT_FAULTS = ("wrong head", "own sums", "stale", "early flag", "not added")


def faulty_gradients(shape: Attention) -> dict[str, list[str]]:
    """Failures with each fault in the backward, after a right call."""
    right, native = attention_backward.gradients, attention_backward.native
    found = {}
    for fault in GRADIENT_FAULTS:
        found[fault] = _faulty_gradients(shape, fault)
        attention_backward.gradients, attention_backward.native = right, native
    return found


def _faulty_gradients(shape: Attention, fault: str) -> list[str]:
    work = Trained(shape)
    found = [f"before the fault: {text}" for text in work.failures(0, work.call(0))]
    assert not found, found
    right, native = attention_backward.gradients, attention_backward.native()

    def gradients(given: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Any:
        if fault == "wrong head":
            given = given._replace(lse=given.lse.roll(1, 1))
        if fault == "own sums":  # the log-sum-exp of this part's keys alone
            lse = given.lse.clone()
            lse[:, :, first:] = attend(given.q, k, v, first, causal, scale).lse
            given = given._replace(lse=lse)
        return right(given, k, v, first, causal, scale)

    class Native:
        """The native module, which sends home what it should not, or adds less."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def push_gradients(
            self, device: int, world: Any, owner: int, k: int, v: int, *rest: Any
        ) -> None:
            wrong = {"stale": old, "early flag": nothing}.get(fault)
            if wrong is not None:
                k, v = (one.data_ptr() for one in wrong)
            native.push_gradients(device, world, owner, k, v, *rest)

        def Sum(self, given: Any, *rest: Any) -> Any:
            return native.Sum(given[:1] if fault == "not added" else given, *rest)

    old = [work.work.given[name].clone() for name in "kv"]
    nothing = [torch.zeros_like(one) for one in old]
    attention_backward.gradients = gradients
    attention_backward.native = Native  # type: ignore[assignment]
    result = work.call(1)
    mkernel.synchronize()
    return work.failures(1, result)


def runs_on(widths: Sequence[int]) -> list[str]:
    """The accelerators of calls with heads of these widths, after a right call of each."""
    found = []
    for width in widths:
        shape = Attention(1, 2, 1, 64, width=width, dtype="float16")
        assert judged([shape], 0) == []
        plan = mkernel.plan(
            "ring_attention", batch=1, heads=2, kv_heads=1, sequence=64 * mkernel.world().size,
            head_dim=width, dtype="float16",
        )  # fmt: skip
        found.append(plan.accelerator)
    return found
