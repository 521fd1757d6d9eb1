"""What rank processes run of products that go to cuBLAS without torch: their bits are those of calls
from Python, whose products are torch.mm's, and torch sees none of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import parts_ranks
import torch
from calls import captured
from hopper_ranks import Shape, Work
from torch import distributed
from torch.profiler import ProfilerActivity, profile

import mkernel
from mkernel.backends.accelerators.cuda.schedule import ProductSchedule

GROUPS = 2


def products_of_torch(call: Callable[[], object]) -> int:
    """How many products torch makes meanwhile."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return sum(each.count for each in seen.key_averages() if each.key == "aten::mm")


@dataclass(frozen=True)
class Made:
    """A filled work, what a call from Python made of it, and whether torch multiplies in known calls:
    in float32, to round behind the product."""

    work: Work
    first: torch.Tensor
    left_to_torch: bool


def first_calls(shapes: Sequence[Shape]) -> list[Made]:
    """Of each shape; calls into ``out`` are known then."""
    made = []
    for shape in shapes:
        work = shape.work()
        work.fill(0)
        plan = work.case.called(work.given, work.outs, {}).plan
        product = plan.part(ProductSchedule).product
        rounds = plan.op == "all_gather_gemm" and product != plan.out_dtype
        made.append(Made(work, work.out.clone(), rounds))
    for each in made:
        each.work.call()
    mkernel.synchronize()
    return made


def other(first: torch.Tensor, again: torch.Tensor, what: object) -> list[str]:
    return [] if torch.equal(first, again) else [f"rank {mkernel.world().rank} {what}: other bits"]


def same_bits(shapes: Sequence[Shape], in_parts: bool) -> list[str]:
    """Failures of known calls. ``in_parts``: the planner takes parts where it can."""
    with parts_ranks.preferred() if in_parts else nullcontext():
        made = first_calls(shapes)
        failures = [text for each in made for text in each.work.failure(0, each.first, "first")]
        for each in made:
            each.work.out.fill_(torch.nan)
            count = products_of_torch(each.work.call)
            failures += other(each.first, each.work.out, each.work.shape)
            if bool(count) != each.left_to_torch:
                failures.append(f"{each.work.shape}: torch made {count} products")
    mkernel.synchronize()
    return failures


def in_two_worlds(folder: str, rounds: int) -> list[str]:
    """Failures of calls of two worlds by turns, eager and in a graph of each."""
    mkernel.finalize()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=ranks
    )
    try:
        os.environ["MKERNEL_PATH"] = "library"
        groups: list[Any] = [distributed.new_group() for _ in range(GROUPS)]
        for group in groups:
            mkernel.init(group, accelerator="hopper", timeout_s=100)
        draw = torch.Generator("cuda").manual_seed(rank)
        a, b = (
            torch.randn(shape, generator=draw, device="cuda").bfloat16()
            for shape in ((96, 512), (512, 1024))
        )

        def call(group: Any) -> torch.Tensor:
            return mkernel.gemm_all_reduce(a, b, group=group)

        firsts = [call(group) for group in groups]
        found = [call(group) for _ in range(rounds) for group in groups]
        assert products_of_torch(lambda: [call(group) for group in groups]) == 0
        with sized_by_environment():
            assert products_of_torch(lambda: [call(group) for group in groups]) == GROUPS
        graphs = [captured([partial(call, group)]) for group in groups]
        for _ in range(rounds):
            for graph, (result,) in graphs:
                graph.replay()
                found.append(result.clone())
        mkernel.synchronize()
        wrong = sum(not torch.equal(each, firsts[0]) for each in (*firsts, *found))
        return [f"rank {rank}: {wrong} of {len(found)} have other bits"] if wrong else []
    finally:
        mkernel.finalize()
        distributed.destroy_process_group()


@contextmanager
def flipped(name: str, value: object) -> Iterator[None]:
    """A switch of torch.backends.cuda.matmul."""
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


@contextmanager
def another_library() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def tuned() -> Iterator[None]:
    torch.cuda.tunable.tuning_enable(False)
    torch.cuda.tunable.set_filename(os.devnull)
    torch.cuda.tunable.enable(True)
    try:
        yield
    finally:
        torch.cuda.tunable.enable(False)


@contextmanager
def sized_by_environment() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the usual size
    try:
        yield
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]


SWITCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "bfloat16 sums": lambda: flipped("allow_bf16_reduced_precision_reduction", False),
    "another library": another_library,
    "deterministic": deterministic,
    "tuned": tuned,
    "environment": sized_by_environment,
}


def switched() -> list[str]:
    """Switches of torch's, changed between known calls, that do not bring the product back to torch."""
    (made,) = first_calls([Shape("gemm_all_reduce", 512, 1024, 512)])
    work, failures = made.work, []
    for name, flip in SWITCHES.items():
        for flips, wanted in ((flip, 1), (nullcontext, 0)):
            with flips():
                work.out.fill_(torch.nan)
                count = products_of_torch(work.call)
            failures += work.failure(0, what=name)
            if count != wanted:
                failures.append(f"{name}: torch made {count} products, not {wanted}")
        failures += other(made.first, work.out, f"behind {name}")
    mkernel.synchronize()
    return failures
