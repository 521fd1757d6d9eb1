"""No field of a plan of ``streams`` is decoration: another value is other messages, chunks, events or
memory, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, get_args

import devices
import pytest
import torch
from gpu_plans import gpu_plan
from plan_walk import Launch, WalkedWorld, decorations
from shipped import constants_of

from mkernel.backends.accelerators.streams import (
    all_reduce,
    call_streams,
    matmul,
    ring_attention,
    ring_attention_backward,
    scaled,
    torch_attention,
    window,
)
from mkernel.backends.accelerators.streams.backend import PUT_OPS, StreamsAccelerator, _op
from mkernel.backends.accelerators.streams.call_streams import AbortWord, Scratch
from mkernel.backends.accelerators.streams.device import Device, scaled_mm
from mkernel.backends.accelerators.streams.routing import route
from mkernel.backends.accelerators.streams.schedule import (
    HIERARCHICAL_OPS,
    CombineSchedule,
    DispatchSchedule,
    GemmCombineSchedule,
)
from mkernel.backends.accelerators.streams.window import Windows
from mkernel.backends.accelerators.streams.worker import StreamsLaunch
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.invariant_product import InvariantFactor
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.backends.contracts.scaled import dequantised
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError
from mkernel.plan.arguments import Around
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import (
    E4M3,
    CombineShape,
    DispatchShape,
    GemmCombineShape,
    LaunchPlan,
    MoeShape,
    ScaleMode,
    Scales,
)
from mkernel.plan.ops import BACKWARD
from mkernel.plan.shapes import GEMMS
from mkernel.topology.model import Topology
from mkernel.topology.reshape import split_into_nodes
from mkernel.world.agreement import planned_tensors

SIZES: dict[str, dict[str, int]] = {
    "all_gather_gemm": {"m": 96, "n": 16, "k": 8},
    "gemm_reduce_scatter": {"m": 96, "n": 16, "k": 8},
    "gemm_all_reduce": {"m": 94, "n": 16, "k": 8},
    "all_reduce": {"m": 94, "n": 16},
    "moe_dispatch": {"tokens": 24, "hidden": 8, "experts": 8, "top_k": 2},
    "moe_dispatch_gemm": {"tokens": 24, "hidden": 8, "features": 12, "experts": 8, "top_k": 2},
    "moe_combine": {"tokens": 24, "features": 12, "experts": 8, "top_k": 2},
    "moe_gemm_combine": {"tokens": 24, "hidden": 16, "features": 8, "experts": 8, "top_k": 2},
    "ring_attention": {"batch": 1, "heads": 2, "kv_heads": 1, "sequence": 96, "head_dim": 8},
}
SIZES |= {backward: SIZES[op] for op, backward in BACKWARD.items()}
RANK, WORLD, CHUNK, SIGNALS = 1, 4, 5, 64
FAR = 1 << 40
"""Peers' workspaces, which nothing reads, are this far apart."""


class Painted(CombineSchedule):
    """Has a field that is decoration, which must be found."""

    kind: Any = "tests.painted_rows"  # type: ignore[mutable-override]
    colour: str = "red"


class Recorder:
    """What a call does, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, *what: Any) -> Any:
        self.told.append(what)
        return SimpleNamespace(wait=lambda *_: None)


class Stream:
    device_index = 0

    def __init__(self, number: int, recorder: Recorder) -> None:
        self.cuda_stream, self._recorder = number, recorder

    def wait_event(self, event: Event) -> None:
        self._recorder.tell("waits", self.cuda_stream, event.of)

    def wait_stream(self, other: Stream) -> None:
        self._recorder.tell("waits", self.cuda_stream, other.cuda_stream)

    def query(self) -> bool:
        return True


class Event:
    of = -1

    def record(self, stream: Stream) -> None:
        self.of = stream.cuda_stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class RecordedDevice:
    """A kind of torch device whose streams are numbers."""

    has_streams = True

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder
        self.queues = name == "cuda"
        self._made = 0

    def stream(self, device: object) -> Stream:
        self._made += 1
        return Stream(self._made, self._recorder)

    def current(self, device: object) -> Stream:
        self._made = 0
        return Stream(0, self._recorder)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        self._recorder.tell("on", stream.cuda_stream)
        return nullcontext()

    def event(self, *, timed: bool) -> Event:
        return Event()

    def hold(self, stream: Stream, cycles: int) -> None:
        self._recorder.tell("held", cycles)

    def shared(
        self, device: object, compute: Stream, comm: Stream, share: int
    ) -> AbstractContextManager[None]:
        self._recorder.tell("shared", share)
        return nullcontext()

    def release(self, group: object) -> None:
        """Nothing is under way."""


class RecordedNative:
    """Stands for the part of `_cuda` that a window needs."""

    CudaError = RuntimeError

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def MappedPages(self, address: int, nbytes: int) -> object:
        return address

    def copy(self, dst: int, src: int, nbytes: int, *, stream: int) -> None:
        self._recorder.tell("put", dst, nbytes, stream)

    def write_word(self, address: int, value: int, *, stream: int) -> None:
        self._recorder.tell("word", value, stream)

    def wait_word(self, device: int, address: int, value: int, *, stream: int) -> None:
        self._recorder.tell("awaits", value, stream)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()

    def receive(tensor: torch.Tensor, group: object = None, group_src: int = -1) -> Any:
        return made.tell("receive", group_src, tuple(tensor.shape))

    def send(tensor: torch.Tensor, group: object = None, group_dst: int = -1) -> Any:
        return made.tell("send", group_dst, tuple(tensor.shape))

    def one(way: Callable[..., Any], tensor: torch.Tensor, group: Any, group_peer: int) -> Any:
        return (way.__name__, group_peer, tuple(tensor.shape))

    def batch(operations: list[Any]) -> list[Any]:
        return [made.tell("batch", *operations)]

    def product(self: object, a: torch.Tensor, out: torch.Tensor) -> None:
        made.tell("product", tuple(a.shape), tuple(out.shape), str(out.dtype))

    def attend(q: torch.Tensor, k: torch.Tensor, *rest: Any, **how: Any) -> Any:
        made.tell("scores", tuple(q.shape), tuple(k.shape), how["causal"])
        return torch_attention.attend(q, k, *rest, **how)

    def gradients(
        of_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any, **how: Any
    ) -> Any:
        made.tell("gradients", tuple(q.shape), tuple(k.shape), how["causal"])
        return torch_attention.gradients(of_out, q, k, *rest, **how)

    fake = SimpleNamespace(irecv=receive, isend=send, P2POp=one, batch_isend_irecv=batch)
    monkeypatch.setattr(call_streams, "distributed", fake)

    def product_of_all(a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        made.tell("product of all", tuple(a.shape))
        return a.new_empty((len(a), w.shape[2]))

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, **how: Any) -> None:
        made.tell("scaled product", tuple(a.shape), tuple(scale_a.shape), how["use_fast_accum"])

    def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made.tell("dequantised", tuple(values.shape), tuple(scale.shape))
        return dequantised(values, scale)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(scaled, "dequantised", widened)
    monkeypatch.setattr(matmul.Factor, "product", product)
    monkeypatch.setattr(matmul, "_product_of_groups", product_of_all)
    monkeypatch.setattr(ring_attention, "attend", attend)
    monkeypatch.setattr(ring_attention_backward, "gradients", gradients)
    monkeypatch.setattr(window, "native", lambda: RecordedNative(made))
    return made


def gpus(count: int, kind: str, nodes: int) -> Topology:
    one = devices.node(tuple(devices.gpu(i, kind=kind) for i in range(count)))
    return devices.world(*[one] * nodes)


def world_of(where: str) -> WalkedWorld:
    """``cpu``, ``cuda`` and ``npu``: two nodes of two ranks, whose messages are torch.distributed's;
    ``puts``: one node of four GPUs that reach each other."""
    if where == "cpu":
        machine = devices.world(devices.node())
        cpu = devices.SIM.model_copy(update={"id": "cpu0", "kind": "cpu"})
        return WalkedWorld(
            StreamsAccelerator("cpu"), split_into_nodes(machine, 2, 2, cpu, devices.SOFT), 2
        )
    accelerator = StreamsAccelerator("npu" if where == "npu" else "cuda")
    claims = accelerator.capabilities()
    if where == "puts":
        claims = claims.model_copy(update={"put_ops": PUT_OPS})
    accelerator._capabilities = claims
    kind = "ascend" if where == "npu" else "cuda"
    topology = gpus(4, kind, 1) if where == "puts" else gpus(2, kind, 2)
    return WalkedWorld(accelerator, topology, 4 if where == "puts" else 2, claims)


def tensors(plan: LaunchPlan) -> dict[str, torch.Tensor]:
    made = {}
    for name, (shape, dtypes, stored) in planned_tensors(plan).items():
        size = [1 if one is None else one for one in shape]
        made[name] = torch.zeros(size, dtype=getattr(torch, dtypes[0]))
        if stored and plan.scales is not None:
            made[name] = made[name].t().contiguous().t()
    if "topk_ids" in made:
        made["topk_ids"] = (torch.arange(made["topk_ids"].numel()) % 8).view(-1, 2)
    return made


def routed(plan: LaunchPlan, given: dict[str, torch.Tensor]) -> None:
    """``routing`` of a dispatch whose tokens go everywhere, with a mark; other tensors get its rows."""
    shape = plan.shape
    assert isinstance(shape, CombineShape | DispatchShape | GemmCombineShape | MoeShape)
    every = torch.arange(WORLD * shape.tokens * shape.top_k, dtype=torch.int32) % shape.experts
    ids = every.view(WORLD, shape.tokens, shape.top_k)
    rows = len(route(ids, RANK, shape.experts // WORLD).row_token)
    given["routing"] = torch.cat([every, torch.tensor([rows, 0], dtype=torch.int32)])
    for name in {"y", "h", "grad_y", "grad_h", "grad_outputs"} & given.keys():
        given[name] = given[name].new_zeros((rows, shape.features))


CASES = [(where, op) for where in ("cpu", "cuda", "npu") for op in SIZES] + [
    ("puts", op) for op in PUT_OPS
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("op", HIERARCHICAL_OPS)
def test_no_field_of_relays_is_decoration(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, where: str, op: str
) -> None:
    world = world_of(where)
    usual = world.plan(
        op, SIZES[op], dtype="bfloat16", out_dtype="bfloat16", chunk=CHUNK, exchange="hierarchical"
    )
    assert getattr(usual.schedule, "exchange", None) == "hierarchical"
    assert decorations(usual, launched(recorder, monkeypatch, world, where, usual)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize(("where", "op"), CASES)
def test_no_field_is_decoration(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, where: str, op: str
) -> None:
    world = world_of(where)
    usual = world.plan(op, SIZES[op], dtype="bfloat16", out_dtype="bfloat16", chunk=CHUNK)
    launch = launched(recorder, monkeypatch, world, where, usual)
    assert decorations(usual, launch) == []
    if op == "moe_combine":
        part = Painted(**{**dict(usual.part(CombineSchedule)), "kind": "tests.painted_rows"})
        found = decorations(usual.model_copy(update={"schedule": part}), launch)
        assert found == ["schedule.colour: 'red' or 'red-other'"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", PUT_OPS)
def test_no_field_of_invariant_results_is_decoration(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    def added(parts: list[torch.Tensor]) -> torch.Tensor:
        recorder.tell("added", len(parts), str(parts[0].dtype))
        return parts[0]

    def product(self: InvariantFactor, a: torch.Tensor, out: torch.Tensor) -> None:
        recorder.tell("product", self._segments, self._partial, tuple(a.shape), str(out.dtype))

    monkeypatch.setattr(InvariantFactor, "product", product)
    monkeypatch.setattr(all_reduce, "tree_sum", added)
    world = world_of("cpu")
    sizes = {"m": 96, "n": 128, **({} if op == "all_reduce" else {"k": 128})}
    around = Around(invariant=Invariant(8, "float32"))
    usual = world.plan(
        op, sizes, dtype="bfloat16", out_dtype="bfloat16", around=around, chunk=CHUNK
    )
    assert usual.invariant is not None
    assert decorations(usual, launched(recorder, monkeypatch, world, "cpu", usual)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", get_args(ScaleMode))
@pytest.mark.parametrize("op", sorted(GEMMS))
def test_no_field_of_scaled_operands_is_decoration(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, op: str, mode: ScaleMode
) -> None:
    world = world_of("cpu")
    around = Around(scales=Scales(mode=mode))
    usual = world.plan(
        op, {"m": 96, "n": 128, "k": 128}, dtype=E4M3, out_dtype="bfloat16", b_layout="column",
        around=around, chunk=CHUNK,
    )  # fmt: skip
    launch = launched(recorder, monkeypatch, world, "cpu", usual)
    # The reference, which older versions of torch leave, adds up in float32 whatever is asked for.
    taken = mode == "block" or mode in scaled_mm("cpu")
    expected = [] if taken else ["scales.use_fast_accum: False or True"]
    assert decorations(usual, launch) == expected


def launched(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    world: WalkedWorld,
    where: str,
    usual: LaunchPlan,
) -> Launch:
    """What launches of plans like this one do."""
    accelerator: Any = world.accelerator
    op = usual.op
    given, options = tensors(usual), {"scale": 1.0}
    if op.startswith("moe"):
        routed(usual, given)
    device: Any = Device("cpu") if where == "cpu" else RecordedDevice(accelerator.device, recorder)
    pads = [HostMemory.create(_transport.pad_bytes(SIGNALS)) for _ in range(WORLD)]
    for pad in pads:
        _transport.pad_format(pad.address, SIGNALS)

    def launch(plan: LaunchPlan) -> object:
        recorder.told.clear()
        world.admit(plan, given)
        accelerator._windows = Windows(device) if where == "puts" else None
        needs = accelerator.workspace(plan)
        memory = torch.zeros(max(1, sum(needs.areas)), dtype=torch.uint8)
        peers = {r: PeerMemory(pads[r].address, r * FAR) for r in range(WORLD) if r != RANK}
        call = Call(
            plan=plan, rank=RANK, tensors=given, epoch=1, number=1, pad=pads[RANK].address,
            workspace=memory.data_ptr(), areas=(0,), peers=peers, region=0, fifo=0, timeout_s=9.0,
            options=options,
        )  # fmt: skip
        start = memory.data_ptr()
        monkeypatch.setattr(
            window, "bytes_at", lambda at, nbytes: memory[at - start : at - start + nbytes]
        )
        words = accelerator._windows.words(call) if accelerator._windows else None
        started = StreamsLaunch(call, _op(plan.op), device, words, AbortWord(call.pad))
        started.run(Scratch())
        assert started.wait(9.0)
        results = {name: tuple(found.shape) for name, found in started.results().items()
                   if isinstance(found, torch.Tensor)}  # fmt: skip
        return needs, recorder.told[:], results

    return launch


def moe_plan(op: str, tokens: int, top_k: int) -> LaunchPlan:
    """On four GPUs that reach each other, of a layer of DeepSeek-V3's size."""
    sizes = {"hidden": 7168, "features": 2048, "experts": 256, "tokens": tokens, "top_k": top_k}
    return gpu_plan(
        StreamsAccelerator("cuda"), op, 4, sizes, dtype="bfloat16", out_dtype="bfloat16",
        constants=constants_of("streams-cuda"),
    )  # fmt: skip


def test_results_of_few_tokens_come_home_by_slot_and_of_many_by_rank() -> None:
    few, many, one = (
        moe_plan("moe_gemm_combine", *each).part(GemmCombineSchedule)
        for each in ((64, 8), (8192, 8), (8192, 1))
    )
    assert [each.returns for each in (few, many, one)] == ["slots", "ranks", "slots"]
    # What is added here is float32; torch has one product for all experts into bfloat16 alone.
    assert [each.grouped for each in (few, many, one)] == [True, False, True]


@pytest.mark.parametrize("returns", ["slots", "ranks"])
def test_results_come_home_as_is_asked_for(returns: str) -> None:
    sizes: dict[str, Any] = {**SIZES["moe_gemm_combine"], "returns": returns}
    for where in ("cpu", "npu"):
        plan = world_of(where).plan("moe_gemm_combine", sizes, dtype="float16")
        assert plan.part(GemmCombineSchedule).returns == returns
    with pytest.raises(ArgumentError, match="returns = 'rails'"):
        world_of("cpu").plan("moe_gemm_combine", sizes | {"returns": "rails"}, dtype="float16")


def test_tokens_travel_whole_where_nearly_all_are_wanted_or_there_are_few() -> None:
    found = [
        moe_plan("moe_dispatch_gemm", *each).part(DispatchSchedule)
        for each in ((64, 1), (1024, 8), (8192, 2))
    ]
    assert [each.gathers for each in found] == ["whole", "whole", "wanted"]
    assert all(each.grouped and not each.as_they_arrive for each in found)
