"""The `streams` backend on a CPU, beyond the conformance kit, which tests/conformance runs on it."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S
from kept_ranks import run

import mkernel
from mkernel.backends.accelerators.streams import schedule
from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.device import torch_device
from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Case, case_of
from mkernel.conformance.ranks import Judge
from mkernel.errors import CapacityExceeded, Unsupported
from mkernel.plan.shapes import SHAPES

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def sizes(op: str, world: int) -> dict[str, int]:
    """Small, odd, legal in a world of that size."""
    return {
        "all_gather_gemm": {"m": 37 * world, "n": 65, "k": 259},
        "gemm_reduce_scatter": {"m": 37 * world, "n": 65, "k": 259},
        "gemm_all_reduce": {"m": 37 * world + 1, "n": 65, "k": 259},
        "all_reduce": {"m": 37 * world + 1, "n": 65},
        "moe_dispatch_gemm": {
            "tokens": 53, "hidden": 67, "features": 35, "experts": 4 * world, "top_k": 3,
        },
        "moe_combine": {"tokens": 53, "features": 35, "experts": 4 * world, "top_k": 3},
        "moe_gemm_combine": {
            "tokens": 53, "hidden": 83, "features": 35, "experts": 4 * world, "top_k": 3,
        },
        "ring_attention": {
            "batch": 2, "heads": 6, "kv_heads": 2, "sequence": 22 * world, "head_dim": 24,
        },
    }[op]  # fmt: skip


def make(op: str, world: int, dtype: str = "float32", **changes: Any) -> Case:
    """The op's case in its small sizes; ``changes`` may hold sizes, too."""
    chosen = dict(sizes(op, world))
    chosen.update({name: changes.pop(name) for name in SHAPES[op].model_fields if name in changes})
    fields = {"out_dtype": dtype, **changes}
    return case_of(op)(sizes=chosen, dtype=dtype, **fields)  # type: ignore[arg-type]


def judged_together(cases: Sequence[Case]) -> tuple[list[str], list[int]]:
    """What is wrong with one call of each case, where messages of all peers go together; and how many
    messages there were."""
    posted = []
    post = CallStreams.post

    def counted(streams: CallStreams, *parcels: Any) -> Any:
        posted.append(parcels)
        return post(streams, *parcels)

    with pytest.MonkeyPatch.context() as patch:
        cpu = torch_device("cpu")
        together = cpu.traits.model_copy(update={"peers_together": True})
        described = cpu.model_copy(update={"traits": together})
        patch.setattr(schedule, "torch_device", lambda name: described)
        patch.setattr(CallStreams, "post", counted)
        found, messages = [], []
        for case in cases:
            posted.clear()
            found += Judge(case)(0)
            messages.append(len(posted))
        return found, messages


def test_messages_of_all_peers_together() -> None:
    """Of a rank's 37 rows, in chunks or not, to two peers; and of tokens of which peers get unlike
    numbers."""
    cases = [
        make("all_gather_gemm", 3),
        make("all_gather_gemm", 3, chunk=5),
        make("gemm_all_reduce", 3, chunk=5),
        make("moe_dispatch_gemm", 3, options={"routing": "some_empty"}),
        make("moe_dispatch_gemm", 3, chunk=5, options={"routing": "one_expert"}),
        make("moe_combine", 3),
        make("moe_gemm_combine", 3, options={"returns": "slots"}),
        make("moe_gemm_combine", 3, options={"returns": "ranks"}),
    ]
    for found, messages in mkernel.launch(
        judged_together, cases, ranks_per_node=3, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert found == []
        assert messages[:2] == [1, 8]


def travelling(cases: Sequence[Case], gathers: str) -> list[str]:
    """What is wrong with calls whose tokens travel so, and with what a dispatch refuses meanwhile."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_gathering", lambda *_: (gathers, ()))
        for case in cases:
            judge = Judge(case)
            for iteration, view in enumerate(("pipelined", "sequential", "pipelined")):
                outcome = case.run(judge.inputs(iteration), view=view)
                found += judge.problems(outcome, iteration)
                assert outcome.plan.schedule.gathers == gathers
        given = judge.inputs(0)
        for _ in range(3):
            with pytest.raises(CapacityExceeded):
                mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"], capacity=1)
            found += judge(1)
    return found


@pytest.mark.parametrize("gathers", ["wanted", "whole"])
def test_tokens_travel_where_they_are_wanted_or_everywhere(gathers: str) -> None:
    cases = [
        make("moe_dispatch_gemm", 3, dtype, chunk=chunk, options={"routing": routing})
        for routing in ("uniform", "one_expert", "padded", "empty_ranks")
        for dtype, chunk in (("float32", None), ("bfloat16", 20))
    ]
    found = mkernel.launch(
        travelling, cases, gathers, ranks_per_node=3, accelerator="streams", timeout_s=DEADLINE_S
    )
    assert found == [[]] * 3


def peak_mib(work: Callable[[], object]) -> float:
    """How much more memory this process held while it worked than before."""

    def held(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    work()  # what is made once
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = held("VmRSS")
    work()
    return (held("VmHWM") - before) / 1024


def attention_peaks() -> dict[str, float]:
    rows, width = 4096, 16
    q, k, v = (torch.randn(1, 1, rows, width, requires_grad=True) for _ in range(3))

    def step() -> None:
        mkernel.ring_attention(q, k, v, causal=True).sum().backward()
        mkernel.ring_attention(q, k, v).sum().backward()

    def materialised() -> None:
        (q.detach() @ k.detach().transpose(2, 3)).exp_()

    return {"ring": peak_mib(step), "materialised": peak_mib(materialised)}


def test_attention_does_not_hold_scores() -> None:
    """Of 4096 queries and keys a part scores are 64 MiB, and all tensors of a call and its backward
    some 5 MiB."""
    for found in mkernel.launch(
        attention_peaks, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert found["materialised"] > 60
        assert found["ring"] < 16


def in_other_views() -> None:
    world = mkernel.world()
    case = make("all_gather_gemm", world.size)
    inputs = case.inputs(world.rank, world.size, 0)
    assert Judge(case)(0) == []
    for view in {*typing.get_args(View)} - {"pipelined"}:
        with pytest.raises(Unsupported, match="in the view 'pipelined' only"):
            case.run(inputs, view=view)


def test_a_backend_that_is_not_instrumented_has_one_view() -> None:
    backend = "limited_backends:NotInstrumented"
    mkernel.launch(in_other_views, ranks_per_node=2, accelerator=backend)


def under_inference_mode() -> list[float]:
    """Errors of calls inside, outside and again inside inference mode, which share buffers."""
    world = mkernel.world()
    errors = []
    for iteration, mode in enumerate((True, False, True)):
        with torch.inference_mode(mode):
            a = torch.randn(64, 64, generator=torch.Generator().manual_seed(iteration))
            summed = mkernel.gemm_all_reduce(a, a)
        wanted = world.size * (a.double() @ a.double())
        errors.append(float((summed.double() - wanted).norm() / wanted.norm()))
    return errors


def test_inference_mode() -> None:
    for errors in run(under_inference_mode, ranks_per_node=2, accelerator="streams"):
        assert max(errors) <= 1e-5
