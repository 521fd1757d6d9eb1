"""What a rank runs under a tool that watches one process, after ``hopper_ranks``: ``python
checked_kernels.py WHAT TOOL``, in the world of the environment's ranks. Prints ``right`` where it is.
Where the tool is ``names``, nothing watches, and our kernels that ran are printed, each by its name."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import attention_ranks
import collective_ranks
import norm_ranks
import output_ranks
import torch
from attention_ranks import Attention, Trained
from calls import judged
from collective_ranks import Ranks
from hopper_ranks import OPS, Shape, normed, rows
from moe_ranks import Moe
from rows_ranks import Rows
from torch.profiler import ProfilerActivity, profile

import mkernel
from mkernel.backends.accelerators.cuda.attention import in_parts as attention_op
from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.gemm import scaled_tuning
from mkernel.backends.accelerators.cuda.native import device_clock
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.cases import poison
from mkernel.cases.poison import uninitialised_is_nan

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter")


def fused() -> list[str]:
    """Every GEMM by one kernel, odd sizes."""
    shapes = [Shape(op, 512, 264, 200, path="fused") for op in OPS]
    return judged(shapes, 0)


def few_rows() -> list[str]:
    """GEMM+AllReduce by one kernel, of odd tiles, of whole ones, and of two waves of them; e4m3 too;
    with norms, which follow the kernel."""
    shapes: list[Any] = [
        Shape("gemm_all_reduce", m, n, k, path="fused")
        for m, n, k in ((33, 1032, 520), (16, 1024, 512), (8, 17416, 72))
    ]
    scaled = [
        Shape(op, 34, 1040, 528, "float8_e4m3fn", "column", "fused", "bfloat16", scales, fast=True)
        for op, scales in (("gemm_all_reduce", "row"), ("gemm_reduce_scatter", "tensor"))
    ]
    behind = [normed(33, 1032, 520), normed(3, 264, 4096, norm="alone")]
    return judged([*shapes, *scaled, *behind], 0)


def medium() -> list[str]:
    """Every GEMM with tiles of 128 x 192, odd sizes; of fewer rows, AllReduce has other tiles."""
    tuning.tiling_of = lambda *_: "medium"
    return judged([Shape(op, 1040, 264, 200, path="fused") for op in OPS], 0)


def e4m3() -> list[str]:
    """Our own products of e4m3, and the scales of their results."""
    shapes = [
        Shape(op, 512, 272, 208, "float8_e4m3fn", "column", "fused", "bfloat16", scales, fast=True)
        for op in GEMMS
        for scales in ("row", "tensor")
    ]
    return judged(shapes, 0)


def e4m3_by_library() -> list[str]:
    """The library's product of e4m3, whose results a kernel scales."""
    gather = Shape(
        "all_gather_gemm", 512, 272, 208, "float8_e4m3fn", "column", "library", "bfloat16", "row"
    )
    with mock.patch.object(scaled_tuning, "scaled_by", return_value="kernel"):
        return judged([gather], 0)


def attention() -> list[str]:
    """Parts of a ring and their merges."""
    whole = Attention(1, 4, 2, 288, causal=False)
    return judged([whole, Attention(1, 4, 2, 288, causal=True)], 0)


def attention_by_flash() -> list[str]:
    """The same by FlashAttention-2, for initcheck, which takes memory that a library has stored to by
    TMA for uninitialised: it says so of cuDNN's results, and of torch's ``a @ b`` alone
    (``test_initcheck_does_not_see_stores_of_libraries_by_tma``). It sees those of FlashAttention-2, and
    so judges our reads of the parts, their merges and flags; cuDNN's own kernels it does not judge."""
    with mock.patch.object(attention_op, "attend", _flash_attention):
        return attention()


def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, scale: float
) -> Seen:
    """As :func:`.attention.library.attend`."""
    q, shared = q[:, :, first:], q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return Seen(torch.empty_like(q).copy_(out), lse[:, :, : q.shape[2]].contiguous(), first)


def experts() -> list[str]:
    """The three MoE ops, sums of few and of many partial rows."""
    many = Moe(72, 136, 72, experts=4, top_k=4, narrow=True)
    return judged([Moe(72, 136, 72), many], 0)


def scaled_experts() -> list[str]:
    """The MoE ops in e4m3, whose rows are quantised between their products."""
    return judged([Moe(72, 256, 128, scales=True, quantise=True)], 0)


def experts_wanted() -> list[str]:
    """The same where each token goes once to each rank that has an expert of it."""
    return experts()


def scaled_experts_wanted() -> list[str]:
    """As ``experts_wanted``."""
    return scaled_experts()


def dispatched_rows() -> list[str]:
    """The dispatch without a product, of rows and of e4m3 ones with scales."""
    return judged([Rows(72, 136), Rows(72, 256, scales=True)], 0)


def experts_by_rows() -> list[str]:
    """The same with fewer rows for each expert than a box has: every result leaves by plain stores."""
    return judged([Moe(24, 136, 72), Moe(24, 136, 72, experts=4, top_k=4, narrow=True)], 0)


def experts_filled(run: Callable[[], list[str]] = experts) -> list[str]:
    """The same as ``experts``, or as another program, for initcheck, with NaN in results of products
    before our kernels store to them by TMA, which the tool does not see
    (``test_initcheck_sees_stores_of_rows_and_none_of_boxes``). A result that is read and was not stored
    is NaN, which judges see; tables, rows in order and sums are the tool's to judge."""
    new_empty = torch.Tensor.new_empty

    def filled(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = new_empty(like, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with mock.patch.object(torch.Tensor, "new_empty", filled):
        return run()


def scaled_experts_filled() -> list[str]:
    """As ``experts_filled``."""
    return experts_filled(scaled_experts)


def attention_by_core() -> list[str]:
    """Parts of a ring by our own kernel."""
    return attention_ranks.by_core([Attention(1, 4, 2, 288, causal=True)], judged, 0)


def attention_by_core_filled() -> list[str]:
    """The same for initcheck, with NaN in what our kernel stores to by TMA, as ``experts_filled``."""
    with uninitialised_is_nan():
        return attention_by_core()


def attention_by_kernel() -> list[str]:
    """A whole ring by one kernel."""
    shapes = [Attention(1, 4, 2, 256, causal=causal, way="kernel") for causal in (False, True)]
    return judged(shapes, 0)


def attention_backward() -> list[str]:
    """Gradients of parts, and the sums of those that travel."""
    return judged([Trained(Attention(1, 4, 2, 288, causal=True))], 0)


def sums() -> list[str]:
    """AllReduce of rows, by mail at once and in two exchanges, and by flags; with norms and without."""
    few = [rows(3, 1032), rows(64, 4096, norm="alone"), rows(33, 1032, "float16", "residual")]
    many = [rows(4096, 4104, norm=norm) for norm in (None, "residual")]
    return judged([*few, rows(1031, 4104, norm="residual"), *many], 0)


def exchanges() -> list[str]:
    """The collectives around a library's products: by mail, at once and in two steps, and by flags."""
    by_mail = [Shape(op, 64, 264, 200, path="library") for op in OPS]
    by_mail += [Shape("gemm_all_reduce", 1031, 4104, 72, path="library")]
    at_once = [Shape("gemm_all_reduce", 1031, 520, 72, path="library", bias=True)]
    by_flags = [
        Shape("all_gather_gemm", 4096, 72, 4104, path="library"),
        Shape("gemm_reduce_scatter", 4096, 4104, 72, path="library"),
        Shape("gemm_all_reduce", 4096, 4104, 72, path="library"),
    ]
    return judged([*by_mail, *at_once, *by_flags], 0)


def collectives() -> list[str]:
    """Those of ``exchanges`` without products, of two GPUs in one process, in a world of one rank."""
    ranks = Ranks(2, 64 << 20)
    ways = (
        ("all_gather", ""),
        ("reduce_scatter", ""),
        ("all_reduce", "one_shot"),
        ("all_reduce", "two_shot"),
    )
    failures = []
    mailed = (*((name, "mail") for name, _ in ways[:3]), ("all_reduce", "mail_twice"))
    for name, way in (*ways, *mailed):
        made = collective_ranks.Work(ranks, name, 4099, way=way)
        ranks.on_each(made.launch)
        ranks.synchronize()
        ranks.check_outcomes()
        failures += [f"{name} {way}: rank {rank}" for rank in made.wrong_ranks()]
    return failures


def landing() -> list[str]:
    """Results in outputs that peers write, by one kernel."""
    return _landed(Shape("gemm_all_reduce", 2048, 1032, 72))


def landing_by_library() -> list[str]:
    """The same by two exchanges, of more than mail holds."""
    return _landed(Shape("gemm_all_reduce", 8200, 1032, 72))


def _landed(shape: Shape) -> list[str]:
    failures, places = output_ranks.kept([shape], 4, 0)
    return failures if any(places) else [*failures, "no output lay where peers may write"]


def parts() -> list[str]:
    """A library's products in parts, whose sums add up what copy engines brought."""
    shapes = [Shape(op, 1001 // 2 * 2, 264, 200, path="library", chunk=128) for op in OPS]
    behind = [normed(130, 264, 200, path="library", chunk=64)]
    return judged([*shapes, *behind], 0)


def nodes() -> list[str]:
    """Each rank a node of its own: rows, parts and slots go through NICs, and sums by rank."""
    failures = judged([Shape("all_gather_gemm", 512, 264, 200, path="fused")], 0)
    failures += judged([Attention(1, 4, 2, 256, causal=True)], 1)
    return failures + judged([Moe(72, 136, 72)], 2)


def sums_between_nodes() -> list[str]:
    """Products whose sums go through NICs."""
    shapes = [Shape(op, 512, 264, 200, path="fused") for op in OPS[1:]]
    return judged(shapes, 0)


def copies_and_clocks() -> list[str]:
    """What benchmarks launch: copies by multiprocessors, a device's clock, and a stream held up."""
    from mkernel.backends.accelerators.cuda import _kernels

    stream = torch.cuda.current_stream().cuda_stream
    src = torch.randint(0, 255, (300_016,), dtype=torch.uint8, device="cuda")
    failures = []
    for engine in (_kernels.Engine.bulk, _kernels.Engine.plain):
        dst = torch.zeros_like(src)
        _kernels.copy(dst.data_ptr(), src.data_ptr(), 300_001, engine, stream=stream)
        whole = torch.equal(dst[:300_001], src[:300_001]) and not dst[300_001:].any()
        failures += [] if whole else [f"{engine} copied something else"]
    clock = device_clock(torch.cuda.current_device())
    assert clock is not None
    readings = clock.read(8, 20.0, stream=stream)
    clock.hold(readings[-1][1] + 1_000_000, 5.0, stream=stream)
    torch.cuda.synchronize()
    return failures + ([] if len(readings) == 8 else [f"{len(readings)} readings of 8"])


ALONE = {"memcheck": 2, "initcheck": 1, "racecheck": 1, "synccheck": 1}
"""Ranks by tool. initcheck knows nothing of what other processes write, racecheck nothing of their
threads."""
WANTED = {"MKERNEL_HOPPER_TOKENS": "wanted"}
MET = {"memcheck": 2, "racecheck": 2, "synccheck": 2}
"""Of what one rank alone does not launch."""
WITHOUT_RACECHECK = {"memcheck": 2, "synccheck": 2}
"""racecheck fails by itself, with an internal error, in a process that runs cuBLAS; and it takes words
of shared memory that one warp releases and another acquires (``tell_stored``) for races, since it
knows barriers alone, and of those only what each thread does: a slot that one lane frees for its warp
(the scales of ``scaled_experts``) is a race to it
(``test_racecheck_does_not_see_that_a_lane_frees_for_its_warp``)."""


@dataclass(frozen=True)
class Program:
    """What is run, by how many ranks under which tool."""

    run: Callable[[], list[str]]
    ranks: Mapping[str, int] = field(default_factory=lambda: ALONE)
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1


CHECKED = {
    each.run.__name__: each
    for each in (
        *map(
            Program,
            (few_rows, medium, e4m3, attention, experts, dispatched_rows, attention_by_core),
        ),
        Program(scaled_experts, {**WITHOUT_RACECHECK, "initcheck": 1}),
        Program(copies_and_clocks),
        Program(fused, {**ALONE, **MET}),
        Program(attention_by_kernel, MET, environment={"MKERNEL_HOPPER_ATTENTION": "kernel"}),
        *(Program(each, MET) for each in (attention_backward, sums)),
        *(Program(each, WITHOUT_RACECHECK) for each in (exchanges, parts)),
        Program(collectives, {"memcheck": 1, "racecheck": 1, "synccheck": 1}),
        Program(e4m3_by_library, WITHOUT_RACECHECK),
        Program(landing, MET, environment={"MKERNEL_PATH": "fused"}),
        Program(landing_by_library, WITHOUT_RACECHECK, environment={"MKERNEL_PATH": "library"}),
        Program(experts_wanted, MET, environment=WANTED),
        Program(scaled_experts_wanted, WITHOUT_RACECHECK, environment=WANTED),
        Program(nodes, MET, nodes=2),
        Program(sums_between_nodes, WITHOUT_RACECHECK, nodes=2),
    )
}
CONTROLS = {
    "experts_by_boxes": Program(experts),
    "experts_by_rows": Program(experts_by_rows),
}
"""What shows which stores initcheck sees."""
SEEN_BY_INITCHECK = {
    "attention": attention_by_flash,
    "attention_by_core": attention_by_core_filled,
    "experts": experts_filled,
    "scaled_experts": scaled_experts_filled,
}
"""What stands for one of these under that tool."""


def main(what: str, tool: str) -> int:
    """1 where any result was wrong."""
    program = {**CHECKED, **CONTROLS}[what]
    run = SEEN_BY_INITCHECK.get(what, program.run) if tool == "initcheck" else program.run
    os.environ |= program.environment
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MKERNEL_CONSTANTS"] = str(
            norm_ranks.everywhere(Path(folder) / "constants.json")
        )
        far: dict[str, Any] = {"nodes": program.nodes, "nic": "cx7", "verbs": "soft"}
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
        mkernel.init(accelerator="hopper", timeout_s=200, **(far if program.nodes > 1 else {}))
    # Poison in what an op is about to allocate is what initcheck looks for in vain.
    freed = mock.patch.object(poison, "freed") if tool == "initcheck" else nullcontext()
    try:
        with freed:
            failures = _named(run) if tool == "names" else run()
    finally:
        mkernel.finalize()
    print(*failures or ["right"], sep="\n")
    return 1 if failures else 0


def _named(run: Callable[[], list[str]]) -> list[str]:
    """What it finds. Prints our kernels, each once, with its template's arguments."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        failures = run()
        torch.cuda.synchronize()
    for name in sorted({event.name for event in seen.events() if "mkernel::" in event.name}):
        print(f"kernel {name}")
    return failures


def function_of(name: str) -> str:
    """A kernel's name without its result, template's arguments, arguments and nameless namespaces."""
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N_\w+::", "", name)
    found = re.search(r"\bmkernel(::\w+)+", name)
    assert found is not None, name
    return found.group()


def compiled() -> dict[str, int]:
    """Kernels that the native modules hold, by name without template's arguments, and of each how
    many there are."""
    from mkernel.backends.accelerators.cuda import _cuda, _kernels

    symbols = {
        symbol
        for module in (_kernels, _cuda)
        for symbol in re.findall(
            rb"\.nv\.constant0\.(_ZN7mkernel\w+)", Path(str(module.__file__)).read_bytes()
        )
    }
    names = [_qualified(symbol.decode()) for symbol in symbols]
    return {name: names.count(name) for name in sorted(set(names))}


def _qualified(symbol: str) -> str:
    """Of a nested name as the Itanium C++ ABI writes it: each part with its length before it."""
    parts, rest = [], symbol.removeprefix("_ZN")
    while number := re.match(r"\d+", rest):
        end = number.end() + int(number.group())
        parts.append(rest[number.end() : end])
        rest = rest[end:]
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N_"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
