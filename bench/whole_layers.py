"""Whole tensor-parallel layers against the same layers of libraries: what a program meets.

    python bench/whole_layers.py [--ranks 2] [--tokens 128,32768] [--modes eager,graph,compiled]
    python bench/whole_layers.py --accelerator streams --hidden 64 --tokens 64 --modes eager   on a CPU

A gated MLP and the projections of an attention block (no attention between them), by default of
Llama-3-70B, forward and forward with backward. Rows of activations are sharded between layers
(AllGather+GEMM, then GEMM+ReduceScatter); fewer than 128 tokens, of a decoder, are replicated and run
forward only (product, then GEMM+AllReduce). Modes:
  eager     20 calls one behind another, from a barrier until the device has done them
  graph     the replay of a CUDA graph of them
  compiled  as eager, of torch.compile(fullgraph=True)
Contenders take turns; a time is a call's, the median over turns of the slowest rank. Every contender's
result is compared with float64 in some rows, and its gradients with the first one's.
Bar: ahead of every other contender from 128 tokens on, in every mode. Exit code 1 where it is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import results_file
import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import silu

import mkernel
from mkernel.harness.contenders import collectives
from mkernel.harness.contenders.symm_mem import ENVIRONMENT, group_name

CALLS = 20
DECODER_TOKENS = 128
"""With fewer, activations are replicated."""
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Of the relative error of a result: in bfloat16 some five roundings of 1.7e-3 each."""
GRADIENT_LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
SAMPLED_ROWS = 16
MODES = ("eager", "graph", "compiled")


class Way(ABC):
    """How a layer's products communicate. Weights are [in, out]; rows are tokens."""

    name: str

    @abstractmethod
    def gather(self, x: Tensor, w: Tensor) -> Tensor:
        """All ranks' rows of ``x``, times ``w``."""

    @abstractmethod
    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of ``x @ w``."""

    @abstractmethod
    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """The sum over ranks of ``x @ w``. Forward only."""


class Mkernel(Way):
    name = "mkernel"

    def gather(self, x: Tensor, w: Tensor) -> Tensor:
        return mkernel.all_gather_gemm(x, w, save_gathered=True)  # as the others do

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        return mkernel.gemm_reduce_scatter(x, w)

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        return mkernel.gemm_all_reduce(x, w)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.new_empty(x.shape[0] * distributed.get_world_size(), x.shape[1])
        collectives.all_gather(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _scattered(gradient)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole = gradient.new_empty(
            gradient.shape[0] * distributed.get_world_size(), gradient.shape[1]
        )
        collectives.all_gather(whole, gradient.contiguous())
        return whole


def _scattered(x: Tensor) -> Tensor:
    part = x.new_empty(x.shape[0] // distributed.get_world_size(), x.shape[1])
    collectives.reduce_scatter(part, x.contiguous())
    return part


class Library(Way):
    """torch's product and torch.distributed's collective; compiled, its functional collectives."""

    name = "library"

    def gather(self, x: Tensor, w: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return collectives.traced_all_gather(x, 0, distributed.group.WORLD) @ w
        whole: Tensor = _AllGather.apply(x)
        return whole @ w

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return collectives.traced_reduce_scatter(x @ w, "sum", 0, distributed.group.WORLD)
        part: Tensor = _ReduceScatter.apply(x @ w)
        return part

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        if torch.compiler.is_compiling():
            return functional.all_reduce(y, "sum", distributed.group.WORLD)
        distributed.all_reduce(y)
        return y


class _FusedGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: str) -> Tensor:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)
        ctx.save_for_backward(whole, w)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        whole, w = ctx.saved_tensors
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(gradient, w.t(), "sum", 0, ctx.group)
        return dx, whole.t() @ gradient, None


class _FusedScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        whole, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(
            gradient.contiguous(), [w.t()], 0, ctx.group
        )
        return dx, x.t() @ whole, None


class SymmMem(Way):
    """torch.ops.symm_mem's fused ops, with the derivatives that they lack; few rows as the library."""

    name = "symm_mem"

    def __init__(self) -> None:
        self._group = group_name()

    def gather(self, x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = _FusedGather.apply(x, w, self._group)
        return y

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = _FusedScatter.apply(x, w, self._group)
        return y

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        return Library().reduce(x, w)


class Layer:
    """One layer's weights on this rank, and those of all ranks for its truth.

    ``between``: what happens to the first product's columns before the second takes them.
    """

    def __init__(
        self, name: str, hidden: int, columns: int, inner: int, between: Callable[[Tensor], Tensor]
    ) -> None:
        self.name, self.hidden, self._columns, self._inner = name, hidden, columns, inner
        self.between = between

    def weights(self, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn by rank alone."""
        generator = torch.Generator(like.device).manual_seed(1000 + rank)

        def drawn(rows: int, columns: int) -> Tensor:
            found = torch.randn(rows, columns, generator=generator, device=like.device)
            return (found * rows**-0.5).to(like.dtype)

        return drawn(self.hidden, self._columns), drawn(self._inner, self.hidden)

    def run(self, way: Way, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return way.scatter(self.between(way.gather(x, first)), second)

    def decode(self, way: Way, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return way.reduce(self.between(x @ first), second)

    def truth(self, rows: Tensor, world: int) -> Tensor:
        """Of these rows of all tokens, in float64."""
        found = torch.zeros(rows.shape[0], self.hidden, dtype=torch.float64, device=rows.device)
        for rank in range(world):
            first, second = self.weights(rank, rows)
            found += self.between(rows.double() @ first.double()) @ second.double()
        return found


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return silu(gate) * up


def layers(hidden: int, world: int) -> list[Layer]:
    """Llama-3-70B's at hidden 8192; smaller ones in proportion. One group of keys is an eighth of
    the queries."""
    mlp, heads, kv = hidden * 7 // 2 // world, hidden // world, hidden // 8 // world
    return [
        Layer("mlp", hidden, 2 * mlp, mlp, gated),
        Layer("attention projections", hidden, heads + 2 * kv, heads, lambda h: h[:, :heads]),
    ]


class Device:
    """The rank's device, on which time is the host's until it is idle."""

    def __init__(self, cuda: bool) -> None:
        self.torch = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
        self.dtype = torch.bfloat16 if cuda else torch.float32

    def wait(self) -> None:
        if self.torch.type == "cuda":
            torch.cuda.synchronize()

    def us(self, calls: Callable[[], object]) -> float:
        self.wait()
        mkernel.world().barrier()
        start = time.perf_counter_ns()
        calls()
        self.wait()
        mkernel.synchronize()
        return (time.perf_counter_ns() - start) / 1000 / CALLS

    def graph(self, calls: Callable[[], object]) -> Callable[[], object]:
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls()
        torch.cuda.current_stream().wait_stream(side)
        mkernel.synchronize()
        self.wait()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        replay: Callable[[], object] = graph.replay
        return replay


def error(found: Tensor, truth: Tensor) -> float:
    """The relative one; not a number where there is one."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


class Case:
    """One layer at one number of tokens on this rank, with or without its backward."""

    def __init__(self, layer: Layer, tokens: int, backward: bool, device: Device) -> None:
        world = mkernel.world()
        self._layer, self._device, self.backward = layer, device, backward
        self._decodes = tokens < DECODER_TOKENS
        generator = torch.Generator(device.torch).manual_seed(tokens)
        shape = (tokens, layer.hidden)
        whole = torch.randn(shape, generator=generator, device=device.torch).to(device.dtype)
        rows = tokens if self._decodes else tokens // world.size
        own = slice(None) if self._decodes else slice(world.rank * rows, (world.rank + 1) * rows)
        self._x = whole[own].clone().requires_grad_(backward)
        self._weights = [
            w.requires_grad_(backward) for w in layer.weights(world.rank, self._x.detach())
        ]
        self._seed = torch.randn(rows, layer.hidden, generator=generator, device=device.torch)
        self._seed = self._seed.to(device.dtype)
        step = max(1, rows // SAMPLED_ROWS)
        self._sampled = torch.arange(0, rows, step, device=device.torch)[:SAMPLED_ROWS]
        self._truth = layer.truth(whole[own][self._sampled], world.size)

    def call(self, way: Way, compiled: bool) -> Callable[[], Sequence[Tensor]]:
        layer = self._layer
        form = layer.decode if self._decodes else layer.run

        def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return form(way, x, first, second)

        run = torch.compile(forward, fullgraph=True) if compiled else forward

        def whole() -> Sequence[Tensor]:
            if not self.backward:
                with torch.no_grad():
                    return (run(self._x, *self._weights),)
            y = run(self._x, *self._weights)
            found = torch.autograd.grad(y, (self._x, *self._weights), self._seed)
            # What is kept of one call must not keep its graph, whose streams a capture cannot wait for.
            return (y.detach(), *found)

        return whole

    def check(self, results: Sequence[Tensor], others: Sequence[Tensor] | None) -> str:
        """What is wrong with a contender's results, or nothing."""
        found = error(results[0].detach()[self._sampled], self._truth)
        if not found <= LIMIT[self._device.dtype]:
            return f"relative error {found:.1e}, limit {LIMIT[self._device.dtype]:.0e}"
        compared = zip(results[1:], (others or results)[1:], strict=True)
        for name, (mine, theirs) in zip(("x", "first", "second"), compared, strict=False):
            found = error(mine, theirs)
            if not found <= GRADIENT_LIMIT[self._device.dtype]:
                return f"gradient of {name}: {found:.1e} from another's"
        return ""


def of_one_rank(
    hidden: int, tokens: Sequence[int], modes: Sequence[str], turns: int, cuda: bool
) -> list[dict[str, Any]]:
    """A row for each layer, number of tokens, direction and mode: microseconds by contender, or why
    there are none."""
    world, device = mkernel.world(), Device(cuda)
    rows = []
    with default_group(device):
        ways: list[Way] = [Library(), *([SymmMem()] if cuda else []), Mkernel()]
        for layer in layers(hidden, world.size):
            for count in tokens:
                for backward in (False, True) if count >= DECODER_TOKENS else (False,):
                    case = Case(layer, count, backward, device)
                    for mode in modes:
                        row = {"layer": layer.name, "tokens": count, "backward": backward}
                        times = take_turns(case, ways, mode, turns, device)
                        rows.append({**row, "mode": mode, "us": times})
    return rows


@contextmanager
def default_group(device: Device) -> Iterator[None]:
    """torch's, where the world has not made it."""
    if distributed.is_initialized():
        yield
        return
    world = mkernel.world()
    distributed.init_process_group(
        "nccl" if device.torch.type == "cuda" else "gloo", store=world.group_store,
        rank=world.rank, world_size=world.size, timeout=timedelta(seconds=120),
    )  # fmt: skip
    try:
        yield
    finally:
        distributed.destroy_process_group()


def take_turns(
    case: Case, ways: Sequence[Way], mode: str, turns: int, device: Device
) -> dict[str, float | str]:
    """By contender: the median of its turns, or what went wrong."""
    found: dict[str, float | str] = {}
    loops: dict[str, Callable[[], object]] = {}
    first: Sequence[Tensor] | None = None
    for way in ways:
        torch.compiler.reset()
        call = case.call(way, mode == "compiled")
        try:
            results = call()
            call()
            wrong = case.check(results, first)
        except (RuntimeError, NotImplementedError) as failure:  # what torch raises of a peer
            if isinstance(way, Mkernel):
                raise
            found[way.name] = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
            continue
        if wrong:
            found[way.name] = f"wrong: {wrong}"
            continue
        first = first or results

        def calls(call: Callable[[], object] = call) -> None:
            for _ in range(CALLS):
                call()

        loops[way.name] = device.graph(calls) if mode == "graph" else calls
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(turns + 1):
        for name in loops if turn % 2 == 0 else reversed(loops):
            passed = device.us(loops[name])
            if turn:  # the first warms up
                times[name].append(passed)
    return found | {name: statistics.median(each) for name, each in times.items()}


def slowest(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all ranks as one: the slowest rank's times, any rank's failure; and mkernel's time
    over the best of the others."""
    rows = []
    for same in zip(*ranks, strict=True):
        us: dict[str, float | str] = {}
        for name in same[0]["us"]:
            each = [rank["us"][name] for rank in same]
            texts = [one for one in each if isinstance(one, str)]
            us[name] = texts[0] if texts else max(each)
        peers = [us[name] for name in us if name != "mkernel" and not isinstance(us[name], str)]
        mine = us["mkernel"]
        ratio = mine / min(peers) if peers and not isinstance(mine, str) else None
        rows.append({**same[0], "us": us, "to_best": ratio})
    return rows


def shown(row: dict[str, Any]) -> str:
    direction = "with backward" if row["backward"] else "forward"
    what = f"{row['layer']}, {row['tokens']} tokens, {direction}"
    cells = [
        f"{name} {value if isinstance(value, str) else format(value, '.1f')}"
        for name, value in row["us"].items()
    ]
    best = "" if row["to_best"] is None else f"  {row['to_best']:.3f} of the best"
    return f"{what}, {row['mode']}: {', '.join(cells)}{best}"


def main() -> int:
    """Print a line a row; 1 where mkernel is wrong, or behind from 128 tokens on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accelerator", default="hopper")
    parser.add_argument("--hidden", type=int, default=8192, help="a multiple of 16 times the ranks")
    parser.add_argument("--tokens", default="1,16,64,128,512,2048,8192,32768")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="into bench/results/whole_layers.json")
    given = parser.parse_args()
    modes, cuda = given.modes.split(","), given.accelerator == "hopper"
    if not set(modes) <= set(MODES) or (not cuda and "graph" in modes):
        parser.error(f"--modes: of {', '.join(MODES)}; graph needs a GPU")
    tokens = [int(each) for each in given.tokens.split(",")]
    os.environ.update(ENVIRONMENT)  # multicast stays off
    ranks = mkernel.launch(
        of_one_rank, given.hidden, tokens, modes, given.turns, cuda,
        ranks_per_node=given.ranks, accelerator=given.accelerator,
    )  # fmt: skip
    rows = slowest(ranks)
    print("\n".join(map(shown, rows)))
    if given.write:
        figures = {"accelerator": given.accelerator, "ranks": given.ranks, "rows": rows}
        results_file.write("whole_layers", figures)
    wrong = [row for row in rows if isinstance(row["us"]["mkernel"], str)]
    behind = [
        row
        for row in rows
        if row["tokens"] >= DECODER_TOKENS and row["to_best"] is not None and row["to_best"] >= 1
    ]
    print(f"{len(wrong)} wrong, behind in {len(behind)} of {len(rows)} rows")
    return 1 if wrong or (cuda and behind) else 0


if __name__ == "__main__":
    sys.exit(main())
