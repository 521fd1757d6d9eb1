"""Attention by one kernel (`kernels/attention_core.*`) beside cuDNN's on one GPU, forward.

    python bench/attention_core.py [--sequences 8192,16384] [--repeat 9]

B 1, D 128, bfloat16, full and causal, 16 heads with as many of keys, and 32 with 8, as many queries as
keys. Each turn replays a CUDA graph of some 2 ms of calls, of the kernel and of cuDNN by turns; a time
is the median over turns, a call. L2 is not flushed. Writes bench/results/hopper_attention_core.json.
Bar: at least 0.95 of cuDNN's rate.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import results_file
import torch
from graphs import captured, replay_us

from mkernel.backends.accelerators.hopper.native import native

HEADS = ((16, 16), (32, 8))
WIDTH = 128
GRAPH_FLOPS = 1.2e12
BAR = 0.95


def row(heads: int, kv_heads: int, sequence: int, causal: bool, repeat: int) -> dict[str, Any]:
    """Microseconds of both, and cuDNN's by the kernel's."""

    def normal(count: int) -> torch.Tensor:
        return torch.randn(1, count, sequence, WIDTH, dtype=torch.bfloat16, device="cuda")

    q, k, v, scale = normal(heads), normal(kv_heads), normal(kv_heads), WIDTH**-0.5
    out, counters = torch.empty_like(q), torch.zeros(2, dtype=torch.int32, device="cuda")
    lse = torch.empty(1, heads, sequence, device="cuda")
    core = native().Core(
        [(each.data_ptr(), each.stride()[:3]) for each in (q, k, v, out)],
        lse.data_ptr(),
        counters.data_ptr(),
        (1, heads, kv_heads, sequence, sequence),
        scale,
        causal,
        False,
    )

    def ours() -> None:
        native().attend(0, core, torch.cuda.current_stream().cuda_stream)

    def cudnn() -> None:
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        attention(q, k, v, None, True, 0.0, causal, False)

    flops = 4 * heads * sequence**2 * WIDTH / (2 if causal else 1)
    calls = max(2, round(GRAPH_FLOPS / flops))
    graphs = {call.__name__: captured([call] * calls) for call in (ours, cudnn)}
    turns: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(repeat + 1):
        for name, graph in graphs.items():
            took = replay_us(graph, calls)
            if turn:
                turns[name].append(took)
    us = {name: statistics.median(each) for name, each in turns.items()}
    return {
        "heads": heads, "kv_heads": kv_heads, "sequence": sequence, "causal": causal,
        "us": {name: round(each, 1) for name, each in us.items()},
        "tflops": {name: round(flops / each / 1e6, 1) for name, each in us.items()},
        "of_cudnn": round(us["cudnn"] / us["ours"], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="8192,16384")
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    rows = [
        row(heads, kv_heads, int(sequence), causal, arguments.repeat)
        for heads, kv_heads in HEADS
        for sequence in arguments.sequences.split(",")
        for causal in (False, True)
    ]
    held = sum(each["of_cudnn"] >= BAR for each in rows)
    results_file.write(
        "hopper_attention_core",
        {
            "cudnn": torch.backends.cudnn.version(),
            "bar": f"at least {BAR} of cuDNN's rate: {held} of {len(rows)}",
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
