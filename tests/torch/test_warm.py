"""What is warmed, or comes from a file of plans, is known at its first call: nothing is planned,
agreed on or allocated, and no Python runs before the launch. Files of other worlds are refused."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from groups_in_ranks import ranks
from in_world import DEADLINE_S, stores
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import mkernel
from mkernel import machine
from mkernel.backends import registry
from mkernel.errors import ArgumentError, InputFileError, PlanMismatch, ShapeError
from mkernel.launch import host_store
from mkernel.nn import (
    ColwiseParallel,
    ExpertParallelMLP,
    ParallelMLP,
    RingAttention,
    RowwiseParallel,
    VocabParallelEmbedding,
)
from mkernel.ops.steps import Steps
from mkernel.plan.planner import Plans
from mkernel.settings import load as load_settings
from mkernel.world.agreement import Agreement
from mkernel.world.memory import SymmetricHeap

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

EXPERTS = {"tokens": 16, "hidden": 32, "experts": 4, "top_k": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "ag_gemm": {"m": 64, "n": 48, "k": 32},
    "gemm_rs": {"m": 64, "n": 48, "k": 32},
    "gemm_ar": {"m": 64, "n": 48, "k": 32, "b_layout": "column"},
    "all_reduce": {"m": 16, "n": 64},
    "ring_attention": {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 32, "head_dim": 16},
    "moe_dispatch": {**EXPERTS, "capacity": 64},
    "dispatch_gemm": {**EXPERTS, "features": 24},
    "moe_combine": {"tokens": 16, "features": 32, "experts": 4, "top_k": 2},
    "gemm_combine": {**EXPERTS, "features": 24},
}
COUNTED = {
    "planned": (Plans, "planned"),
    "agreed": (Agreement, "_agree"),
    "allocated": (SymmetricHeap, "_allocate"),
    "python": (Steps, "learn"),
}


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often this rank plans, agrees, allocates symmetric memory and goes through Python."""
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as undo:
        for name, (owner, method) in COUNTED.items():
            real: Callable[..., Any] = getattr(owner, method)

            def counted(
                *given: Any, _real: Callable[..., Any] = real, _name: str = name, **options: Any
            ) -> Any:
                found[_name] += 1
                return _real(*given, **options)

            undo.enter_context(mock.patch.object(owner, method, counted))
        yield found


def warmed(op: str, **more: Any) -> None:
    mkernel.warm(op, **{"dtype": torch.float16, **SHAPES[op], **more})


def launched(function: Callable[..., Any], *given: Any, size: int = 2, **options: Any) -> list[Any]:
    return mkernel.launch(
        function, *given, ranks_per_node=size, timeout_s=DEADLINE_S,
        **{"accelerator": "streams", **options},
    )  # fmt: skip


# ---- shapes --------------------------------------------------------------------------------------


def of_shapes(ops: tuple[str, ...]) -> dict[str, tuple[Counter[str], Counter[str]]]:
    found = {}
    for op in ops:
        with counting() as first:
            warmed(op)
        with counting() as then:
            warmed(op)
        found[op] = (first, then)
    return found


@pytest.mark.parametrize(
    ("accelerator", "ops"),
    [("streams", (*SHAPES,)), ("ascend", ("ag_gemm", "gemm_ar"))],
    ids=["streams", "ascend"],
)
def test_a_call_of_warmed_shapes_is_known(accelerator: str, ops: tuple[str, ...]) -> None:
    for found in launched(of_shapes, ops, accelerator=accelerator):
        for op, (first, then) in found.items():
            assert not then, op
            assert op == "gemm_combine" or all(first[e] for e in ("planned", "agreed", "python"))
        if accelerator == "ascend":
            assert found["ag_gemm"][0]["allocated"] == 1


def of_a_call(column: bool) -> tuple[Counter[str], Counter[str]]:
    """What a user's own first call does after a warm-up, and one of other sizes."""
    warmed("gemm_ar")
    b = torch.ones(48, 32).half().t()
    with counting() as known:
        out = mkernel.gemm_all_reduce(torch.ones(64, 32).half(), b)
    assert float(out[0, 0]) == 32 * mkernel.world().size
    with counting() as other:
        mkernel.gemm_all_reduce(torch.ones(65, 32).half(), b)
    return known, other


def test_the_first_real_call_is_known_and_others_are_not() -> None:
    for known, other in launched(of_a_call, True):
        assert not known
        assert other["planned"] == other["agreed"] == other["python"] == 1


# ---- models --------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(64, 32)
        self.mlp = ParallelMLP(32, 64, sequence_parallel=False)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.embed(ids))
        return y


@torch.inference_mode()
def of_models() -> dict[str, Counter[str]]:
    found = {}
    model = Decoder()
    mkernel.warm(model, rows=[1, (2, 8)])
    for name, shape in {"one token": (1,), "sequences": (2, 8)}.items():
        with counting() as found[name]:
            model(torch.ones(shape, dtype=torch.int64))

    experts, attention = ExpertParallelMLP(32, 24, 4), RingAttention(causal=True)
    mkernel.warm(experts, rows=[16], top_k=2)
    mkernel.warm(attention, rows=[(1, 32)], heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    ids = torch.arange(32).view(16, 2) % 4
    with counting() as found["experts"]:
        experts(torch.ones(16, 32), ids, torch.ones(16, 2))
    q, k, v = (torch.ones(1, 16, heads, 16) for heads in (4, 2, 2))
    with counting() as found["attention"]:
        attention(q, k, v)

    whole = ParallelMLP(32, 64)  # its inner activations have strides of their own
    mkernel.warm(whole, torch.zeros(2, 4, 32))
    with counting() as found["by inputs"]:
        whole(torch.ones(2, 4, 32))
    with counting() as found["not warmed"]:
        whole(torch.ones(2, 5, 32))
    return found


def test_models_are_warmed_by_layers_or_by_inputs() -> None:
    for found in launched(of_models):
        other = found.pop("not warmed")
        assert other["planned"] == other["agreed"] == 2
        assert not any(found.values()), found


def of_styles() -> Counter[str]:
    mesh = init_device_mesh("cpu", (2,))
    mkernel.init(mesh, accelerator="streams", timeout_s=DEADLINE_S)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, mesh, styles)
    with torch.inference_mode():
        mkernel.warm(model, rows=[8], group=mesh)
        with counting() as found:
            out = model(torch.ones(8, 32))
    assert out.shape == (8, 32)
    return found


def test_layers_of_styles_are_warmed(tmp_path: Path) -> None:
    assert not any(ranks(of_styles, tmp_path, size=2))


def of_the_pass() -> Counter[str]:
    import torch.distributed._functional_collectives as collectives

    mesh = init_device_mesh("cpu", (2,))
    world = mkernel.init(mesh, accelerator="streams", timeout_s=DEADLINE_S)
    mkernel.enable_async_tensor_parallel()
    weight = torch.ones(16, 32)

    @torch.compile
    def layer(x: Tensor) -> Tensor:
        return collectives.all_reduce(x @ weight, "sum", mesh) + 1

    with torch.inference_mode():
        mkernel.warm(layer, torch.zeros(8, 16), group=mesh)
        before = world.statistics().calls.get("gemm_all_reduce", 0)
        with counting() as found:
            out = layer(torch.ones(8, 16))
    assert before == 1
    assert world.statistics().calls["gemm_all_reduce"] == 2
    assert float(out[0, 0]) == 33
    return found


@pytest.mark.long
def test_what_the_compilers_pass_put_into_a_graph_is_warmed(tmp_path: Path) -> None:
    assert not any(ranks(of_the_pass, tmp_path, size=2))


# ---- ranks that differ, and wrong calls ----------------------------------------------------------


def refusals() -> list[str]:
    rank, found = mkernel.world().rank, []
    for what, inputs, options in (
        ("gemm_ar", (), {**SHAPES["gemm_ar"], "m": 64 + rank}),
        (("gemm_ar", "all_reduce")[rank], (), {"m": 64, "n": 48} | {"k": 32} if rank == 0 else {}),
        (Decoder(), (), {"rows": [1 + rank]}),
        (Decoder(), (torch.zeros(1 + rank, dtype=torch.int64),), {}),
    ):
        with pytest.raises(PlanMismatch) as told:
            mkernel.warm(what, *inputs, **options)
        found.append(told.value.field)
    for what, options, error, named in (
        ("gemm_ar", {"m": 64, "n": 48}, ArgumentError, "k = None"),
        ("gemm_ar", {"m": 64, "n": 48, "k": 32, "rank": 1}, ArgumentError, "rank = 1"),
        ("ag_gemm", {"m": 63, "n": 48, "k": 32}, ShapeError, "m = 63"),
        (nn.Linear(2, 2), {"rows": [1]}, ArgumentError, "what = Linear"),
        (ExpertParallelMLP(32, 24, 4), {"rows": [1]}, ArgumentError, "top_k = None"),
        (ParallelMLP(32, 64, device="cpu"), {"rows": [(2, 5)]}, ShapeError, "rows = (2, 5)"),
    ):
        with pytest.raises(error, match=named.replace("(", r"\(").replace(")", r"\)")):
            mkernel.warm(what, **options)
    return found


def test_a_difference_between_ranks_and_wrong_sizes_are_named() -> None:
    wanted = ["warm.sizes.m", "warm.op", "warm.rows[0][0]", "warm.inputs[0][0][0]"]
    assert launched(refusals) == [wanted, wanted]


# ---- files of plans ------------------------------------------------------------------------------


def save(path: str) -> None:
    warmed("gemm_ar")  # known before: in the file all the same
    for op in SHAPES:
        warmed(op, save=path)
    with torch.inference_mode():
        mkernel.warm(Decoder(), torch.zeros(2, 8, dtype=torch.int64), save=path)


def first_calls() -> tuple[Counter[str], int]:
    with counting() as found:
        for op in SHAPES:
            warmed(op)
        with torch.inference_mode():
            Decoder()(torch.ones(2, 8, dtype=torch.int64))
    return found, mkernel.world().statistics().new_shapes


def test_calls_of_a_file_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.json"
    launched(save, str(path))
    monkeypatch.setenv("MKERNEL_PLANS", str(path))
    for found, kinds in launched(first_calls):
        assert not found
        assert kinds >= len(SHAPES)
    monkeypatch.setenv("MKERNEL_PLANS", str(tmp_path / "none.json"))
    with pytest.raises(InputFileError, match=r"MKERNEL_PLANS .*none.json: No such file"):
        launched(first_calls)


def in_another_world(path: str, patches: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """How this process, alone in a world, takes the file; empty: it does."""
    mkernel.finalize()
    with contextlib.ExitStack() as undo:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        undo.enter_context(mock.patch.dict(os.environ, {**environment, "MKERNEL_PLANS": path}))
        for target, value in patches.items():
            undo.enter_context(mock.patch(target, value))
        try:
            with counting() as found:
                mkernel.init(accelerator="streams", timeout_s=DEADLINE_S)
            assert not found["planned"]
            assert found["agreed"] == 1
        except InputFileError as error:
            assert not mkernel.is_initialized()
            return str(error)
    mkernel.finalize()
    return ""


REAL_TOPOLOGY = machine.machine_topology


def cabled(*given: Any) -> Any:
    """This machine, of whose links more is known."""
    (node,) = REAL_TOPOLOGY(*given).nodes
    changed = node.model_copy(update={"fabric_known": not node.fabric_known})
    return REAL_TOPOLOGY(*given).model_copy(update={"nodes": (changed,)})


def stale(path: str, folder: str) -> dict[str, str]:
    mkernel.warm("gemm_ar", m=64, n=48, k=32, save=path)
    constants = registry.accelerator("streams").capabilities().constants_by(None)[0]
    slower = constants.model_copy(update={"source": "a user's own"})
    own = Path(folder, "constants.json")
    own.write_text(slower.model_dump_json())
    content = json.loads(Path(path).read_text())
    (stored,) = content["plans"].values()
    edited = Path(folder, "edited.json")
    stored["shape"]["n"] += 8
    edited.write_text(json.dumps(content))
    newer = Path(folder, "newer.json")
    newer.write_text(json.dumps({**content, "format": "mkernel-plans-2"}))
    return {
        "the same": in_another_world(path, {}, {}),
        "topology": in_another_world(path, {"mkernel.machine.machine_topology": cabled}, {}),
        "version": in_another_world(path, {"mkernel.ops.plan_file.__version__": "0.3.0"}, {}),
        "constants": in_another_world(path, {}, {"MKERNEL_CONSTANTS": str(own)}),
        "path": in_another_world(path, {}, {"MKERNEL_PATH": "library"}),
        "edited": in_another_world(str(edited), {}, {}),
        "format": in_another_world(str(newer), {}, {}),
    }


def test_a_file_of_another_world_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    (found,) = launched(stale, str(path), str(tmp_path), size=1)
    assert found.pop("the same") == ""
    for name, wanted in {
        "topology": "was made for another world: topology (streams) is ",
        "version": "version of mkernel is 0.3.0 here, and ",
        "constants": "constants (streams) is ",
        "path": "MKERNEL_PATH is library here, and auto in the file; make it anew",
        "edited": "was changed after it was written",
        "format": "'mkernel-plans-2' is of another version of mkernel",
    }.items():
        assert wanted in found[name], found
        assert found[name].startswith("MKERNEL_PLANS"), found


def differing(port: int, paths: tuple[str, str]) -> str:
    """How a rank of a world takes files that are not the same on all ranks."""
    settings = load_settings().model_copy(update={"plans": Path(paths[mkernel.world().rank])})
    mkernel.finalize()
    with pytest.raises((PlanMismatch, InputFileError)) as told:
        mkernel.init(settings=settings, stores=stores(port), nodes=1, accelerator="streams")
    assert not mkernel.is_initialized()
    return str(told.value)


def two_files(one: str, other: str) -> None:
    warmed("gemm_ar", save=one)
    warmed("ag_gemm", save=other)


@pytest.mark.parametrize(
    ("second", "wanted"),
    [
        ("other.json", "ranks 0 and 1 hold different plans: MKERNEL_PLANS.file is "),
        ("none.json", "none.json: No such file or directory"),
    ],
    ids=["another file", "no file"],
)
def test_ranks_with_different_files_say_so(second: str, wanted: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    launched(two_files, str(one), str(other))
    store, port = host_store(2, DEADLINE_S)
    found = launched(differing, port, (str(one), str(tmp_path / second)))
    del store
    assert all(wanted in each for each in found), found
