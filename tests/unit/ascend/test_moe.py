"""MoE dispatch+GEMM and its combine beside what the kit judges: wide results against float64, bits,
handles, what is sent, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mkernel.backends.accelerators.ascend import AscendLaunch, _ascend
from mkernel.backends.accelerators.ascend.moe import MoeDispatchOp, balanced_ids, table_words
from mkernel.backends.accelerators.ascend.op import TORCH_DTYPES
from mkernel.backends.accelerators.ascend.schedule import CombineSchedule, DispatchSchedule
from mkernel.backends.accelerators.ascend.timeline import model, replayed_spans
from mkernel.backends.accelerators.ascend.trace import NO_CHUNK, Kind
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.transport._transport import AbortCode
from mkernel.cases.base import Case
from mkernel.errors import DtypeError, LayoutError, ShapeError
from mkernel.plan.model import CombineShape, LaunchPlan, OpName

from .rig import (
    A3,
    PATIENCE_S,
    World,
    case_for,
    planned,
    same_bits,
    scheduled,
    traces,
)

Tensors = dict[str, torch.Tensor]
Results = list[dict[str, Any]]


def moe_plan(
    op: OpName = "moe_dispatch_gemm",
    *,
    tokens: int = 40,
    hidden: int = 48,
    features: int = 72,
    experts: int = 3,
    top_k: int = 3,
    chunk: int = 16,
    **options: Any,
) -> LaunchPlan:
    """``experts``: of one rank."""
    every = experts * options.get("nodes", 1) * options.get("ranks_per_node", 1)
    sizes = {"tokens": tokens, "features": features, "experts": every, "top_k": min(top_k, every)}
    if op == "moe_dispatch_gemm":
        sizes["hidden"] = hidden
    made = planned(op, sizes, **{"out_dtype": "float16", **options})
    return scheduled(made, rows_per_chunk=min(chunk, tokens))


def combine_plan(plan: LaunchPlan, *, features: int | None = None, chunk: int = 7) -> LaunchPlan:
    """What brings home the results of a dispatch's plan: in its output dtype."""
    sizes = plan.shape.model_dump(exclude={"kind", "hidden", "capacity", "activation", "routed"})
    sizes["features"] = features or sizes["features"]
    rows = min(chunk, plan.shape.tokens)
    sent = plan.part(DispatchSchedule)
    how = CombineSchedule(
        rows_per_chunk=rows,
        vector_cores=sent.vector_cores,
        comm_cores=sent.comm_cores,
    )
    update = {"op": "moe_combine", "shape": CombineShape(**sizes), "schedule": how}
    return plan.model_copy(update={**update, "dtype": plan.out_dtype})


def case_with(plan: LaunchPlan, ids: torch.Tensor) -> Case:
    """The case of a dispatch whose ``topk_ids`` are given [W, T, k]."""
    drawn = case_for(plan)
    every = [drawn.inputs(rank, plan.world_size, 0) for rank in range(plan.world_size)]
    whole = {name: torch.cat([own[name] for own in every]) for name in every[0]}
    return drawn.with_(options={"tensors": {**whole, "topk_ids": ids.flatten(0, 1)}})


def inputs(plan: LaunchPlan, case: Case, seed: int = 0) -> list[Tensors]:
    """What every rank passes; ``topk_ids`` int32 on odd ranks."""
    shape = plan.shape
    words = 1 + table_words(plan.world_size, shape.tokens, shape.top_k, shape.experts)
    every = [case.inputs(rank, plan.world_size, seed) for rank in range(plan.world_size)]
    for own in every:
        own["routing"] = torch.empty(words, dtype=torch.int32)
    for own in every[1::2]:
        own["topk_ids"] = own["topk_ids"].to(torch.int32)
    return every


def judge(plan: LaunchPlan, case: Case, seed: int, got: Results) -> None:
    """What every rank got beside float64."""
    for rank, own in enumerate(got):
        found = case.compared(own, rank, plan.world_size, seed, promised=own.keys())
        assert case.passed(found), f"rank {rank}: {found}"


def run(world: World, tensors: list[Tensors]) -> Results:
    """One epoch on all ranks; what each launch gave, and the routing."""
    world.epoch += 1
    launches = [world.launch(rank, each) for rank, each in enumerate(tensors)]
    for rank, launch in enumerate(launches):
        assert launch.wait(PATIENCE_S), f"rank {rank} did not return"
        assert world.outcome(rank)[0] == AbortCode.none, world.outcome(rank)
    return [
        {"routing": each["routing"], **launch.results()}
        for each, launch in zip(tensors, launches, strict=True)
    ]


def bring_home(
    world: World, given: list[Tensors], sent: Results, y: list[torch.Tensor]
) -> list[torch.Tensor]:
    shape = world.plan.shape
    outs = [
        torch.full(
            (shape.tokens, shape.features), float("nan"), dtype=TORCH_DTYPES[world.plan.out_dtype]
        )
        for _ in given
    ]
    tensors = [
        {"y": rows, "topk_weights": each["topk_weights"], "out": out, "routing": of["routing"]}
        for rows, each, out, of in zip(y, given, outs, sent, strict=True)
    ]
    run(world, tensors)
    return outs


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 300, "hidden": 264, "features": 520, "experts": 2, "top_k": 4, "chunk": 75},
        {"tokens": 17, "hidden": 72, "features": 1040, "experts": 5, "top_k": 8, "chunk": 1},
    ],
)
def test_wide_results(sizes: dict[str, int]) -> None:
    """Several bands of columns; more chunks than blocks."""
    plan = moe_plan(ranks_per_node=3, comm_blocks=3, **sizes)
    with World(plan) as out_world, World(combine_plan(plan)) as home_world:
        out_world.poison()
        home_world.poison()
        for epoch, routing in enumerate(("duplicates", "some_empty")):
            case = case_for(plan, routing=routing)
            given = inputs(plan, case, seed=epoch)
            sent = run(out_world, given)
            y = [own["outputs"] for own in sent]
            outs = bring_home(home_world, given, sent, y)
            assert all(own["counts"].dtype == torch.int64 for own in sent)
            got = [{**own, "out": out} for own, out in zip(sent, outs, strict=True)]
            judge(plan, case, epoch, got)


def layer(
    plan: LaunchPlan, home: LaunchPlan, seed: int = 5, epochs: int = 1, **options: Any
) -> list[torch.Tensor]:
    """Every result of some epochs."""
    found = []
    with World(plan, **options) as out_world, World(home, **options) as home_world:
        out_world.poison()
        home_world.poison()
        for epoch in range(epochs):
            given = inputs(plan, case_for(plan), seed + epoch)
            sent = run(out_world, given)
            y = [each["outputs"] for each in sent]
            found += y + bring_home(home_world, given, sent, y)
    return found


def test_bits_depend_on_nothing_but_the_inputs() -> None:
    """Chunks, blocks, slots and nodes change nothing."""
    results = []
    options: list[tuple[dict[str, Any], int, int | None]] = [
        ({"ranks_per_node": 4}, 7, None),
        ({"ranks_per_node": 4, "chunk": 3, "comm_blocks": 1, "compute_blocks": 1}, 40, 1),
        ({"nodes": 2, "ranks_per_node": 2, "compute_blocks": 5, "comm_blocks": 7}, 1, 4),
    ]
    for chosen, chunk, slots in options:
        plan = moe_plan(tokens=130, hidden=264, features=264, **chosen)
        results.append(layer(plan, combine_plan(plan, chunk=chunk), slots=slots))
    assert same_bits(results)


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16", "bfloat16"), ("float32", "float32")])
def test_strict_simulation_finds_nothing(dtype: str, out_dtype: str) -> None:
    """In any legal order of the instructions: no hazard, and the same bits."""
    plan = moe_plan(nodes=2, ranks_per_node=2, dtype=dtype, out_dtype=out_dtype)
    results = [
        layer(plan, combine_plan(plan), epochs=3, strict=strict)
        for strict in (None, _ascend.Strict(), _ascend.Strict(seed=1), _ascend.Strict(seed=2))
    ]
    assert same_bits(results)


def complaint(launch: AscendLaunch) -> str:
    """What strict simulation says of a call; empty if nothing."""
    try:
        assert launch.wait(PATIENCE_S)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("role", "wait"), [("vector", 0), ("vector", 1), ("cube", 1)])
def test_a_missing_wait_for_another_core_is_reported(role: Any, wait: int) -> None:
    """The wait for the counts of all sources (block 0's first one on rank 0, its second one on rank 1),
    or the wait for tokens in their rows. Whichever of the two cores comes second reports it."""
    plan = moe_plan(ranks_per_node=2, chunk=40, compute_blocks=4)
    with World(plan, strict=_ascend.Strict(skip_role=role, skip_waits=[wait])) as world:
        world.epoch = 1
        launches = [
            world.launch(rank, each) for rank, each in enumerate(inputs(plan, case_for(plan)))
        ]
        said = [complaint(launch) for launch in launches]
        wanted = "no signal orders the two cores; a TNOTIFY or a TWAIT is missing"
        assert any(wanted in text for text in said), said


def test_a_handle_is_good_for_many_combines() -> None:
    """After other dispatches, in another order, for rows of another width."""
    plan = moe_plan(ranks_per_node=3)
    home = combine_plan(plan, features=24)
    with World(plan) as out_world, World(home) as home_world:
        routings = ("duplicates", "one_expert", "some_empty")
        sent = [run(out_world, inputs(plan, case_for(plan, routing=each), 9)) for each in routings]
        for number in (1, 0, 2, 0):
            case = case_for(home, routing=routings[number])
            given = inputs(home, case, 9)
            y = [own["y"] for own in given]
            outs = bring_home(home_world, given, sent[number], y)
            judge(home, case, 9, [{"out": out} for out in outs])


def test_numbers_that_name_no_expert_have_no_rows() -> None:
    """Ops refuse them; kernels, which get them from other ranks too, write nothing for them."""
    plan = moe_plan(ranks_per_node=3)
    ids = torch.stack([own["topk_ids"] for own in inputs(plan, case_for(plan), 4)])
    wrong = torch.tensor([-1, plan.shape.experts, 2**31 - 1, -(2**31)])
    for rank, each in enumerate(ids):
        each[rank::3, 1] = wrong[torch.arange(len(each[rank::3])) % 4]
    case = case_with(plan, ids)
    given = inputs(plan, case)
    with World(plan) as out_world, World(combine_plan(plan)) as home_world:
        sent = run(out_world, given)
        judge(plan, case, 0, sent)
        y = [each["outputs"] for each in sent]
        outs = bring_home(home_world, given, sent, y)
        for token_ids, each in zip(ids, outs, strict=True):
            legal = ((token_ids >= 0) & (token_ids < plan.shape.experts)).all(1)
            assert 0 < legal.sum() < len(legal)
            assert each.isfinite().all()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_token_travels_once_to_a_rank(nodes: int) -> None:
    """All of a token's experts on one rank: a chunk holds it once."""
    plan = moe_plan(nodes=nodes, ranks_per_node=2 // nodes, experts=4, top_k=3, chunk=40)
    hidden, tokens = plan.shape.hidden, plan.shape.tokens
    case = case_with(plan, torch.tensor([[[4, 5, 7]] * tokens, [[0, 1, 3]] * tokens]))
    with World(plan) as world:
        judge(plan, case, 0, run(world, inputs(plan, case)))
        if nodes > 1:
            sizes = sorted(put.nbytes for _, put in world.puts if put.nbytes)
            assert sizes == [tokens * 3 * 4] * 2 + [tokens * hidden * 2] * 2


@pytest.mark.parametrize("source", [0, 1])
def test_waits_for_every_chunk(source: int) -> None:
    """With ids and chunks counted as arrived that are not, the result is wrong: the waits are what
    makes it right."""
    plan = moe_plan(ranks_per_node=2)
    shape = MoeDispatchOp().geometry(plan)
    last = 1 - source
    with World(plan) as world:
        world.poison()
        world.epoch = 1
        world.add(last, shape.ids(source, epoch=1))
        for chunk in range(shape.chunks):
            world.add(last, shape.arrived(source, chunk, epoch=1))
        case = case_for(plan)
        launch = world.launch(last, inputs(plan, case)[last], timeout_s=0.5)
        assert launch.wait(PATIENCE_S)
        assert len(launch.results()["outputs"]) < len(case.reference(last, 2, 0)["outputs"])


@pytest.mark.parametrize("view", ["pipelined", "sequential"])
def test_a_rank_that_does_not_come_is_named(view: View) -> None:
    plan = moe_plan(ranks_per_node=2)
    given = inputs(plan, case_for(plan))
    with World(plan) as world:
        code, seen = world.alone(0, given[0], view=view)
        assert (code, seen.peer) == (AbortCode.timeout, 1)
        assert seen.signal == MoeDispatchOp().geometry(plan).ids(1, epoch=1)
    with World(plan) as world, World(combine_plan(plan)) as home:
        sent = run(world, given)
        out = torch.empty(plan.shape.tokens, plan.shape.features, dtype=torch.float16)
        tensors = {"y": sent[0]["outputs"], "topk_weights": given[0]["topk_weights"], "out": out}
        tensors["routing"] = sent[0]["routing"]
        code, seen = home.alone(0, tensors, view=view)
        assert (code, seen.peer) == (AbortCode.timeout, 1)


def test_arguments_that_do_not_fit_the_plan_are_named() -> None:
    plan = moe_plan()
    given = inputs(plan, case_for(plan))[0]
    wrong: list[tuple[type[Exception], str, Callable[[Tensors], torch.Tensor]]] = [
        (ShapeError, "x", lambda t: t["x"][1:]),
        (DtypeError, "x", lambda t: t["x"].float()),
        (DtypeError, "topk_ids", lambda t: t["topk_ids"].short()),
        (LayoutError, "w", lambda t: t["w"].transpose(1, 2).contiguous().transpose(1, 2)),
    ]
    with World(plan) as world:
        for error, name, change in wrong:
            with pytest.raises(error, match=name):
                world.launch(0, {**given, name: change(given)})
    with pytest.raises(ValueError, match=r"hidden = 49160: a row takes 98320 bytes; .* 98304"):
        MoeDispatchOp().geometry(moe_plan(hidden=49160))
    with pytest.raises(ValueError, match="make 2147483648 rows; at most 2147483647"):
        MoeDispatchOp().geometry(moe_plan(tokens=2**30, experts=2, top_k=2))


def test_balanced_routing_is_balanced() -> None:
    plan = moe_plan(tokens=64, experts=8, top_k=4, ranks_per_node=4)
    ids = balanced_ids(plan)
    assert ids.shape == (4, 64, 4)
    counts = torch.bincount(ids.flatten().long(), minlength=32)
    assert counts.min() == counts.max()
    assert all(len(set(slots.tolist())) == 4 for slots in ids.view(-1, 4))


@pytest.mark.parametrize(("chunk", "overlaps"), [(16, True), (512, False)])
def test_the_last_token_leaves_when_tiles_are_multiplied(chunk: int, overlaps: bool) -> None:
    """So the modelled call says, of every rank: as one chunk all tokens leave before the first tile of
    other nodes' rows, which here all tiles have."""
    plan = moe_plan(nodes=2, ranks_per_node=2, tokens=512, hidden=1024, features=256, chunk=chunk)
    _, spans = replayed_spans(traces(plan), A3)
    for rank in range(plan.world_size):
        own = spans[spans["rank"] == rank]
        tokens = own[(own["kind"] == Kind.NIC_PUT) & (own["chunk"] != NO_CHUNK)]
        left = tokens["start_ns"].max()
        started = own["start_ns"][own["kind"] == Kind.TMATMUL].min()
        assert (left > started) == overlaps, (left, started)


@pytest.mark.parametrize("nodes", [1, 2])
def test_recording_without_running_gives_the_trace_of_a_run(nodes: int) -> None:
    """The call has the record's routing here."""
    plan = moe_plan(nodes=nodes, ranks_per_node=4 // nodes)
    home = combine_plan(plan)
    given = inputs(plan, case_with(plan, balanced_ids(plan)))

    def compare(world: World, tensors: list[Tensors]) -> Results:
        world.epoch = 1
        launches = [world.launch(rank, each, trace=True) for rank, each in enumerate(tensors)]
        assert all(launch.wait(PATIENCE_S) for launch in launches)
        ran = [launch.trace() or b"" for launch in launches]
        dry = traces(world.plan)
        assert [len(trace) for trace in dry] == [len(trace) for trace in ran]
        assert model(dry, A3) == model(ran, A3)
        return [dict(launch.results()) for launch in launches]

    with World(plan) as out_world, World(home) as home_world:
        sent = compare(out_world, given)
        size = plan.shape.tokens, plan.shape.features
        tensors = [
            {
                "y": s["outputs"],
                "topk_weights": g["topk_weights"],
                "routing": g["routing"],
                "out": torch.empty(size).half(),
            }
            for s, g in zip(sent, given, strict=True)
        ]
        compare(home_world, tensors)
