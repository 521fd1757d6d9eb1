"""Families of calls that take one way through ``hopper``, or ``streams``, and how
``test_calls_on_gpus`` tries each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import attention_ranks
import calls
import hopper_ranks
import kept_ranks
import moe_ranks
import pytest
from attention_ranks import Attention, Trained
from calls import Decisions
from hopper_ranks import OPS, Shape, normed, rows
from in_world import TOLD_S
from moe_ranks import GATHERED, IN_ORDER, IN_PIECES, PERMUTED, WANTED, Moe
from test_fp8_on_gpus import FUSED, PROMOTED, drawn_scaled
from test_fp8_on_gpus import MIXED as SCALED_BY_LIBRARY
from test_hopper_nodes import ATTENTION as ATTENTION_OF_NODES
from test_hopper_nodes import BY_KERNEL as KERNEL_OF_NODES
from test_hopper_nodes import DIRECT, NICS
from test_hopper_nodes import EXPERTS as EXPERTS_OF_NODES
from test_hopper_nodes import MIXED as PRODUCTS_OF_NODES
from test_node_exchanges import SHARED
from test_parts_on_gpus import MIXED as IN_PARTS
from test_parts_on_gpus import drawn as drawn_parts

import mkernel

GATHER: Final = "all_gather_gemm"
SCATTER: Final = "gemm_reduce_scatter"
REDUCE: Final = "gemm_all_reduce"


@dataclass(frozen=True)
class Family:
    """Calls of one way, mixed with others, and how often they are made.

    Attributes:
        shapes: what is called by turns. in_graphs, repeated: instead of them, in graphs and again and
            again on the same inputs.
        rounds: of calls with late ranks; a queue has ``queued`` of them. replays: of a graph.
        streams: rounds of two streams; 0: none. times: of the same inputs; 0: none.
        drawn: a random shape for so many ranks; ``draws`` of them are tried.
        environment, decisions, around: what makes calls take the way: variables, what the tuning
            decides, and a function of shapes that runs another one on them in a fresh process.
        least: the fewest ranks. everywhere: whether few rows are left to their kernel wherever it fits.
        nic: of ranks on several nodes. worlds: nodes and ranks of each; between nodes, random shapes
            are for all of them, and the rest for the first. judged: calls beside those that are drawn,
            instead of those of graphs.
    """

    shapes: Sequence[calls.Shape]
    rounds: int = 40
    queued: int = 40
    replays: int = 40
    streams: int = 0
    times: int = 12
    drawn: Callable[[random.Random, int], calls.Shape] | None = None
    draws: int = 200
    in_graphs: Sequence[calls.Shape] | None = None
    repeated: Sequence[calls.Shape] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    decisions: Decisions | None = None
    around: Callable[..., Any] | None = None
    least: int = 1
    everywhere: bool = False
    accelerator: str = "hopper"
    nic: str | None = None
    worlds: Sequence[tuple[int, int]] = ((1, 1), (1, 2), (1, 4))
    judged: Sequence[calls.Shape] | None = None
    marks: Sequence[pytest.MarkDecorator] = ()

    def run(
        self, world: tuple[int, int], fn: Callable[..., Any], shapes: Sequence[Any], *arguments: Any
    ) -> list[Any]:
        """Return what each rank of a world finds."""
        call: tuple[Any, ...] = (fn, shapes, *arguments)
        if self.around is not None:
            call = self.around, shapes, fn, *arguments
        if self.decisions is not None:
            call = calls.decided, self.decisions, *call
        run = mkernel.launch if self.around else kept_ranks.run
        found: list[Any] = run(
            *call, nodes=world[0], ranks_per_node=world[1], accelerator=self.accelerator,
            nic=self.nic, verbs="soft" if self.nic else None, timeout_s=TOLD_S,
        )  # fmt: skip
        return found

    def right(
        self, world: tuple[int, int], fn: Callable[..., Any], shapes: Sequence[Any], *arguments: Any
    ) -> None:
        """No rank found a failure."""
        kept_ranks.none_failed(self.run(world, fn, shapes, *arguments))


PRODUCTS = [
    Shape(GATHER, 1024, 512, 1024),
    Shape(SCATTER, 1024, 768, 256),
    Shape(REDUCE, 512, 1024, 320, layout="column"),
    Shape(GATHER, 128, 64, 4096, dtype="float16"),
    Shape(REDUCE, 2048, 2048, 512),
]
# Calls that end without waiting for peers, between others: pushed by copy engines, by blocks, summed.
BRIEF = [
    Shape(REDUCE, 64, 1024, 512, path="library"),
    Shape(GATHER, 8192, 512, 4096, path="fused"),
    Shape(SCATTER, 256, 1024, 512, path="library"),
    Shape(GATHER, 1024, 512, 1024, path="fused"),
    Shape(REDUCE, 1024, 2048, 256, path="library"),
    Shape(REDUCE, 2048, 2048, 512, path="fused"),
    Shape(GATHER, 64, 512, 1024, path="library"),
    Shape(GATHER, 16384, 256, 2048, path="library"),
]
# Few rows: each height of the kernel, whole and odd tiles, one wave of them and two, sums that travel
# in float32 and rounded.
SUMS = [
    Shape(REDUCE, 1, 4096, 2048, layout="column"),
    Shape(REDUCE, 16, 1032, 4096),
    Shape(REDUCE, 33, 8192, 512, dtype="float16"),
    Shape(REDUCE, 128, 5120, 1048, layout="column"),
    Shape(REDUCE, 127, 7168, 264),
    Shape(REDUCE, 40, 17416, 264, layout="column"),  # a second wave of tiles
]
SCATTERED = [
    Shape(SCATTER, 4, 4096, 2048, layout="column"),
    Shape(SCATTER, 36, 1032, 4096, dtype="float16", bias=True),
    Shape(SCATTER, 124, 7168, 264),
    Shape(SCATTER, 20, 17416, 520),
]
SCALED = [
    Shape(op, m, n, k, "float8_e4m3fn", "column", None, out, scales, fast=True)
    for op, m, n, k, out, scales in (
        (REDUCE, 16, 1040, 4096, "bfloat16", "row"),
        (REDUCE, 128, 5120, 1040, "float16", "tensor"),
        (SCATTER, 64, 4096, 2048, "bfloat16", "row"),
        (SCATTER, 124, 7168, 272, "float16", "row"),
        (SCATTER, 36, 17424, 528, "bfloat16", "tensor"),
    )
]
FEW = [*SUMS, *SCATTERED, *SCALED]
# Of more rows: whole tiles and odd ones of both sizes, one wave of them and several, a norm behind.
TILED = [
    Shape(REDUCE, 256, 7168, 264),
    Shape(REDUCE, 129, 1032, 4096, layout="column", bias=True),
    Shape(REDUCE, 512, 8192, 520, dtype="float16"),
    Shape(REDUCE, 1000, 2056, 264, layout="column"),
    Shape(REDUCE, 300, 12296, 136, dtype="float16", layout="column", bias=True),
    normed(400, 4104, 1032, layout="column"),
]
# A kernel that follows does norms: each height, odd tiles, shares of one row and of none, split K.
NORMED = [
    normed(1, 4096, 2048, layout="column"),
    normed(16, 1032, 4096, norm="alone"),
    normed(33, 8192, 512, dtype="float16", bias=True),
    normed(128, 5120, 1048, layout="column"),
    normed(127, 7168, 264),
    normed(3, 264, 8192, norm="alone", bias=True),
    normed(64, 8192, 4096),
    *(
        Shape(REDUCE, m, n, k, "float8_e4m3fn", "column", "fused", out, "row", True, norm=norm)
        for m, n, k, out, norm in (
            (1, 4096, 2048, "bfloat16", "residual"),
            (33, 7168, 272, "float16", "alone"),
        )
    ),
]
IN_TWO_WAVES = normed(40, 17416, 264, layout="column")
FEW_AND_OTHERS = [
    *NORMED,
    *FEW,
    *TILED,
    Shape(GATHER, 1024, 512, 1024),
    Shape(REDUCE, 64, 1024, 512, path="library"),
    Shape(SCATTER, 256, 1024, 512, path="library"),
    Shape(REDUCE, 2048, 2048, 512),
    Shape(GATHER, 64, 512, 1024, path="library"),
]


def drawn_few(chance: random.Random, world: int) -> Shape:
    """Draw any legal shape of up to 600 rows, for up to four ranks, half of them with a norm."""
    op = chance.choice((REDUCE, SCATTER))
    m = chance.choice((1, 2, 8, 15, 16, 17, 32, 64, 100, 128, 129, 256, chance.randint(1, 600)))
    n = 8 * chance.randint(1, chance.choice((4, 40, 160, 1100, 2400)))
    k = 8 * chance.randint(1, chance.choice((2, 40, 400, 1000)))
    m = m if op == REDUCE else min(256, -(-m // 4) * 4)
    out, bias = chance.choice(("bfloat16", "float16")), chance.random() < 0.25
    layout = chance.choice(("row", "column"))
    if world > 1 and chance.random() < 0.5:
        return normed(m, n, k, out, layout, chance.choice(("alone", "residual")), bias)
    if chance.random() < 0.3:
        scales = chance.choice(("row", "tensor"))
        n, k = (-(-size // 16) * 16 for size in (n, k))
        return Shape(op, m, n, k, "float8_e4m3fn", "column", None, out, scales, True, bias)
    return Shape(op, m, n, k, out, layout, bias=bias)


# One row, more than multiprocessors; rows of one vector, of several a thread; two exchanges, by flags,
# by mail, and by flags since results are symmetric; by mail with norms, of at most all that mail holds,
# of rows of several vectors a thread, and of narrow ones.
ROWS = [
    rows(1, 8192, norm="residual"),
    rows(300, 4096, norm="residual"),
    rows(64, 8, "float16"),
    rows(5, 24576, norm="alone"),
    rows(128, 8192, to="x"),
    rows(3000, 4096, norm="residual"),
    rows(4096, 4096, norm="residual", to="x"),
    rows(4000, 4096, to="symmetric"),
    rows(1031, 4104, norm="residual"),
    rows(1031, 4104, "float16", to="symmetric"),
    rows(1024, 8192, norm="residual"),
    rows(300, 16392, norm="alone", to="x"),
    rows(2048, 2056, "float16", norm="residual"),
    rows(4000, 520, norm="residual"),
    rows(1024, 4096, norm="residual", to="symmetric"),
]
ATTENTION = [
    Attention(1, 4, 4, 256, causal=True),
    Attention(2, 4, 1, 128, width=64, lies="positions"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 64, dtype="float16"),
]
BY_KERNEL = [
    Attention(1, 4, 4, 256, causal=True, way="kernel"),
    Attention(2, 4, 1, 128, lies="positions", way="kernel"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions", way="kernel"),
    Attention(2, 2, 2, 384, dtype="float16", way="kernel"),
]
BY_CORE = [
    Attention(1, 4, 4, 288, causal=True, way="parts"),
    Attention(2, 4, 1, 128, lies="positions", way="parts"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions", way="parts"),
    Attention(1, 8, 8, 4096, way="parts"),
    Attention(1, 8, 2, 4096, causal=True, way="parts"),
]
BY_PIECES = [
    Attention(1, 4, 4, 512, causal=True),
    Attention(2, 4, 1, 320, width=64, lies="positions"),
    Attention(1, 8, 2, 480, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 192, dtype="float16"),
]
# Products whose last terms cuBLAS leaves out.
LONG = [
    Shape(op, 6, 264, 12808, dtype=dtype, path="library", bias=bias)
    for op in OPS for dtype in ("bfloat16", "float16") for bias in (False, True)
]  # fmt: skip
LONG_BY_TORCH = [replace(each, path=None) for each in LONG if not each.bias]


def extremes(dtype: Any, way: str) -> list[Attention]:
    """Return scores and numbers out of the ordinary; a value of weight 0 that is NaN may show."""
    return [
        Attention(1, 4, 2, 256, causal=causal, dtype=dtype, way=way, extreme=extreme)
        for extreme in attention_ranks.EXTREMES
        for causal in (False, True)
        if not (causal and "value" in extreme)
    ]


# More tiles than blocks, several chunks of each part.
LARGE_BY_KERNEL = [
    Attention(1, 8, kv_heads, 4096, causal=causal, lies=lies, way="kernel")
    for causal in (False, True) for kv_heads, lies in ((2, "heads"), (8, "positions"))
]  # fmt: skip
LARGE_PRODUCT = Shape(GATHER, 8192, 512, 4096)


def drawn_gradients(chance: random.Random, world: int) -> Trained:
    """Draw the gradients of any legal size. Large scores make weights of nearly 1, where dO·v - dO·O
    cancels: the library itself is off there."""
    return Trained(replace(attention_ranks.drawn(chance), scale=chance.choice((None, 0.05, -0.1))))


def trained(shapes: Sequence[Attention], **how: bool) -> list[Trained]:
    """Return the gradients of these."""
    return [Trained(shape, **how) for shape in shapes]


BOUNDED = [
    Moe(37, hidden=72, features=136, experts=3, top_k=3, capacity=4 * 37 * 3),
    Moe(64, 128, 264, 4, 2, routing="padded", capacity=4 * 64 * 2, returns="ranks", narrow=True),
]
GATED = Moe(1024 + 13, 512, 264, 2, 2, activation="silu_and_mul")
MANY = [
    Moe(2048 + 77, 256, 512, 2, 2),
    Moe(1536, 128, 776, 1, 1, routing="one_expert"),
    GATED,
    replace(GATED, layout="column", dtype="float16"),
]
"""Tiles of every height, and of own tokens alone."""
MANY_WANTED = [
    Moe(2048 + 77, 256, 512, 2, 2), Moe(1536, 1032, 776, 1, 1), Moe(700, 7168, 264, 2, 1)
]  # fmt: skip
"""Also beside tiles of own tokens, which leave the push its multiprocessors."""
# Sums by rank, of wide tiles.
WIDE = [
    Moe(513, hidden, 136, 3, 3, returns="ranks", narrow=True, dtype=dtype, layout=layout)
    for hidden, dtype, layout in (
        (256, "bfloat16", "row"), (1032, "float16", "column"), (2104, "bfloat16", "column"),
    )
]  # fmt: skip
SORTED = Moe(300, 1032, 512, 4, 4, narrow=True)
EXPERTS = Family(
    [*BOUNDED, Moe(129, 256, 64, 2, 2)],
    24,
    24,
    60,
    in_graphs=BOUNDED,
    drawn=moe_ranks.drawn,
    repeated=[replace(SORTED, returns=returns) for returns in ("slots", "ranks")],
    judged=[*BOUNDED, *MANY],
)
SCALED_BOUNDED = [
    Moe(37, 384, 256, 3, 3, capacity=4 * 37 * 3, scales=True, activation="silu_and_mul"),
    Moe(64, 128, 272, 4, 2, routing="padded", capacity=4 * 64 * 2, scales=True),
    Moe(40, 640, 384, 2, 2, capacity=4 * 40 * 2, returns="ranks", narrow=True, scales=True,
        quantise=True, activation="silu_and_mul"),
    Moe(129, 256, 128, 2, 2, capacity=4 * 129 * 2, returns="slots", narrow=True, scales=True,
        quantise=True, dtype="float16"),
]  # fmt: skip
SCALED_MANY = [
    Moe(2048 + 77, 256, 512, 2, 2, scales=True, quantise=True),
    Moe(1536, 128, 784, 1, 1, routing="one_expert", scales=True, dtype="float16"),
    Moe(1024 + 13, 512, 640, 2, 2, scales=True, activation="silu_and_mul"),
    Moe(1024 + 13, 512, 384, 2, 2, scales=True, activation="silu_and_mul", quantise=True),
]
SCALED_EXPERTS = Family(
    SCALED_BOUNDED, 24, 24, 60, drawn=moe_ranks.drawn_scaled, draws=120,
    judged=[*SCALED_BOUNDED, *SCALED_MANY],
)  # fmt: skip
ONCE = Family([], 0, 0, 0, times=0)
EARLY = moe_ranks.all_of(moe_ranks.early(128), PERMUTED)
WANTED_EXPERTS = replace(EXPERTS, draws=100, least=2, judged=[*BOUNDED, *MANY_WANTED])  # fmt: skip
STREAMS = Family(
    [Shape(op, m, n, 320) for op in OPS for m, n in ((64, 264), (1024, 520), (2048, 4096))],
    45, 45, 0, streams=30, times=0, accelerator="streams", least=2,
)  # fmt: skip
PATH, WAY = "MKERNEL_PATH", "MKERNEL_HOPPER_ATTENTION"


def drawn_far(chance: random.Random, world: int, ops: Sequence[str] = OPS) -> Shape:
    """Draw a shape of a world of several nodes. In fewer sums the error of parts that are rounded once
    scatters beyond the limit."""
    op = chance.choice(ops)
    gathers = op == GATHER
    rows = chance.randint(1 if gathers else 200, 2000)
    return Shape(
        op,
        m=rows if op == REDUCE else rows // world * world or world,
        n=8 * chance.randint(1 if gathers else 20, 200),
        k=8 * chance.randint(1, 260),
        dtype=chance.choice(("bfloat16", "float16")),
        layout=chance.choice(("row", "column")),
    )


def drawn_levels(chance: random.Random, world: int) -> Shape:
    """Draw a shape whose exchange may be hierarchical."""
    return drawn_far(chance, world, OPS)


def between_nodes(nic: str) -> dict[str, Family]:
    """Calls of worlds of several nodes, staged; and those that a NIC also writes into device memory."""
    far: dict[str, Any] = {"nic": nic, "worlds": ((2, 1), (3, 1), (2, 2)), "times": 0}
    bounded = [replace(one, capacity=2 * one.tokens * one.top_k) for one in EXPERTS_OF_NODES]
    documents = Attention(2, 4, 2, 256, causal=True, documents=(0, 7, 200, 201, 512))
    products = Family(
        PRODUCTS_OF_NODES, **{**far, "times": 10}, drawn=drawn_far, draws=24, judged=(),
        in_graphs=PRODUCTS_OF_NODES[:3], repeated=[Shape(op, 2048, 1536, 1024) for op in OPS],
    )  # fmt: skip
    attention = Family(
        ATTENTION_OF_NODES, 12, 0, 12, **far, drawn=attention_ranks.drawn, draws=40,
    )  # fmt: skip
    by_kernel = Family(
        KERNEL_OF_NODES, 12, 12, 12, **{**far, "times": 12},
        drawn=attention_ranks.drawn_for_kernel, draws=24, environment={WAY: "kernel"},
        repeated=[Attention(1, 8, 2, 512, causal=each, way="kernel") for each in (False, True)],
    )  # fmt: skip
    chunked = replace(
        by_kernel, around=attention_ranks.in_chunks, drawn=None, worlds=((2, 1), (2, 2))
    )
    experts = Family(
        bounded, 0, 16, 12, **far, in_graphs=bounded[:2], judged=EXPERTS_OF_NODES,
    )  # fmt: skip
    permuted = replace(experts, queued=0, replays=0, decisions=PERMUTED)
    pieces = replace(experts, decisions=IN_PIECES)
    early = replace(permuted, decisions=moe_ranks.all_of(IN_PIECES, moe_ranks.early(128)))
    several = ((2, 2), (3, 2), (2, 3))
    plain = [replace(one, activation=None) for one in bounded]
    by_torch: dict[str, Any] = {
        "accelerator": "cuda",
        "shapes": plain,
        "judged": plain,
        # torch's product of groups in float16 waits there, which no graph takes
        "in_graphs": [one for one in plain if one.dtype == "bfloat16"][:2],
    }
    relayed = replace(pieces, around=moe_ranks.relaying, worlds=several)
    hierarchical = Family(
        SHARED, 30, 30, 30, drawn=drawn_levels,
        draws=24, judged=(), nic=nic, worlds=((2, 2), (3, 2), (2, 3)), times=10,
        repeated=[Shape(op, 2048, 1536, 1024) for op in OPS],
        environment={"MKERNEL_EXCHANGE": "hierarchical"},
    )  # fmt: skip
    drawn_alone: dict[str, Any] = {"rounds": 0, "queued": 0, "replays": 0, "times": 0}
    found = {
        "products": products, "attention": attention, "experts": experts,
        "attention-kernel": by_kernel, "attention-chunks": chunked,
        "experts-permuted": permuted, "experts-pieces": pieces, "experts-early": early,
        "experts-relayed": relayed,
        "experts-relayed-permuted": replace(
            relayed, decisions=moe_ranks.all_of(IN_PIECES, PERMUTED), queued=0, replays=0
        ),
        "experts-cuda": replace(pieces, **by_torch),
        "experts-relayed-cuda": replace(relayed, **by_torch),
        "hierarchical": hierarchical,
        "documents": replace(
            attention, shapes=[documents], **drawn_alone, drawn=None, worlds=((2, 1),)
        ),
    }  # fmt: skip
    into_device = {
        "products": replace(products, **{**drawn_alone, "times": 10}, draws=0),
        "attention": replace(attention, **drawn_alone, drawn=None),
        "attention-kernel": replace(by_kernel, drawn=None), "attention-chunks": chunked,
        "experts": experts, "experts-permuted": permuted, "experts-pieces": pieces,
        "experts-relayed": relayed,
        "hierarchical": replace(hierarchical, **drawn_alone),
    }  # fmt: skip
    found |= {
        f"{name}-direct": replace(
            each,
            environment={**each.environment, "MKERNEL_NIC_SETTINGS__GPUDIRECT": "1"},
            marks=DIRECT,
        )
        for name, each in into_device.items()
    }
    return {f"{nic}-{name}": each for name, each in found.items()}


FAMILIES = {
    **{
        path: Family(
            PRODUCTS, 60, 60, 100, streams=100, times=20, drawn=hopper_ranks.drawn, draws=240,
            in_graphs=PRODUCTS[:3], repeated=[Shape(op, 2048, 1536, 1024) for op in OPS],
            environment={PATH: path},
        )
        for path in ("fused", "library")
    },
    "brief": Family(BRIEF, 60, 80),
    "long": Family(
        LONG, 0, 0, 10, times=0, in_graphs=LONG[::4], judged=LONG, worlds=((1, 2),)
    ),
    "long-streams": Family(
        [], 0, 0, 0, times=0, judged=LONG_BY_TORCH, worlds=((1, 2),), accelerator="streams"
    ),
    "e4m3": Family([], 0, 0, 0, times=0, drawn=drawn_scaled, draws=300),
    "e4m3-library": Family(SCALED_BY_LIBRARY, 60, 60, least=2),
    "e4m3-fused": Family(FUSED, 60, 60, least=2),
    "e4m3-promoted": Family(PROMOTED, 60, 60, least=2),
    "parts": Family(IN_PARTS, 60, 60, drawn=drawn_parts, draws=90, least=2),
    "few-rows": Family(
        FEW_AND_OTHERS, 100, 1000, 60, in_graphs=[*NORMED, IN_TWO_WAVES, *FEW, *TILED], times=20,
        repeated=[SUMS[3], SCATTERED[2], NORMED[3], NORMED[6], TILED[2]], drawn=drawn_few, draws=240,
        environment={PATH: "fused"}, everywhere=True,
    ),
    "sums": Family(
        [*ROWS, Shape(GATHER, 1024, 512, 1024), Shape(REDUCE, 64, 1024, 512, path="library"),
         Shape(REDUCE, 1031, 4104, 512, path="library", bias=True),
         Shape(REDUCE, 2048, 2048, 512, path="fused"),
         *(normed(m, 1032, 512, layout="column", norm=norm, bias=m > 33, path=path)
           for m in (33, 700) for norm in ("alone", "residual") for path in ("fused", "library")),
         normed(1031, 4104, 520, path="library")],
        60, 300, 60, in_graphs=[*ROWS[:6], *ROWS[7:]], drawn=hopper_ranks.drawn_rows, draws=80,
        repeated=[each for each in ROWS if each.to != "x"], times=3,
    ),
    "attention": Family(
        [*ATTENTION, LARGE_PRODUCT], 40, 40, 50, streams=16, drawn=attention_ranks.drawn,
        in_graphs=ATTENTION,
        repeated=[Attention(1, 8, 2, 512, causal=causal) for causal in (False, True)],
    ),
    "documents": Family(
        [], 0, 0, 0, times=0, drawn=attention_ranks.drawn_packed
    ),
    "attention-kernel": Family(
        BY_KERNEL, 24, 24, 24, streams=16, drawn=attention_ranks.drawn_for_kernel, draws=40,
        repeated=[Attention(1, 8, 2, 512, causal=each, way="kernel") for each in (False, True)],
        environment={WAY: "kernel"}, least=2,
        judged=[*BY_KERNEL, *extremes("float16", "kernel"), *LARGE_BY_KERNEL],
    ),
    "attention-core": Family(
        BY_CORE, 0, 0, 20, drawn=attention_ranks.drawn_for_core, draws=60,
        around=attention_ranks.by_core, repeated=BY_CORE[-1:],
        judged=[*BY_CORE, *extremes("float16", "parts"), *extremes("bfloat16", "parts")],
    ),
    "attention-pieces": Family(
        BY_PIECES, 12, 12, 10, times=0, around=attention_ranks.in_pieces
    ),
    "gradients": Family(
        trained(ATTENTION), 40, 40, 10, drawn=drawn_gradients, draws=64, times=8,
        in_graphs=trained([Attention(1, 8, 4, 256, causal=c) for c in (False, True)], by_op=True),
        repeated=trained([Attention(1, 8, 2, 512, causal=causal) for causal in (False, True)],
                         deterministic=True),
        judged=trained([*ATTENTION, *(Attention(1, 8, 2, 2048, causal=c) for c in (False, True))]),
    ),
    "experts": EXPERTS,
    "experts-permuted": replace(EXPERTS, decisions=PERMUTED),
    "experts-e4m3": replace(SCALED_EXPERTS, decisions=GATHERED),
    "experts-e4m3-permuted": replace(SCALED_EXPERTS, decisions=IN_ORDER),
    "experts-e4m3-wanted": replace(
        ONCE, judged=[*SCALED_BOUNDED, *SCALED_MANY], decisions=WANTED, least=2
    ),
    "experts-early": replace(ONCE, judged=MANY, decisions=EARLY),
    "experts-wide": Family(WIDE, 0, 12, 0, times=0, judged=WIDE, decisions=PERMUTED),
    "experts-wanted": replace(WANTED_EXPERTS, decisions=WANTED),
    "experts-wanted-permuted": replace(
        WANTED_EXPERTS, decisions=moe_ranks.all_of(WANTED, PERMUTED)
    ),
    "experts-wanted-early": replace(
        ONCE, judged=MANY_WANTED, decisions=moe_ranks.all_of(WANTED, EARLY), least=2
    ),
    **{name: each for nic in NICS for name, each in between_nodes(nic).items()},
    "efa-repeated-and-late-packets": Family(
        PRODUCTS_OF_NODES, 20, 0, 0, times=0, draws=0, nic="efa", worlds=((2, 1),),
        environment={
            "MKERNEL_SOFTVERBS_DUPLICATES": "50", "MKERNEL_SOFTVERBS_HOLD_NS": "400000",
        },
    ),
    # With one hardware queue, a wait on a stream holds up all other streams.
    **{
        f"streams-{queues}": replace(
            STREAMS, environment={"CUDA_DEVICE_MAX_CONNECTIONS": queues}
        )
        for queues in ("1", "8")
    },
}  # fmt: skip
# What needs no kernel of Hopper's own, by the backend that has none.
FAMILIES |= {
    f"cuda-{name}": replace(
        FAMILIES[name],
        accelerator="cuda",
        environment={},
        shapes=[each for each in FAMILIES[name].shapes if getattr(each, "path", None) != "fused"],
        draws=FAMILIES[name].draws // 2,
    )
    for name in (
        "library", "brief", "long", "e4m3", "e4m3-library", "parts", "sums", "attention",
        "documents", "attention-pieces", "gradients", "experts",
    )
}  # fmt: skip
FAMILIES["cuda-e4m3"] = replace(
    FAMILIES["cuda-e4m3"],
    drawn=lambda chance, world: replace(drawn_scaled(chance, world), path=None),
)
FAMILIES["cuda-experts"] = replace(  # torch's product has no activation
    FAMILIES["cuda-experts"],
    drawn=lambda chance, world: replace(moe_ranks.drawn(chance, world), activation=None),
    judged=[*BOUNDED, *(each for each in MANY if each.activation is None)],
)
# Between nodes a library also takes e4m3 operands, and adds a bias inside the launch.
FAR_BY_LIBRARY = [
    *(Shape(op, 768, 256, 512, "float8_e4m3fn", "column", None, "bfloat16", mode, bias=op == REDUCE)
      for op in OPS for mode in ("row", "tensor", "block")),
    *(Shape(op, 384, 264, 520, bias=True, gathered=op == GATHER) for op in OPS),
    Shape(REDUCE, 521, 1032, 512, norm="residual", bias=True),
    Shape(REDUCE, 5, 1032, 4096, norm="alone"),
]  # fmt: skip
FAMILIES |= {
    f"cuda-{name}": replace(
        FAMILIES[name], accelerator="cuda", draws=12, judged=FAR_BY_LIBRARY
    )
    for nic in NICS for name in (f"{nic}-products", f"{nic}-products-direct")
}  # fmt: skip
FAMILIES |= {
    f"cuda-{nic}-attention": replace(FAMILIES[f"{nic}-attention"], accelerator="cuda")
    for nic in NICS
}
FAMILIES |= {
    f"cuda-{nic}-experts": replace(
        FAMILIES[f"{nic}-experts"],
        accelerator="cuda",
        shapes=[each for each in FAMILIES[f"{nic}-experts"].shapes if each.activation is None],
        judged=[each for each in EXPERTS_OF_NODES if each.activation is None],
    )
    for nic in NICS
}
