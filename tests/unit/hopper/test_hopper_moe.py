"""MoE's part on the host: plans, and what calls of them start, by stand-ins for kernels and copies."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import torch
from plan_walk import Launch, WalkedWorld, decorations

from mkernel import Invariant
from mkernel.backends.accelerators.cuda import capabilities
from mkernel.backends.accelerators.cuda.capabilities import MOE
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.moe import executors as moe
from mkernel.backends.accelerators.cuda.moe.reports import MoeReports
from mkernel.backends.accelerators.cuda.schedule import RowsSchedule
from mkernel.backends.accelerators.hopper import dispatch
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.moe import executors as moe_upon
from mkernel.backends.accelerators.hopper.moe import tuning as moe_tuning
from mkernel.backends.accelerators.hopper.schedule import DispatchSchedule, GemmCombineSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.errors import CapacityExceeded, ShapeError, Unsupported
from mkernel.ops import moe_composed
from mkernel.plan.arguments import NOTHING, Around
from mkernel.plan.model import E4M3, GemmCombineShape, LaunchPlan, MoeShape, Scales
from mkernel.plan.pipeline import Returns
from mkernel.plan.planner import explain
from mkernel.plan.shapes import size_names

WORLD, RANK, MAIN, BESIDE = 2, 1, 5, 6
ROWS = 11
SIZES = {"tokens": 12, "hidden": 64, "features": 128, "experts": 8, "top_k": 3}
STARTED = (
    "push_whole", "push_wanted", "moe_route", "quantise_rows", "copy_rows", "moe_grouped", "moe_home",
)  # fmt: skip
LEAST_ADDRESS = 1 << 20
FRESH = ("a", "out", "out_scales", "scales", "counts", "ids", "y", "permuted")
"""Addresses of memory that a call allocates, or zero."""
BUILT = (
    "Routing", "GroupedProduct", "Home", "MoeSizes", "QuantisedRows",
    "WantedTokens", "DispatchedRows",
)  # fmt: skip


class Started:
    """Stands for the native module: notes what is made of it and started."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.told: list[Any] = []
        self.given: dict[str, dict[str, Any]] = {}
        self.shared = False
        self.loaded_at: list[tuple[str, int]] = []

    def load_moe(self, device: int) -> None:
        """Notes behind how much of what was told."""
        self.loaded_at.append(("load_moe", len(self.names)))

    def load_grouped(self, device: int) -> None:
        """Does the same."""
        self.loaded_at.append(("load_grouped", len(self.names)))

    def shares_device(self, device: int, world: Any) -> bool:
        return self.shared

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)

        def build(*given: Any, **named: Any) -> Any:
            self.given[name] = named
            steady = {
                name: each != 0 if name in FRESH else each
                for name, each in named.items()
                if name != "sizes"
            }
            self.told.append((name, str(given), str(steady)))
            return found(*given, **named)

        def start(*given: Any, **named: int) -> None:
            sizes = [one for one in given if isinstance(one, int) and one < LEAST_ADDRESS]
            steps = [str(one) for one in given if type(one) is step]
            self.told.append((name, given[-1], *steps, *sizes, *named.values()))

        step = self._made.HomeStep
        return build if name in BUILT else start if name in STARTED else found

    @property
    def names(self) -> list[Any]:
        """What was started, and on which stream."""
        return [each[:2] for each in self.told if each[0] in STARTED]


class Order:
    """Stands for CallOrder."""

    open = 0

    def fork(self, stream: int) -> int:
        self.open += 1
        return BESIDE

    def join(self, stream: int) -> None:
        self.open -= 1


class Reports(MoeReports):
    """Knows of every call."""

    block: Any = None  # type: ignore[assignment]

    def rows(self, call: int) -> int:
        return ROWS


@pytest.fixture
def started(made: Any, monkeypatch: pytest.MonkeyPatch) -> Started:
    module = Started(made)
    for each in (moe, moe_upon):
        monkeypatch.setattr(each, "native", lambda: module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def world_of_two() -> WalkedWorld:
    return world_of(WORLD)


def world_of(size: int) -> WalkedWorld:
    gpus = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(size))
    backend = HopperAccelerator()
    ops = (*capabilities.OPS, *MOE)  # whatever this build has
    backend._capabilities = backend.capabilities().model_copy(update={"ops": ops})
    return WalkedWorld(backend, devices.world(devices.node(gpus)), size)


def planned(op: str, around: Around = NOTHING, **changes: Any) -> LaunchPlan:
    return world_of_two().plan(op, sizes_of(op, changes), dtype="bfloat16", around=around)


def sizes_of(op: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The sizes, of these, that an op takes."""
    return {name: size for name, size in SIZES.items() if name in size_names(op)} | changes


def called(plan: LaunchPlan, view: View = "pipelined") -> Call:
    """A call of rank 1, number 1."""
    if plan.scales is not None:
        return called_with_scales(plan, view)
    tokens, experts, top_k = (SIZES[name] for name in ("tokens", "experts", "top_k"))
    up = torch.zeros(experts // WORLD, SIZES["hidden"], SIZES["features"]).bfloat16()
    down = up.transpose(1, 2).contiguous()
    words = HopperAccelerator().routing_words(WORLD, tokens, top_k, experts) + 1
    tensors = {"routing": torch.zeros(words, dtype=torch.int32)}
    weights = {"topk_weights": torch.zeros(tokens, top_k)}
    if plan.op in ("moe_dispatch", "moe_dispatch_gemm"):
        ids = torch.zeros(tokens, top_k, dtype=torch.int32)
        tensors |= {"x": torch.zeros(tokens, SIZES["hidden"]).bfloat16(), "topk_ids": ids}
        tensors |= {"w": up} if plan.op == "moe_dispatch_gemm" else {}
    elif plan.op == "moe_combine":
        y = torch.zeros(ROWS, SIZES["features"]).bfloat16()
        tensors |= {"y": y, **weights, "out": y.new_zeros(tokens, SIZES["features"])}
    else:
        h = torch.zeros(ROWS, SIZES["features"]).bfloat16()
        tensors |= {"h": h, "w2": down, **weights, "out": h.new_zeros(tokens, SIZES["hidden"])}
    return call_of(plan, tensors, view)


def call_of(plan: LaunchPlan, tensors: dict[str, torch.Tensor], view: View) -> Call:
    return Call(
        plan=plan, rank=RANK, tensors=tensors, epoch=1, number=1, pad=0, workspace=1 << 30,
        areas=(0,), peers={0: PeerMemory(0, 1 << 21)}, region=0, fifo=0, timeout_s=1.0, view=view,
    )  # fmt: skip


SCALED: dict[str, Any] = {**SIZES, "hidden": 256}
SCALED_OPS = ("moe_dispatch_gemm", "moe_gemm_combine")


def planned_with_scales(
    op: str, quantises: Any = "bfloat16", out_dtype: Any = "bfloat16", **changes: Any
) -> LaunchPlan:
    around = Around(scales=Scales(mode="block", quantises=quantises))
    return world_of_two().plan(
        op, {**SCALED, **changes}, dtype=E4M3, out_dtype=out_dtype, b_layout="column", around=around
    )


def called_with_scales(plan: LaunchPlan, view: View = "pipelined") -> Call:
    """A call of rank 1 with e4m3 weights, and rows as the plan has them."""
    assert isinstance(plan.shape, MoeShape | GemmCombineShape)
    assert plan.scales is not None
    shape, kind = plan.shape, plan.scales.quantises or plan.dtype
    dispatches = isinstance(shape, MoeShape)
    k, n = shape.hidden, shape.columns if dispatches else shape.features
    k, n = (k, n) if dispatches else (n, k)
    own, count = shape.experts // WORLD, shape.tokens if dispatches else ROWS
    rows, weight = ("x", "w") if dispatches else ("h", "w2")
    words = HopperAccelerator().routing_words(WORLD, shape.tokens, shape.top_k, shape.experts) + 1
    places = shape.tokens, shape.top_k
    tensors = {
        "routing": torch.zeros(words, dtype=torch.int32),
        rows: torch.zeros(count, k, dtype=getattr(torch, kind)),
        weight: torch.zeros(own, n, k, dtype=torch.float8_e4m3fn).transpose(1, 2),
        f"{weight}_scale": torch.ones(own, -(-n // 128), k // 128).transpose(1, 2),
    }
    if plan.scales.quantises is None:
        tensors[f"{rows}_scale"] = torch.ones(count, k // 128)
    if dispatches:
        tensors["topk_ids"] = torch.zeros(places, dtype=torch.int32)
    else:
        out = torch.zeros(shape.tokens, n, dtype=getattr(torch, plan.out_dtype))
        tensors |= {"topk_weights": torch.zeros(places), "out": out}
    return call_of(plan, tensors, view)


def context() -> DispatchContext:
    order: Any = Order()
    return DispatchContext(0, order, 64, reports=Reports())


def run(call: Call) -> Any:
    """What a call returns."""
    where = context()
    found = dispatch.executor_of(call.plan)(call, where).start(call, MAIN)
    order: Any = where.order
    assert order.open == 0
    return found


def launches(started: Started, world: WalkedWorld, usual: LaunchPlan) -> Launch:
    calls = [called(usual, view) for view in ("pipelined", "sequential")]

    def launch(plan: LaunchPlan) -> object:
        started.told.clear()
        world.admit(plan, dict(calls[0].tensors))
        needs = world.accelerator.workspace(plan)
        for call in calls:
            run(replace(call, plan=plan))
        return [needs, *started.told]

    return launch


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", MOE)
@pytest.mark.parametrize("returns", ["slots", "ranks"])
def test_no_field_is_decoration(started: Started, op: str, returns: str) -> None:
    usual = planned(op)
    if op == "moe_gemm_combine":
        how = usual.part(GemmCombineSchedule).model_copy(update={"returns": returns})
        usual = usual.model_copy(update={"schedule": how})
    elif returns == "ranks":
        pytest.skip("the op has one way home")
    assert decorations(usual, launches(started, world_of_two(), usual)) == []


def test_a_dispatch_sorts_while_tokens_travel(started: Started) -> None:
    found = run(called(planned("moe_dispatch_gemm")))
    assert started.names == [("push_whole", BESIDE), ("moe_route", MAIN), ("moe_grouped", MAIN)]
    assert found["outputs"].shape == (ROWS, SIZES["features"])
    assert found["counts"].shape == (SIZES["experts"] // WORLD,)
    started.told.clear()
    run(called(planned("moe_dispatch_gemm"), "sequential"))
    assert started.names == [("push_whole", MAIN), ("moe_route", MAIN), ("moe_grouped", MAIN)]
    started.told.clear()
    run(called(planned("moe_dispatch_gemm"), "compute_only"))
    assert started.names == [("moe_route", MAIN), ("moe_grouped", MAIN)]
    started.told.clear()
    started.shared = True  # copies within a device need room on it
    run(called(planned("moe_dispatch_gemm")))
    assert started.names[0] == ("push_whole", MAIN)


class Joins(Order):
    """Notes behind how many starts the second stream was joined."""

    def __init__(self, started: Started) -> None:
        self.started, self.at = started, list[int]()

    def join(self, stream: int) -> None:
        super().join(stream)
        self.at.append(len(self.started.names))


@pytest.mark.parametrize(("early", "joined"), [(0, 2), (3, 3)])
def test_wanted_tokens_are_pushed_where_the_product_keeps_out_no_push(
    started: Started, early: int, joined: int
) -> None:
    """A product waits for all ranks' tokens, on all multiprocessors unless it has early tiles."""
    usual = planned("moe_dispatch_gemm")
    how = usual.part(DispatchSchedule).model_copy(update={"push_blocks": 6, "early_tiles": early})
    assert not how.copy_engines
    call = called(usual.model_copy(update={"schedule": how}))
    order: Any = Joins(started)
    where = DispatchContext(0, order, 64, reports=Reports())
    dispatch.executor_of(call.plan)(call, where).start(call, MAIN)
    assert started.names == [("push_wanted", BESIDE), ("moe_route", MAIN), ("moe_grouped", MAIN)]
    assert (order.at, order.open) == ([joined], 0)
    tokens = started.given["WantedTokens"]
    assert tokens["x"] == call.tensors["x"].data_ptr()
    assert (tokens["blocks"], tokens["row_bytes"]) == (6, 2 * SIZES["hidden"])
    started.told.clear()
    run(replace(call, view="sequential"))
    assert started.names[0] == ("push_wanted", MAIN)
    started.told.clear()
    run(replace(call, view="compute_only"))
    assert started.names == [("moe_route", MAIN), ("moe_grouped", MAIN)]


DEEPSEEK = {"hidden": 7168, "features": 2048, "experts": 256, "top_k": 8, "tokens": 4096}
FEW_OF_MANY = {"hidden": 4096, "features": 768, "experts": 32, "top_k": 2, "tokens": 1024}


def pushing(world: int, sizes: dict[str, int]) -> DispatchSchedule:
    made = world_of(world).plan("moe_dispatch_gemm", sizes, dtype="bfloat16")
    return made.part(DispatchSchedule)


def test_tokens_go_where_they_are_wanted_where_few_ranks_want_one() -> None:
    """With two ranks and top-8 nearly every token is wanted by both; with eight ranks 66 of 100 are,
    and of top-2 23."""
    found = [pushing(world, DEEPSEEK).push_blocks for world in (2, 4, 8)]
    assert found == [0, 0, 8]
    found = [pushing(world, FEW_OF_MANY).push_blocks for world in (2, 4, 8)]
    assert found == [0, 8, 8]
    decode = {**FEW_OF_MANY, "tokens": 8}  # on their way for less than ids are sorted
    assert [pushing(world, decode).push_blocks for world in (2, 4, 8)] == [0, 0, 0]
    assert pushing(1, DEEPSEEK).push_blocks == 0


def test_a_push_beside_early_tiles_has_multiprocessors_of_its_own() -> None:
    few, many = (pushing(8, {**DEEPSEEK, "tokens": tokens}) for tokens in (4096, 16384))
    assert (few.early_tiles, few.blocks, few.push_blocks) == (0, 132, 8)
    assert many.early_tiles > 0
    assert (many.blocks, many.push_blocks) == (124, 8)


def test_both_ways_of_tokens_stand_in_the_plan() -> None:
    eight = world_of(8)
    made = explain(
        "moe_dispatch_gemm", DEEPSEEK, world=eight.map, accelerator="hopper", nic=None, verbs=None,
        capabilities=eight.claims, schedule=eight.accelerator.schedule, dtype="bfloat16",
    )  # fmt: skip
    told = {each.option: each for each in made.alternatives if each.decision == "tokens"}
    assert {name: each.chosen for name, each in told.items()} == {"whole": False, "wanted": True}


@pytest.mark.parametrize(("wished", "blocks"), [("whole", 0), ("wanted", 8)])
def test_how_tokens_travel_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, wished: str, blocks: int
) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_TOKENS", wished)
    assert [pushing(world, DEEPSEEK).push_blocks for world in (2, 8)] == [blocks] * 2
    assert pushing(1, DEEPSEEK).push_blocks == 0


def test_a_capacity_is_the_height_and_nothing_is_waited_for(started: Started) -> None:
    call = called(planned("moe_dispatch_gemm", capacity=40))
    found = run(call)
    assert found["outputs"].shape == (40, SIZES["features"])
    words = call.tensors["routing"]
    assert HopperAccelerator().dispatched_rows(words) == 40
    assert HopperAccelerator().dispatched_rows(words.clone()) is None
    words[0] = 1
    assert HopperAccelerator().dispatched_rows(words) is None


def test_rows_without_a_product_are_copied_behind_the_push_that_they_would_keep_out(
    started: Started,
) -> None:
    usual = planned("moe_dispatch")
    how = usual.part(RowsSchedule).model_copy(update={"push_blocks": 6})
    call = called(usual.model_copy(update={"schedule": how}))
    order: Any = Joins(started)
    where = DispatchContext(0, order, 64, reports=Reports())
    found = dispatch.executor_of(call.plan)(call, where).start(call, MAIN)
    assert started.names == [("push_wanted", BESIDE), ("moe_route", MAIN), ("copy_rows", MAIN)]
    assert (order.at, order.open) == ([2], 0)
    assert found["rows"].shape == (ROWS, SIZES["hidden"])
    copies = started.given["DispatchedRows"]
    assert (copies["a"], copies["waits"]) == (call.tensors["x"].data_ptr(), True)
    started.told.clear()
    run(replace(call, view="compute_only"))
    assert started.names == [("moe_route", MAIN), ("copy_rows", MAIN)]


def test_rows_of_a_routing_that_is_there_need_neither_ids_nor_the_host(started: Started) -> None:
    """They have the height that the dispatch of this process gave, which a graph may capture too; in a
    copy of the words it is read from the last but one."""
    first = called(planned("moe_dispatch", capacity=40))
    run(first)
    words = first.tensors["routing"]
    plan = planned("moe_dispatch", routed=True)
    how = plan.part(RowsSchedule).model_copy(update={"push_blocks": 0})
    plan = plan.model_copy(update={"schedule": how})
    again = replace(first, plan=plan, tensors={**first.tensors, "topk_ids": words.new_zeros(0)})
    started.told.clear()
    found = run(again)
    assert started.names == [("push_whole", BESIDE), ("copy_rows", MAIN)]
    assert (found["rows"].shape, "counts" in found) == ((40, SIZES["hidden"]), False)
    copied = words.clone()
    copied[-2] = 24
    found = run(replace(again, tensors={**again.tensors, "routing": copied}))
    assert len(found["rows"]) == 24
    how = how.model_copy(update={"push_blocks": 6})
    run(replace(again, plan=plan.model_copy(update={"schedule": how})))
    own = RANK * SIZES["tokens"] * SIZES["top_k"]
    assert started.given["WantedTokens"]["ids"] == words[own:].data_ptr()


def test_a_product_of_a_routing_that_is_there_permutes_its_rows_again(started: Started) -> None:
    """The words that count permuted rows, two of each tile and one of all, start from zero; others
    stay, and so does what is known of the handle's height."""
    first = called(planned("moe_dispatch_gemm", capacity=40))
    run(first)
    words, version = first.tensors["routing"], first.tensors["routing"]._version
    plan = planned("moe_dispatch_gemm", routed=True)
    assert plan.shape.model_copy(update={"routed": False}) == planned("moe_dispatch_gemm").shape
    for permutes in (False, True):
        how = plan.part(DispatchSchedule).model_copy(
            update={"push_blocks": 0, "permutes": permutes}
        )
        words.data.fill_(7)
        made = plan.model_copy(update={"schedule": how})
        started.told.clear()
        found = run(replace(first, plan=made, tensors={**first.tensors, "topk_ids": words[:0]}))
        assert started.names == [("push_whole", BESIDE), ("moe_grouped", MAIN)]
        assert (found["outputs"].shape, "counts" in found) == ((40, SIZES["features"]), False)
        zeros = (words == 0).nonzero().flatten().tolist()
        tiles = WORLD * 12 * 3 // 256 + 3 * 8 // WORLD + 1
        last = len(words) - 5  # rows, refused, height and the world's mark follow it
        assert zeros == (list(range(last - 2 * tiles, last + 1)) if permutes else [])
        assert words._version == version
    with torch.inference_mode():
        own = words.clone()
    run(replace(first, plan=made, tensors={**first.tensors, "routing": own}))


@pytest.mark.parametrize("quantises", ["bfloat16", None])
def test_rows_in_e4m3_come_with_their_scales(started: Started, quantises: Any) -> None:
    around = Around(scales=Scales(mode="block", quantises=quantises))
    sizes = sizes_of("moe_dispatch", {"hidden": 256})
    plan = world_of_two().plan("moe_dispatch", sizes, dtype=E4M3, around=around)
    tokens = SIZES["tokens"]
    kind = torch.bfloat16 if quantises else torch.float8_e4m3fn
    tensors = called(planned("moe_dispatch")).tensors | {"x": torch.zeros(tokens, 256, dtype=kind)}
    tensors |= {} if quantises else {"x_scale": torch.ones(tokens, 2)}
    found = run(call_of(plan, tensors, "pipelined"))
    assert (found["rows"].dtype, found["scales"].shape) == (torch.float8_e4m3fn, (ROWS, 2))
    copies = started.given["DispatchedRows"]
    assert (copies["row_bytes"], copies["width"]) == (256 + 16, 256)
    assert copies["scales"] == found["scales"].data_ptr()


def test_results_come_home_by_slot_or_by_rank(started: Started) -> None:
    def returning(returns: Returns) -> LaunchPlan:
        usual = planned("moe_gemm_combine")
        how = usual.part(GemmCombineSchedule).model_copy(update={"returns": returns})
        return usual.model_copy(update={"schedule": how})

    run(called(returning("slots")))
    assert [each[0] for each in started.names] == ["moe_grouped", "moe_home"]
    started.told.clear()
    run(called(returning("ranks")))
    assert [each[0] for each in started.names] == [
        "push_whole",
        "moe_grouped",
        "moe_home",
        "moe_home",
    ]
    started.told.clear()
    run(called(planned("moe_combine")))
    assert [each[2] for each in started.told if each[0] == "moe_home"] == [
        "HomeStep.send_rows", "HomeStep.sum_slots",
    ]  # fmt: skip


@pytest.mark.parametrize("op", ["moe_combine", "moe_gemm_combine"])
def test_invariant_results_are_added_by_groups_of_experts(started: Started, op: str) -> None:
    for how, groups in ((None, 0), (Invariant(), 8), (Invariant(2, "bfloat16"), 2)):
        for returns in ("slots", "ranks") if op == "moe_gemm_combine" else ("slots",):
            wish = {"returns": returns} if op == "moe_gemm_combine" else {}
            run(called(planned(op, Around(invariant=how), **wish)))
            home = started.given["Home"]
            assert (home["groups"], home["by_rank"]) == (groups, returns == "ranks")
            assert not (groups and home["wide"])
    plan = planned(op, Around(invariant=Invariant(8, "float32")))
    with pytest.raises(Unsupported, match="partial_dtype is float32"):
        HopperAccelerator().workspace(plan)


def test_many_tokens_are_permuted_before_they_are_multiplied(started: Started) -> None:
    """Of few tokens each block gathers its own: reading the weights takes longer than that."""

    def sizes(tokens: int) -> dict[str, int]:
        model = {"hidden": 7168, "features": 2048, "experts": 256, "top_k": 8}
        return {**model, "tokens": tokens // WORLD}

    def permutes(tokens: int) -> bool:
        return planned("moe_dispatch_gemm", **sizes(tokens)).part(DispatchSchedule).permutes

    def tiling(tokens: int) -> str:
        return planned("moe_gemm_combine", **sizes(tokens)).part(GemmCombineSchedule).tiling

    assert [permutes(tokens) for tokens in (64, 1024, 8192, 65536)] == [False, False, True, True]
    assert [tiling(tokens) for tokens in (64, 1024, 8192)] == ["deep", "deep", "deep"]
    short = {**sizes(8192), "features": 1536, "hidden": 4096}
    assert planned("moe_gemm_combine", **short).part(GemmCombineSchedule).tiling == "wide"
    assert planned("moe_dispatch_gemm", **short).part(DispatchSchedule).tiling == "deep"
    long = planned("moe_dispatch_gemm", **sizes(8192)).part(DispatchSchedule)
    assert (long.permutes, long.tiling) == (True, "wide")
    usual = planned("moe_dispatch_gemm")
    for wanted in (False, True):
        how = usual.part(DispatchSchedule).model_copy(update={"permutes": wanted})
        run(called(usual.model_copy(update={"schedule": how})))
        product = started.given["GroupedProduct"]
        assert (product["permuted"] != 0) is wanted
        assert product["tokens"]
        assert product["rows"] == ROWS


def test_own_tokens_come_first_only_where_experts_get_many() -> None:
    usual = planned("moe_dispatch_gemm", tokens=32768, hidden=7168, features=2048, top_k=8)
    assert usual.part(DispatchSchedule).early_tiles > 100
    assert planned("moe_dispatch_gemm").part(DispatchSchedule).early_tiles == 0
    assert usual.part(DispatchSchedule).copy_engines
    assert moe_tuning.TILE_ROWS == 256


def test_what_was_refused_is_told_once(started: Started) -> None:
    reports: Any = MoeReports()
    assert reports.refused() is None  # and no memory of a device is asked for
    told = [(1, 30, 20), None]
    reports._block = SimpleNamespace(take_refusal=lambda: told.pop(0))
    found = reports.refused()
    assert isinstance(found, CapacityExceeded)
    assert (found.rank, found.rows, found.capacity) == (1, 30, 20)
    assert reports.refused() is None


def test_too_many_experts_are_named(started: Started) -> None:
    """The most that are named are taken, and one more on each rank is not."""
    with pytest.raises(Unsupported, match="50000 experts on a rank; at most") as refused:
        HopperAccelerator().workspace(planned("moe_dispatch_gemm", experts=100_000))
    named = re.search(r"at most (\d+)", str(refused.value))
    assert named is not None
    most = int(named[1])
    at_most = planned("moe_dispatch_gemm", experts=2 * most)
    assert HopperAccelerator().workspace(at_most).areas
    with pytest.raises(Unsupported, match=f"{most + 1} experts on a rank; at most {most}"):
        HopperAccelerator().workspace(planned("moe_dispatch_gemm", experts=2 * (most + 1)))


# ---- experts in e4m3 -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", SCALED_OPS)
@pytest.mark.parametrize("quantises", ["bfloat16", None])
def test_no_field_of_e4m3_experts_is_decoration(
    started: Started, op: str, quantises: str | None
) -> None:
    usual = planned_with_scales(op, quantises)
    assert decorations(usual, launches(started, world_of_two(), usual)) == []


@pytest.mark.parametrize("quantises", ["bfloat16", "float16", None])
@pytest.mark.parametrize("out_dtype", ["float16", E4M3])
def test_tokens_of_e4m3_experts_are_quantised_once_and_travel_with_their_scales(
    started: Started, quantises: str | None, out_dtype: str
) -> None:
    plan = planned_with_scales("moe_dispatch_gemm", quantises, out_dtype, features=384)
    call, each = called(plan), SCALED["hidden"] + SCALED["hidden"] // 128 * 4 + 8
    found = run(call)
    assert started.names == [
        ("quantise_rows", MAIN), ("push_whole", BESIDE), ("moe_route", MAIN), ("moe_grouped", MAIN),
    ]  # fmt: skip
    rows, product = started.given["QuantisedRows"], started.given["GroupedProduct"]
    assert rows["x"] == call.tensors["x"].data_ptr()
    of_x = call.tensors.get("x_scale")
    assert rows["scales"] == (0 if of_x is None else of_x.data_ptr())
    assert (rows["rows"], rows["width"]) == (SCALED["tokens"], SCALED["hidden"])
    assert rows["half"] is (quantises == "float16")
    assert (
        rows["row_bytes"] == started.given["Routing"]["row_bytes"] == each == product["row_bytes"]
    )
    assert each % 16 == 0
    assert each - SCALED["hidden"] // 128 * 4 - 16 < SCALED["hidden"] <= each, "half of 16 bits"
    assert product["a"] == rows["out"], "what is multiplied is what travels"
    assert product["b_scales"] == call.tensors["w_scale"].data_ptr()
    assert product["a_scales"] == 0
    assert not product["n_major"]
    outputs = found["outputs"]
    assert outputs.shape == (ROWS, 384)
    assert (product["out"], outputs.dtype) == (outputs.data_ptr(), getattr(torch, out_dtype))
    if out_dtype == E4M3:
        assert found["scales"].shape == (ROWS, 3)
        assert product["out_scales"] == found["scales"].data_ptr()
    else:
        assert "scales" not in found
        assert (product["out_scales"], product["half"]) == (0, True)


@pytest.mark.parametrize("returns", ["slots", "ranks"])
@pytest.mark.parametrize("partial_dtype", ["bfloat16", "float32"])
def test_rows_that_are_e4m3_already_are_multiplied_as_they_lie(
    started: Started, returns: str, partial_dtype: str
) -> None:
    wishes = {"returns": returns, "partial_dtype": partial_dtype}
    call = called(planned_with_scales("moe_gemm_combine", None, **wishes))
    run(call)
    product = started.given["GroupedProduct"]
    assert "QuantisedRows" not in started.given
    assert product["a"] == call.tensors["h"].data_ptr()
    assert product["a_scales"] == call.tensors["h_scale"].data_ptr()
    assert product["row_bytes"] == SCALED["features"]
    assert product["wide"] is started.given["Home"]["wide"] is (partial_dtype == "float32")
    assert product["home"] is (returns == "slots")
    run(called(planned_with_scales("moe_gemm_combine", "float16", **wishes)))
    rows, product = started.given["QuantisedRows"], started.given["GroupedProduct"]
    assert rows["rows"] == ROWS
    assert (product["a"], product["a_scales"]) == (rows["out"], 0)
    assert product["row_bytes"] == rows["row_bytes"] == SCALED["features"] + 16


def test_a_workspace_of_e4m3_tokens_is_half_as_large(started: Started) -> None:
    large = {"tokens": 4096, "hidden": 4096}
    accelerator = HopperAccelerator()
    wide, narrow = (
        accelerator.workspace(each).areas[0]
        for each in (
            planned("moe_dispatch_gemm", **large),
            planned_with_scales("moe_dispatch_gemm", **large),
        )
    )
    tokens = WORLD * 4096 * 4096
    assert wide - narrow == 2 * tokens - tokens * (1 + 4 / 128)


def test_e4m3_experts_are_refused_where_no_kernel_takes_them() -> None:
    with pytest.raises(ShapeError, match=r"features = 144 .* multiple of 128"):
        planned_with_scales("moe_dispatch_gemm", features=144, activation="silu_and_mul")
    assert planned_with_scales("moe_dispatch_gemm", features=144).scales
    around = Around(scales=Scales(mode="block", quantises="bfloat16"))
    gpus, nics = (devices.gpu(0, name="NVIDIA H200"),), (devices.nic(0, gpudirect=True),)
    apart = devices.world(*(devices.node(gpus, nics) for _ in range(2)))
    for op in SCALED_OPS:
        with pytest.raises(Unsupported, match=f"e4m3 operands of {op} in worlds of one node.* 2"):
            WalkedWorld(HopperAccelerator(), apart, 1).plan(
                op, SCALED, dtype=E4M3, out_dtype="bfloat16", b_layout="column", around=around
            )


def test_e4m3_products_of_few_tokens_gather_them() -> None:
    sizes = {"hidden": 7168, "features": 2048, "experts": 256, "top_k": 8}
    found = [
        planned_with_scales("moe_dispatch_gemm", tokens=tokens, **sizes).part(DispatchSchedule)
        for tokens in (32, 32768)
    ]
    assert [each.permutes for each in found] == [False, True]
    assert {each.tiling for each in found} == {"deep"}


@pytest.mark.parametrize(
    ("changes", "composed"),
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"width": 68}, False),  # rows that do not begin at 16 bytes
        ({"experts": 1024}, False),
        ({"nodes": 2}, False),
        ({"torch": "2.8.0+cu128"}, False),
    ],
)
def test_gradients_are_composed_where_torch_multiplies_groups(
    changes: dict[str, Any], composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go to a companion."""
    found = {"dtype": torch.bfloat16, "width": 64, "experts": 8, "nodes": 1, "torch": "2.11.0"}
    found |= changes
    version = type(torch.__version__)(found["torch"])
    monkeypatch.setattr(torch, "__version__", version)
    engine = SimpleNamespace(claims=HopperAccelerator().capabilities())
    world: Any = SimpleNamespace(
        engine=lambda op: engine, identity=SimpleNamespace(nodes=found["nodes"])
    )
    counts = torch.zeros(found["experts"], dtype=torch.int64)
    rows = torch.zeros(4, found["width"], dtype=found["dtype"])
    wide = torch.zeros(4, 64, dtype=torch.bfloat16)
    for op in ("moe_dispatch_backward", "moe_combine_backward", "moe_gemm_combine_backward"):
        assert moe_composed.composes(world, op, counts, wide, rows) == composed
    assert not moe_composed.composes(world, "moe_combine", counts, wide, rows)
