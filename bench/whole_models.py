"""Whole models, tensor parallel with sequence parallelism, beside torch and beside no communication.

    python bench/whole_models.py [--ranks 2] [--sizes 8b:8192x1,70b:8192x1] [--minutes 8] [--json FILE]
    python bench/whole_models.py --drawn SEED [--count 6]
    python bench/whole_models.py --accelerator streams --sizes tiny:128x2 --backend aot_eager   on a CPU

A size is WIDTH:TOKENSxBATCH, with tokens counted over the batch. Measures: `prefill`, a forward pass
without gradients; `step`, forward and backward to every weight and the input. Fewer than 128 tokens are
a `decode` step of as many sequences of one token, replicated, with GEMM+AllReduce. Contenders, each
eager, compiled, and compiled in a CUDA graph that is captured by hand (`graph`):
  torch   torchtitan's plan by parallelize_module, with torch's collectives
  async   the same under torch's micro-pipeline pass
  nn      mkernel.nn's blocks
  styles  the plan with mkernel.nn's styles
  pass    `torch` under mkernel.enable_async_tensor_parallel
  floor   the products, attention and norms of `nn` with nothing communicated
All of a row take turns in one run; a turn's time is the slowest rank's. Before and after, results and
gradients of all but the floor are compared with an unsharded float32 model. The fused calls of each of
ours are counted, so that a fallback is no contender. `recovered` is (torch - ours) / (torch - floor) of
one mode; the ceiling is the floor and what each communicating op alone takes above its product alone,
in turns with torch's product and collective.
Exit code 1 where a bar is missed; times count on GPUs only.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import graphs
import llama
import torch
import turns
from torch import Tensor, distributed
from turns import LIMIT, Call, Place

import mkernel
from mkernel.harness.contenders import collectives
from mkernel.harness.contenders.symm_mem import group_name

SIZES = (
    "8b:8192x1,8b:2048x1,70b:8192x1,8b:512x1,8b:8192x4,8b:16384x1,70b:2048x1,8b:2048x4,8b:4096x1,"
    "70b:8192x4,70b:512x1,70b:16384x1,8b:16x1,70b:16x1"
)
"""The sizes, those that matter most first: a run that is short of time leaves out the rest."""
MODES = ("eager", "compiled", "graph")
MODELS = {"torch": MODES, "async": MODES[1:], "nn": MODES, "styles": MODES, "pass": MODES[1:],
          "floor": MODES}  # fmt: skip
FORM_OF = {"async": "torch", "pass": "torch"}
OURS = ("nn", "styles", "pass")
DECODER_TOKENS = 128
"""With fewer, activations are replicated."""
OP_CALLS = 10
GRADIENT_LIMIT = {torch.bfloat16: 4e-2, torch.float32: 1e-4}
"""The limit of a gradient's relative error: twice a result's, in float32 ten times that."""
LARGE_TOKENS = 4096
RECOVERED = {("prefill", False): 0.4, ("prefill", True): 0.65, ("step", False): 0.3,
             ("step", True): 0.5}  # fmt: skip
"""The bars, by measure and whether the size is large; of small ones in CUDA graphs, of large ones
compiled."""
LITTLE = 0.05
"""The share of the floor that torch must lie above it before anything has to be recovered."""
SLOWER, SLOWER_DRAWN, UNLIKE, MEMORY = 1.01, 1.03, 1.03, 1.1
"""The bars of ratios to torch, of ours to each other where compiled, and of a step's peak memory."""
SEED = 20261129


class Size(NamedTuple):
    """The size that a row is measured at. ``layers``: None where the width says."""

    width: str
    tokens: int
    batch: int
    layers: int | None = None

    @property
    def decode(self) -> bool:
        return self.tokens < DECODER_TOKENS

    @property
    def depth(self) -> int:
        return self.layers or llama.WIDTHS[self.width].layers

    def measures(self) -> tuple[str, ...]:
        return ("decode",) if self.decode else ("prefill", "step")

    def shape(self) -> tuple[int, int, int]:
        """Return the whole activation's [batch, sequence, hidden]."""
        hidden = llama.WIDTHS[self.width].hidden
        if self.decode:
            return self.tokens, 1, hidden
        return self.batch, self.tokens // self.batch, hidden


class Options(NamedTuple):
    """What all rows of a run share."""

    sizes: tuple[Size, ...]
    models: tuple[str, ...]
    modes: tuple[str, ...]
    turns: int
    minutes: float
    backend: str
    whole: bool
    drawn: bool
    trace: Path | None = None


class Contender(NamedTuple):
    """One model in one mode at one size. ``held``: the results of a graph, which its replay writes;
    other calls return theirs."""

    model: str
    mode: str
    call: Callable[[], Any]
    held: Sequence[Tensor] = ()


class Case:
    """The inputs of one size on this rank, its models, and what an unsharded float32 model says."""

    def __init__(self, size: Size, models: Sequence[str], place: Place) -> None:
        self.size, self.place = size, place
        self.width = llama.WIDTHS[size.width]
        options = {"device": place.device, "dtype": place.dtype}
        whole = llama.plain(self.width, size.depth, SEED, **options)
        forms = dict.fromkeys(FORM_OF.get(name, name) for name in models)
        self.blocks = {
            form: llama.sharded(form, whole, self.width, place.mesh, size.decode) for form in forms
        }
        generator = torch.Generator(place.device).manual_seed(SEED + size.tokens)
        drawn = [
            torch.randn(size.shape(), generator=generator, device=place.device).to(place.dtype)
            for _ in range(2)
        ]
        own = [each if size.decode else each.chunk(place.ranks, 1)[place.rank] for each in drawn]
        self._given = [each.clone() for each in own]
        self.x, self.gradient = (each.clone() for each in own)
        self.x.requires_grad_()
        self.whole = drawn[0]
        for block in () if size.decode else self.blocks.get("floor", ()):
            block.whole = self.whole
        self.turned = llama.rotary(self.width, size.shape()[1], self.x)
        self.reference = self._referred(whole, *drawn)

    def _referred(self, whole: Sequence[Any], x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        for block in whole:
            block.float()
        x = x.float().requires_grad_()
        turned = llama.rotary(self.width, x.shape[1], x)
        y, _ = llama.stack(whole)(x, turned)
        names = self._names(whole)
        found = torch.autograd.grad(y, [x, *self._parameters(whole)], gradient.float())
        own = {
            name: llama.own_part(name.partition(" ")[2], each, self.place.mesh)
            for name, each in zip(names, found[1:], strict=True)
        }
        result = self._merged(own)
        for name, each in (("result", y.detach()), ("gradient of x", found[0])):
            parts = each.chunk(self.place.ranks, 1)
            result[name] = (each if self.size.decode else parts[self.place.rank]).clone()
        return result

    @staticmethod
    def _parameters(blocks: Sequence[Any]) -> list[Tensor]:
        return [each for block in blocks for each in block.parameters()]

    @staticmethod
    def _names(blocks: Sequence[Any]) -> list[str]:
        return [
            f"{number} {name}"
            for number, block in enumerate(blocks)
            for name, _ in block.named_parameters()
        ]

    def _merged(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for number in range(self.size.depth):
            start = f"{number} "
            one = {n.removeprefix(start): g for n, g in gradients.items() if n.startswith(start)}
            found |= {f"{start}{name}": each for name, each in llama.merged(one).items()}
        return found

    def call(
        self, model: str, measure: str, compiler: Callable[[Any], Any]
    ) -> Callable[[], list[Tensor]]:
        """Return the function of one pass, whose results are the output and, of a step, gradients."""
        blocks = self.blocks[FORM_OF.get(model, model)]
        run, parameters = compiler(blocks), self._parameters(blocks)
        plain_x = self.x.detach()  # else the first block would be compiled for itself

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [run(plain_x, self.turned)[0]]

        def step() -> list[Tensor]:
            y, others = run(self.x, self.turned)
            driven = [each for each in others if each.requires_grad]
            gradients = [self.gradient, *[self.whole] * len(driven)]
            found = torch.autograd.grad((y, *driven), (self.x, *parameters), gradients)
            # What is kept of one call must not keep its graph, whose streams a capture cannot wait for.
            return [y.detach(), *found]

        return step if measure == "step" else forward

    def checked(self, one: Contender) -> str:
        """Call a contender with other inputs, then with the right ones into poisoned results; return
        what is wrong, or nothing. What it kept of an earlier call is wrong then. Collective."""
        for sign in (-0.5, 1.0):
            with torch.no_grad():
                for mine, given in zip((self.x, self.gradient), self._given, strict=True):
                    mine.copy_(sign * given)
                for each in one.held:
                    llama.local(each).fill_(math.nan)
            results = one.call() or one.held
        self.place.wait()
        return "" if one.model == "floor" else self._wrong(one.model, results)

    def _wrong(self, model: str, results: Sequence[Tensor]) -> str:
        found = {"result": results[0]}
        if len(results) > 1:
            found["gradient of x"] = results[1]
            names = self._names(self.blocks[FORM_OF.get(model, model)])
            gradients = {
                name: llama.local_part(name.partition(" ")[2], each)
                for name, each in zip(names, results[2:], strict=True)
            }
            found |= self._merged(gradients)
        for name, each in found.items():
            error = turns.off(each, self.reference[name])
            limit = (LIMIT if name == "result" else GRADIENT_LIMIT)[self.place.dtype]
            if not error <= limit:  # nor where it is not a number
                return f"{name}: relative error {error:.1e}, limit {limit:.0e}"
        return ""


def compiler(model: str, mode: str, options: Options) -> Callable[[Any], llama.Run]:
    """Return what makes a function of blocks. Each contender has a backend of its own, since torch
    reuses what it compiled of the same code by the same backend."""
    if mode == "eager":
        return llama.stack
    from torch._dynamo.backends.registry import lookup_backend

    def backend(graph: Any, inputs: Any) -> Any:
        if options.backend != "inductor":
            return lookup_backend(options.backend)(graph, inputs)
        from torch._inductor.compile_fx import compile_fx

        patches = {"_micro_pipeline_tp": True} if model == "async" else None
        return compile_fx(graph, inputs, config_patches=patches)

    def compiled(blocks: Sequence[Any]) -> llama.Run:
        given: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": False}
        if options.whole:
            run: llama.Run = torch.compile(llama.stack(blocks), **given)
            return run
        return llama.stack([torch.compile(block, **given) for block in blocks])

    return compiled


def wanted_calls(size: Size, measure: str) -> dict[str, tuple[int, int]]:
    """Return the least and the most fused calls of a pass, by op. A layer that did not save what it
    gathered may gather it once more for the gradient of its weight."""
    per_layer = Counter(each.op for each in llama.products(llama.WIDTHS[size.width], 1, measure))
    found = {op: (size.depth * count,) * 2 for op, count in per_layer.items()}
    if measure == "step":
        least, _ = found["all_gather_gemm"]
        found["all_gather_gemm"] = (least, least + 2 * size.depth)
    return found


def calls_wrong(counted: Mapping[str, int], size: Size, measure: str) -> str:
    """Return where fused calls are not what the layers have, or nothing."""
    wanted = wanted_calls(size, measure)
    wrong = [
        f"{counted.get(op, 0)} x {op}, {least} to {most} wanted"
        for op, (least, most) in wanted.items()
        if not least <= counted.get(op, 0) <= most
    ]
    return "; ".join(wrong)


def of_one_row(case: Case, measure: str, options: Options) -> dict[str, Any]:
    """Set all contenders up, let them take turns, and return what all ranks found. Collective."""
    place = case.place
    entries: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    for model in options.models:
        for mode in MODELS[model]:
            if mode in options.modes:
                name = f"{model} {mode}"
                before = contenders.get(f"{model} compiled")
                make = partial(_set_up, model, mode, case, measure, options, before)
                one, entries[name] = turns.set_up(make, place)
                if one is not None:
                    contenders[name] = one
                if place.rank == 0:  # of a run that does not end this is what is known
                    print(f"# {name}: {entries[name].get('failed', 'ready')}", file=sys.stderr)
    calls = {name: each.call for name, each in contenders.items()}
    for name, each in turns.take_turns(calls, options.turns, place).items():
        entries[name] |= each
        wrong = [text for text in place.of_all(case.checked(contenders[name])) if text]
        if wrong:
            entries[name] = {"failed": f"wrong after its turns: {wrong[0]}"}
        if options.trace is not None:
            size = case.size
            about = f"{size.width} {size.tokens}x{size.batch} {measure} {name}".replace(" ", "_")
            turns.trace(calls[name], options.trace / about, place)
    return entries


def _set_up(
    model: str, mode: str, case: Case, measure: str, options: Options, before: Contender | None
) -> tuple[Contender, dict[str, Any]]:
    """Make a contender, check it and count its calls; return it and what was found on this rank.
    ``before``: the compiled one, of which a graph is captured. Unfit: it is none or wrong."""
    place = case.place
    if mode == "graph":
        if before is None:
            raise turns.Unfit("is not compiled")
        held: list[Tensor] = []

        def once() -> None:
            held[:] = before.call()

        contender = Contender(model, mode, graphs.captured([once]).replay, held)
        place.wait()
    else:
        with mkernel.enable_async_tensor_parallel() if model == "pass" else nullcontext():
            contender = Contender(
                model, mode, case.call(model, measure, compiler(model, mode, options))
            )
            contender.call()
    wrong = case.checked(contender)
    if wrong:
        raise turns.Unfit(f"wrong: {wrong}")
    if mode == "graph":
        return contender, {}
    found = _memory(contender.call, place)
    before_calls = Counter(mkernel.stats(place.mesh).calls)
    contender.call()
    place.wait()
    counted = Counter(mkernel.stats(place.mesh).calls) - before_calls
    if model in OURS:
        found["calls"] = dict(counted)
        found["calls_wrong"] = calls_wrong(counted, case.size, measure)
    return contender, found


def _memory(call: Call, place: Place) -> dict[str, Any]:
    """Return the most memory of torch's allocator that a call takes beyond what is there, and what the
    device has in use beside that allocator: libraries' buffers and mkernel's."""
    if not place.cuda:
        call()
        return {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    place.wait()
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20,
        "beside_mb": (total - free - torch.cuda.memory_reserved()) / 2**20,
    }


class Ops:
    """What each communicating op takes alone, above its product alone. Measured once for a shape."""

    def __init__(self, place: Place, count: int) -> None:
        self._place, self._count = place, count
        self._known: dict[tuple[llama.Product, int], dict[str, float]] = {}

    def of(self, product: llama.Product, tokens: int) -> dict[str, float]:
        """Return microseconds of mkernel's op, of torch's product and collective, and of the product.
        Collective."""
        key = product, tokens
        if key not in self._known:
            calls = self._calls(product, tokens)
            found = turns.take_turns(calls, self._count, self._place)
            each = OP_CALLS if self._place.cuda else 1
            self._known[key] = {name: one["median_us"] / each for name, one in found.items()}
        return self._known[key]

    def _calls(self, product: llama.Product, tokens: int) -> dict[str, Call]:
        place = self._place
        gathers, reduces = product.op == "all_gather_gemm", product.op == "gemm_all_reduce"
        options: Any = {"device": place.device, "dtype": place.dtype}
        whole = torch.randn(tokens, product.k, **options)
        weight = torch.randn(product.n, product.k, **options).t()
        a = whole.chunk(place.ranks)[place.rank].clone() if gathers else whole
        part = torch.empty(tokens // place.ranks, product.n, **options)
        fused = getattr(mkernel, product.op)

        def library() -> object:
            if gathers:
                collectives.all_gather(whole, a)
                return whole @ weight
            found = whole @ weight
            if reduces:
                return distributed.all_reduce(found)
            return collectives.reduce_scatter(part, found)

        calls: dict[str, Call] = {
            "mkernel": lambda: fused(a, weight, group=place.mesh),
            "library": library,
            "product": lambda: whole @ weight,
        }
        if not place.cuda:
            return calls
        return {name: graphs.captured([call] * OP_CALLS).replay for name, call in calls.items()}


def ceilings(size: Size, measure: str, ops: Ops, ranks: int) -> dict[str, Any]:
    """Return what the ops add to a model beyond its products: mkernel's alone, and torch's."""
    products = llama.products(llama.WIDTHS[size.width], ranks, measure)
    shown = []
    above = {"mkernel": 0.0, "library": 0.0}
    for each in products:
        us = ops.of(each, size.tokens)
        shown.append({"op": each.op, "m": size.tokens, "n": each.n, "k": each.k, "us": us})
        for name in above:
            above[name] += size.depth * (us[name] - us["product"])
    return {"ops": shown, "above_products_us": above}


# ---- what a row says -----------------------------------------------------------------------------


def ratio(entries: Mapping[str, dict[str, Any]], one: str, other: str) -> float | None:
    """Return the median ratio of two contenders' turns; None: one of them has none."""
    times = [entries.get(name, {}).get("us", ()) for name in (one, other)]
    found = [a / b for a, b in zip(*times, strict=False) if a is not None and b is not None]
    return statistics.median(found) if found else None


def judged(row: dict[str, Any], drawn: bool) -> list[dict[str, Any]]:
    """Return a line for each of ours in each mode: its ratio to torch, what it recovered, what the ops
    alone would, and the bars that it misses."""
    entries, measure = row["contenders"], row["measure"]
    large = row["tokens"] >= LARGE_TOKENS
    lines = []
    for name, entry in entries.items():
        model, mode = name.split()
        if model not in OURS:
            continue
        line: dict[str, Any] = {"contender": name, "missed": []}
        lines.append(line)
        for needed in (name, f"torch {mode}", f"floor {mode}"):
            if "failed" in entries.get(needed, {}):
                line["missed"].append(f"{needed}: {entries[needed]['failed']}")
        if "failed" in entry:
            continue
        if entry.get("calls_wrong"):
            line["missed"].append(entry["calls_wrong"])
        to_torch = ratio(entries, name, f"torch {mode}")
        floor, torch_us, mine = (
            entries.get(each, {}).get("median_us")
            for each in (f"floor {mode}", f"torch {mode}", name)
        )
        if to_torch is None:
            continue
        line["to_torch"] = to_torch
        timed = line["missed"] if row["cuda"] else []
        judges = mode == "eager" or model != "styles"
        if judges and measure != "decode" and to_torch > (SLOWER_DRAWN if drawn else SLOWER):
            timed.append(f"{to_torch:.3f} of torch")
        if None not in (floor, torch_us, mine) and torch_us > floor:
            exposed = torch_us - floor
            line["exposed"] = exposed / torch_us
            line["recovered"] = (torch_us - mine) / exposed
            ceiling = floor + row["above_products_us"]["mkernel"]
            line["ceiling_us"], line["ceiling"] = ceiling, (torch_us - ceiling) / exposed
            bar = RECOVERED.get((measure, large))
            counts = judges and mode == ("compiled" if large else "graph")
            if counts and bar is not None and line["exposed"] >= LITTLE and line["recovered"] < bar:
                timed.append(f"recovered {line['recovered']:.2f}, bar {bar}")
        peaks = [entries.get(each, {}).get("peak_mb") for each in (name, f"torch {mode}")]
        if mode == "compiled" and measure == "step" and None not in peaks:
            line["to_torch_memory"] = peaks[0] / peaks[1]
            if line["to_torch_memory"] > MEMORY:
                timed.append(f"{line['to_torch_memory']:.2f} of torch's peak memory")
    return [*lines, *_unlike(row)]


def _unlike(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for ours that are not alike where they are compiled."""
    times = {
        model: us
        for model in OURS
        if (us := row["contenders"].get(f"{model} compiled", {}).get("median_us")) is not None
    }
    if len(times) < 2 or row["measure"] == "decode":
        return []
    apart = max(times.values()) / min(times.values())
    missed = [f"{apart:.3f} between ours, bar {UNLIKE}"] if row["cuda"] and apart > UNLIKE else []
    return [{"contender": "ours compiled", "apart": apart, "missed": missed}]


def shown(row: dict[str, Any]) -> str:
    """Return a row in lines of text."""
    lines = [
        f"{row['width']}, {row['layers']} layers, {row['tokens']} tokens, B {row['batch']}, "
        f"{row['measure']}"
    ]
    memory = lambda _, entry: f"  {entry['peak_mb']:.0f} MB" if "peak_mb" in entry else ""  # noqa: E731
    lines += turns.shown(row, memory)
    for line in row["judged"]:
        figures = [
            f"{name} {line[name]:.2f}"
            for name in ("to_torch", "recovered", "ceiling", "to_torch_memory", "apart")
            if name in line
        ]
        verdict = "; ".join(line["missed"]) or "bars met"
        lines.append(f"  -> {line['contender']}: {', '.join(figures)}: {verdict}")
    return "\n".join(lines)


# ---- a run ---------------------------------------------------------------------------------------


def rows(place: Place, options: Options) -> Iterator[dict[str, Any]]:
    """Measure all sizes that the time is enough for."""
    began = time.monotonic()
    if place.cuda:
        group_name()  # lets torch's passes use symmetric memory in that group
    ops = Ops(place, options.turns)
    for size in options.sizes:
        case: Case | None = None
        for measure in size.measures():
            if max(place.of_all(time.monotonic() - began)) > 60 * options.minutes:
                break
            case = case or Case(size, options.models, place)
            turns.let_go()
            since = time.monotonic()
            entries = of_one_row(case, measure, options)
            row = {
                **size._asdict(), "layers": size.depth, "measure": measure,
                "cuda": place.cuda, "contenders": entries,
                **ceilings(size, measure, ops, place.ranks),
            }  # fmt: skip
            row["seconds"] = time.monotonic() - since
            row["judged"] = judged(row, options.drawn)
            for each in entries.values():
                turns.count_turns(each)
            yield row


def size_of(text: str) -> Size:
    """Read ``WIDTH:TOKENSxBATCH``. ArgumentTypeError, ValueError: it is none."""
    start, _, batch = text.partition("x")
    size = Size(*turns.size_of(start, llama.WIDTHS), int(batch or 1))
    if size.tokens % size.batch:
        raise ValueError
    return size


def drawn_sizes(seed: int, count: int, ranks: int, layers: int | None) -> tuple[Size, ...]:
    """Draw sizes from 512 to 16384 tokens, whose logarithms are uniform."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        batch, step = draw.choice((1, 4)), 8 * ranks
        tokens = 512 * 32 ** draw.random()
        whole = max(1, round(tokens / batch / step)) * step * batch
        found.append(Size(draw.choice(("8b", "70b")), whole, batch, layers))
    return tuple(found)


def main() -> int:
    """Print each row as it is done; 1 where a bar is missed."""
    parser = turns.parser(__doc__, SIZES, size_of)
    parser.add_argument("--drawn", type=int, metavar="SEED", help="sizes that are drawn")
    parser.add_argument("--count", type=int, default=6, help="how many are drawn")
    parser.add_argument("--layers", type=int, help="default: four of 8b, two of 70b")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--compile", choices=("block", "whole"), default="block")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no row begins after that")
    parser.add_argument("--trace", type=Path, help="a folder for traces of a call of each")
    given = parser.parse_args()
    cuda = given.accelerator == "hopper"
    models, modes = given.models.split(","), given.modes.split(",")
    if not cuda:
        modes, models = [m for m in modes if m != "graph"], [m for m in models if m != "async"]
    if given.backend != "inductor":
        models = [each for each in models if each not in ("async", "pass")]
    if not {*models} <= {*MODELS} or not {*modes} <= {*MODES}:
        parser.error(f"--models: of {', '.join(MODELS)}; --modes: of {', '.join(MODES)}")
    if "graph" in modes and "compiled" not in modes:
        parser.error("--modes: graph is captured of compiled")
    chosen = [each._replace(layers=given.layers) for each in given.sizes]
    if given.drawn is not None:
        chosen = drawn_sizes(given.drawn, given.count, given.ranks, given.layers)
    options = Options(
        tuple(chosen), tuple(models), tuple(modes), given.turns, given.minutes, given.backend,
        given.compile == "whole", given.drawn is not None, given.trace,
    )  # fmt: skip
    found = turns.launched(
        "whole_models", given, rows, options, text=shown, compile=given.compile,
        backend=given.backend, seed=given.drawn,
    )  # fmt: skip
    missed = [line for row in found for line in row["judged"] if line["missed"]]
    wanted = sum(len(each.measures()) for each in chosen)
    print(f"{len(found)} of {wanted} rows; {len(missed)} lines miss a bar")
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
