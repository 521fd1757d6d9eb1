"""What rank processes on GPUs run to try how clusters take tiles: by strides or by claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from hopper_ranks import Shape, Work

import mkernel
from mkernel.errors import WorldError

HOLDER = """
extern "C" __global__ void hold(unsigned* words, int limit_ms) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    if (threadIdx.x == 0) atomicAdd_system(words, 1U);
    do {
        __nanosleep(20000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*static_cast<volatile unsigned*>(words + 1) == 0 && now - start < limit_ms * 1000000ULL);
}
"""
HELD_BYTES = 120 << 10
"""Of shared memory, a block: it leaves too little of its multiprocessor for a block of a product."""
BEGIN_S = 5.0


@contextmanager
def held(blocks: int, limit_s: float) -> Iterator[None]:
    """So many multiprocessors of the current device are taken, at most for ``limit_s``.

    Raises:
        TimeoutError: they are not, within seconds.
    """
    words = torch.zeros(2, dtype=torch.int32).pin_memory()
    compiled: Any = torch.cuda
    kernel = compiled._compile_kernel(HOLDER, "hold")
    kernel.set_shared_memory_config(HELD_BYTES)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel(
        grid=(blocks, 1, 1),
        block=(32, 1, 1),
        args=[words, int(limit_s * 1e3)],
        shared_mem=HELD_BYTES,
        stream=stream,
    )
    try:
        deadline = time.monotonic() + BEGIN_S
        while int(words[0]) < blocks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{int(words[0])} of {blocks} blocks began in {BEGIN_S} s")
            time.sleep(0.001)
        yield
    finally:
        words[1] = 1
        stream.synchronize()


@contextmanager
def taking(claims: bool) -> Iterator[None]:
    """Fused GEMM calls of this rank take tiles so; not those that native code starts by itself."""
    world: Any = mkernel.world()
    accelerator = world._calls._accelerator
    launch: Callable[..., Any] = accelerator.launch
    plans: dict[str, Any] = {}

    def launched(call: Any) -> Any:
        digest = call.plan.digest()
        if digest not in plans:
            schedule = call.plan.schedule.model_copy(update={"claims": claims})
            plan = call.plan.model_copy(update={"schedule": schedule})
            plan.__dict__.pop("_digest", None)
            plans[digest] = plan
        return launch(replace(call, plan=plans[digest]))

    accelerator.launch = launched
    try:
        yield
    finally:
        del accelerator.launch


def in_a_share(
    shape: Shape, claims: bool, blocks: int, ranks: tuple[int, ...], calls: int, limit_s: float
) -> tuple[str, float, list[str]]:
    """The error of calls while ``ranks`` have so many multiprocessors less ("": none), seconds that
    they took, and what is wrong with their results."""
    rank, failures = mkernel.world().rank, []
    work = Work(shape)
    with taking(claims):
        work.fill(0)
        work.call()  # plans, workspaces and kernels are there
        mkernel.synchronize()
        with held(blocks, limit_s) if rank in ranks else nullcontext():
            start, error = time.monotonic(), ""
            try:
                for turn in range(1, calls + 1):
                    work.fill(turn)
                    work.call()
                    mkernel.synchronize()
                    failures += work.failure(turn)
            except WorldError as raised:
                error = f"{type(raised).__name__}: {raised}"
            seconds = time.monotonic() - start
    return error, seconds, failures
