"""Times of the pieces of MoE on one GPU: routing and grouped product, beside torch's grouped product.

    python3 bench/moe_kernels.py [tokens ...]

Random balanced routing of all tokens on the experts of one of two ranks; microseconds, of a graph of
five calls, whose weights are cold where they exceed L2. ``gathered``, ``permuted`` and ``ready`` are
the ways of rows in ``kernels/moe/grouped.cuh``; the permuted ones are of a graph that sorts, too, less
the time of sorting alone. ``gated``: half the columns are the gate's. What is wrong is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from graphs import captured, replay_us
from torch import Tensor

import mkernel
from mkernel.backends.accelerators.hopper import _hopper as native

MODELS = {"deepseek-v3": (7168, 2048, 128), "qwen3-235b": (4096, 1536, 64)}
TOKENS = (64, 256, 1024, 8192, 32768)
WRONG = 1e-2  # relative, of bfloat16


def graphed(body: Callable[[], object], calls: int = 5) -> float:
    """Microseconds of one."""
    graph = captured([body] * calls)
    return min(replay_us(graph, calls) for _ in range(4))


def stream() -> int:
    """The one that is captured."""
    found: int = torch.cuda.current_stream().cuda_stream
    return found


class Problem:
    """One size, after a first routing."""

    def __init__(self, tokens: int, w: Tensor, up: bool) -> None:
        self.tokens, self.w, self.up = tokens, w, up
        self.experts, self.k, self.n = w.shape
        scores = torch.rand(tokens, 2 * self.experts, device="cuda")
        ids = scores.topk(8, dim=1).indices
        self.ids = torch.where(ids < self.experts, ids, -1).int()
        sizes = native.MoeSizes(world=1, tokens=tokens, top_k=8, experts=self.experts)
        self.sizes = sizes
        self.memory = torch.zeros(
            sizes.dispatch_bytes(2 * self.k), dtype=torch.uint8, device="cuda"
        )
        self.control, self.report = native.ControlBlock(), native.ReportBlock()
        self.here = native.DeviceWorld([self.memory.data_ptr()], 0, self.control.address, 20.0, 1)
        self.words = torch.zeros(sizes.table_words(), dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(self.experts, dtype=torch.int64, device="cuda")
        self.route()
        self.rows = int(self.counts.sum())
        made = tokens if up else self.rows
        self.x = torch.randn(made, self.k, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(self.rows, self.n, device="cuda", dtype=torch.bfloat16)
        self.permuted = torch.empty(self.rows, self.k, device="cuda", dtype=torch.bfloat16)

    def route(self) -> None:
        """Sort the ids."""
        routing = native.Routing(
            sizes=self.sizes, routing=self.words.data_ptr(), ids=self.ids.data_ptr(),
            counts=self.counts.data_ptr(), row_bytes=2 * self.k, capacity=0, early=0,
            early_rows=256, exchanges=False,
        )  # fmt: skip
        native.moe_route(0, self.here, routing, self.report, stream())

    def product(self, *, permutes: bool, deep: bool, gated: bool) -> Callable[[], None]:
        """A call of it."""
        blocks = torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2
        made = native.GroupedProduct(
            sizes=self.sizes, routing=self.words.data_ptr(), a=self.x.data_ptr(),
            permuted=self.permuted.data_ptr() if permutes else 0, b=self.w.data_ptr(),
            out=self.out.data_ptr(), rows=self.rows,
            n=self.n // 2 if gated else self.n, k=self.k, height=0, half=False,
            n_major=True, tokens=self.up, gated=gated, wide=False, home=False, waits=False,
            ends=False, deep=deep, blocks=blocks,
        )  # fmt: skip
        return lambda: native.moe_grouped(0, self.here, made, stream())

    def variants(self) -> Iterator[tuple[str, bool, bool, bool]]:
        """Their names; whether rows are permuted, stages deep, columns gated."""
        if not self.up:
            yield "ready deep", False, True, False
            yield "ready wide", False, False, False
            return
        yield "gathered", False, True, False
        yield "gathered gated", False, True, True
        yield "permuted deep", True, True, False
        yield "permuted wide", True, False, False
        yield "permuted deep gated", True, True, True
        yield "permuted wide gated", True, False, True

    def measure(self) -> str:
        """All variants beside torch's product, on rows that are there."""
        of_route = graphed(self.route)
        place = self.words[2 * self.tokens * 8 : 2 * self.tokens * 8 + self.rows].long()
        ready = self.x[place // 8] if self.up else self.x
        ends = self.counts.cumsum(0).int()
        wanted = torch._grouped_mm(ready, self.w, offs=ends)
        theirs = graphed(lambda: torch._grouped_mm(ready, self.w, offs=ends))
        parts = [f"route {of_route:.1f} torch {theirs:.1f}"]
        for name, permutes, deep, gated in self.variants():
            multiply = self.product(permutes=permutes, deep=deep, gated=gated)

            def both(multiply: Callable[[], None] = multiply) -> None:
                self.route()
                multiply()

            self.out.fill_(float("nan"))
            self.permuted.fill_(float("nan"))
            us = graphed(both) - of_route if permutes else graphed(multiply)
            off = self.error(wanted, gated)
            parts.append(f"{name} {us:.1f} ({us / theirs:.2f}, {self.rate(us):.0f} TFLOP/s)")
            if not off < WRONG:
                parts.append(f"WRONG: off by {off:.1e}")
        return " ".join(parts)

    def rate(self, us: float) -> float:
        """TFLOP/s."""
        return 2e-6 * self.rows * self.n * self.k / us

    def error(self, wanted: Tensor, gated: bool) -> float:
        """Relative, of the last results, by the norm."""
        found = self.out.float()
        truth = wanted.float()
        if gated:
            gate, up = truth.chunk(2, dim=1)
            truth = torch.nn.functional.silu(gate) * up
            found = self.out.view(-1)[: truth.numel()].view(truth.shape).float()
        return float((found - truth).norm() / truth.norm())


def measure(tokens_of: tuple[int, ...]) -> list[str]:
    """A line for each size, on the one rank of a world."""
    lines = []
    for model, (hidden, features, experts) in MODELS.items():
        for up in (True, False):
            k, n = (hidden, features) if up else (features, hidden)
            w = torch.randn(experts, k, n, device="cuda", dtype=torch.bfloat16) * 0.02
            for tokens in tokens_of:
                problem = Problem(tokens, w, up)
                which = f"{model} {'up' if up else 'down'} {tokens} tokens {problem.rows} rows:"
                lines.append(f"{which} {problem.measure()}")
                print(lines[-1], flush=True)
                del problem
                torch.cuda.empty_cache()
    return lines


if __name__ == "__main__":
    wished = tuple(int(each) for each in sys.argv[1:]) or TOKENS
    mkernel.launch(measure, wished, ranks_per_node=1, accelerator="hopper", timeout_s=30)
