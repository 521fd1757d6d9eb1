"""Async tensor parallel: what is rewritten, what is left and why, and that results stay the same.

Programs are traced and differentiated as Inductor does it, the pass rewrites their graphs, and these
are run as they are; one test has Inductor generate code too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from once import once
from python_calls import plans
from torch import Tensor, distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mkernel
from mkernel.async_tensor_parallel import Report, patterns, rewrite

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

all_gather: Any = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter: Any = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
"""Torch has called them ``_single`` since 2.13, and called them ``_tensor`` before."""

RANKS = 2
B, S, H, N = 3, 8, 12, 20
"""A batch of sequences, of all ranks; features, and those of a product on one rank."""


def drawn(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's tensor."""
    seed = sum(map(ord, name)) + 1000 * distributed.get_rank()
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    rewriting: Any = config.post_grad_custom_pre_pass
    rewriting(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return make_boxed_func(graph.forward)


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program whose graphs the pass has rewritten."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=_compiler,
        bw_compiler=_compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    made: Callable[..., Any] = torch.compile(program, backend=backend, fullgraph=True)
    return made


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Inductor compiles what it compiles, so that the pass sees it."""
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


# ---- programs ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What becomes of a program: ops that collectives become, words of why others are left."""

    program: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rewritten: dict[str, int]
    left: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] = ()
    """Of the first dimension, which is symbolic; empty: no size is."""
    joined: int = 0
    """The number of collectives that the call which replaces another one replaces too."""
    quiet: bool = False
    """True if what is left is beside no product, so that nobody is warned."""
    narrow: bool = False
    """True if it multiplies in 16 bits, in which its inputs are exact."""


def gathers(dim: int, use: Callable[..., Any]) -> Callable[..., Any]:
    def program(x: Tensor, *weights: Tensor) -> Any:
        return use(all_gather(x, dim, distributed.group.WORLD), *weights)

    return program


def scatters(dim: int, reduce_op: str, make: Callable[..., Tensor] = torch.matmul) -> Any:
    def program(*inputs: Tensor) -> Tensor:
        x = make(*inputs)
        return reduce_scatter(x, reduce_op, dim, distributed.group.WORLD)

    return program


def reduces(reduce_op: str, make: Callable[..., Tensor] = torch.matmul) -> Any:
    def program(*inputs: Tensor) -> Tensor:
        return funcol.all_reduce(make(*inputs), reduce_op, distributed.group.WORLD)

    return program


def autocast(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program that multiplies in 16 bits where it is compiled, and widens its results."""

    def run(*inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.compiler.is_compiling()):
            results = program(*inputs)
        return tree_map_only(Tensor, lambda each: each.float(), here(results))

    return run


def widened(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Sum, as autocast's backward does, the gradients of layers with one input."""
    return (x @ v).float() + (y @ w).float()


E4M3_K, E4M3_N = 32, 48


def quantised(x: Tensor, w: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """Operands in e4m3, w as its transpose, and scales far from 1."""
    e4m3 = torch.float8_e4m3fn
    return x.to(e4m3), w.to(e4m3).t(), *(each.float().abs() + 0.1 for each in scales)


def scaled_mm(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor) -> Tensor:
    """Of an activation of any number of dimensions."""
    of_rows = of_x if of_x.numel() == 1 else of_x.flatten(0, -2)
    c = torch._scaled_mm(x.flatten(0, -2), w, of_rows, of_w, out_dtype=torch.float32)
    return c.view(*x.shape[:-1], -1)


def scaled_gathers(
    dim: int, also: Callable[[Tensor], Any] | None = None, gathers_scales: bool = True
) -> Callable[..., Any]:
    def program(*inputs: Tensor) -> Any:
        x, w, of_x, of_w = quantised(*inputs)
        group = distributed.group.WORLD
        if of_x.numel() > 1 and gathers_scales:
            of_x = all_gather(of_x, dim, group)
        if torch.compiler.is_compiling():
            whole = all_gather(x, dim, group)
        else:  # gloo knows bytes alone
            whole = all_gather(x.view(torch.uint8), dim, group).view(x.dtype)
        c = scaled_mm(whole, w, of_x, of_w)
        return c if also is None else (c, also(whole))

    return program


def scaled_sums(reduce: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: reduce(scaled_mm(*quantised(*inputs)))


def swapped(x: Tensor, w: Tensor) -> Tensor:
    """Gathers along dimension 1, but puts the ranks' parts together in the opposite order."""
    whole = all_gather(x, 0, distributed.group.WORLD)
    return torch.cat(whole.chunk(RANKS)[::-1], 1) @ w


def scatters_swapped(x: Tensor, w: Tensor) -> Tensor:
    parts = (x @ w).chunk(RANKS, 1)
    return reduce_scatter(torch.cat(parts[::-1]), "sum", 0, distributed.group.WORLD)


def used_twice(x: Tensor, w: Tensor) -> Any:
    y = x @ w
    return funcol.all_reduce(y, "sum", distributed.group.WORLD), y.sin()


def products(*inputs: Tensor) -> Tensor:
    """The sum of x @ v, y @ w, ..."""
    pairs = zip(inputs[::2], inputs[1::2], strict=True)
    return functools.reduce(torch.add, (x @ w for x, w in pairs))


def linears(x: Tensor, v: Tensor, c: Tensor, y: Tensor, w: Tensor, d: Tensor) -> Tensor:
    return nn.functional.linear(x, v, c) + nn.functional.linear(y, w, d)


def added(*programs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Programs of two inputs each, whose results are added."""

    def program(*inputs: Tensor) -> Tensor:
        pairs = zip(programs, inputs[::2], inputs[1::2], strict=True)
        return functools.reduce(torch.add, (each(x, w) for each, x, w in pairs))

    return program


def used_beside(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Any:
    one = x @ v
    return funcol.all_reduce(one + y @ w, "sum", distributed.group.WORLD), one.sin()


def sum_used_beside(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Any:
    """Nothing but one of two sums over ranks that are added is used by itself too."""
    one, other = (
        funcol.all_reduce(a @ b, "sum", distributed.group.WORLD) for a, b in ((x, v), (y, w))
    )
    return one + other, one.sin()


def in_another_group(x: Tensor, w: Tensor) -> Any:
    return funcol.all_reduce(x @ w, "sum", _another_group)


_another_group: Any = None

ROWS, PART, WEIGHT = (B * S // RANKS, H), (B, S // RANKS, H), (H, N)
WHOLE = (B, S, H)
CASES = {
    "rows": Case(gathers(0, torch.matmul), (ROWS, WEIGHT), {"all_gather_gemm": 1}),
    "batches": Case(
        gathers(0, torch.matmul), ((B, S, H), WEIGHT), {"all_gather_gemm": 1}
    ),
    "sequences": Case(gathers(1, torch.matmul), (PART, WEIGHT), {"all_gather_gemm": 1}),
    "one sequence": Case(
        gathers(1, torch.matmul), ((1, S, H), WEIGHT), {"all_gather_gemm": 1}
    ),
    "inner dimension": Case(
        gathers(2, torch.matmul), ((2, B, S // RANKS, H), WEIGHT), {"all_gather_gemm": 1}
    ),
    "several weights": Case(
        gathers(1, lambda x, v, w: (x @ v, x @ w)),
        (PART, WEIGHT, (H, N + 4)),
        {"all_gather_gemm_gathered": 1},
    ),
    "weights of few columns": Case(
        gathers(1, lambda x, u, v, w: (x @ u, x @ v.t(), x.flatten(0, 1) @ w)),
        (PART, (H, 8), (4, H), (H, 6)), {"all_gather_gemm": 1},
    ),
    "weights of equal columns": Case(
        gathers(0, lambda x, *weights: tuple(x @ each for each in weights)),
        (ROWS, *[(H, 8)] * 3), {"all_gather_gemm": 1},
    ),
    "weights of few columns, and gathered is used": Case(
        gathers(0, lambda x, v, w: (x @ v, x @ w, x.sin())),
        (ROWS, (H, 8), (H, 4)), {"all_gather_gemm_gathered": 1},
    ),
    "weights of few columns and a bias": Case(
        gathers(0, lambda x, v, w, b: (x @ v, nn.functional.linear(x, w, b))),
        (ROWS, (H, 8), (4, H), (4,)), {"all_gather_gemm_gathered": 1},
    ),
    "gathered is used": Case(
        gathers(1, lambda x, w: (x.sin(), x @ w)), (PART, WEIGHT), {"all_gather_gemm_gathered": 1}
    ),
    "bias": Case(
        gathers(0, nn.functional.linear), (ROWS, (N, H), (N,)), {"all_gather_gemm": 1}
    ),
    "bias of sequences": Case(
        gathers(1, nn.functional.linear), (PART, (N, H), (N,)), {"all_gather_gemm": 1}
    ),
    "any number of sequences": Case(
        gathers(1, torch.matmul), (PART, WEIGHT), {"all_gather_gemm": 1}, sizes=(3, 5, 4)
    ),
    "half": Case(
        gathers(1, torch.matmul), (PART, WEIGHT), {"all_gather_gemm": 1}, dtype=torch.bfloat16
    ),
    "sum of rows": Case(scatters(0, "sum"), ((B * S, H), WEIGHT), {"gemm_reduce_scatter": 1}),
    "sum of batches": Case(scatters(0, "sum"), ((4, S, H), WEIGHT), {"gemm_reduce_scatter": 1}),
    "sum of sequences": Case(scatters(1, "sum"), (WHOLE, WEIGHT), {"gemm_reduce_scatter": 1}),
    "mean of sequences": Case(scatters(1, "avg"), (WHOLE, WEIGHT), {"gemm_reduce_scatter": 1}),
    "sum": Case(reduces("sum"), (WHOLE, WEIGHT), {"gemm_all_reduce": 1}),
    "mean": Case(reduces("avg"), (WHOLE, WEIGHT), {"gemm_all_reduce": 1}),
    "mean of halves": Case(
        reduces("avg"), (WHOLE, WEIGHT), {"gemm_all_reduce": 1}, dtype=torch.float16
    ),
    "autocast": Case(
        autocast(gathers(1, torch.matmul)), (PART, WEIGHT), {"all_gather_gemm": 1}, narrow=True
    ),
    "autocast, any number of sequences": Case(
        autocast(gathers(1, torch.matmul)), (PART, WEIGHT), {"all_gather_gemm": 1},
        sizes=(3, 5, 4), narrow=True,
    ),
    "autocast of several weights": Case(
        autocast(gathers(1, lambda x, v, w: (x @ v, x @ w))), (PART, WEIGHT, (H, N + 4)),
        {"all_gather_gemm_gathered": 1}, narrow=True,
    ),
    "autocast, and gathered is used": Case(
        autocast(gathers(1, lambda x, w: (x.sin(), x @ w))), (PART, WEIGHT), {},
        ("no matrix product has what it gathers",), narrow=True,
    ),
    "autocast of a sum": Case(
        autocast(scatters(1, "sum")), (WHOLE, WEIGHT), {"gemm_reduce_scatter": 1}, narrow=True
    ),
    "autocast of a sum that is widened": Case(
        autocast(reduces("sum", lambda x, w: (x @ w).float())), (WHOLE, WEIGHT),
        {"gemm_all_reduce": 1}, narrow=True,
    ),
    "autocast of a sum of widened products": Case(
        autocast(scatters(1, "sum", widened)), (WHOLE, WEIGHT) * 2, {"gemm_reduce_scatter": 1},
        narrow=True,
    ),
    "autocast, and a product is used that is widened": Case(
        autocast(lambda x, w: (-(y := x.abs() @ w.abs()), reduces("sum", Tensor.float)(y))),
        (WHOLE, WEIGHT), {}, ("is used elsewhere too",), narrow=True,
    ),
    "greatest": Case(reduces("max"), (WHOLE, WEIGHT), {}, ("reduce op is max",)),
    "greatest of rows": Case(
        scatters(0, "max"), ((B * S, H), WEIGHT), {}, ("reduce op is max",)
    ),
    "greatest of two": Case(
        added(*[reduces("max")] * 2), (WHOLE, WEIGHT) * 2, {}, ("reduce op is max",) * 2
    ),
    "another group": Case(in_another_group, (WHOLE, WEIGHT), {}, ("its group has no world",)),
    "product is used": Case(used_twice, (WHOLE, WEIGHT), {}, ("is used elsewhere too",)),
    "no product": Case(
        reduces("sum", torch.add), (WHOLE, WHOLE), {}, ("is no matrix product",), quiet=True
    ),
    "sum of two products": Case(
        reduces("sum", products), (WHOLE, WEIGHT) * 2, {"gemm_all_reduce": 1}
    ),
    "sum of three products of sequences": Case(
        scatters(1, "sum", products), (WHOLE, WEIGHT, (B, S, 4), (4, N), WHOLE, WEIGHT),
        {"gemm_reduce_scatter": 1},
    ),
    "sum of half products": Case(
        scatters(1, "sum", products), (WHOLE, WEIGHT) * 2, {"gemm_reduce_scatter": 1},
        dtype=torch.bfloat16,
    ),
    "sum of products of any number of sequences": Case(
        scatters(1, "sum", lambda x, v, w: x @ v + x.sin() @ w), (WHOLE, WEIGHT, WEIGHT),
        {"gemm_reduce_scatter": 1}, sizes=(3, 5, 4),
    ),
    "sum of products with large weights": Case(
        scatters(1, "sum", products), ((B, S, 40), (40, N)) * 2, {"gemm_reduce_scatter": 2}
    ),
    "mean of products with large weights": Case(
        reduces("avg", products), ((B, S, 40), (40, N)) * 2, {"gemm_all_reduce": 2}
    ),
    "mean of biased products": Case(
        reduces("avg", linears), (WHOLE, (N, H), (N,)) * 2, {"gemm_all_reduce": 1}
    ),
    "sum of biased products with large weights": Case(
        scatters(0, "sum", linears), ((4, S, 40), (N, 40), (N,)) * 2, {"gemm_reduce_scatter": 2}
    ),
    "sums that are added": Case(
        added(*[scatters(1, "sum")] * 3), (WHOLE, WEIGHT) * 3, {"gemm_reduce_scatter": 1},
        joined=2,
    ),
    "sums of sums": Case(
        lambda *x: reduces("sum", products)(*x[:4]) + reduces("sum")(*x[4:]), (WHOLE, WEIGHT) * 3,
        {"gemm_all_reduce": 1}, joined=1,
    ),
    "sums of unlike sequences": Case(
        lambda x, v, y, w: scatters(1, "sum")(x, v) + scatters(1, "sum")(y, w).view(B + 1, 3, N),
        ((B + 1, 6, H), WEIGHT, (6, B + 1, H), WEIGHT), {"gemm_reduce_scatter": 2},
    ),
    "sums with large weights that are added": Case(
        added(*[scatters(1, "sum")] * 2), ((B, S, 40), (40, N)) * 2, {"gemm_reduce_scatter": 2}
    ),
    "sum and mean": Case(
        added(reduces("sum"), reduces("avg")), (WHOLE, WEIGHT) * 2, {"gemm_all_reduce": 2}
    ),
    "one sum is used": Case(sum_used_beside, (WHOLE, WEIGHT) * 2, {"gemm_all_reduce": 2}),
    "one sum is of no product": Case(
        added(reduces("sum"), reduces("sum", torch.mul)), (WHOLE, (H, H), WHOLE, WHOLE),
        {"gemm_all_reduce": 1}, ("is no matrix product",), quiet=True,
    ),
    "product and another": Case(
        reduces("sum", lambda x, w, y: x @ w + y), (WHOLE, WEIGHT, (B, S, N)), {},
        ("another tensor with a matrix product",),
    ),
    "one product is used": Case(
        used_beside, (WHOLE, WEIGHT) * 2, {}, ("is used elsewhere too",)
    ),
    "weighted sum": Case(
        reduces("sum", lambda x, v, y, w: torch.add(x @ v, y @ w, alpha=2)), (WHOLE, WEIGHT) * 2,
        {}, ("is no matrix product",),
    ),
    "on the right": Case(
        gathers(0, lambda x, w: w @ x), (ROWS, (N, B * S)), {}, ("as its left side",)
    ),
    "with itself": Case(
        gathers(0, lambda x: x @ x.t()), (ROWS,), {}, ("before the right side of a product",)
    ),
    "batches with themselves": Case(
        gathers(1, lambda x: x.flatten(0, 1) @ x.flatten(0, 1).t()), (PART,), {},
        ("before the right side of a product",),
    ),
    "strided weights": Case(
        gathers(1, lambda x, w: (x @ w[:, 2:-2], w.sum())), (PART, WEIGHT), {"all_gather_gemm": 1}
    ),
    "integers": Case(
        reduces("sum"), (WHOLE, WEIGHT), {}, ("does not take it",), dtype=torch.int32
    ),
    "nothing": Case(gathers(0, torch.sin), (ROWS,), {}, ("as its left side",), quiet=True),
    "columns": Case(
        gathers(2, torch.matmul), (PART, (H * RANKS, N)), {}, ("along the last dimension",)
    ),
    "sum of columns": Case(scatters(2, "sum"), (WHOLE, WEIGHT), {}, ("product's columns",)),
    "bias in the sum": Case(
        reduces("sum", nn.functional.linear), (WHOLE, (N, H), (N,)), {"gemm_all_reduce": 1}
    ),
    "bias in a mean of rows": Case(
        scatters(1, "avg", nn.functional.linear), (WHOLE, (N, H), (N,)), {"gemm_reduce_scatter": 1}
    ),
    "other order": Case(swapped, (PART, WEIGHT), {}, ("as its left side",)),
    "sum in other order": Case(scatters_swapped, (WHOLE, WEIGHT), {}, ("is no matrix product",)),
    "e4m3 rows": Case(
        scaled_gathers(0), ((ROWS[0], E4M3_K), (E4M3_N, E4M3_K), (ROWS[0], 1), (1, E4M3_N)),
        {"all_gather_gemm_scaled": 1},
    ),
    "e4m3 sequences": Case(
        scaled_gathers(1),
        ((B, S // RANKS, E4M3_K), (E4M3_N, E4M3_K), (B, S // RANKS, 1), (1, E4M3_N)),
        {"all_gather_gemm_scaled": 1},
    ),
    "e4m3 with one scale": Case(
        scaled_gathers(1), ((B, S // RANKS, E4M3_K), (E4M3_N, E4M3_K), (), ()),
        {"all_gather_gemm_scaled": 1},
    ),
    "e4m3 gathered is used": Case(
        scaled_gathers(1, lambda whole: whole.float()),
        ((B, S // RANKS, E4M3_K), (E4M3_N, E4M3_K), (B, S // RANKS, 1), (1, E4M3_N)),
        {"all_gather_gemms_scaled": 1},
    ),
    "sum of e4m3 rows": Case(
        scaled_sums(lambda c: reduce_scatter(c, "sum", 0, distributed.group.WORLD)),
        ((B * S, E4M3_K), (E4M3_N, E4M3_K), (B * S, 1), (1, E4M3_N)),
        {"gemm_reduce_scatter_scaled": 1},
    ),
    "mean of e4m3 sequences": Case(
        scaled_sums(lambda c: reduce_scatter(c, "avg", 1, distributed.group.WORLD)),
        ((B, S, E4M3_K), (E4M3_N, E4M3_K), (B, S, 1), (1, E4M3_N)),
        {"gemm_reduce_scatter_scaled": 1},
    ),
    "sum of e4m3": Case(
        scaled_sums(lambda c: funcol.all_reduce(c, "sum", distributed.group.WORLD)),
        ((B, S, E4M3_K), (E4M3_N, E4M3_K), (), ()),
        {"gemm_all_reduce_scaled": 1},
    ),
    "two of a chain": Case(
        lambda x, v, w: scatters(1, "sum")(gathers(1, torch.matmul)(x, v).relu(), w),
        (PART, WEIGHT, (N, H)),
        {"all_gather_gemm": 1, "gemm_reduce_scatter": 1},
    ),
}  # fmt: skip


class Found(NamedTuple):
    """How a case went on one rank."""

    rewritten: dict[str, int]
    left: list[str]
    called: int
    equal: bool
    warned: list[str]
    joined: int


def called(world: mkernel.World) -> Callable[[], Counter[str]]:
    """What counts the calls that a world has run since now, by op."""
    before = Counter(world.statistics().calls)
    return lambda: Counter(world.statistics().calls) - before


def here(results: Any) -> Any:
    """Eager collectives return tensors that may be on their way, which older torch cannot compare."""
    return tree_map_only(funcol.AsyncCollectiveTensor, lambda each: each.wait(), results)


def close(found: Any, wanted: Any, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    try:
        torch.testing.assert_close(found, here(wanted), rtol=tolerance, atol=tolerance)
    except AssertionError:
        return False
    return True


def judged(case: Case, world: mkernel.World) -> Found:
    right = True
    calls = called(world)
    with (
        warnings.catch_warnings(record=True) as caught,
        mkernel.enable_async_tensor_parallel() as enabled,
    ):
        warnings.simplefilter("always")
        program = compiled(case.program)
        for size in case.sizes or (case.shapes[0][0],):
            shapes = [(size, *case.shapes[0][1:]), *case.shapes[1:]]
            inputs = [drawn(str(i), *shape, dtype=case.dtype) for i, shape in enumerate(shapes)]
            if case.narrow:
                inputs = [each.bfloat16().to(case.dtype) for each in inputs]
            if case.sizes:
                torch._dynamo.mark_dynamic(inputs[0], 0)
            wide = [x.float() if x.is_floating_point() else x for x in inputs]
            wanted = tree_map_only(Tensor, lambda x: x.to(case.dtype), here(case.program(*wide)))
            kind = torch.bfloat16 if case.narrow else case.dtype
            right = right and close(program(*inputs), wanted, kind)
    report = enabled.report
    left = [each.why for each in report.decisions if each.op is None]
    warned = [str(each.message) for each in caught if "async tensor parallel" in str(each.message)]
    joined = sum(each.calls == 0 for each in report.decisions)
    return Found(dict(report.rewritten), left, calls().total(), right, warned, joined)


def with_a_world(judge: Callable[..., Any], *arguments: Any) -> Any:
    global _another_group  # noqa: PLW0603 - programs are functions of tensors alone
    _another_group = distributed.new_group()
    torch.manual_seed(distributed.get_rank())
    world = mkernel.init(distributed.group.WORLD, accelerator="streams", timeout_s=TIMEOUT_S)
    return judge(world, *arguments)


def all_cases(world: mkernel.World) -> dict[str, Found]:
    return {name: judged(case, world) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def every_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Found]]:
    folder = tmp_path_factory.mktemp("cases")
    return once(request, lambda: ranks(with_a_world, folder, all_cases, size=RANKS))


@pytest.mark.parametrize("name", CASES)
def test_a_program(name: str, every_case: list[dict[str, Found]]) -> None:
    case = CASES[name]
    for found in (each[name] for each in every_case):
        assert found.rewritten == case.rewritten
        assert len(found.left) == len(case.left)
        for why, words in zip(found.left, case.left, strict=True):
            assert words in why
        assert len(found.warned) == (0 if case.quiet else len(set(found.left)))
        assert all(why in said for why, said in zip(found.left, found.warned, strict=False))
        assert found.called == sum(case.rewritten.values()) * max(1, len(case.sizes))
        assert found.equal
        assert found.joined == case.joined


def scales_of_all_rows(world: mkernel.World) -> list[str]:
    shapes = ((6, E4M3_K), (E4M3_N, E4M3_K), (6 * RANKS, 1), (1, E4M3_N))
    inputs = [drawn(str(i), *shape) for i, shape in enumerate(shapes)]
    with mkernel.enable_async_tensor_parallel() as enabled:
        program = compiled(scaled_gathers(0, gathers_scales=False))
        with pytest.raises(RuntimeError, match="scalar type"):  # gloo gathers no e4m3
            program(*inputs)
    return [each.why for each in enabled.report.decisions]


def test_a_gather_whose_scales_are_not_gathered_is_left(tmp_path: Path) -> None:
    for found in ranks(with_a_world, tmp_path, scales_of_all_rows, size=RANKS):
        (why,) = found
        assert "scales of what it gathers are not gathered" in why


# ---- rewrites that are wrong -------------------------------------------------------------------------


def any_order(piece: torch.fx.Node, place: int, count: int) -> Any:
    """Takes parts in whatever order for the parts in order."""
    found = [_part(piece, each, count) for each in range(count)]
    return next((each for each in found if each is not None), None)


def scales_as_they_lie(graph: Any, rows: torch.fx.Node, *rest: Any) -> torch.fx.Node:
    """Puts rows in the order of ranks, but not their scales."""
    return rows if rows.meta["val"].shape[1] == 1 else _rows_by_rank(graph, rows, *rest)


def joined_in_another_order(graph: Any, found: Any) -> Any:
    right = _joined(graph, found)
    return right._replace(b=_joined(graph, found[::-1]).b)


def columns_of_others(graph: Any, c: Any, found: Any) -> Any:
    first, *others = _columns_of(graph, c, found)
    return [first, *others[::-1]]


_joined = rewrite._joined
_columns_of = rewrite._columns_of
_rows_by_rank = rewrite._rows_by_rank
_part = patterns._part
_reduction = patterns.reduction

MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "gathered rows are left in the order of ranks": (
        rewrite, "_rows_by_program", lambda graph, rows, *rest: rows, "sequences",
    ),
    "rows are scattered as they lie": (
        rewrite, "_rows_by_rank", lambda graph, rows, *rest: rows, "sum of sequences",
    ),
    "a mean is a sum": (
        rewrite, "_mean", lambda graph, c, *rest: c, "mean",
    ),
    "every rank's bias is its own": (
        rewrite, "_summed", lambda graph, bias, *rest: bias, "bias in the sum",
    ),
    "a bias is forgotten": (
        rewrite, "_biased", lambda graph, rows, product: rows, "bias",
    ),
    "the wrong dimension": (
        patterns, "reduction", lambda *a: dataclasses.replace(_reduction(*a), dim=0),
        "sum of sequences",
    ),
    "one scale goes with its rows": (
        rewrite, "_scales_of_gather", lambda graph, scales, sources: scales, "e4m3 with one scale",
    ),
    "scales of rows are left in the order of the program": (
        rewrite, "_rows_by_rank", scales_as_they_lie, "mean of e4m3 sequences",
    ),
    "columns are those of another weight": (
        rewrite, "_columns_of", columns_of_others, "weights of equal columns",
    ),
    "one of the products is left out": (
        rewrite, "_joined", lambda graph, found: found[0], "sum of two products",
    ),
    "weights are joined in another order": (
        rewrite, "_joined", joined_in_another_order, "sum of three products of sequences",
    ),
    "one of the sums is left out": (
        rewrite, "_added", lambda graph, nodes: nodes[0], "sum of products with large weights",
    ),
    "sums of all kinds are alike": (patterns, "_alike", lambda *_: True, "sum and mean"),
    "sums of all rows are alike": (
        patterns, "_alike", lambda *_: True, "sums of unlike sequences",
    ),
    "factors are overlooked": (
        patterns, "_adds", lambda node: node.target is patterns.aten.add.Tensor, "weighted sum",
    ),
    "gathered parts in any order": (patterns, "_part", any_order, "other order"),
    "scattered parts in any order": (patterns, "_part", any_order, "sum in other order"),
}  # fmt: skip
"""What is replaced where, and the case that must notice."""


def with_mistakes(world: mkernel.World) -> dict[str, bool]:
    found = {}
    for name, (module, attribute, wrong, case) in MISTAKES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, attribute, wrong)
            found[name] = judged(CASES[case], world).equal
    return found


def test_wrong_rewrites_are_noticed(tmp_path: Path) -> None:
    for found in ranks(with_a_world, tmp_path, with_mistakes, size=RANKS):
        assert found == dict.fromkeys(MISTAKES, False)


# ---- order -----------------------------------------------------------------------------------------


def in_order(world: mkernel.World) -> tuple[list[int], list[bool]]:
    """Of a compiled program whose products do not need each other: the columns of those that it calls,
    one after another; whether Inductor's scheduler knows that each comes after the one before."""
    x = drawn("x", S, H)
    weights = [drawn(str(n), H, n) for n in range(N, N + 4)]

    def program(x: Tensor, *weights: Tensor) -> list[Tensor]:
        group = distributed.group.WORLD
        made = [
            mkernel.gemm_all_reduce(x, w, group=world.name)
            if place % 2
            else funcol.all_reduce(x @ w, "sum", group)
            for place, w in enumerate(weights)
        ]
        return [each.sin() for each in reversed(made)]

    wanted = program(x, *weights)
    after: list[bool] = []

    def scheduled(nodes: list[Any]) -> list[Any]:
        behind: dict[str, set[str]] = {}  # of each buffer, those that must be there before it
        ops: list[set[str]] = []
        for node in nodes:
            waits = {dependency.name for dependency in node.unmet_dependencies}
            waits = waits.union(*(behind.get(each, set()) for each in waits))
            behind.update(dict.fromkeys(node.get_buffer_names(), waits))
            if "mkernel" in str(getattr(node.node, "op_overload", "")):
                after.extend(bool(waits & names) for names in ops[-1:])
                ops.append(set(node.get_buffer_names()))
        return nodes

    watched = config.patch(_pre_fusion_custom_pass=scheduled)
    with plans() as made, mkernel.enable_async_tensor_parallel(), uncached(), watched:
        found = torch.compile(program, fullgraph=True)(x, *weights)
    assert close(found, wanted, torch.float32)
    return [plan.gemm.n for plan in made], after


def test_ops_keep_the_order_of_the_program(tmp_path: Path) -> None:
    for columns, after in ranks(with_a_world, tmp_path, in_order, size=RANKS):
        assert columns == list(range(N, N + 4))
        assert after == [True] * 3


# ---- the switch ----------------------------------------------------------------------------------


def test_another_pass_runs_first_and_is_put_back() -> None:
    seen: list[str] = []

    def another(graph: torch.fx.Graph) -> None:
        seen.append("another")

    with config.patch(post_grad_custom_pre_pass=another):
        with mkernel.enable_async_tensor_parallel() as outer:
            inner = mkernel.enable_async_tensor_parallel()
            config.post_grad_custom_pre_pass(torch.fx.Graph())
            with pytest.raises(RuntimeError, match="take that one off first"):
                outer.disable()
            inner.disable()
            inner.disable()
        assert config.post_grad_custom_pre_pass is another
    assert seen == ["another"]
    assert str(outer.report) == "no collective was met"


def test_the_code_cache_knows_the_pass() -> None:
    with mkernel.enable_async_tensor_parallel():
        key = config.post_grad_custom_pre_pass.uuid()
        mkernel.init(accelerator="streams")
        assert config.post_grad_custom_pre_pass.uuid() != key
        mkernel.finalize()
        assert config.post_grad_custom_pre_pass.uuid() == key
    with config.patch(post_grad_custom_pre_pass=print), mkernel.enable_async_tensor_parallel():
        assert config.post_grad_custom_pre_pass.uuid() is None


# ---- models of parallelize_module --------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(H, 2 * N, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * N, H, bias=bias)

    def forward(self, y: Tensor) -> Tensor:
        z: Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return z


class GatedMlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(H), Gated(bias)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = x + self.mlp(self.norm(x))
        return z


def styles(sequence_dim: int | None, shared: bool) -> dict[str, Any]:
    """A plan. ``shared``: the input of gate and up is gathered once, as torchtitan does it, so that
    their gradients of it are added before they are summed over ranks; else after that."""
    columns, rows = ("mlp.gate", "mlp.up"), "mlp.down"
    if sequence_dim is None:
        return {**{each: ColwiseParallel() for each in columns}, rows: RowwiseParallel()}
    split = Shard(sequence_dim)
    plan = {
        "norm": SequenceParallel(sequence_dim=sequence_dim),
        rows: RowwiseParallel(output_layouts=split, use_local_output=False),
    }
    if not shared:
        return plan | {each: ColwiseParallel(input_layouts=split) for each in columns}
    gathers = PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate())
    return {**plan, "mlp": gathers, **{each: ColwiseParallel() for each in columns}}


class Step(NamedTuple):
    tensors: list[Tensor]
    rewritten: dict[str, int]
    left: dict[tuple[str, str], int]
    calls: list[str]


def local(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def steps(
    world: mkernel.World,
    sequence_dim: int | None,
    bias: bool,
    shared: bool,
    sequences: int,
    casts: bool = False,
    wrapped: Callable[[nn.Module], Callable[..., Tensor]] = lambda model: model,
) -> tuple[Step, Step]:
    """One step of a model as it is, and one of it compiled: output and gradients, all of them whole."""
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = parallelize_module(GatedMlp(bias), mesh, styles(sequence_dim, shared))
    whole = torch.randn(sequences, S, H)

    def step(run: Callable[..., Tensor], report: Report) -> Step:
        x: Tensor = whole.clone()
        if sequence_dim is not None:
            part = x.chunk(RANKS, sequence_dim)[world.rank].contiguous()
            x = DTensor.from_local(part, mesh, [Shard(sequence_dim)])
        x.requires_grad_()
        model.zero_grad()
        with plans() as made:
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                y = run(x)
            y.sin().sum().backward()
        tensors = [local(each) for each in (y, x.grad, *(p.grad for p in model.parameters()))]
        return Step(tensors, dict(report.rewritten), dict(report.left), [plan.op for plan in made])

    plain = step(wrapped(model), Report())
    with mkernel.enable_async_tensor_parallel() as enabled:
        return plain, step(compiled(wrapped(model)), enabled.report)


MANY, FEW = 6, 4
"""Sequences whose rows are at least as many as the features of gate and up on a rank; and fewer."""


def fused(sequence_dim: int | None, sequences: int) -> list[str]:
    """A step's calls. What gate and up add to the input's gradient is one call, unless rows are few."""
    forward = (
        ["all_gather_gemm", "gemm_reduce_scatter"]
        if sequence_dim is not None
        else ["gemm_all_reduce"]
    )
    return [*forward, *forward, *forward[-1:] * (sequences == FEW)]


@pytest.mark.parametrize(
    ("sequence_dim", "bias", "shared", "sequences", "casts"),
    [
        (None, True, False, MANY, False),
        (0, False, False, MANY, False),
        (1, True, False, MANY, False),
        (1, True, True, MANY, False),
        (0, False, True, FEW, False),
        (1, False, False, FEW, False),
        (1, True, True, MANY, True),
    ],
)
def test_models_of_parallelize_module(
    sequence_dim: int | None, bias: bool, shared: bool, sequences: int, casts: bool, tmp_path: Path
) -> None:
    given = (sequence_dim, bias, shared, sequences, casts)
    for plain, found in ranks(with_a_world, tmp_path, steps, *given, size=RANKS):
        assert plain.calls == []
        assert found.calls == fused(sequence_dim, sequences)
        assert sum(found.rewritten.values()) == len(found.calls)
        assert found.left == {}
        tolerance = 3e-2 if casts else 1e-4
        torch.testing.assert_close(found.tensors, plain.tensors, rtol=tolerance, atol=tolerance)


def saves_sums_and_products(context: Any, op: Any, *arguments: Any, **options: Any) -> Any:
    saved = (torch.ops.aten.mm.default, patterns.SCATTER)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


REGIONS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "whole": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "selective": lambda model: lambda x: checkpoint(
        model, x, use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, saves_sums_and_products),
    ),
}  # fmt: skip
"""Ways of checkpointing a model."""
AGAIN = {
    "whole": ["all_gather_gemm"],
    "selective": [],  # what is gathered again for gradients of weights is their right side
}
"""The calls of the forward pass that are made in the backward pass too."""


def in_regions(world: mkernel.World) -> dict[str, tuple[Step, Step]]:
    return {
        name: steps(world, 1, False, True, MANY, wrapped=each) for name, each in REGIONS.items()
    }


def test_checkpointed_models(tmp_path: Path) -> None:
    """The report has the calls of both passes, and the gather that is left."""
    for everything in ranks(with_a_world, tmp_path, in_regions, size=RANKS):
        for name, (plain, found) in everything.items():
            forward = fused(1, MANY)[:2]
            assert found.calls == [*forward, *AGAIN[name], *forward]
            assert sum(found.rewritten.values()) == len(found.calls)
            left = [why for _, why in found.left]
            assert len(left) == (name == "selective")
            assert all("as its left side" in why for why in left)
            torch.testing.assert_close(found.tensors, plain.tensors, rtol=1e-4, atol=1e-4)
