"""Times of the MoE ops of ``hopper`` on two GPUs, whole calls with a capacity in CUDA graphs.

    python3 bench/moe_ops.py [result.json]

It needs a build that claims the ops (``hopper/capabilities.py``).

Random balanced routing, top-8; microseconds a call of the slowest rank, best of four replays of a
graph of three calls. ``tokens`` counts those of both ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import mkernel

MODELS = {"deepseek-v3": (7168, 2048, 256), "qwen3-235b": (4096, 1536, 128)}
TOKENS = (64, 256, 1024, 8192, 32768, 65536)
CALLS, REPLAYS = 3, 4


def graphed(body: Any) -> float:
    """Microseconds of one call on this rank."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            body()
    best = float("inf")
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        mkernel.world().barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / CALLS)
    mkernel.synchronize()
    return best


def measured() -> list[dict[str, Any]]:
    """A row for each size."""
    world, rows = mkernel.world(), []
    for model, (hidden, features, experts) in MODELS.items():
        each = experts // world.size
        w = torch.randn(each, hidden, features, device="cuda", dtype=torch.bfloat16) * 0.02
        w2 = torch.randn(each, features, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
        for tokens in TOKENS:
            own = tokens // world.size
            x = torch.randn(own, hidden, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(own, experts, device="cuda").topk(8, dim=1).indices.int()
            weights = torch.rand(own, 8, device="cuda")
            capacity = tokens * 8 // world.size * 5 // 4 + 256

            def up(x: Any = x, ids: Any = ids, w: Any = w, capacity: int = capacity) -> Any:
                return mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity)

            sent = up()
            row: dict[str, Any] = {
                "model": model,
                "tokens": tokens,
                "dispatch_gemm_us": graphed(up),
            }
            for returns in ("slots", "ranks"):

                def down(
                    returns: Any = returns, sent: Any = sent, weights: Any = weights, w2: Any = w2
                ) -> Any:
                    return mkernel.moe_gemm_combine(
                        sent.outputs, w2, sent.handle, weights, returns=returns
                    )

                row[f"gemm_combine_{returns}_us"] = graphed(down)
            rows.append(row)
            if world.rank == 0:
                print(row, flush=True)
            del sent
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Print the rows; write them where a file is named."""
    found = mkernel.launch(measured, ranks_per_node=2, accelerator="hopper", timeout_s=60)
    slowest = [
        {name: max(one[name] for one in rows) for name in rows[0]}
        for rows in zip(*found, strict=True)
    ]
    for row in slowest:
        print({name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()})
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": slowest}, file, indent=1)


if __name__ == "__main__":
    main()
