"""How well the planner's constants choose between the fused and the library path; better ones.

    mkernel bench --shapes layers --peers \\
        mkernel-fused,mkernel-library,mkernel-parts,mkernel-halves,nccl+cublas,symm_mem \\
        --ranks 4 --json FILE                    on the GPUs
    python bench/path_constants.py FILE... [--fit backends/accelerators/cuda/machine.json]

A FILE is such a result, or ``bench/results/ways.json``, which has those of all fits. One line a shape:
both paths and, where they took part, the library's in one and two parts of each rank measured and
predicted, the choice, and what it costs: the chosen way's time over the fastest way's, and over the
best peer's. ``--fit`` then searches constants that predict
the measured times, wrong choices counting most, and writes those of both paths, and of few rows, into
that backend's data file; its ``source`` is then yours to set right.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ways
from machine_file import write_section
from pydantic import ValidationError

from mkernel.backends.accelerators.cuda.capabilities import OPS
from mkernel.backends.accelerators.cuda.gemm import library_tuning, parts_tuning
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.harness.contenders import OURS
from mkernel.plan import paths
from mkernel.plan.model import DtypeName, GemmShape, LaunchPlan, OpName, ScaleMode
from mkernel.plan.planner import plan
from mkernel.topology.cost import MachineConstants, load_constants
from mkernel.topology.model import Accelerator, Node, NumaNode, Topology
from mkernel.topology.world_map import world_map

CORES = machine().cores
PARTS = {"mkernel-parts": 1, "mkernel-halves": 2}
"""Contenders, and parts of each rank."""
FITTED = ("fused", "library", "few_rows")
GROUPS = {
    "streamed": ("uneven_rate", "depth_us", "results_gbs", "loads_gbs", "sums_gbs"),
    "loaded": ("uneven", "lines_a_us"),
}
STEPS = (0.5, 0.8, 0.93, 1.07, 1.25, 2.0)
ROUNDS = 40


@dataclass(frozen=True)
class Sample:
    """One measured row. Times in microseconds; ``peer``: the best peer's, where one was right."""

    op: OpName
    shape: GemmShape
    dtype: DtypeName
    world: int
    ways: Mapping[str, float]
    peer: float | None

    def predicted(self, constants: MachineConstants) -> dict[str, float]:
        """Of the ways that were measured."""
        both = paths.predict(self.op, self.shape, self.dtype, self.world, CORES, CORES, constants)
        if both is None or constants.library is None:
            raise SystemExit(f"constants {constants.name!r} lack those of a path")
        found = {"mkernel-fused": both[0].pipelined_us, "mkernel-library": both[1].pipelined_us}
        for name, parts in PARTS.items():
            if name in self.ways:
                times = library_tuning.times(self.plan, parts, CORES, constants)
                found[name] = times.pipelined + constants.library.start_us
        return found

    @cached_property
    def plan(self) -> LaunchPlan:
        """On the library path."""
        sizes = self.shape.model_dump(exclude={"kind"})
        return plan_of(self.op, sizes, self.world, dtype=self.dtype, path="library")

    def choice(self, constants: MachineConstants) -> str:
        """Of the ways that plans may take."""
        predicted, taken = self.predicted(constants), parts_tuning.ways(self.plan)
        legal = [name for name in predicted if PARTS.get(name, parts_tuning.WHOLE) in taken]
        return min(legal, key=predicted.__getitem__)

    def cost(self, constants: MachineConstants) -> float:
        """The chosen way's time over the fastest way's."""
        return self.ways[self.choice(constants)] / min(self.ways.values())


def plan_of(op: str, sizes: dict[str, int], world: int, **options: Any) -> LaunchPlan:
    """Such a call's plan, on a node of that many GPUs. ``options``: of the planner."""
    modes: tuple[ScaleMode, ...] = ("tensor", "row", "block")
    claims = HopperAccelerator().capabilities().model_copy(
        update={
            "ops": OPS, "library_ops": OPS, "scale_modes": modes, "fused_scale_modes": modes[:2],
            "fused_float32_scale_modes": modes[:2],
        }
    )  # fmt: skip
    gpus = tuple(
        Accelerator(id=f"cuda{i}", kind="cuda", name="H200", index=i, numa_node=0)
        for i in range(world)
    )
    node = Node(id=0, hostname="host", numa=(NumaNode(id=0, cpus=(0,)),), accelerators=gpus)
    where = world_map(Topology(nodes=(node,)), world, claims.constants)
    return plan(
        op, sizes, world=where, nic=None, verbs=None, capabilities=claims, accelerator="hopper",
        schedule=HopperAccelerator().schedule, **options,
    )  # fmt: skip


def samples(files: list[Path]) -> Iterator[Sample]:
    """The rows of one call a turn, or of a graph of calls, of which both paths were right."""
    names = ("mkernel-fused", "mkernel-library", *PARTS)
    for one in ways.measured(files):
        if one.mode not in ("kernel", "graph") or one.scales or not {*names[:2]} <= one.us.keys():
            continue
        yield Sample(
            one.op, GemmShape(m=one.m, n=one.n, k=one.k), one.dtype, one.ranks,
            {name: one.us[name] for name in names if name in one.us},
            min((us for name, us in one.us.items() if name not in OURS), default=None),
        )  # fmt: skip


def table(found: list[Sample], constants: MachineConstants) -> None:
    print(f"{'op':20} {'M x N x K':>22} W {'us / predicted: fused, library, 1 and 2 parts':60}"
          f"  {'choice':16} {'cost':>5} {'/peer':>6}")  # fmt: skip
    over = []
    for one in found:
        predicted, choice = one.predicted(constants), one.choice(constants)
        chosen = one.ways[choice]
        peer = "" if one.peer is None else f"{chosen / one.peer:6.3f}"
        size = f"{one.shape.m} x {one.shape.n} x {one.shape.k}"
        ways = "".join(f"{us:7.1f} / {predicted[name]:5.0f}" for name, us in one.ways.items())
        print(f"{one.op:20} {size:>22} {one.world} {ways:60}  {choice:16} "
              f"{one.cost(constants):5.2f} {peer}")  # fmt: skip
        over.append(one.peer is not None and chosen > 1.03 * one.peer)
    costs = [one.cost(constants) for one in found]
    print(f"{len(found)} shapes: {sum(cost > 1.03 for cost in costs)} choices cost more than 3 %, "
          f"{statistics.geometric_mean(costs):.4f} in the mean, {sum(over)} are more than 3 % behind "
          f"a peer; loss {loss(found, constants):.4f}")  # fmt: skip


def loss(found: list[Sample], constants: MachineConstants) -> float:
    """Mean of squared logarithms: of predicted over measured, and ten times that of the choice."""
    total = 0.0
    for one in found:
        predicted = one.predicted(constants)
        total += sum(math.log(predicted[name] / us) ** 2 for name, us in one.ways.items())
        total += 10 * math.log(one.cost(constants))
    return total / len(found)


def variables(tree: dict[str, object]) -> list[tuple[object, ...]]:
    """Where the numbers lie that are searched."""
    names = (
        "start_us", "tile_us", "split_us", "exchange_us", "egress_gbs", "unhidden_gather",
        "unhidden_scatter", "unhidden_reduce",
    )  # fmt: skip
    found: list[tuple[object, ...]] = []
    for path in FITTED:
        part = tree[path]
        assert isinstance(part, dict)
        found += [(path, name) for name in names if part.get(name)]
        for group, numbers in GROUPS.items():
            found += [(path, group, name) for name in numbers if part.get(group, {}).get(name)]
        products = (
            (("tiles",), part.get("tiles", ())),
            (
                ("streamed", "tiles"),
                part.get("streamed", {}).get("tiles", ()),
            ),
        )
        for where, tiles in products:
            found += [(path, *where, i, "tflops_per_core") for i in range(len(tiles))]
    return found


def scaled(tree: dict[str, object], where: tuple[object, ...], by: float) -> dict[str, object]:
    copy = json.loads(json.dumps(tree))
    place = copy
    for part in where[:-1]:
        place = place[part]
    place[where[-1]] = float(f"{place[where[-1]] * by:.4g}")
    found: dict[str, object] = copy
    return found


def searched(
    tree: dict[str, Any],
    places: Callable[[dict[str, Any]], list[tuple[object, ...]]],
    rated: Callable[[dict[str, Any]], float],
    steps: Sequence[float],
    rounds: int,
) -> dict[str, Any]:
    """Coordinate search from the given constants: the number in each of the places times each step,
    while that lowers what ``rated`` says. ValidationError of it: no legal constants."""
    best = rated(tree)
    for _ in range(rounds):
        before = best
        for where in places(tree):
            for by in steps:
                candidate = scaled(tree, where, by)
                try:
                    value = rated(candidate)
                except ValidationError:  # a share above 1
                    continue
                if value < best:
                    tree, best = candidate, value
        if before - best < 1e-5:
            break
    return tree


def fit(found: list[Sample], tree: dict[str, object]) -> dict[str, object]:
    """The constants by which the samples are predicted best, near the given ones."""

    def rated(candidate: dict[str, object]) -> float:
        return loss(found, MachineConstants.model_validate(candidate))

    return searched(tree, variables, rated, STEPS, ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--constants", type=Path, help="a file of constants [the backend's own]")
    parser.add_argument("--fit", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = list(samples(options.files))
    if not found:
        raise SystemExit("no row has both mkernel-fused and mkernel-library")
    constants = load_constants(options.constants) if options.constants else machine().constants
    table(found, constants)
    if options.fit:
        tree = fit(found, constants.model_dump(mode="json", exclude_unset=True))
        table(found, MachineConstants.model_validate(tree))
        own = json.loads(options.fit.read_text())["constants"]
        write_section(options.fit, "constants", own | {path: tree[path] for path in FITTED})


if __name__ == "__main__":
    main()
