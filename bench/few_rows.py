"""Times of GEMM+AllReduce of few rows on two GPUs, beside its peers, in CUDA graphs with cold weights.

    python3 bench/few_rows.py [result.json]

Microseconds a call of the slowest rank, median of 7 replays. A graph has as many calls as there are
copies of the weights, 160 MB of them at least, so that each call reads its own from device memory.
``mm``: the product alone; peers: ``mm`` into symmetric memory and torch's one-shot or two-shot
all-reduce of it, or NCCL's, without multicast; ``library``, ``fused``: mkernel's paths. With
``_norm``: and a residual and RMSNorm behind it, two kernels of torch; ``norm``: mkernel's call with
these. ``splits_S``, for S in the variable SPLITS: the few-rows kernel without exchange, K cut into S.
The variables ROWS, LAYERS and CONTENDERS name some of these: ``ROWS=1,64 LAYERS="8b o,70b o"``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graphs import captured, replay_us
from results_file import described
from torch import distributed
from torch.nn.functional import rms_norm

import mkernel
from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.harness.contenders.symm_mem import ENVIRONMENT
from mkernel.ops.gemm_all_reduce import OP
from mkernel.world.world import World

ALL_LAYERS = {
    "8b o": (4096, 2048),
    "8b down": (4096, 7168),
    "70b o": (8192, 4096),
    "70b down": (8192, 14336),
    "deepseek-v3 o": (7168, 8192),
}
LAYERS = (
    {each: ALL_LAYERS[each] for each in os.environ["LAYERS"].split(",")}
    if ("LAYERS" in os.environ)
    else ALL_LAYERS
)
ROWS = tuple(int(each) for each in os.environ.get("ROWS", "1,16,32,64,128,256").split(","))
COLD_BYTES = 160 << 20
REPLAYS = 7
PEERS = ("one_shot", "two_shot", "nccl")
CONTENDERS = tuple(
    os.environ["CONTENDERS"].split(",")
    if "CONTENDERS" in os.environ
    else ("mm", *PEERS, "library", "fused", "norm", *(f"{peer}_norm" for peer in PEERS))
)


def graphed(calls: list[Callable[[], object]]) -> float:
    """Microseconds of a call: each of the list once in a graph."""
    graph, times = captured(calls), []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        distributed.barrier()
        torch.cuda.synchronize()
        times.append(replay_us(graph, len(calls)))
    slowest = torch.tensor(times, device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return round(statistics.median(slowest.tolist()), 2)


class Contenders:
    """Calls on one rank's rows `a`, by name; `shared` is symmetric memory of torch's."""

    def __init__(
        self, a: torch.Tensor, out: torch.Tensor, shared: torch.Tensor, group: str
    ) -> None:
        self._a, self._out, self._shared, self._group = a, out, shared, group
        self._residual, self._weight = torch.randn_like(out), torch.ones_like(out[0])

    def mm(self, b: torch.Tensor) -> None:
        torch.mm(self._a, b, out=self._out)

    def one_shot(self, b: torch.Tensor) -> None:
        torch.mm(self._a, b, out=self._shared)
        torch.ops.symm_mem.one_shot_all_reduce(self._shared, "sum", self._group)

    def two_shot(self, b: torch.Tensor) -> None:
        torch.mm(self._a, b, out=self._shared)
        torch.ops.symm_mem.two_shot_all_reduce_(self._shared, "sum", self._group)

    def nccl(self, b: torch.Tensor) -> None:
        torch.mm(self._a, b, out=self._out)
        distributed.all_reduce(self._out)

    def _normed(self, total: torch.Tensor) -> None:
        new = total + self._residual
        rms_norm(new, self._weight.shape, self._weight, 1e-6)

    def one_shot_norm(self, b: torch.Tensor) -> None:
        torch.mm(self._a, b, out=self._shared)
        self._normed(torch.ops.symm_mem.one_shot_all_reduce(self._shared, "sum", self._group))

    def two_shot_norm(self, b: torch.Tensor) -> None:
        self.two_shot(b)
        self._normed(self._shared)

    def nccl_norm(self, b: torch.Tensor) -> None:
        self.nccl(b)
        self._normed(self._out)

    def norm(self, b: torch.Tensor) -> None:
        mkernel.gemm_all_reduce(
            self._a, b, residual=self._residual, norm_weight=self._weight, out=self._out
        )

    def library(self, b: torch.Tensor) -> None:
        OP.call(self._a, b, out=self._out, path="library")

    def fused(self, b: torch.Tensor) -> None:
        OP.call(self._a, b, out=self._out, path="fused")


def measured(splits: list[int]) -> list[dict[str, Any]]:
    """A row for each size."""
    from torch.distributed import _symmetric_memory

    world, rows = mkernel.world(), []
    group = distributed.group.WORLD
    assert group is not None
    name = group.group_name
    for layer, (n, k) in LAYERS.items():
        count = max(4, -(-COLD_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k, device="cuda").bfloat16().t() for _ in range(count)]
        for m in ROWS:
            a = torch.randn(m, k, device="cuda").bfloat16()
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            shared = _symmetric_memory.empty(m, n, device="cuda", dtype=torch.bfloat16)
            _symmetric_memory.rendezvous(shared, name)

            contenders = Contenders(a, out, shared, name)
            plan = mkernel.plan(
                "gemm_all_reduce", m=m, n=n, k=k, dtype="bfloat16", b_layout="column", path="fused"
            )
            row: dict[str, Any] = {"layer": layer, "m": m, "n": n, "k": k}
            row["schedule"] = plan.schedule.model_dump() if plan.schedule else None
            for contender in CONTENDERS:
                call = getattr(contenders, contender)
                row[contender] = graphed([partial(call, b) for b in weights])
            for each in splits:
                row[f"splits_{each}"] = graphed(_split_calls(each, a, weights, out))
            for ours, more in (("fused", ""), ("norm", "_norm")):
                peers = [row[peer + more] for peer in PEERS if peer + more in row]
                if ours in row and peers:
                    row["ratio" + more] = round(row[ours] / min(peers), 3)
            rows.append(row)
            if world.rank == 0:
                shown = {key: value for key, value in row.items() if key != "schedule"}
                print(shown, row["schedule"]["kind"], flush=True)
        del weights
        torch.cuda.empty_cache()
    mkernel.synchronize()
    return rows


def _split_calls(splits: int, a: Any, weights: Any, out: Any) -> list[Callable[[], object]]:
    """The kernel with K cut into so many parts, in a world of this rank alone: without exchange."""
    from mkernel.backends.accelerators.hopper import _hopper as native

    memory = torch.zeros(80 << 20, dtype=torch.uint8, device="cuda")
    control = native.ControlBlock()
    here = native.DeviceWorld([memory.data_ptr()], 0, control.address, 20.0, 1)
    (m, k), n = a.shape, out.shape[1]
    product = native.Product(
        n=n, k=k, half=False, n_major=False, tiling=native.Tiling.narrow, band=1, blocks=0
    )
    schedule = native.FewRowsSchedule(m=m, splits=splits, unrounded=False)
    calls = native.FewRowsCalls(torch.cuda.current_device(), here, product, schedule)

    def call(b: torch.Tensor) -> object:
        tensors = native.GemmTensors(a.data_ptr(), b.data_ptr(), out.data_ptr())
        calls.start(1, 20.0, tensors, torch.cuda.current_stream().cuda_stream)
        return memory, control

    return [partial(call, b) for b in weights]


@contextmanager
def torch_group(store: str) -> Iterator[World]:
    """torch's group of the world's ranks, which meet at a file."""
    os.environ.update(ENVIRONMENT)
    world = mkernel.world()
    distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip
    try:
        yield world
    finally:
        distributed.destroy_process_group()


def ranks(splits: list[int], store: str) -> list[dict[str, Any]]:
    """What a rank runs."""
    with torch_group(store):
        return measured(splits)


def with_few_rows(file: Path) -> None:
    """Ranks find constants in ``file`` by which the fused path is that kernel wherever it fits. No time
    here depends on them."""
    constants = machine().constants
    if "MKERNEL_CONSTANTS" in os.environ:
        return
    assert constants.few_rows is not None
    few = constants.few_rows.model_copy(update={"most_rows": 256, "least_columns": 1})
    file.write_text(constants.model_copy(update={"few_rows": few}).model_dump_json())
    os.environ["MKERNEL_CONSTANTS"] = str(file)


def main() -> None:
    """Both GPUs."""
    store = f"/tmp/few_rows_{os.getpid()}"
    with_few_rows(Path(store + ".json"))
    splits = [int(each) for each in os.environ.get("SPLITS", "").split(",") if each]
    os.environ.update(ENVIRONMENT)
    found = mkernel.launch(
        ranks, splits, store, ranks_per_node=2, accelerator="hopper", timeout_s=60
    )
    if len(sys.argv) > 1:
        told = described("few_rows", {"rows": found[0]})
        Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
