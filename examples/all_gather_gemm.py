"""A sequence-parallel linear layer: every rank holds some rows of x and some columns of the weight.

    torchrun --nproc-per-node 4 examples/all_gather_gemm.py
    torchrun --nproc-per-node 4 examples/all_gather_gemm.py --nodes 2   # two emulated nodes

Under torchrun on several hosts each host is a node; docs/nics.md has the command.
Each rank prints its error against float64 and leaves with exit code 1 where it is too large.
"""

import argparse
import sys

import torch

import mkernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, help="default: the hosts; more are emulated on them")
    parser.add_argument("--tokens", type=int, default=1024, help="rows of x, all ranks together")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--features", type=int, default=2048, help="of all ranks together")
    options = parser.parse_args()

    world = mkernel.init(nodes=options.nodes)
    try:
        generator = torch.Generator().manual_seed(7)  # the same on every rank, to have a reference
        x = torch.randn(options.tokens, options.hidden, generator=generator).half()
        layer = torch.nn.Linear(options.hidden, options.features // world.size, bias=False)
        torch.nn.init.normal_(layer.weight, generator=generator)
        weight = layer.weight.detach().half()  # [features of this rank, hidden]

        rows = options.tokens // world.size
        mine = x[world.rank * rows : (world.rank + 1) * rows]
        device = world.accelerator.device  # of this rank: "cpu", "cuda"
        y = mkernel.all_gather_gemm(mine.to(device), weight.to(device).t()).cpu()  # in half

        reference = x.double() @ weight.t().double()
        error = float((y.double() - reference).norm() / reference.norm())
        print(f"rank {world.rank} of {world.size} on node {world.identity.node}: error {error:.1e}")
    finally:
        mkernel.finalize()
    return 0 if error <= 1e-3 else 1  # the result is rounded to half once


if __name__ == "__main__":
    sys.exit(main())
