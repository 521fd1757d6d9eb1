"""How well the constants of e4m3 products choose between the fused and the library path; better ones.

    mkernel bench ag_gemm,gemm_rs,gemm_ar --shapes FILE --dtype float8_e4m3 --scales row \\
        --fast-accum --mode graph --peers mkernel-fused,mkernel-library --ranks 2 \\
        --json FILE                                                          on the GPUs
    python bench/scaled_constants.py FILE... [--held-out FILE...] \\
        [--fit backends/accelerators/cuda/machine.json]

One line a shape: both paths measured and predicted, the choice, and what it costs, the chosen path's
time over the faster path's. ``--fit`` then searches constants that predict the measured times, wrong
choices counting most, and writes those of the fused kernels and of the library's products (``fused``
and ``fast``, or, of files without ``--fast-accum``, ``promoted``) into that backend's data file; its
``source`` is then yours to set right. Files of ``--held-out`` are judged, before and after, and never
fitted to.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ways
from machine_file import write_section
from path_constants import STEPS, plan_of, searched

from mkernel.backends.accelerators.cuda.gemm import parts_tuning, scaled_tuning
from mkernel.backends.accelerators.cuda.machine import CudaMachine, Scaled, machine
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.hopper.gemm import scaled_tuning as fused_tuning
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule, ReduceSchedule
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan, ScaleMode, Scales

CORES = machine().cores
ROUNDS = 60
NUMBERS = ("start_us", "tile_us", "exchange_us", "egress_gbs", "unhidden_gather",
           "unhidden_scatter", "unhidden_reduce")  # fmt: skip
SHARES = tuple(name for name in NUMBERS if name.startswith("unhidden"))


@dataclass(frozen=True)
class Sample:
    """One measured row, in microseconds."""

    plan: LaunchPlan
    fused: float
    library: float

    def predicted(self) -> tuple[float, float]:
        """By the constants that :func:`use` set."""
        constants = machine().constants
        fused = fused_tuning.fused(self.plan, self.tiling, CORES, constants)
        assert fused is not None
        library = min(
            scaled_tuning.times(self.plan, parts, CORES).pipelined
            for parts in parts_tuning.ways(self.plan)
        )
        start = scaled_tuning._MACHINE.scaled.product.start_us
        return fused.pipelined_us, library + start

    @property
    def tiling(self) -> TilingName:
        """Of the fused path."""
        schedule = self.plan.schedule
        assert isinstance(schedule, GatherSchedule | ReduceSchedule)
        return schedule.tiling

    @property
    def columns(self) -> int:
        """Of its tiles."""
        return machine().tilings.clusters[self.tiling][1]

    def cost(self) -> float:
        """The chosen path's time over the faster path's."""
        fused, library = self.predicted()
        chosen = self.fused if fused < library else self.library
        return chosen / min(self.fused, self.library)


def fused_plan(
    op: str, sizes: dict[str, int], world: int, mode: ScaleMode, fast: bool
) -> LaunchPlan:
    """Such a call's plan on the fused path."""
    around = Around(scales=Scales(mode=mode, use_fast_accum=fast))
    return plan_of(
        op, sizes, world, dtype="float8_e4m3fn", b_layout="column", around=around, path="fused"
    )


def samples(files: Iterable[Path]) -> Iterator[Sample]:
    """The rows of which both paths were right."""
    for one in ways.measured(files):
        # The planner took the library's path as long as it knew no times of the fused one.
        library = one.us.get("mkernel-library", one.us.get("mkernel"))
        if one.scales in (None, "block") or one.mode != "graph" or library is None:
            continue  # scales by blocks have the library's path alone
        if "mkernel-fused" in one.us:
            sizes = {"m": one.m, "n": one.n, "k": one.k}
            made = fused_plan(one.op, sizes, one.ranks, one.scales, one.fast_accum)
            yield Sample(made, one.us["mkernel-fused"], library)


def use(section: Scaled) -> None:
    """Predictions are by these constants from now on."""
    known: CudaMachine = machine().model_copy(update={"scaled": section})
    scaled_tuning._MACHINE = fused_tuning._MACHINE = known


def table(title: str, found: list[Sample]) -> None:
    """By the constants in use."""
    if not found:
        return
    print(f"{title}\n{'op':20} {'M x N x K':>22} {'fused us':>9} {'pred.':>7} {'library':>9} "
          f"{'pred.':>7}  {'choice':8} {'cost':>5}")  # fmt: skip
    for one in found:
        fused, library = one.predicted()
        shape = one.plan.gemm
        size = f"{shape.m} x {shape.n} x {shape.k}"
        choice = "fused" if fused < library else "library"
        print(f"{one.plan.op:20} {size:>22} {one.fused:9.1f} {fused:7.1f} {one.library:9.1f} "
              f"{library:7.1f}  {choice:8} {one.cost():5.2f}")  # fmt: skip
    costs = [one.cost() for one in found]
    wrong = sum(cost > 1.03 for cost in costs)
    print(f"{len(found)} shapes: {wrong} choices cost more than 3 %, at most {max(costs):.3f}; "
          f"loss {loss(found):.4f}\n")  # fmt: skip


def loss(found: list[Sample], choice: float = 10.0) -> float:
    """Mean of squared logarithms: of predicted over measured, of their ratio, which is what chooses,
    and ``choice`` times the logarithm of what the choice costs."""
    total = 0.0
    for one in found:
        fused, library = one.predicted()
        ours, theirs = math.log(fused / one.fused), math.log(library / one.library)
        total += ours**2 + theirs**2 + 3 * (ours - theirs) ** 2 + choice * math.log(one.cost())
    return total / len(found)


def fit(found: list[Sample], tree: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The constants by which the samples are predicted best, near the given ones. First by the times
    alone, since a choice changes all at once."""
    for choice in (0.0, 10.0):
        tree = _searched(found, tree, names, choice)
    use(Scaled.model_validate(tree))
    return tree


def _searched(
    found: list[Sample], tree: dict[str, Any], names: tuple[str, ...], choice: float
) -> dict[str, Any]:
    def rated(candidate: dict[str, Any]) -> float:
        use(Scaled.model_validate(candidate))
        return loss(found, choice)

    steps = (*STEPS, 0.97, 1.03, 0.99, 1.01)
    return searched(tree, partial(variables, names=names), rated, steps, ROUNDS)


def variables(tree: dict[str, Any], names: tuple[str, ...]) -> list[tuple[object, ...]]:
    """Where the numbers lie that are searched."""
    found: list[tuple[object, ...]] = []
    for path in names:
        part = tree[path]
        found += [(path, name) for name in NUMBERS if part.get(name)]
        found += [(path, "tiles", i, "tflops_per_core") for i in range(len(part["tiles"]))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--held-out", nargs="*", type=Path, default=[])
    parser.add_argument("--fit", type=Path, metavar="FILE")
    options = parser.parse_args()
    found, others = list(samples(options.files)), list(samples(options.held_out))
    if not found:
        raise SystemExit("no row has both mkernel-fused and mkernel or mkernel-library")
    scales = [one.plan.scales for one in found]
    fast = {each.use_fast_accum for each in scales if each is not None}
    if len(fast) != 1:
        raise SystemExit("the files differ in --fast-accum: fit each kind by itself")
    names = ("fused", "fast") if fast == {True} else ("promoted",)
    tree = machine().scaled.model_dump(mode="json", exclude_unset=True)
    columns = sorted({one.columns for one in found}, reverse=True)
    for name in names:
        tree.setdefault(name, _first(tree, name, columns))
    known = {tile["columns"] for tile in tree[names[0]]["tiles"]}
    found, others = ([one for one in each if one.columns in known] for each in (found, others))
    use(Scaled.model_validate(tree))
    table("Before", found)
    table("Before, held out", others)
    if options.fit:
        tree = fit(found, tree, names)
        table("After", found)
        table("After, held out", others)
        own = json.loads(options.fit.read_text())["scaled"]
        write_section(options.fit, "scaled", own | {name: tree[name] for name in names})


def _first(tree: dict[str, Any], name: str, columns: list[int]) -> dict[str, Any]:
    """What a search begins with where there are no constants. ``columns``: of fused tiles."""
    product: dict[str, Any] = json.loads(json.dumps(tree["product"]))
    if name == "fast":  # cuBLAS has more sizes of tiles than two
        sizes = (256, 192, 160, 128, 64)
        tiles = [{"rows": 128, "columns": each, "tflops_per_core": 10.4} for each in sizes]
        return product | {"tiles": tiles}
    tiles = [{"rows": 128, "columns": each, "tflops_per_core": 10.4} for each in columns]
    start = {"start_us": 12.0, "tile_us": 3.0, "exchange_us": 15.0, "tiles": tiles}
    return product | start | dict.fromkeys(SHARES, 0.1)


if __name__ == "__main__":
    main()
