"""Times of the pieces of MoE on one GPU: routing and grouped product, beside torch's grouped product.

    python3 bench/moe_kernels.py

Random balanced routing of all tokens on the experts of one of two ranks; microseconds, of a graph of
five calls, whose weights are cold where they exceed L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mkernel
from mkernel.backends.accelerators.hopper import _hopper as native

MODELS = {"deepseek-v3": (7168, 2048, 128), "qwen3-235b": (4096, 1536, 64)}
TOKENS = (64, 256, 1024, 8192, 32768)


def graphed(body: Callable[[], object], calls: int = 5) -> float:
    """Microseconds of one."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / calls)
    return best


def measure() -> list[str]:
    """A line for each size, on the one rank of a world."""
    lines = []
    world = mkernel.world()
    memory = torch.zeros(6 << 30, dtype=torch.uint8, device="cuda")
    control = native.ControlBlock()
    report = native.ReportBlock()
    here = native.DeviceWorld([memory.data_ptr()], 0, control.address, 20.0, 1)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2
    assert world.size == 1
    for model, (hidden, features, experts) in MODELS.items():
        for up in (True, False):
            k, n = (hidden, features) if up else (features, hidden)
            w = torch.randn(experts, k, n, device="cuda", dtype=torch.bfloat16) * 0.02
            for tokens in TOKENS:
                scores = torch.rand(tokens, 2 * experts, device="cuda")
                ids = scores.topk(8, dim=1).indices
                ids = torch.where(ids < experts, ids, -1).int()
                sizes = native.MoeSizes(world=1, tokens=tokens, top_k=8, experts=experts)
                words = torch.zeros(sizes.table_words(), dtype=torch.int32, device="cuda")
                counts = torch.zeros(experts, dtype=torch.int64, device="cuda")
                routing = native.Routing(
                    sizes=sizes, routing=words.data_ptr(), ids=ids.data_ptr(),
                    counts=counts.data_ptr(), row_bytes=2 * hidden, capacity=0, early=0,
                    exchanges=False,
                )  # fmt: skip

                def route(routing: Any = routing) -> None:
                    stream = torch.cuda.current_stream().cuda_stream
                    native.moe_route(0, here, routing, report, stream)

                of_route = graphed(route)
                rows = int(counts.sum())
                x = torch.randn(tokens if up else rows, k, device="cuda", dtype=torch.bfloat16)
                out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
                product = native.GroupedProduct(
                    sizes=sizes, routing=words.data_ptr(), a=x.data_ptr(), b=w.data_ptr(),
                    out=out.data_ptr(), n=n, k=k, height=0, half=False, n_major=True, gathers=up,
                    wide=False, home=False, waits=False, ends=False, blocks=blocks,
                )  # fmt: skip

                def multiply(product: Any = product) -> None:
                    stream = torch.cuda.current_stream().cuda_stream
                    native.moe_grouped(0, here, product, stream)

                ours = graphed(multiply)
                place = words[2 * tokens * 8 : 2 * tokens * 8 + rows].long()
                ready = x[place // 8] if up else x
                ends = counts.cumsum(0).int()
                wanted = torch._grouped_mm(ready, w, offs=ends)
                theirs = graphed(lambda a=ready, b=w, e=ends: torch._grouped_mm(a, b, offs=e))
                off = float((out.float() - wanted.float()).norm() / wanted.float().norm())
                rate = 2e-6 * rows * n * k / ours
                bytes_ = float((counts > 0).sum()) * n * k * 2e-6 / ours
                lines.append(
                    f"{model} {'up' if up else 'down'} {tokens} tokens {rows} rows: route "
                    f"{of_route:.1f}, grouped {ours:.1f}, torch {theirs:.1f} "
                    f"({ours / theirs:.2f}), {rate:.0f} TFLOP/s, weights {bytes_:.2f} TB/s, "
                    f"off by {off:.1e}"
                )
                print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    mkernel.launch(measure, ranks_per_node=1, accelerator="hopper", timeout_s=30)
