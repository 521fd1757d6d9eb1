"""Measure where the time of an expert layer's prefill goes: the ops, their parts alone, the floor.

    python bench/prefill.py [--sizes deepseek:4096,qwen:8192] [--dtype bfloat16] [--json FILE]
    python bench/prefill.py --accelerator streams --sizes tiny:64        on a CPU

A size is WIDTH:TOKENS, of each rank. All of it takes turns in one run, in CUDA graphs; a turn's time is
the slowest rank's:
  layer, up, down  moe_dispatch_gemm with silu_and_mul, then moe_gemm_combine; each alone
  dispatch         moe_dispatch: ids, their routing, tokens, and a row for each expert of a token
  routed           the same by a handle: no ids travel and nothing is sorted; `up routed` up so
  up, down alone   the op's product by moe_dispatch_gemm in a world of one rank, by such a handle, on
                   rows that lie in order: copies beside the product. moe_gemm_combine there brings
                   rows home by slot, each stored by itself, then copied: more than all of `down`
  up, down torch   torch's grouped product of the same rows; of e4m3 ones a product an expert
  activation       silu(gate) * up of all rows by a compiled kernel, with e4m3 quantised
  quantise         tokens by a compiled kernel, of e4m3 experts
  combine          moe_combine of products that are there
  dense, copy      the card's rates: a large product, and a large tensor's negative, which a kernel
                   writes faster than torch copies
A floor is the larger of products at the dense product's rate and of the weights of experts that have
rows at the copy's, bytes read and written. `routing` is dispatch - routed, `exposed` an op - its
product alone, `tails` how many more rows are multiplied (64 at a time of each tile) than there are,
`halves` the share of tiles with at most half their rows. Results are compared with torch's products.
Exit code 1 where one is wrong; times count on GPUs only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import turns
from experts import WIDTHS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from turns import E4M3, LIMIT, Call, Place

import mkernel
from mkernel.backends.accelerators.hopper.moe.tuning import TILE_ROWS
from mkernel.backends.contracts.scaled import (
    STEP,
    block_product,
    dequantised,
    padded_blocks,
    quantised_blocks,
)
from mkernel.cases.moe import gated
from mkernel.plan.model import BLOCK

SIZES = "deepseek:4096,deepseek:8192,deepseek:16384,qwen:4096,qwen:8192,qwen:16384"
GROUP_ROWS = 64
"""A warpgroup's rows of a tile; one that has none multiplies nothing."""
SEED = 20261201


class Shape(NamedTuple):
    """Says what one row of results is of: the width, tokens of a rank, and the dtype of weights."""

    width: str
    tokens: int
    dtype: torch.dtype


class Weight(NamedTuple):
    """A rank's experts [E/W, K, N], each column-major; e4m3 ones with scales by blocks, as users lay
    them out and as cuBLAS takes them."""

    data: Tensor
    scale: Tensor | None = None
    blocks: Any = None


def drawn(experts: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Weight:
    """Draw random experts."""
    held = torch.empty((experts, n, k), dtype=dtype, device=device)
    for each in held:
        each.copy_(torch.randn(n, k, device=device) * (1 if dtype == E4M3 else k**-0.5))
    if dtype != E4M3:
        return Weight(held.transpose(1, 2))
    scale = torch.full((experts, k // BLOCK, n // BLOCK), k**-0.5, device=device)
    blocks = torch.stack([padded_blocks(each).t() for each in scale]).transpose(1, 2)
    return Weight(held.transpose(1, 2), scale, blocks)


class Layer:
    """A rank's part of a layer, its tokens, and results of its ops. ``one``: this rank's own world."""

    def __init__(self, shape: Shape, place: Place, one: DeviceMesh) -> None:
        self.place, self.one, device = place, one, place.device
        hidden, inner, experts, top_k = WIDTHS[shape.width]
        torch.manual_seed(SEED + place.rank)
        self.scaled, own = shape.dtype == E4M3, experts // place.ranks
        self.x = torch.randn(shape.tokens, hidden, device=device)
        self.x = self.x.to(torch.bfloat16 if self.scaled else shape.dtype)
        chances = torch.rand(shape.tokens, experts, device=device)
        self.ids = chances.topk(top_k).indices.to(torch.int32)
        self.shares = torch.rand(shape.tokens, top_k, device=device) / top_k
        self.w = drawn(own, hidden, 2 * inner, shape.dtype, device)
        self.w2 = drawn(own, inner, hidden, shape.dtype, device)
        self.options: dict[str, Any] = {"num_experts": experts, "group": place.mesh}
        self.options |= {"quantise": "block"} if self.scaled else {}
        counts = mkernel.moe_dispatch(self.x, self.ids, **self.options).counts
        self.counts: list[int] = counts.tolist()
        self.offs = counts.cumsum(0, dtype=torch.int32)
        most = max(place.of_all(sum(self.counts)))
        self.capacity = (most // STEP + 2) * STEP  # the last expert's rows in fours, too
        self.sent, self.whole = self.dispatch(), self.up()
        self.own_ids = torch.full((self.capacity, 1), -1, dtype=torch.int32, device=device)
        numbers = torch.arange(own, dtype=torch.int32, device=device).repeat_interleave(counts)
        self.own_ids[: len(numbers), 0] = numbers
        self.alone = self.up_alone(None).handle

    def dispatch(self, handle: Any = None) -> Any:
        """Return the rows of this rank's experts."""
        return mkernel.moe_dispatch(
            self.x, self.ids, capacity=self.capacity, handle=handle, **self.options
        )

    def up(self, handle: Any = None) -> Any:
        """Call the first op."""
        more = {"w_scale": self.w.scale, "quantise": "block"} if self.scaled else {}
        return mkernel.moe_dispatch_gemm(
            self.x, self.ids, self.w.data, capacity=self.capacity, activation="silu_and_mul",
            handle=handle, group=self.place.mesh, **more,
        )  # fmt: skip

    def down(self, up: Any) -> Tensor:
        """Call the second op on the first one's results."""
        more = {"h_scale": up.scales, "w2_scale": self.w2.scale} if self.scaled else {}
        return mkernel.moe_gemm_combine(
            up.outputs, self.w2.data, up.handle, self.shares, group=self.place.mesh, **more
        )

    def up_alone(self, handle: Any) -> Any:
        """Multiply rows in order as the first op does, on one rank."""
        more = {"x_scale": self.sent.scales, "quantise": "block"} if self.scaled else {}
        return self._alone(self.sent.rows, self.w, handle, activation="silu_and_mul", **more)

    def down_alone(self) -> Tensor:
        """Multiply rows in order as the second op does, on one rank."""
        more = {"x_scale": self.whole.scales} if self.scaled else {}
        return self._alone(self.whole.outputs, self.w2, self.alone, **more).outputs

    def _alone(self, rows: Tensor, w: Weight, handle: Any, **more: Any) -> Any:
        more |= {"w_scale": w.scale} if self.scaled else {}
        return mkernel.moe_dispatch_gemm(
            rows, self.own_ids, w.data, capacity=self.capacity, handle=handle, group=self.one,
            **more,
        )  # fmt: skip

    def combine(self, y: Tensor) -> Tensor:
        """Bring products home."""
        return mkernel.moe_combine(y, self.whole.handle, self.shares, group=self.place.mesh)

    def product(self, second: bool = False) -> Tensor:
        """Multiply the rows of all experts by torch."""
        rows, w = (self.whole.outputs, self.w2) if second else (self.sent.rows, self.w)
        if rows.dtype == torch.bfloat16 and rows.is_cuda:
            return torch._grouped_mm(rows, w.data, offs=self.offs)
        scale: Any = getattr(self.whole if second else self.sent, "scales", None)
        out = torch.empty((len(rows), w.data.shape[2]), dtype=self.x.dtype, device=rows.device)
        first = 0
        for number, count in enumerate(self.counts):
            fours = -count % STEP if rows.is_cuda else 0  # of the next expert: written again
            at = slice(first, first + count + fours)
            if count and rows.is_cuda:
                block_product(rows[at], w.data[number], scale[at], w.blocks[number], out[at])
            else:
                out[at] = _wide(rows, scale, at) @ _wide(w.data, w.scale, number)
            first += count
        return out

    def wrong(self, limit: float) -> list[str]:
        """Say which results are not those of torch's products, on any rank. Collective."""
        rows = slice(sum(self.counts))
        up, scale = self.whole.outputs, getattr(self.whole, "scales", None)
        y = self.product(second=True)
        pairs = {
            "up": (_wide(up, scale, rows), gated(self.product()[rows].float())),
            "down": (self.down(self.whole), self.combine(y)),
            "down alone": (self.down_alone()[rows], y[rows]),
        }
        found = {name: max(self.place.of_all(turns.off(*each))) for name, each in pairs.items()}
        return [f"{name} is off by {each:.2g}" for name, each in found.items() if not each <= limit]

    def tiles(self) -> list[int]:
        """Return the rows of each tile of the first op: on `hopper` those of its tables
        (kernels/moe/tables.cuh), elsewhere as they would be cut from the counts."""
        if not self.x.is_cuda:
            return [min(TILE_ROWS, count - first) for count in self.counts
                    for first in range(0, count, TILE_ROWS)]  # fmt: skip
        places = self.place.ranks * self.ids.numel()
        words = self.whole.handle.routing[(3 * places + 3) // 4 * 4 :]
        count = int((words[::4] == -1).nonzero()[0])
        return words[2 : 4 * count : 4].tolist()  # type: ignore[no-any-return]

    def routed(self) -> dict[str, int]:
        """Count rows, experts that have some, tiles, rows that are multiplied, and tiles with at most
        half their rows (kernels/moe/grouped.cuh)."""
        tiles = self.tiles()
        return {"rows": sum(self.counts), "experts": sum(map(bool, self.counts)),
                "tiles": len(tiles),
                "multiplied": sum(-(-rows // GROUP_ROWS) * GROUP_ROWS for rows in tiles),
                "halves": sum(2 * rows <= TILE_ROWS for rows in tiles)}  # fmt: skip


def _wide(rows: Tensor, scale: Tensor | None, at: Any) -> Tensor:
    return rows[at].float() if scale is None else dequantised(rows[at], scale[at])


def calls_of(layer: Layer, side: int) -> dict[str, Call]:
    """Return what is timed, by name."""
    cuda, device, scaled = layer.x.is_cuda, layer.x.device, layer.scaled
    compiler: Any = partial(torch.compile, dynamic=False) if cuda else lambda function: function
    both, y = layer.product(), layer.product(second=True)
    quantise = compiler(quantised_blocks)
    activate = compiler(lambda rows: quantised_blocks(gated(rows)) if scaled else gated(rows))
    kind = E4M3 if scaled and cuda else layer.x.dtype
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    source, target = torch.empty((2, side * side * 2), device=device)
    one = torch.ones((), device=device)

    def dense() -> Tensor:
        if kind != E4M3:
            return a @ b.t()
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {
        "layer": lambda: layer.down(layer.up()),
        "up": layer.up,
        "dispatch": layer.dispatch,
        "routed": lambda: layer.dispatch(layer.sent.handle),
        "up routed": lambda: layer.up(layer.whole.handle),
        "up alone": lambda: layer.up_alone(layer.alone),
        "up torch": layer.product,
        "activation": lambda: activate(both),
        **({"quantise": lambda: quantise(layer.x)} if scaled else {}),
        "down": lambda: layer.down(layer.whole),
        "combine": lambda: layer.combine(y),
        "down alone": layer.down_alone,
        "down torch": lambda: layer.product(second=True),
        "dense": dense,
        "copy": lambda: torch.neg(source, out=target),
    }


@torch.no_grad()
def of_one_row(shape: Shape, count: int, place: Place, one: DeviceMesh) -> dict[str, Any]:
    """Check and time one shape, ``count`` turns of each call. Collective."""
    layer, side = Layer(shape, place, one), 8192 if place.cuda else 256
    makers = {name: partial(_ready, call, place) for name, call in calls_of(layer, side).items()}
    entries = turns.of_contenders(makers, count, place)
    row = {"width": shape.width, "tokens": shape.tokens, "ranks": place.ranks, "cuda": place.cuda,
           "dtype": turns.name_of(shape.dtype), "contenders": entries,
           "routed": place.of_all(layer.routed()),
           "missed": layer.wrong(LIMIT[shape.dtype])}  # fmt: skip
    return row | {"parts": parts(row, side)}


def _ready(call: Call, place: Place) -> tuple[Call, dict[str, Any]]:
    return place.captured(call), {}


def parts(row: dict[str, Any], side: int) -> dict[str, float]:
    """Return what follows from the times of a row, in microseconds; ``tails``, ``halves`` and what is
    of a floor are ratios, the rates TFLOP/s and GB/s."""
    us = {
        name: each["median_us"] for name, each in row["contenders"].items() if "median_us" in each
    }
    hidden, inner, _, _ = WIDTHS[row["width"]]
    routed = row["routed"]
    rows, experts = (max(each[name] for each in routed) for name in ("rows", "experts"))
    some = [each for each in routed if each["rows"]]
    found = {"tails": max(each["multiplied"] / each["rows"] for each in some) - 1,
             "halves": max(each["halves"] / each["tiles"] for each in some)}  # fmt: skip
    for name, whole, part in (
        ("routing", "dispatch", "routed"),
        ("exposed of up", "up", "up alone"),
        ("exposed of down", "down", "down alone"),
    ):
        if {whole, part} <= us.keys():
            found[name] = us[whole] - us[part]
    if not {"dense", "copy"} <= us.keys():
        return found
    found["tflops"], found["gbs"] = 2e-6 * side**3 / us["dense"], 16e-3 * side**2 / us["copy"]
    element = getattr(torch, row["dtype"]).itemsize
    for name, factor in (("up", 2), ("down", 1), ("layer", 3)):
        weight = factor * hidden * inner
        products_us = 2e-6 * rows * weight / found["tflops"]
        floor = max(products_us, 1e-3 * experts * weight * element / found["gbs"])
        found[f"floor of {name}"] = floor
        if name in us:
            found[f"{name} of its floor"] = us[name] / floor
    return found


def shown(row: dict[str, Any]) -> str:
    """Return a row as lines of text."""
    return "\n".join([
        f"{row['width']}, {row['tokens']} tokens a rank, {row['ranks']} ranks, {row['dtype']}",
        *turns.shown(row),
        *(f"  {name:18} {each:12.3f}" for name, each in row["parts"].items()),
        f"  -> {'; '.join(row['missed']) or 'right'}",
    ])  # fmt: skip


def rows(place: Place, shapes: Sequence[Shape], count: int) -> Iterator[dict[str, Any]]:
    """Measure all shapes."""
    one = place.mesh
    if place.ranks > 1:
        names = ("all", "one")
        one = init_device_mesh(place.device.type, (place.ranks, 1), mesh_dim_names=names)["one"]
        mkernel.init(one)
    for shape in shapes:
        yield of_one_row(shape, count, place, one)


def main() -> int:
    """Print each row as it is done; 1 where a result is wrong."""
    parser = turns.parser(__doc__, SIZES, partial(turns.size_of, widths=WIDTHS))
    parser.add_argument("--dtype", type=turns.dtypes, help="of weights [both; on a CPU float32]")
    given = parser.parse_args()
    both = [torch.bfloat16, E4M3] if given.accelerator == "hopper" else [torch.float32]
    shapes = [Shape(*size, dtype) for dtype in given.dtype or both for size in given.sizes]
    found = turns.launched("prefill", given, rows, shapes, given.turns, text=shown)
    return turns.exit_code(found, len(shapes))


if __name__ == "__main__":
    sys.exit(main())
