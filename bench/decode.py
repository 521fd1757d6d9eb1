"""Decode steps of a tensor-parallel Llama in one CUDA graph, beside the libraries that serve.

    python bench/decode.py [--sizes 70b:1,70b:128] [--dtype bfloat16,float8_e4m3fn] [--json FILE]
    python bench/decode.py --accelerator streams --sizes tiny:4 --layers 2      on a CPU

A size is WIDTH:ROWS, as many sequences, each of which has CONTEXT keys in its cache. A layer has two
products whose sums go to all ranks, each followed by the residual and the norm. What ends them:
  nccl         torch's product, all_reduce, and a compiled kernel for residual and norm
  one-shot     torch's product into symmetric memory, its one_shot_all_reduce, and that kernel
  two-shot     the same with two_shot_all_reduce_
  flashinfer   torch's product and FlashInfer's one-shot sum, residual and norm
  mkernel      gemm_all_reduce with residual and norm
  prefetch     the same, which names the weight of the next product
  none         torch's product and the compiled kernel: nothing is communicated
The rest of a step is the same in all of them, and compiled where it is no product. All take turns in
one run; a turn's time is the slowest rank's. Results of all but `none` are compared with an unsharded
float32 model's. With e4m3 weights (a scale a column) rows are quantised by the norm and by the
activation. `above` is microseconds a layer above `none`, `bar` what the issue of decode steps asks.
Exit code 1 where a result is wrong or a bar is missed; times count on GPUs only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import llama
import torch
import turns
from torch import Tensor, distributed
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from turns import E4M3, LIMIT, Call, Place

import mkernel
from mkernel.cases.moe import gated
from mkernel.harness.contenders import flash_infer
from mkernel.harness.contenders.symm_mem import group_name

SIZES = "70b:1,70b:8,70b:32,70b:128,8b:1,8b:8,8b:32,8b:128"
LAYERS = {"70b": 8, "8b": 16, "tiny": 2}
CONTEXT = {"70b": 1024, "8b": 1024, "tiny": 16}
BARS = {("70b", 8): 5.0, ("70b", 32): 8.0, ("70b", 128): 15.0, ("8b", 8): 6.0, ("8b", 32): 7.0,
        ("8b", 128): 12.0}  # fmt: skip
"""Microseconds a layer above `none`, up to so many rows."""
ENDINGS = ("nccl", "one-shot", "two-shot", "flashinfer", "mkernel", "prefetch", "none")
OURS = ("mkernel", "prefetch")
EPS, SEED = 1e-5, 20261130
LARGEST = torch.finfo(E4M3).max


class Rows(NamedTuple):
    """Rows of activations; e4m3 ones with their scales [rows, 1]."""

    data: Tensor
    scale: Tensor | None = None


class Weight(NamedTuple):
    """A weight [K, N], column-major; an e4m3 one with its scales [1, N]."""

    data: Tensor
    scale: Tensor | None = None


def quantised(x: Tensor) -> Rows:
    """Return rows in e4m3."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Rows((x.float() / scale).to(E4M3), scale)


def add_norm(y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised rows and the new residual."""
    new = y + residual
    return rms_norm(new, weight.shape, weight, EPS), new


def add_norm_quantised(
    y: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows in e4m3, their scales, and the new residual."""
    normed, new = add_norm(y, residual, weight)
    return *quantised(normed), new


def activated_quantised(merged: Tensor) -> Rows:
    """Return silu(gate) * up in e4m3."""
    return quantised(gated(merged))


class Step(NamedTuple):
    """One half of a layer as its ending takes it."""

    rows: Rows
    weight: Weight
    residual: Tensor
    norm: Tensor
    following: Tensor
    """The weight of the next product."""


SHARDED = ("o", "down")
"""The products of whose rows each rank has a part."""
NOISE = 1.5
"""The largest error with e4m3 rows, over that of the unsharded model with such rows and float32 sums:
they are rounded anew in each layer, so that two orders of additions differ as much as from float32."""
Ending = Callable[[Step], tuple[Rows, Tensor]]
"""A function that returns the normalised rows and the new residual."""


class Shape(NamedTuple):
    """The sizes and the dtype of weights that one row of results is of."""

    width: str
    rows: int
    layers: int
    dtype: torch.dtype


class Model:
    """A rank's part of a decoder of random weights, and what the whole one makes of one step."""

    def __init__(self, shape: Shape, place: Place) -> None:
        self.shape, self.place = shape, place
        self.dtype = torch.bfloat16 if shape.dtype == E4M3 else shape.dtype  # of activations
        self.sizes = llama.WIDTHS[shape.width]
        sizes, ranks, depth = self.sizes, place.ranks, self.sizes.head_dim
        draw = torch.Generator(place.device).manual_seed(SEED)
        self.heads, self.kv_heads = sizes.heads // ranks, sizes.kv_heads // ranks
        keys = sizes.kv_heads * depth

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, device=place.device).to(self.dtype)

        def part(whole: Tensor, dim: int) -> Tensor:
            return whole.chunk(ranks, dim)[place.rank]

        x = drawn(shape.rows, sizes.hidden)
        self.x, wanted, rounded = x, x.float(), x.float()
        self.norms = 1 + drawn(2 * shape.layers + 1, sizes.hidden) / 8
        self.layers: list[dict[str, Weight]] = []
        self.caches: list[tuple[Tensor, Tensor]] = []
        for layer in range(shape.layers):
            held = {
                name: self._kept(drawn(n, k) / k**0.5)
                for name, n, k in (
                    ("q", sizes.hidden, sizes.hidden), ("k", keys, sizes.hidden),
                    ("v", keys, sizes.hidden), ("o", sizes.hidden, sizes.hidden),
                    ("gate", sizes.inner, sizes.hidden), ("up", sizes.inner, sizes.hidden),
                    ("down", sizes.hidden, sizes.inner),
                )
            }  # fmt: skip
            cache = [
                drawn(shape.rows, sizes.kv_heads, CONTEXT[shape.width], depth) for _ in range(2)
            ]
            wanted = self._whole_layer(layer, wanted, held, cache)
            if shape.dtype == E4M3:
                rounded = self._whole_layer(layer, rounded, held, cache, rounds=True)
            groups = (("qkv", "qkv", 0), ("o", ("o",), 1), ("gate_up", ("gate", "up"), 0),
                      ("down", ("down",), 1))  # fmt: skip
            self.layers.append(
                {
                    name: self._joined([held[each] for each in names], dim, part)
                    for name, names, dim in groups
                }
            )
            own_keys, own_values = (part(each, 1).contiguous() for each in cache)
            self.caches.append((own_keys, own_values))
        self.wanted, rounded = (
            rms_norm(each, each.shape[-1:], self.norms[-1].float(), EPS)
            for each in (wanted, rounded)
        )
        self.limit = LIMIT[shape.dtype]
        if shape.dtype == E4M3:
            self.limit = NOISE * turns.off(rounded, self.wanted)

    def _kept(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a weight [N, K] as it is held, with its scales [N, 1]."""
        return quantised(weight) if self.shape.dtype == E4M3 else (weight, None)

    @staticmethod
    def _joined(
        held: Sequence[tuple[Tensor, Tensor | None]], dim: int, part: Callable[..., Tensor]
    ) -> Weight:
        data = torch.cat([part(each, dim).view(torch.uint8) for each, _ in held])
        data = data.view(held[0][0].dtype)
        scales = [scale if dim else part(scale, 0) for _, scale in held if scale is not None]
        return Weight(data.t(), torch.cat(scales).t() if scales else None)

    def _whole_layer(
        self, layer: int, x: Tensor, held: dict[str, Any], cache: Sequence[Tensor], *,
        rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the residual behind a layer of the unsharded model, in float32. ``rounds``: rows are
        quantised as each rank quantises its part of them."""
        depth, ranks = self.sizes.head_dim, self.place.ranks

        def times(rows: Tensor, name: str) -> Tensor:
            data, scale = held[name]
            if rounds:
                parts = map(quantised, rows.chunk(ranks if name in SHARDED else 1, 1))
                rows = torch.cat([part.data.float() * part.scale for part in parts], 1)
            return rows @ (data.float() if scale is None else data.float() * scale).t()

        def normed(rows: Tensor, number: int) -> Tensor:
            return rms_norm(rows, rows.shape[-1:], self.norms[number].float(), EPS)

        y = normed(x, 2 * layer)
        q = times(y, "q").unflatten(1, (-1, 1, depth))
        new = [times(y, name).unflatten(1, (-1, 1, depth)) for name in "kv"]
        k, v = (torch.cat((c[:, :, :-1], n), 2) for c, n in zip(cache, new, strict=True))
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = (q @ k.transpose(2, 3) / depth**0.5).softmax(-1)
        x = x + times((scores @ v).flatten(1), "o")
        y = normed(x, 2 * layer + 1)
        return x + times(silu(times(y, "gate")) * times(y, "up"), "down")

    def multiply(self, rows: Rows, weight: Weight, out: Tensor | None = None) -> Tensor:
        """Multiply by torch."""
        if weight.scale is None or rows.scale is None:
            return torch.mm(rows.data, weight.data, out=out)  # type: ignore[no-any-return]
        return torch._scaled_mm(
            rows.data, weight.data, rows.scale, weight.scale, out_dtype=self.dtype,
            use_fast_accum=True, out=out,
        )  # fmt: skip

    def step(self, end: Ending, compiler: Callable[[Any], Any]) -> Tensor:
        """Return the normalised rows behind the last layer."""
        scaled = self.shape.dtype == E4M3
        activate = compiler(activated_quantised if scaled else gated)
        rows: Any = rms_norm(self.x, self.x.shape[-1:], self.norms[0], EPS)
        mixed: Any
        rows, residual = compiler(quantised)(rows) if scaled else Rows(rows), self.x
        for number, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            following = self.layers[(number + 1) % len(self.layers)]["qkv"].data
            mixed = compiler(self._attended)(self.multiply(rows, layer["qkv"]), *cache)
            mixed = compiler(quantised)(mixed) if scaled else Rows(mixed)
            norms = self.norms[2 * number + 1], self.norms[2 * number + 2]
            weight = layer["gate_up"].data
            rows, residual = end(Step(mixed, layer["o"], residual, norms[0], weight))
            inner = activate(self.multiply(rows, layer["gate_up"]))
            inner = inner if scaled else Rows(inner)
            rows, residual = end(Step(inner, layer["down"], residual, norms[1], following))
        return rows.data if rows.scale is None else rows.data.to(self.dtype) * rows.scale

    def _attended(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return attention [rows, features] over the cache, whose last place is the new token's."""
        depth = self.sizes.head_dim
        q, k, v = qkv.unflatten(1, (-1, 1, depth)).split(
            (self.heads, self.kv_heads, self.kv_heads), 1
        )
        keys[:, :, -1:], values[:, :, -1:] = k, v
        mixed = scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return mixed.flatten(1)


class Library:
    """An ending of torch's product, a library's sum, and one kernel for residual and norm."""

    def __init__(self, name: str, model: Model, compiler: Callable[[Any], Any]) -> None:
        self._model, self._scaled = model, model.shape.dtype == E4M3
        self._norm = compiler(add_norm_quantised if self._scaled else add_norm)
        self._sums = {"nccl": self._all_reduce, "one-shot": self._symmetric,
                      "two-shot": self._symmetric, "none": lambda y: y}[name]  # fmt: skip
        self._product: Tensor | None = None
        if self._sums == self._symmetric:
            from torch.distributed import _symmetric_memory as symmetric

            self._group, place = group_name(), model.place
            self._product = symmetric.empty(
                model.shape.rows, model.sizes.hidden, dtype=model.dtype, device=place.device
            )
            symmetric.rendezvous(self._product, self._group)
            ops = torch.ops.symm_mem
            self._op = ops.one_shot_all_reduce if name == "one-shot" else ops.two_shot_all_reduce_

    def __call__(self, step: Step) -> tuple[Rows, Tensor]:
        total = self._sums(self._model.multiply(step.rows, step.weight, self._product))
        *rows, new = self._norm(total, step.residual, step.norm)
        return Rows(*rows), new

    def _symmetric(self, y: Tensor) -> Tensor:
        return self._op(y, "sum", self._group)  # type: ignore[no-any-return]

    @staticmethod
    def _all_reduce(y: Tensor) -> Tensor:
        distributed.all_reduce(y)
        return y

    def close(self) -> None:
        self._product = None


class FlashInfer:
    """An ending of torch's product and FlashInfer's sum, residual and norm in one kernel."""

    def __init__(self, model: Model, compiler: Callable[[Any], Any]) -> None:
        self._model, shape = model, (model.shape.rows, model.sizes.hidden)
        self._quantise = compiler(quantised) if model.shape.dtype == E4M3 else Rows
        place = model.place
        where = place.rank, place.ranks
        self._sums = flash_infer.Sums(where, shape, place.device, one_shot=True, eps=EPS)

    def __call__(self, step: Step) -> tuple[Rows, Tensor]:
        y = self._model.multiply(step.rows, step.weight)
        out = torch.empty_like(y)
        new = self._sums.add_and_normalise(y, step.residual, step.norm, out)
        return self._quantise(out), new

    def close(self) -> None:
        self._sums.close()


class Ours:
    """An ending of one op, which with ``prefetch`` names the weight of the next product."""

    def __init__(self, name: str, model: Model) -> None:
        self._prefetches, self._group = name == "prefetch", model.place.mesh

    def __call__(self, step: Step) -> tuple[Rows, Tensor]:
        more: dict[str, Any] = {"prefetch": step.following} if self._prefetches else {}
        if step.weight.scale is not None:
            more |= {"a_scale": step.rows.scale, "b_scale": step.weight.scale, "quantise": "row",
                     "use_fast_accum": True}  # fmt: skip
        *rows, new = mkernel.gemm_all_reduce(
            step.rows.data, step.weight.data, residual=step.residual, norm_weight=step.norm,
            eps=EPS, group=self._group, **more,
        )  # fmt: skip
        return Rows(*rows), new

    def close(self) -> None:
        """Nothing is held."""


def ending(name: str, model: Model, compiler: Callable[[Any], Any]) -> Any:
    """Return an ending. Unfit: it cannot be had here."""
    if name in OURS:
        return Ours(name, model)
    if name == "flashinfer":
        if why := flash_infer.why_not_usable():
            raise turns.Unfit(why)
        return FlashInfer(model, compiler)
    return Library(name, model, compiler)


def of_one_row(
    shape: Shape, names: Sequence[str], count: int, trace: Path | None, place: Place
) -> dict[str, Any]:
    """Check and time all endings at one shape, ``count`` turns of each. Collective."""
    model, ends = Model(shape, place), dict[str, Any]()
    compiler: Callable[[Any], Any] = torch.compile if place.cuda else lambda function: function

    @torch.no_grad()
    def ready(name: str) -> tuple[Call, dict[str, Any]]:
        end = ends[name] = ending(name, model, compiler)
        call = partial(model.step, end, compiler)
        error = turns.off(call(), model.wanted)
        if name != "none" and not error <= model.limit:
            raise turns.Unfit(f"wrong: relative error {error:.2g}, limit {model.limit:.2g}")
        return place.captured(call), {"error": error}

    makers = {name: partial(ready, name) for name in names}
    traces = None if trace is None else f"{trace}/{shape.width}_{shape.rows}"
    entries = turns.of_contenders(makers, count, place, traces)
    for end in ends.values():
        end.close()
    row = {"width": shape.width, "rows": shape.rows, "layers": shape.layers,
           "dtype": turns.name_of(shape.dtype), "context": CONTEXT[shape.width],
           "cuda": place.cuda, "contenders": entries}  # fmt: skip
    return row | judged(row)


def bar(width: str, rows: int) -> float | None:
    """Return the bar of a layer, in microseconds above `none`."""
    legal = [us for (name, most), us in BARS.items() if name == width and rows <= most]
    return legal[0] if legal else None


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return microseconds a layer above `none`, and what misses the bar."""
    entries, layers = row["contenders"], row["layers"]
    none = entries.get("none", {}).get("median_us")
    above = {
        name: (each["median_us"] - none) / layers
        for name, each in entries.items()
        if name != "none" and none is not None and "median_us" in each
    }
    missed = [
        f"{name}: {each['failed']}"
        for name, each in entries.items()
        if name in (*OURS, "none") and "failed" in each
    ]
    most = bar(row["width"], row["rows"])
    best = min((above[name] for name in OURS if name in above), default=None)
    if row["cuda"] and most is not None and best is not None and best > most:
        missed.append(f"{best:.1f} us a layer above none, bar {most:g}")
    return {"above_us": above, "bar_us": most, "missed": missed}


def shown(row: dict[str, Any]) -> str:
    """Return a row as lines of text."""

    def a_layer(name: str, entry: dict[str, Any]) -> str:
        above = row["above_us"].get(name)
        more = "" if above is None else f", {above:.1f} above none"
        return f"  {entry['median_us'] / row['layers']:.1f} a layer{more}"

    return "\n".join([
        f"{row['width']}, {row['rows']} rows, {row['layers']} layers, {row['dtype']}, context "
        f"{row['context']}",
        *turns.shown(row, a_layer),
        f"  -> {'; '.join(row['missed']) or 'bar met'}",
    ])  # fmt: skip


def rows(
    place: Place, shapes: Sequence[Shape], names: Sequence[str], count: int, trace: Path | None
) -> Iterator[dict[str, Any]]:
    """Measure all shapes."""
    for shape in shapes:
        yield of_one_row(shape, names, count, trace, place)


def main() -> int:
    """Print each row as it is done; 1 where a result is wrong or a bar is missed."""
    parser = turns.parser(__doc__, SIZES, partial(turns.size_of, widths=LAYERS))
    parser.add_argument(
        "--dtype", type=turns.dtypes, help="of weights [bfloat16; on a CPU float32]"
    )
    parser.add_argument("--layers", type=int, help="default: sixteen of 8b, eight of 70b")
    parser.add_argument("--endings", default=",".join(ENDINGS))
    parser.add_argument("--trace", type=Path, help="a folder for traces of a step of each")
    given = parser.parse_args()
    cuda, names = given.accelerator == "hopper", given.endings.split(",")
    if not {*names} <= {*ENDINGS}:
        parser.error(f"--endings: of {', '.join(ENDINGS)}")
    if not cuda:
        names = [each for each in names if each in ("nccl", "none", *OURS)]
    shapes = [
        Shape(width, number, given.layers or LAYERS[width], dtype)
        for dtype in given.dtype or [torch.bfloat16 if cuda else torch.float32]
        for width, number in given.sizes
    ]
    found = turns.launched(
        "decode", given, rows, shapes, names, given.turns, given.trace, text=shown
    )
    return turns.exit_code(found, len(shapes))


if __name__ == "__main__":
    sys.exit(main())
