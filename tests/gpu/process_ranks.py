"""A rank of test_processes_on_gpus, which torchrun starts as it starts a user's program."""

from __future__ import annotations

import argparse
import os

import gpu_shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-gpu", action="store_true", help="show this process no other GPU")
    if parser.parse_args().one_gpu:
        own = gpu_shares.visible()[int(os.environ["LOCAL_RANK"])]
        os.environ["CUDA_VISIBLE_DEVICES"] = own  # CUDA reads it as it starts
    import torch
    from calls import judged, replayed
    from hopper_ranks import OPS, Shape

    import mkernel

    world = mkernel.init(accelerator="hopper", timeout_s=100)
    shapes = [
        Shape(op, 1024, 768, 512, path=path) for path in ("fused", "library", None) for op in OPS
    ]
    failures = judged(shapes, 1)
    for turn, shape in enumerate(shapes[-len(OPS) :]):  # with results that torch allocates
        work = shape.work()
        work.fill(turn)
        failures += work.failure(turn, work.public(), "allocated")
    failures += replayed(shapes, 10)
    expandable = any(each.get("is_expandable") for each in torch.cuda.memory_snapshot())
    mkernel.finalize()
    seen = f"{torch.cuda.device_count()} GPU(s), expandable segments {expandable}"
    print(f"rank {world.rank} sees {seen}: {len(failures)} failures {failures[:5]}")


if __name__ == "__main__":
    main()
