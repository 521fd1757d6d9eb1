"""MoE between nodes on the host: plans, areas, and what calls queue, by stand-ins for kernels."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import test_hopper_moe as one_node
import torch
from plan_walk import WalkedWorld, decorations
from test_hopper_moe import BESIDE, MAIN, SIZES, Started, called, run

from mkernel import Invariant
from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.capabilities import DISPATCHES, MOE
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.moe import executors as moe
from mkernel.backends.accelerators.cuda.moe import nodes as moe_nodes
from mkernel.backends.accelerators.cuda.moe.nodes import sums_bytes
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.moe import executors as moe_upon
from mkernel.backends.accelerators.hopper.moe import tuning as moe_tuning
from mkernel.backends.accelerators.hopper.schedule import DispatchSchedule, GemmCombineSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.errors import Unsupported
from mkernel.plan.arguments import Around
from mkernel.plan.missing import of_op
from mkernel.plan.model import GemmCombineShape, LaunchPlan
from mkernel.plan.shapes import size_names
from mkernel.plan.traffic import RoutedTokens, relay_bytes, traffic_of

COMBINES = MOE[len(DISPATCHES) :]
FAR = ("put_tokens", "land_tokens", "send_far", "send_outbox", "land_far")
MODEL = {"hidden": 7168, "features": 2048, "experts": 256, "top_k": 8}


@pytest.fixture
def started(made: Any, monkeypatch: pytest.MonkeyPatch) -> Started:
    module = Started(made)
    monkeypatch.setattr(one_node, "STARTED", (*one_node.STARTED, *FAR))
    monkeypatch.setattr(one_node, "BUILT", (*one_node.BUILT, "CrossingTokens"))
    for each in (moe, moe_nodes, moe_upon):
        monkeypatch.setattr(each, "native", lambda: module)
    monkeypatch.setattr(DispatchContext, "network_of", lambda self, call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def two_nodes(direct: bool = True, each: int = 1, backend: Any = HopperAccelerator) -> WalkedWorld:
    gpus = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(each))
    nics = tuple(devices.nic(i, gpudirect=direct) for i in range(each))
    nodes = [devices.node(gpus, nics) for _ in range(2)]
    return WalkedWorld(backend(), devices.world(*nodes), each)


def planned(
    op: str, direct: bool = True, each: int = 1, exchange: Any = "auto", chunk: int | None = None,
    **options: Any,
) -> LaunchPlan:  # fmt: skip
    sizes = one_node.sizes_of(op, options)
    world = two_nodes(direct, each)
    return world.plan(op, sizes, dtype="bfloat16", exchange=exchange, chunk=chunk)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", MOE)
def test_no_field_is_decoration(started: Started, op: str) -> None:
    usual = planned(op)
    assert decorations(usual, one_node.launches(started, two_nodes(), usual)) == []


def test_tokens_leave_first_and_the_product_waits_for_pieces_alone(started: Started) -> None:
    plan = planned("moe_dispatch_gemm", chunk=5)
    run(called(plan))
    travels = [("put_tokens", BESIDE), ("land_tokens", BESIDE)]
    given = [started.given[name] for name in ("CrossingTokens", "Routing", "GroupedProduct")]
    assert [each["pieces"] for each in given] == [3] * 3  # 12 tokens, 5 a piece
    assert started.names == [*travels, ("moe_route", MAIN), ("moe_grouped", MAIN)]
    started.told.clear()
    run(called(plan, "compute_only"))
    assert started.names == [("moe_route", MAIN), ("moe_grouped", MAIN)]
    assert [started.given[name]["pieces"] for name in ("Routing", "GroupedProduct")] == [0, 0]


def test_rows_travel_so_too_and_a_routing_is_used_again_inside_a_node_alone(
    started: Started,
) -> None:
    run(called(planned("moe_dispatch")))
    travels = [("put_tokens", BESIDE), ("land_tokens", BESIDE)]
    assert started.names == [*travels, ("moe_route", MAIN), ("copy_rows", MAIN)]
    assert started.given["DispatchedRows"]["pieces"] == 1
    for op in ("moe_dispatch", "moe_dispatch_gemm"):
        with pytest.raises(Unsupported, match="in worlds of one node; this one has 2"):
            planned(op, routed=True)


@pytest.mark.parametrize("op", MOE)
def test_kernels_are_loaded_before_one_waits_for_a_nic(started: Started, op: str) -> None:
    run(called(planned(op)))
    first = [("load_moe", 0), *([("load_grouped", 0)] if "gemm" in op else [])]
    assert started.loaded_at == first
    run(one_node.called(one_node.planned(op)))
    assert started.loaded_at == first


@pytest.mark.usefixtures("started")  # the plan asks what the build has
def test_only_wanted_tokens_travel_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_TOKENS", "whole")
    several = planned("moe_dispatch_gemm", each=2).part(DispatchSchedule)
    assert (several.push_blocks, several.whole_tokens, several.copy_engines) == (8, False, False)
    alone = planned("moe_dispatch_gemm").part(DispatchSchedule)
    assert (alone.push_blocks, alone.whole_tokens, alone.copy_engines) == (0, False, False)
    assert one_node.planned("moe_dispatch_gemm").part(DispatchSchedule).whole_tokens


def test_sums_leave_behind_the_product(started: Started) -> None:
    plan = planned("moe_gemm_combine")
    assert plan.part(GemmCombineSchedule).returns == "ranks"
    run(called(plan))
    assert started.names == [
        ("push_whole", BESIDE), ("send_far", BESIDE), ("land_far", BESIDE), ("moe_grouped", MAIN),
        ("moe_home", MAIN), ("send_outbox", MAIN), ("land_far", MAIN), ("moe_home", MAIN),
    ]  # fmt: skip
    started.told.clear()
    run(called(plan, "compute_only"))
    assert not {name for name, _ in started.names} & set(FAR)


@pytest.mark.parametrize("op", COMBINES)
def test_sums_leave_piece_by_piece(started: Started, op: str) -> None:
    run(called(planned(op, chunk=5)))  # of 12 tokens
    pieces = [("moe_home", MAIN), ("send_outbox", MAIN)] * 3
    assert started.names[-8:] == [*pieces, ("land_far", MAIN), ("moe_home", MAIN)]
    home = started.given["Home"]
    assert (home["first"], home["end"], home["pieces"]) == (8, 12, 3)
    sent = [each[-1] for each in started.told if each[0] == "send_outbox"]
    assert sent == [0, 1, 2]


@pytest.mark.parametrize("op", COMBINES)
def test_relays_add_a_piece_behind_that_of_their_neighbours(
    started: Started, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece that a relay adds leaves before it adds the next one, and while ranks make that."""
    plan = planned(op, each=EACH, exchange="hierarchical", chunk=5)  # of 12 tokens
    here = SimpleNamespace(of_call=lambda *given: None)
    monkeypatch.setattr(moe, "device_world", lambda *given: here)
    steps: list[Any] = []
    vars(started).update(
        moe_home=lambda *given: steps.append(given[3].name),
        send_outbox=lambda *given, piece: steps.append(piece),
    )
    start(plan, relayed_call(plan, 1, torch.zeros(12, SIZES["top_k"], dtype=torch.int32)))
    rows, relay = "sum_rows", "relay_sums"
    assert steps == [rows, rows, relay, 0, rows, relay, 1, relay, 2, "sum_ranks"]
    assert (started.given["Home"]["hierarchical"], started.given["Home"]["first"]) == (True, 8)


def test_a_combine_alone_adds_by_rank_in_float32(started: Started) -> None:
    call = called(planned("moe_combine"))
    run(call)
    assert started.names == [
        ("push_whole", BESIDE), ("send_far", BESIDE), ("land_far", BESIDE),
        ("moe_home", MAIN), ("send_outbox", MAIN), ("land_far", MAIN), ("moe_home", MAIN),
    ]  # fmt: skip
    home = started.given["Home"]
    assert (home["wide"], home["by_rank"]) == (True, True)
    started.told.clear()
    run(called(planned("moe_combine"), "compute_only"))
    assert started.names == [("moe_home", MAIN)] * 2


def test_roots_of_invariant_sums_travel_in_their_own_dtype(started: Started) -> None:
    usual, invariant = (
        two_nodes().plan(
            "moe_combine", one_node.sizes_of("moe_combine", {}), dtype="bfloat16",
            around=Around(invariant=how),
        )
        for how in (None, Invariant())
    )  # fmt: skip
    assert sums_bytes(usual) == 2 * sums_bytes(invariant)
    assert traffic_of(usual).from_rank(0)[1] > traffic_of(invariant).from_rank(0)[1]
    areas = [HopperAccelerator().workspace(plan).areas[0] for plan in (usual, invariant)]
    assert areas[0] > areas[1]
    run(called(invariant))
    home = started.given["Home"]
    assert (home["groups"], home["wide"], home["by_rank"]) == (8, False, True)


def test_results_by_slot_are_refused(started: Started) -> None:
    with pytest.raises(
        Unsupported, match="by ranks between nodes, not by slots; leave returns open"
    ):
        planned("moe_gemm_combine", returns="slots")
    claims = HopperAccelerator().capabilities()
    assert [of_op(op, "hopper", claims, 2) for op in MOE] == [()] * len(MOE)


@pytest.mark.parametrize("op", MOE)
def test_areas(started: Started, op: str) -> None:
    """NICs write where ranks of a node write; the outbox is behind it."""
    offset = native.native().DATA_OFFSET
    direct, staged = planned(op), planned(op, direct=False)
    assert (direct.routes.staged, staged.routes.staged) == (False, True)
    sizes = moe.sizes_of(2, SIZES["tokens"], SIZES["top_k"], SIZES["experts"])
    row_bytes = 2 * SIZES["hidden"]
    if op in ("moe_dispatch", "moe_dispatch_gemm"):
        whole, outbox = sizes.dispatch_bytes(row_bytes, 1), SIZES["tokens"] * row_bytes
        slots = []
        assert whole > sizes.dispatch_bytes(row_bytes, 0)  # lists
    else:
        if isinstance(direct.shape, GemmCombineShape):
            row_bytes *= 2 if direct.shape.partial_dtype == "float32" else 1
        else:
            row_bytes = 4 * SIZES["features"]
        whole, outbox = sizes.home_bytes(row_bytes, True), 2 * SIZES["tokens"] * row_bytes
        slots = [sizes.far_weights(False), sizes.far_sums(row_bytes, 1, False)]
        assert offset + sizes.outbox_offset(row_bytes) == whole
    found = HopperAccelerator().workspace(direct)
    assert (found.areas, found.staging) == ((whole + outbox,), 0)
    found = HopperAccelerator().workspace(staged)
    assert (found.areas, found.staging) == ((whole,), whole - offset + outbox)
    assert [slot.flag for slot in slots] in ([], [0, 4])
    ends = [slot.offset + 2 * slot.bytes for slot in slots]
    assert ends == sorted(ends)
    assert all(end <= whole - offset for end in ends)
    assert not slots or ends[0] <= slots[1].offset


def test_a_place_is_left_for_what_lands_and_own_tokens_come_first(started: Started) -> None:
    near = one_node.planned("moe_dispatch_gemm", **MODEL, tokens=32768).part(DispatchSchedule)
    far = planned("moe_dispatch_gemm", **MODEL, tokens=32768).part(DispatchSchedule)
    assert far.blocks == near.blocks - far.land_blocks == near.blocks - 2
    staged = planned("moe_dispatch_gemm", False, **MODEL, tokens=32768).part(DispatchSchedule)
    assert staged.blocks == near.blocks - staged.land_blocks == near.blocks - 8
    assert far.early_tiles > 4 * near.early_tiles
    assert far.early_rows == near.early_rows == moe_tuning.TILE_ROWS


@pytest.mark.usefixtures("started")
def test_own_tiles_that_come_first_may_be_of_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """8192 tokens of DeepSeek-V3: an expert has 128 rows of each rank."""
    sizes = {**MODEL, "tokens": 4096}
    assert planned("moe_dispatch_gemm", **sizes).part(DispatchSchedule).early_tiles == 0
    constants = machine()
    experts = constants.experts.model_copy(update={"far_early_rows": 128})
    monkeypatch.setattr(
        moe_tuning, "machine", lambda: constants.model_copy(update={"experts": experts})
    )
    far = planned("moe_dispatch_gemm", **{**sizes, "tokens": 4100}).part(DispatchSchedule)
    assert far.early_rows == 128
    assert far.early_tiles > 100
    near = one_node.planned("moe_dispatch_gemm", **sizes).part(DispatchSchedule)
    assert (near.early_rows, near.early_tiles) == (256, 0)
    several = planned("moe_gemm_combine", **MODEL, tokens=4096).part(GemmCombineSchedule)
    assert several.blocks == far.blocks  # 2 less than there are, either


def test_what_is_copied_first_where_ranks_share_a_device(started: Started) -> None:
    started.shared = True
    run(called(planned("moe_dispatch_gemm")))
    assert {stream for _, stream in started.names} == {MAIN}


# ---- several ranks a node: relays ----------------------------------------------------------------

RANKS, EACH = 4, 2


class Puts:
    """Stands for the native module; counts what is put to each rank: of tokens as
    kernels/moe/crossing.hpp says, its ids, and a row for each token in the rank's, or node's, list;
    else slots (kernels/moe/far_slots.hpp)."""

    def __init__(self, made: Any, rank: int) -> None:
        self._made, self._rank = made, rank
        self.sent, self.started = Counter[int](), list[str]()

    def CrossingTokens(self, **given: Any) -> Any:
        return SimpleNamespace(**given)

    def put_tokens(self, device: int, world: Any, tokens: Any, stream: int) -> None:
        self.started.append("put_tokens")
        count, top_k = SIZES["tokens"], SIZES["top_k"]
        own, span = SIZES["experts"] // RANKS, EACH if tokens.hierarchical else 1
        at = (ctypes.c_int32 * (count * top_k)).from_address(tokens.ids)
        ids = torch.tensor(list(at)).view(count, top_k)
        for peer in range(RANKS):
            if peer // EACH == self._rank // EACH:
                continue
            if tokens.hierarchical and peer % EACH != self._rank % EACH:
                continue
            first = peer // span * span * own
            wanted = ((ids >= first) & (ids < first + span * own)).any(1)
            self.sent[peer] += 4 * count * top_k + int(wanted.sum()) * tokens.row_bytes

    def send_far(self, device: int, world: Any, rows: int, slots: Any, stream: int) -> None:
        self._to_all(slots, slots.bytes)

    def send_outbox(
        self, device: int, world: Any, outbox: int, slots: Any, stream: int, piece: int
    ) -> None:
        self._to_all(slots, slots.bytes_of(piece))

    def _to_all(self, slots: Any, nbytes: int) -> None:
        for peer in range(RANKS):
            if slots.relayed and peer % EACH != self._rank % EACH:
                continue
            if peer // EACH != self._rank // EACH:
                self.sent[peer] += nbytes

    def __getattr__(self, name: str) -> Any:
        if name == "shares_device":
            return lambda *given: False
        if name[0].isupper():
            return getattr(self._made, name)
        return lambda *given: self.started.append(name)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("op", "exchange"),
    [(op, exchange) for op in MOE for exchange in ("direct", "hierarchical")],
)
def test_planned_bytes_are_those_that_calls_put(
    op: str, exchange: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are so of every rank and peer, with tokens that are spread unevenly."""
    capacity = {"capacity": 99} if op in DISPATCHES else {}
    plan = planned(op, each=EACH, exchange=exchange, chunk=5, **capacity)
    draw = torch.Generator().manual_seed(3)
    size = RANKS, SIZES["tokens"], SIZES["top_k"]
    ids = torch.randint(-1, SIZES["experts"], size, generator=draw).int()
    ids[:, ::2] = ids[:, ::2, :1]  # of one expert
    traffic = traffic_of(plan, RoutedTokens(ids.tolist(), SIZES["experts"], 2))
    for rank in range(RANKS):
        module: Any = Puts(made, rank)
        for each in (moe, moe_nodes, moe_upon):
            monkeypatch.setattr(each, "native", lambda module=module: module)
        monkeypatch.setattr(moe, "device_world", lambda *given: SimpleNamespace(of_call=print))
        call = relayed_call(plan, rank, ids[rank])
        start(plan, call)
        far = {
            peer: n for peer, n in traffic.from_rank(rank).items() if peer // EACH != rank // EACH
        }
        assert module.sent == far, rank
        if op in DISPATCHES:
            travels = [each for each in module.started if each.endswith(("tokens", "wanted"))]
            assert travels == ["put_tokens", "push_wanted", "land_tokens"]


def start(plan: LaunchPlan, call: Call) -> None:
    context: Any = DispatchContext(0, one_node.Order(), 64)  # type: ignore[arg-type]
    context.reports = one_node.Reports()
    HopperAccelerator.executor_of(plan)(call, context).start(call, MAIN)


def relayed_call(plan: LaunchPlan, rank: int, ids: torch.Tensor) -> Call:
    tokens, hidden, experts = (SIZES[name] for name in ("tokens", "hidden", "experts"))
    words = HopperAccelerator().routing_words(RANKS, tokens, SIZES["top_k"], experts) + 1
    tensors = {
        "routing": torch.zeros(words, dtype=torch.int32),
        "x": torch.zeros(tokens, hidden).bfloat16(), "topk_ids": ids.contiguous(),
        "w": torch.zeros(experts // RANKS, hidden, SIZES["features"]).bfloat16(),
        "y": torch.zeros(one_node.ROWS, SIZES["features"]).bfloat16(),
        "h": torch.zeros(one_node.ROWS, SIZES["features"]).bfloat16(),
        "w2": torch.zeros(experts // RANKS, SIZES["features"], hidden).bfloat16(),
        "topk_weights": torch.zeros(tokens, SIZES["top_k"]),
        "out": torch.zeros(tokens, hidden if "gemm" in plan.op else SIZES["features"]).bfloat16(),
    }  # fmt: skip
    neighbour = rank // EACH * EACH + (rank + 1) % EACH
    return Call(
        plan=plan, rank=rank, tensors=tensors, epoch=1, number=1, pad=0, workspace=1 << 30,
        areas=(0,), peers={neighbour: PeerMemory(0, 1 << 21)}, region=0, fifo=0, timeout_s=1.0,
        view="pipelined",
    )  # fmt: skip


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("backend", [HopperAccelerator, CudaAccelerator])
def test_relays_are_claimed_and_taken_where_they_are_predicted_to_be_faster(backend: Any) -> None:
    sizes = one_node.sizes_of("moe_dispatch_gemm", {**MODEL, "tokens": 4096})
    world = two_nodes(each=8, backend=backend)
    found = {
        exchange: world.plan("moe_dispatch_gemm", sizes, dtype="bfloat16", exchange=exchange)
        for exchange in ("direct", "hierarchical", "auto")
    }
    times = {name: plan.prediction.pipelined_us for name, plan in found.items() if plan.prediction}
    assert times["hierarchical"] < 0.9 * times["direct"]
    how: Any = found["auto"].schedule
    assert how == found["hierarchical"].schedule
    shape = found["auto"].shape
    assert how.exchange == "hierarchical"
    assert how.relay_bytes == relay_bytes("moe_dispatch_gemm", shape, "bfloat16", 2) == 4096 * 14336
    assert how.pieces == 16
    assert how.land_blocks == 8
    direct: Any = found["direct"].schedule
    assert (direct.exchange, direct.relay_bytes, direct.land_blocks) == ("direct", 0, 2)
    assert (
        backend().workspace(found["auto"]).areas[0] < backend().workspace(found["direct"]).areas[0]
    )


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("backend", [HopperAccelerator, CudaAccelerator])
@pytest.mark.parametrize("op", COMBINES)
def test_sums_of_nodes_are_kept_and_rounded_as_the_plan_says(op: str, backend: Any) -> None:
    """A relay keeps (nodes - 1) x tokens x row, in the dtype in which sums cross."""
    changes = {name: size for name, size in MODEL.items() if name in size_names(op)}
    sizes = one_node.sizes_of(op, {**changes, "tokens": 4096})
    world = two_nodes(each=8, backend=backend)
    found = {
        exchange: world.plan(op, sizes, dtype="bfloat16", exchange=exchange)
        for exchange in ("direct", "hierarchical", "auto")
    }
    how: Any = found["auto"].schedule
    assert how == found["hierarchical"].schedule
    shape, sums = found["auto"].shape, "float32" if op == "moe_combine" else "bfloat16"
    row = MODEL["features"] * 4 if op == "moe_combine" else MODEL["hidden"] * 2
    assert (how.exchange, how.node_sums, how.pieces) == ("hierarchical", sums, 16)
    assert how.relay_bytes == relay_bytes(op, shape, "bfloat16", 2, how.node_sums) == 4096 * row
    areas = {name: backend().workspace(plan).areas[0] for name, plan in found.items()}
    assert areas["direct"] - areas["auto"] == 15 * 4096 * row
    carried = {name: traffic_of(plan).sent(0, 8) for name, plan in found.items()}
    assert carried["auto"] == carried["direct"] == 4096 * (row + 8 * 4)
    times = {name: plan.prediction.comm_us for name, plan in found.items() if plan.prediction}
    # Sums of all tokens travel, once for each rank, or each node.
    assert 7 < times["direct"] / times["hierarchical"] < 8.5
    assert traffic_of(found["auto"]).sent(0, 9) == 0 < traffic_of(found["direct"]).sent(0, 9)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", MOE)
def test_no_field_of_relays_is_decoration(
    started: Started, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = two_nodes(each=EACH)
    usual = planned(op, each=EACH, exchange="hierarchical")
    here = SimpleNamespace(of_call=lambda *given: None)
    monkeypatch.setattr(moe, "device_world", lambda *given: here)
    started.shares_device = lambda *given: False  # type: ignore[method-assign]
    ids = torch.zeros(SIZES["tokens"], SIZES["top_k"], dtype=torch.int32)
    usual_call = relayed_call(usual, 1, ids)

    def launch(plan: LaunchPlan) -> object:
        started.told.clear()
        call = replace(usual_call, plan=plan)
        world.admit(plan, dict(call.tensors))
        needs = world.accelerator.workspace(plan)
        start(plan, call)
        return [needs, *started.told]

    assert decorations(usual, launch) == []
