"""Serve drawn requests with a tensor-parallel decoder, beside the same loop on torch.distributed.

    torchrun --nproc-per-node 2 examples/serving.py              # some seconds, also without GPUs
    torchrun --nproc-per-node 2 examples/serving.py --width 8b --dtype bfloat16 \
        --accelerator hopper --seconds 300                       # fused kernels take no float32

Batching is continuous. While fewer sequences run than the load, the next request is prefilled in
chunks of drawn sizes, and between two chunks all running sequences decode one token. Prefill is
eager. On GPUs decode steps are CUDA graphs, one for each power of two that batches are padded to;
with --accelerator streams, whose calls cannot be captured, they are eager too. A sequence has a slot
of a static KV cache, whose number is its row in the batch.

Two servers with the same weights take turns, in periods of --steps steps with a drawn load. They serve
the same requests by the same schedule. ``mkernel`` ends each half of a layer in one GEMM+AllReduce with
residual and norm. ``nccl``, without GPUs ``gloo``, ends it in a product, an all-reduce, and residual
and norm, which are one compiled kernel on GPUs. A step takes until its tokens are on the host. The
first period, in which libraries start and kernels are compiled, is not counted.

After each period the logits of a drawn sequence are compared with those of the unsharded model in
float64, which has no cache. Exit code 1 where they differ by more than TOLERANCE, where in float32 the
servers answer with other tokens, or where memory grows by more than --growth in the second half of the
time. In the first one libraries still load kernels for sizes that were not drawn before.
"""

import argparse
import ctypes
import functools
import heapq
import os
import random
import sys
import time
from array import array
from collections import namedtuple
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import mkernel

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}  # of logits, relative
SAME_TOKENS = 0.95  # in float32: after two logits that are as good as equal, answers differ
EPS = 1e-5

Width = namedtuple(
    "Width", "hidden inner heads kv_heads vocabulary layers slots context chunk steps"
)
WIDTHS = {
    "tiny": Width(64, 128, 8, 4, 512, layers=2, slots=8, context=64, chunk=16, steps=50),
    "8b": Width(4096, 14336, 32, 8, 32768, layers=4, slots=64, context=2048, chunk=512, steps=1000),
}


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make one kernel of a function on GPUs. On CPUs that is not worth the compiler's time."""
    return torch.compile(function, dynamic=True) if torch.cuda.is_available() else function


def add_norm(y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised rows and the new residual, computed in float32."""
    total = y.float() + residual.float()
    rows = rms_norm(total, weight.shape, weight.float(), EPS)
    return rows.to(y.dtype), total.to(y.dtype)


def activated(merged: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    gate, up = merged.chunk(2, dim=-1)
    return silu(gate) * up


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys [..., head_dim], rotated by their places."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


def fused(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """End half a layer: a product, its sum over ranks, the residual, and the next norm."""
    return mkernel.gemm_all_reduce(x, weight.t(), residual=residual, norm_weight=norm, eps=EPS)


def unfused(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """End half a layer by torch's collective."""
    y = x @ weight.t()
    dist.all_reduce(y)
    return compiled(add_norm)(y, residual, norm)


class Weights:
    """An unsharded decoder, the same on every rank. Its matrices are [out, in]."""

    def __init__(self, width: Width, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self.head_dim = width, width.hidden // width.heads
        generator = torch.Generator(device).manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        hidden, inner, keys = width.hidden, width.inner, width.kv_heads * self.head_dim
        sizes = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden),
                 "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip
        self.layers = [
            {name: drawn(*size) / size[1] ** 0.5 for name, size in sizes.items()}
            for _ in range(width.layers)
        ]
        self.norms = 1 + drawn(2 * width.layers + 1, hidden) / 8
        self.embedding, self.head = (drawn(width.vocabulary, hidden) for _ in range(2))
        half = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        angles = torch.outer(torch.arange(width.context, device=device), 500_000.0**-half)
        self.turns = [torch.cat((each, each), dim=-1) for each in (angles.cos(), angles.sin())]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Compute the logits [vocabulary] after the last token in float64."""
        norms, turns = self.norms.double(), [each[: len(tokens)] for each in self.turns]
        x = self.embedding[list(tokens)].double()
        for i, layer in enumerate(self.layers):
            w = {name: weight.double().t() for name, weight in layer.items()}
            y = rms_norm(x, x.shape[-1:], norms[2 * i], EPS)
            q, k, v = ((y @ w[n]).unflatten(1, (-1, self.head_dim)).transpose(0, 1) for n in "qkv")
            q, k = rotated(q, *turns), rotated(k, *turns)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + mixed.transpose(0, 1).flatten(1) @ w["o"]
            y = rms_norm(x, x.shape[-1:], norms[2 * i + 1], EPS)
            x = x + (silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return self.head.double() @ rms_norm(x[-1], x.shape[-1:], norms[-1], EPS)


class Model:
    """A rank's heads and features of a decoder, with their KV cache.

    ``end_half``: :func:`fused` or :func:`unfused`.
    """

    def __init__(self, whole: Weights, rank: int, ranks: int, end_half: Callable[..., Any]) -> None:
        self.whole, self.width, self.end_half = whole, whole.width, end_half

        def part(names: Sequence[str], dim: int, layer: dict[str, Tensor]) -> Tensor:
            return torch.cat([layer[name].chunk(ranks, dim)[rank] for name in names])

        parts = ("qkv", 0), ("o", 1), (("gate", "up"), 0), (("down",), 1)
        self.layers = [[part(*each, layer) for each in parts] for layer in whole.layers]
        width, self.device = self.width, whole.embedding.device
        self.heads, self.kv_heads = width.heads // ranks, width.kv_heads // ranks
        shape = (width.layers, 2, width.slots, self.kv_heads, width.context, whole.head_dim)
        # Whoever reads what was not written gets wrong logits.
        self.cache = torch.full(shape, 100, dtype=whole.norms.dtype, device=self.device)
        self.slots = torch.arange(width.slots, device=self.device)
        self.places = torch.arange(width.context, device=self.device)

    def prefill(self, slot: int, start: int, tokens: Sequence[int]) -> Tensor:
        """Return the logits [1, vocabulary] after tokens that follow ``start`` others."""
        end = start + len(tokens)
        mask = causal_lower_right(len(tokens), end)

        def attend(cache: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache[:, slot : slot + 1, :, :end]
            keys[0, :, start:], values[0, :, start:] = k.transpose(0, 1), v.transpose(0, 1)
            q = q.transpose(0, 1).unsqueeze(0)
            mixed = scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
            return mixed[0].transpose(0, 1).flatten(1)

        given = torch.tensor(tokens, device=self.device)
        return self._rows(given, self.places[start:end], attend)[-1:] @ self.whole.head.t()

    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the logits [batch, vocabulary] after tokens [batch] at those places."""
        slots = self.slots[: len(tokens)]
        mask = (self.places <= places[:, None])[:, None, None]

        def attend(cache: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache[:, : len(slots)]
            keys[slots, :, places], values[slots, :, places] = k, v
            q = q.unflatten(1, (self.kv_heads, -1))  # a group's queries, like those of a sequence
            return scaled_dot_product_attention(q, keys, values, mask).flatten(1)

        return self._rows(tokens, places, attend) @ self.whole.head.t()

    def _rows(self, tokens: Tensor, places: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return what the head reads: [tokens, hidden]."""
        norms, turns = self.whole.norms, [each[places].unsqueeze(1) for each in self.whole.turns]
        residual = self.whole.embedding[tokens]
        x, residual = compiled(add_norm)(torch.zeros_like(residual), residual, norms[0])
        for i, (qkv, o, gate_up, down) in enumerate(self.layers):
            heads = (x @ qkv.t()).unflatten(1, (-1, self.whole.head_dim))
            turned, v = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
            turned = compiled(rotated)(turned, *turns)
            mixed = attend(self.cache[i], turned[:, : self.heads], turned[:, self.heads :], v)
            x, residual = self.end_half(mixed, o, residual, norms[2 * i + 1])
            features = compiled(activated)(x @ gate_up.t())
            x, residual = self.end_half(features, down, residual, norms[2 * i + 2])
        return x


class Decode:
    """A decode step of one padded batch; on GPUs a graph, which reads and writes the same tensors."""

    def __init__(self, model: Model, batch: int, graphs: bool, pool: Any) -> None:
        self.model, self.graph = model, None
        self.inputs = torch.zeros(2, batch, dtype=torch.long, device=model.device)
        if graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run()  # plans, workspaces and kernels are made outside of the capture
            torch.cuda.synchronize()
            mkernel.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog may query the device meanwhile.
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self._run()

    def _run(self) -> None:
        self.logits = self.model.decode(*self.inputs)
        self.chosen = self.logits.argmax(-1)

    def __call__(self, tokens: list[int], places: list[int]) -> list[int]:
        self.inputs.copy_(torch.tensor([tokens, places]))
        self.graph.replay() if self.graph else self._run()
        return self.chosen.tolist()


class Request:
    """A drawn prompt, and the drawn number of tokens of its answer."""

    def __init__(self, draw: random.Random, width: Width, slot: int) -> None:
        self.prompt, self.answer = (draw.randint(1, width.context // n) for n in (2, 4))
        self.tokens = [draw.randrange(width.vocabulary) for _ in range(self.prompt)]
        self.slot, self.cached = slot, 0


class Server:
    """The scheduler of a model. Servers, and ranks, with the same seed have the same schedule."""

    def __init__(self, model: Model, seed: int, graphs: bool, pool: Any) -> None:
        self.model, self.width, self.draw = model, model.width, random.Random(seed)
        slots = self.width.slots
        sizes = [1 << i for i in range((slots - 1).bit_length())] + [slots]
        self.decodes = {size: Decode(model, size, graphs, pool) for size in sizes}
        self.free = list(range(slots))  # a heap: the lowest slot makes the shortest batch
        self.arriving: Request | None = None
        self.running: list[Request] = []
        self.finished: list[int] = []  # the tokens of complete answers
        self.last: list[tuple[Request, Tensor]] = []  # sequences of the last step, and their logits
        self.prefilled = False  # in the last step
        self.forget()

    def forget(self) -> None:
        """Start counting anew."""
        self.tokens, self.seconds = 0, 0.0
        self.ms: dict[str, array[float]] = {}  # eight bytes a step, which hardly count as growth

    def serve(self, load: int) -> None:
        """Run the steps of a period with up to ``load`` sequences."""
        for _ in range(self.width.steps):
            begun = time.perf_counter()
            kind, tokens = self._step(load)
            seconds = time.perf_counter() - begun
            self.tokens += tokens
            self.seconds += seconds
            for name in {kind, kind.split()[0]}:  # of a batch, and of all batches
                self.ms.setdefault(name, array("d")).append(seconds * 1e3)

    def _step(self, load: int) -> tuple[str, int]:
        """Run a step. Return its kind and how many tokens it took."""
        if self.arriving is None and len(self.running) < load:
            self.arriving = Request(self.draw, self.width, heapq.heappop(self.free))
        if self.arriving and not (self.prefilled and self.running):
            self.prefilled = True
            return "prefill", self._prefill(self.arriving)
        self.prefilled = False
        return f"decode {self._decode()}", len(self.last)

    def _prefill(self, request: Request) -> int:
        start = request.cached
        end = min(start + self.draw.randint(1, self.width.chunk), request.prompt)
        logits = self.model.prefill(request.slot, start, request.tokens[start:end])
        request.cached, self.last = end, [(request, logits[0])]
        token = int(logits.argmax())
        if end == request.prompt:
            self.arriving = None
            self._answer([(request, token)])
        return end - start

    def _decode(self) -> int:
        highest = max(request.slot for request in self.running)
        batch = next(size for size in self.decodes if size > highest)
        tokens, places = [0] * batch, [self.width.context - 1] * batch  # where nobody reads
        for request in self.running:
            tokens[request.slot], places[request.slot] = request.tokens[-1], request.cached
            request.cached += 1
        chosen = self.decodes[batch](tokens, places)
        logits = self.decodes[batch].logits
        self.last = [(request, logits[request.slot]) for request in self.running]
        requests, self.running = self.running, []
        self._answer([(request, chosen[request.slot]) for request in requests])
        return batch

    def _answer(self, given: list[tuple[Request, int]]) -> None:
        """Append tokens to answers. Those that are complete free their slots, the others run on."""
        for request, token in given:
            request.tokens.append(token)
            if len(request.tokens) < request.prompt + request.answer:
                self.running.append(request)
            else:
                self.finished += request.tokens[request.prompt :]
                heapq.heappush(self.free, request.slot)

    def error(self, draw: random.Random) -> float:
        """Return the error of a drawn sequence's logits in the last step, relative."""
        request, found = draw.choice(self.last)
        expected = self.model.whole.logits(request.tokens[: request.cached])
        return float((found.double() - expected).norm() / expected.norm())


def table(servers: dict[str, Server]) -> str:
    """Return a row for each kind of step: how many there were, and each server's percentiles."""
    heads = [f"{name} {p}" for p in ("p50", "p99") for name in servers]
    lines = [f"{'ms':12}{'steps':>9}" + "".join(f"{head:>15}" for head in heads)]
    one, other = servers.values()
    for kind in sorted(one.ms, key=lambda kind: (len(kind), kind)):
        cells = [np.percentile(each.ms[kind], p) for p in (50, 99) for each in (one, other)]
        lines.append(f"{kind:12}{len(one.ms[kind]):9}" + "".join(f"{ms:15.3f}" for ms in cells))
    rates = [f"{name} {each.tokens / each.seconds:.0f}" for name, each in servers.items()]
    return "\n".join([*lines, f"tokens/s of prompts and answers: {', '.join(rates)}"])


def memory(device: torch.device) -> dict[str, float]:
    """Return the MiB that this process has on the host, and that are taken of its device, after
    allocators have given back what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        found["device"] = (total - free) / (1 << 20)
    return found


def serve(options: argparse.Namespace, width: Width, peer: str, world: Any) -> bool:
    """Serve for the given time, print what it took. Return False where something is wrong."""
    device = torch.device(world.accelerator.device)
    whole = Weights(width, getattr(torch, options.dtype), device)
    graphs = device.type == "cuda" and options.accelerator != "streams"
    pools = (mkernel.graph_pool(), torch.cuda.graph_pool_handle()) if graphs else (None, None)
    servers = {
        name: Server(Model(whole, world.rank, world.size, ends), options.seed, graphs, pool)
        for name, ends, pool in zip(("mkernel", peer), (fused, unfused), pools, strict=True)
    }
    draw, begun = random.Random(options.seed), time.monotonic()
    middle, end = begun + options.seconds / 2, begun + options.seconds
    worst, same, total, periods, halved = 0.0, 0, 0, 0, False
    going = torch.ones((), device=device)
    while going.item():
        if periods <= 1:
            for server in servers.values():
                server.forget()
        if periods <= 1 or (not halved and time.monotonic() >= middle):
            halved = time.monotonic() >= middle
            before = memory(device)  # which empties allocators
        load = round(width.slots ** draw.random())
        for name in reversed(servers) if periods % 2 else servers:
            dist.barrier()
            servers[name].serve(load)
            mkernel.synchronize()  # raises what broke a graph's replay
        chosen = draw.random()
        errors = [each.error(random.Random(chosen)) for each in servers.values()]
        worst = float(np.max([worst, *errors]))  # also if one is no number
        answers = [each.finished for each in servers.values()]
        total, periods = total + len(answers[0]), periods + 1
        same += sum(first == second for first, second in zip(*answers, strict=True))
        for each in answers:
            each.clear()
        going.fill_(periods <= 2 or time.monotonic() < end)
        dist.broadcast(going, 0)  # all ranks serve as many periods
    after = memory(device)
    if world.rank == 0:
        print(table(servers))
    sizes = ", ".join(f"{name} {before[name]:.0f} to {after[name]:.0f}" for name in before)
    print(
        f"rank {world.rank} of {world.size} on {world.backends.accelerator}: {periods} periods, logits "
        f"differ by {worst:.1e} at most, {same} of {total} tokens are the same, MiB of {sizes}"
    )
    right = worst <= TOLERANCE[options.dtype] and total > 0
    right &= options.dtype != "float32" or same >= SAME_TOKENS * total
    return right and all(after[name] - before[name] <= options.growth for name in before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", choices=WIDTHS, default="tiny")
    for name in Width._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="default: the width's")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--growth", type=float, default=64, help="MiB")
    parser.add_argument("--seed", type=int, default=57)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()
    changed = {name: size for name in Width._fields if (size := getattr(options, name))}
    width = WIDTHS[options.width]._replace(**changed)

    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    peer = "nccl" if device else "gloo"
    dist.init_process_group(peer, timeout=timedelta(seconds=120), device_id=device)
    world = mkernel.init(accelerator=options.accelerator)
    right = serve(options, width, peer, world)  # NCCL does not end before its graphs are deleted
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
