"""The backward's part on the host, with the stand-ins of test_hopper_attention.py."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gpu_plans import gpu_plan
from hopper_calls import gpus
from test_hopper_attention import (
    BESIDE,
    CURRENT,
    KERNELS,
    MAIN,
    Fabric,
    Here,
    Order,
    Started,
    decorations_of,
    flat_at,
    lying,
    on_stream,
    rows_at,
    sizes_of,
)

from mkernel.backends.accelerators.cuda import capabilities, device_world
from mkernel.backends.accelerators.cuda.attention import backward as attention_backward
from mkernel.backends.accelerators.cuda.attention import library as attention_library
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention.backward import AttentionBackwardExecutor
from mkernel.backends.accelerators.cuda.attention.library import Gradients, Results
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.schedule import AttentionBackwardSchedule
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.cases.comparison import compare
from mkernel.errors import ArgumentError
from mkernel.ops.zigzag import zigzag_positions
from mkernel.plan.model import LaunchPlan

OP = "ring_attention_backward"
SCALE = 0.2
LIMIT = 8e-3  # bfloat16: what a part gives is rounded, and so is the sum


class Given(NamedTuple):
    of: int
    strides: tuple[int, ...]
    first: int
    rows: int


class Sum(NamedTuple):
    given: list[Given]
    out: int
    strides: tuple[int, ...]
    shape: tuple[int, int]
    factor: float


class Sums(NamedTuple):
    sums: list[Sum]
    batch: int
    width: int
    half: bool


class BackwardFabric(Fabric):
    """Also of gradients. ``kept``: how many of the parts that came home are added up; None: all."""

    GRADIENT_FLAGS = MOST_RANKS = 16
    Given, Sum, Sums = Given, Sum, Sums
    kept: int | None = None

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.home = {(*pair, lot): threading.Event() for pair in self.flags for lot in range(2)}
        self.orders: list[list[int]] = []

    def await_part(self, device: int, here: Here, source: int, flag: int, stream: int) -> None:
        if flag < self.GRADIENT_FLAGS:
            super().await_part(device, here, source, flag, stream)
            return
        lot, of = divmod(flag - self.GRADIENT_FLAGS, self.MOST_RANKS)
        assert of == source
        self._note(here, ("home", source, lot), stream)
        assert self.home[here.rank, source, lot].wait(60)

    def push_gradients(
        self,
        device: int,
        here: Here,
        owner: int,
        k: int,
        v: int,
        nbytes: int,
        keys: Any,
        place: int,
        flag: int,
        stream: int,
    ) -> None:
        lot, of = divmod(flag - self.GRADIENT_FLAGS, self.MOST_RANKS)
        assert of == here.rank
        self._note(here, ("send", owner, lot), stream)
        at = here.workspaces[owner] + self.DATA_OFFSET + place
        at += keys.gradient_offset(self.world, owner, here.rank)
        for number, source in enumerate((k, v)):
            ctypes.memmove(at + number * keys.bytes, source, nbytes)
        self.home[owner, here.rank, lot].set()

    def sum_gradients(
        self, device: int, here: Here, sums: Sums, blocks: int, ends: bool, stream: int
    ) -> None:
        self._note(here, ("sum", blocks, ends), stream)
        dtype = torch.float16 if sums.half else torch.bfloat16
        for which, one in enumerate(sums.sums):
            heads, rows = one.shape
            total = torch.zeros(sums.batch, heads, rows, sums.width)
            for each in one.given[: None if which == 0 else self.kept]:
                total[:, :, each.first : each.first + each.rows] += rows_at(
                    each.of, each.strides, dtype, sums.batch, heads, each.rows, sums.width
                ).float()
            place = rows_at(one.out, one.strides, dtype, sums.batch, heads, rows, sums.width)
            place.copy_(total * one.factor)


def given_by(
    given: Results, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, scale: float
) -> Gradients:
    """As a library's, on the CPU: each rounded once."""
    assert scale > 0
    given, groups = given.rows(first), given.q.shape[1] // k.shape[1]
    q, out, of_out = (each.double() for each in given[:3])
    keys, values = (each.double().repeat_interleave(groups, 1) for each in (k, v))
    scores = q @ keys.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf")
        )
    weights = (scores - given.lse[..., None]).exp()
    delta = (of_out * out).sum(3, keepdim=True)
    of_scores = weights * (of_out @ values.transpose(2, 3) - delta) * scale
    found = (of_scores @ keys, of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ of_out)
    shared = (each.unflatten(1, (-1, groups)).sum(2) for each in found[1:])
    return Gradients(*(each.to(k.dtype) for each in (found[0], *shared)))


def planned(world: int, **changes: Any) -> LaunchPlan:
    claims = HopperAccelerator().capabilities()
    return gpu_plan(
        HopperAccelerator(), OP, world, sizes_of(world, **changes), dtype="bfloat16",
        capabilities=claims.model_copy(update={"ops": (*capabilities.OPS, *capabilities.ATTENTION)}),
    )  # fmt: skip


def scheduled(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    how = plan.part(AttentionBackwardSchedule).model_copy(update=changes)
    return plan.model_copy(update={"schedule": how})


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], BackwardFabric]:
    def make(world: int) -> BackwardFabric:
        made = BackwardFabric(world)
        for module in (attention_backward, attention_ring, device_world):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(attention_backward, "gradients", given_by)
        monkeypatch.setattr(attention_backward, "on_stream", on_stream)
        monkeypatch.setattr(attention_ring, "bytes_at", flat_at)
        return made

    return make


def truth_of(plan: LaunchPlan, scale: float, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole tensors of a call, and whole gradients, in float64 but for their values."""
    shape: Any = plan.shape
    draw = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        sizes = shape.batch, heads, shape.sequence, shape.head_dim
        return torch.randn(sizes, generator=draw).bfloat16()

    whole = {"q": normal(shape.heads), "k": normal(shape.kv_heads), "v": normal(shape.kv_heads)}
    of_out = normal(shape.heads)
    leaves = {name: each.double().requires_grad_() for name, each in whole.items()}
    k, v = (leaves[n].repeat_interleave(shape.heads // shape.kv_heads, 1) for n in "kv")
    scores = leaves["q"] @ k.transpose(2, 3) * scale
    if shape.causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    out = scores.softmax(3) @ v
    out.backward(of_out.double())
    given = {
        **whole, "grad_out": of_out, "out": out.detach().bfloat16(),
        "lse": scores.logsumexp(3).detach().float(),
    }  # fmt: skip
    return given, {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}


def run(
    made: BackwardFabric, plan: LaunchPlan, *, view: View = "pipelined", scale: float = SCALE,
    calls: int = 2,
) -> list[str]:  # fmt: skip
    """What is wrong with any rank's gradients, of calls with fresh inputs each."""
    shape: Any = plan.shape
    world, rows = plan.world_size, shape.sequence // plan.world_size
    room = AttentionBackwardExecutor.workspace(plan).areas[0]
    memory = [torch.full((room,), 0x7F, dtype=torch.uint8) for _ in range(world)]  # NaN
    places = [each.data_ptr() for each in memory]
    made.nbytes = shape.batch * shape.kv_heads * rows * shape.head_dim * 2
    made.stretches = shape.batch * (shape.kv_heads if shape.layout == "heads" else 1)
    order: Any = Order()
    found: list[str] = []
    for number in range(calls):
        whole, truth = truth_of(plan, scale, number)
        for flag in (*made.flags.values(), *made.home.values()):
            flag.clear()

        def start(rank: int, number: int = number, whole: Any = whole, truth: Any = truth) -> Any:
            mine = torch.arange(rank * rows, (rank + 1) * rows)
            if shape.causal:
                mine = zigzag_positions(shape.sequence, world, rank)
            tensors = {n: each[:, :, mine] for n, each in whole.items()}
            tensors = {
                n: lying(each, shape.layout) if each.dim() == 4 else each.contiguous()
                for n, each in tensors.items()
            }
            for name in "qkv":
                tensors[f"grad_{name}"] = torch.full_like(tensors[name], torch.nan)
            call = Call(
                plan=plan, rank=rank, tensors=tensors, epoch=number + 1, number=number, pad=0,
                workspace=places[rank], areas=(0,),
                peers={p: PeerMemory(0, places[p]) for p in range(world) if p != rank},
                region=0, fifo=0, timeout_s=1.0, view=view, options={"scale": scale},
            )  # fmt: skip
            executor = AttentionBackwardExecutor(call, DispatchContext(0, order, 64))
            executor.start(call, MAIN)
            return [
                f"call {number} rank {rank}: {name} is off by {off}"
                for name, right in truth.items()
                if not (off := compare(tensors[name], right[:, :, mine]).error) <= LIMIT
            ]

        with ThreadPoolExecutor(world) as pool:
            found += [text for each in pool.map(start, range(world)) for text in each]
    return found


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients(fabric: Any, world: int, causal: bool, layout: str) -> None:
    plan = planned(world, causal=causal, layout=layout, sequence=64 * world)
    for lots in (1, 2):
        assert run(fabric(world), scheduled(plan, lots=lots), calls=1) == []


@pytest.mark.parametrize("scale", [-0.3, 1.0])
def test_any_scale(fabric: Any, scale: float) -> None:
    assert run(fabric(2), planned(2, causal=True), scale=scale) == []


@pytest.mark.parametrize("view", ["pipelined", "sequential"])
def test_what_is_queued(fabric: Any, view: View) -> None:
    made = fabric(3)
    plan = scheduled(planned(3, causal=True, sequence=96), lots=2)
    assert run(made, plan, view=view, calls=1) == []
    blocks = plan.part(AttentionBackwardSchedule).sum_blocks
    ends = [
        (("home", 1, 0), MAIN), (("home", 2, 0), MAIN), (("sum", blocks, False), MAIN),
        (("home", 1, 1), MAIN), (("home", 2, 1), MAIN), (("sum", blocks, True), MAIN),
    ]  # fmt: skip
    two, one = ([(("send", to, lot), BESIDE) for lot in (0, 1)] for to in (2, 1))
    assert made.queued == {
        "sequential": [
            ("push", MAIN), (("await", 2), MAIN), (("await", 1), MAIN),
            *((what, MAIN) for what, _ in (*two, *one)), *ends,
        ],
        "pipelined": [
            ("push", BESIDE), (("await", 2), KERNELS), *two, (("await", 1), KERNELS), *one, *ends,
        ],
    }[view]  # fmt: skip


def test_what_travels_is_packed_before_its_copies_are_queued_and_kept_until_all_are(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library lays gradients out otherwise, a kernel packs them."""
    made, packed = fabric(2), attention_ring.AttentionRing.packed
    lives: dict[int, list[Any]] = defaultdict(list)  # of each rank's thread
    told: dict[int, list[Any]] = defaultdict(list)

    class Noting(Order):
        def fork(self, stream: int) -> int:
            me = threading.get_ident()
            told[me].append(("fork", stream, len(lives[me])))
            return super().fork(stream)

        def join(self, stream: int) -> None:
            me = threading.get_ident()
            told[me].append(("join", stream, sum(each() is not None for each in lives[me])))
            super().join(stream)

    def copied(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        assert CURRENT.stream == KERNELS
        found = packed(self, tensor).clone()
        lives[threading.get_ident()].append(weakref.ref(found))
        return found

    monkeypatch.setattr(attention_ring.AttentionRing, "packed", copied)
    monkeypatch.setattr(sys.modules[__name__], "Order", Noting)
    assert run(made, scheduled(planned(2), lots=2), calls=1) == []
    queued = [
        ("fork", MAIN, 0), ("fork", KERNELS, 2), ("fork", KERNELS, 4), ("join", MAIN, 4),
        ("join", MAIN, 4),
    ]  # fmt: skip
    assert list(told.values()) == [queued] * 2


def test_compute_only_exchanges_nothing(fabric: Any) -> None:
    made = fabric(2)
    plan = scheduled(planned(2), lots=1)
    run(made, plan, view="compute_only", calls=1)
    blocks = plan.part(AttentionBackwardSchedule).sum_blocks
    assert made.queued == [(("sum", blocks, False), MAIN)] * 2, "of both ranks: each is alone"


def test_wrong_parts_are_seen(fabric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own eyes: the log-sum-exp of another head, a part that is not added, a mask that
    is off by one at a seam, and the log-sum-exp of a part alone."""
    plan = planned(2, causal=True)
    made = fabric(2)
    made.kept = 1
    assert run(made, plan)

    def other_head(given: Results, *rest: Any) -> Gradients:
        return given_by(given._replace(lse=given.lse.roll(1, 1)), *rest)

    def shifted(
        given: Results, k: Any, v: Any, first: int, causal: bool, scale: float
    ) -> Gradients:
        if causal:
            return given_by(given, k, v, first, causal, scale)
        found = given_by(given, k[:, :, 1:], v[:, :, 1:], first, causal, scale)
        pad = (0, 0, 1, 0)
        return found._replace(k=torch.nn.functional.pad(found.k, pad),
                              v=torch.nn.functional.pad(found.v, pad))  # fmt: skip

    def of_the_part(
        given: Results, k: Any, v: Any, first: int, causal: bool, scale: float
    ) -> Gradients:
        return given_by(
            given._replace(lse=given.lse - 0.1 * (not causal)), k, v, first, causal, scale
        )

    for fault in (other_head, shifted, of_the_part):
        made = fabric(2)
        monkeypatch.setattr(attention_backward, "gradients", fault)
        assert run(made, plan), fault


def test_gradients_travel_in_lots_where_that_takes_long() -> None:
    """Of short sequences a further call costs more than it hides."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128}
    plans = {each: planned(2, **sizes, causal=True, sequence=each) for each in (256, 16384)}
    lots = {n: plan.part(AttentionBackwardSchedule).lots for n, plan in plans.items()}
    assert lots == {256: 1, 16384: 2}
    made = plans[16384].prediction
    assert made is not None
    assert made.compute_us < made.pipelined_us < made.sequential_us
    one = planned(2, **{**sizes, "heads": 1, "kv_heads": 1}, sequence=16384)
    assert one.part(AttentionBackwardSchedule).lots == 1


def test_schedules_that_a_call_would_not_follow_are_refused() -> None:
    one = planned(2, kv_heads=1)
    assert executor_of(one) is AttentionBackwardExecutor
    with pytest.raises(ArgumentError, match=r"lots = 2 .*at most 1"):
        AttentionBackwardExecutor.workspace(scheduled(one, lots=2))


def test_heads_are_cut_evenly() -> None:
    for heads, groups, count, keys in ((8, 4, 2, [4, 4]), (3, 1, 2, [1, 2]), (5, 2, 1, [5])):
        shape: Any = SimpleNamespace(kv_heads=heads, heads=heads * groups)
        found = attention_backward.lots(shape, count)
        assert [each.keys.stop - each.keys.start for each in found] == keys
        assert [each.queries.stop for each in found] == [each.keys.stop * groups for each in found]
        assert found[-1].keys.stop == heads


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
def test_no_field_is_decoration(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(made)
    for module in (attention_backward, attention_ring):
        monkeypatch.setattr(module, "native", lambda: started)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, n: torch.zeros(n, dtype=torch.uint8))

    def given(
        results: Results, k: Any, v: Any, first: int, causal: bool, scale: float
    ) -> Gradients:
        started.told.append((tuple(results.q.shape), tuple(k.shape), k.stride(), first, causal))
        q = results.rows(first).q
        return Gradients(*(torch.zeros(each.shape, dtype=each.dtype) for each in (q, k, v)))

    monkeypatch.setattr(attention_backward, "gradients", given)
    monkeypatch.setattr(attention_backward, "on_stream", on_stream)
    world = gpus()
    usual = world.plan(OP, sizes_of(2, causal=True), dtype="bfloat16")
    q, k = torch.zeros(2, 4, 32, 64).bfloat16(), torch.zeros(2, 2, 32, 64).bfloat16()
    tensors = {"q": q, "k": k, "v": k.clone(), "out": q.clone(), "grad_out": q.clone()}
    tensors |= {"lse": torch.zeros(2, 4, 32), "grad_q": q.clone()}
    tensors |= {name: k.clone() for name in ("grad_k", "grad_v")}
    assert decorations_of(world, usual, tensors, started) == []


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("layout", ["heads", "positions"])
def test_all_that_the_library_is_given_for_queries_lies_as_they_do(
    monkeypatch: pytest.MonkeyPatch, layout: str, first: int
) -> None:
    """It keeps plans by the strides of q, k and v alone: a plan that was made for a result that lies
    otherwise reads wrong elements."""
    seen = []

    def backward(of_out: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any, scale: float) -> Any:
        seen.append((q.stride(), of_out.stride(), out.stride()))
        return tuple(torch.zeros_like(each) for each in (q, k, v))

    library = SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward)
    monkeypatch.setattr(attention_library, "_aten", library)
    monkeypatch.setattr(attention_library, "_more_dimensions", lambda device: (1,))
    q, out, of_out = (lying(torch.randn(2, 4, 32, 64).bfloat16(), layout) for _ in range(3))
    k = lying(torch.randn(2, 2, 32, 64).bfloat16(), layout)
    lse, of_lse = torch.randn(2, 4, 32), torch.randn(2, 4, 32)
    results = Results(q, out, of_out, lse, of_lse)
    attention_library.gradients(results, k, k, first, False, 0.2)
    assert len(seen) == 2
    for strides in seen:
        assert len(set(strides)) == 1, strides
