"""Ring attention on `hopper` against the same calls of the library on parts that are already there.

    python bench/attention_parts.py [--backward] [--ranks 2] [--sequences 8192,16384] [--calls 10]
        [--repeat 15]

B 1, D 128, bfloat16, full and causal, 16 heads with as many of keys, and 32 with 8. Each turn replays a
CUDA graph of so many calls from a barrier, `mkernel` and `alone` by turns; a time is the median over
turns of the slowest rank, a call. *Alone* has no merge and no communication. L2 is not flushed.
Bars: at most 1.08 of alone at S 8192, 1.05 at 16384, 1.03 from 24576 on; with --backward, which times
the gradients of q, k and v, 1.08 from 16384 on.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from graphs import captured, replay_us

import mkernel
from mkernel.backends.accelerators.hopper.attention_library import Results, attend, gradients

HEADS = ((16, 16), (32, 8))
WIDTH = 128
BARS = ((8192, 1.08), (16384, 1.05), (24576, 1.03))
BACKWARD_BARS = ((16384, 1.08),)


def times(
    heads: int,
    kv_heads: int,
    sequence: int,
    causal: bool,
    calls: int,
    repeat: int,
    backward: bool,
) -> dict[str, list[float]]:
    """Microseconds a call of each turn on this rank."""
    world = mkernel.world()
    rows = sequence // world.size

    def normal(count: int) -> torch.Tensor:
        return torch.randn(1, count, rows, WIDTH, dtype=torch.bfloat16, device="cuda")

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    others = [(normal(kv_heads), normal(kv_heads)) for _ in range(world.size - 1)]
    scale, half = WIDTH**-0.5, rows // 2

    out, lse = mkernel.ring_attention(q, k, v, causal=causal, return_lse=True)
    results = Results(q, out, normal(heads), lse, None)

    def part(keys: torch.Tensor, values: torch.Tensor, first: int, ordered: bool) -> None:
        if backward:
            gradients(results, keys, values, first, ordered, scale)
        else:
            attend(q, keys, values, first, ordered, scale)

    def seen(step: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not causal:
            part(keys, values, 0, False)
        elif (world.rank - step) % world.size < world.rank:
            part(keys[:, :, :half], values[:, :, :half], 0, False)
        else:
            part(keys, values, half, False)

    def alone() -> None:
        part(k, v, 0, causal)
        for step, (keys, values) in enumerate(others, 1):
            seen(step, keys, values)

    def ours() -> None:
        if backward:
            torch.ops.mkernel.ring_attention_backward(
                results.of_out, None, q, k, v, None, out, lse, causal=causal, group=world.name
            )
        else:
            mkernel.ring_attention(q, k, v, causal=causal)

    graphs = {"mkernel": captured([ours] * calls), "alone": captured([alone] * calls)}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeat):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            world.barrier()
            found[name].append(replay_us(graph, calls))
    mkernel.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", default="8192,16384,24576,49152,98304")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    print(f"{'S':>7} {'heads':>7} {'':7} {'mkernel':>9} {'alone':>9}  us; ratio, bar")
    for sequence in map(int, given.sequences.split(",")):
        for heads, kv_heads in HEADS:
            for causal in (False, True):
                ranks = mkernel.launch(
                    times, heads, kv_heads, sequence, causal, given.calls, given.repeat,
                    given.backward,
                    ranks_per_node=given.ranks, accelerator="hopper", timeout_s=30,
                )  # fmt: skip
                ours, alone = (
                    statistics.median(
                        max(turn) for turn in zip(*(r[name] for r in ranks), strict=True)
                    )
                    for name in ("mkernel", "alone")
                )
                bars = BACKWARD_BARS if given.backward else BARS
                bar = max(
                    (limit for least, limit in bars if sequence <= least), default=bars[-1][1]
                )
                print(
                    f"{sequence:7} {heads:4}/{kv_heads:<2} {'causal' if causal else 'full':7} "
                    f"{ours:9.1f} {alone:9.1f}  {ours / alone:.3f}, {bar}"
                )


if __name__ == "__main__":
    main()
