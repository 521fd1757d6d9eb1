"""A decode step's MLP, tensor parallel: two products, the sum over ranks, the residual and the norm.

    torchrun --nproc-per-node 2 examples/decode_layer.py
    torchrun --nproc-per-node 4 examples/decode_layer.py --batches 1 8 64

A step has few rows, one for each sequence of the batch. On GPUs every batch size is a CUDA graph, which
is captured once and replayed with new tokens, so that the host's part of a call is paid once. Each rank
prints its largest error against float64 and leaves with exit code 1 where it is too large.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import mkernel

STEPS = 3


class Layer:
    """down(silu(up(x))) + residual, and its RMSNorm. A rank has a part of the features in between."""

    def __init__(self, hidden: int, features: int, rank: int, size: int, device: str) -> None:
        generator = torch.Generator().manual_seed(7)  # the same weights on every rank
        up = torch.randn(hidden, features, generator=generator) / hidden**0.5
        down = torch.randn(features, hidden, generator=generator) / features**0.5
        self.whole = up.half().double(), down.half().double()
        mine = slice(rank * features // size, (rank + 1) * features // size)
        self.up, self.down = up[:, mine].half().to(device), down[mine].half().to(device)
        self.scale = torch.ones(hidden, dtype=torch.float16, device=device)

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The next layer's x and residual: [batch, hidden]."""
        return mkernel.gemm_all_reduce(
            torch.nn.functional.silu(x @ self.up),
            self.down,
            residual=residual,
            norm_weight=self.scale,
        )

    def reference(self, x: Tensor, residual: Tensor) -> Tensor:
        """The next x, in float64 on the CPU."""
        up, down = self.whole
        y = torch.nn.functional.silu(x.cpu().double() @ up) @ down + residual.cpu().double()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


def replayable(step: Callable[[], tuple[Tensor, Tensor]], device: str) -> Callable[[], Tensor]:
    """The step; on a GPU as a graph, which reads and writes the same tensors in every replay."""
    if not device.startswith("cuda"):
        return lambda: step()[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # plans and workspaces are made outside of the capture
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--features", type=int, default=2048, help="between the products")
    options = parser.parse_args()

    world = mkernel.init()
    try:
        device = str(world.accelerator.device)  # of this rank: "cpu", "cuda:0"
        layer = Layer(options.hidden, options.features, world.rank, world.size, device)
        generator = torch.Generator().manual_seed(8)
        worst = 0.0
        for batch in options.batches:
            x, residual = (
                torch.zeros(batch, options.hidden, dtype=torch.float16, device=device) for _ in "xr"
            )
            step = replayable(lambda x=x, residual=residual: layer(x, residual), device)
            for _ in range(STEPS):
                for tensor in (x, residual):  # new tokens, the same on every rank
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                y, reference = step().cpu().double(), layer.reference(x, residual)
                worst = max(worst, float((y - reference).norm() / reference.norm()))
        batches = ", ".join(map(str, options.batches))
        print(
            f"rank {world.rank} of {world.size} on {device}: batches of {batches}, error {worst:.1e}"
        )
    finally:
        mkernel.finalize()
    return 0 if worst <= 2e-3 else 1  # the features in between and the result are rounded to half


if __name__ == "__main__":
    sys.exit(main())
