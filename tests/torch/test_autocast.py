"""``torch.autocast`` does with ops and layers what it does with torch's products: results and gradients
are those of the unsharded program in the same autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from python_calls import plans
from ranks import close, on_ranks, operand
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mkernel
from mkernel.errors import DtypeError
from mkernel.nn import (
    ColumnParallelLinear,
    ColwiseParallel,
    ExpertParallelMLP,
    RowParallelLinear,
    RowwiseParallel,
)
from mkernel.ops import autocast

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
B, S, H, N = 2, 8, 16, 24
HALF, WIDE, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def casts(dtype: torch.dtype = HALF, **options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, **options)


# ---- the table -----------------------------------------------------------------------------------


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("mkernel::") for name in names if name.startswith("mkernel::")}


def test_every_op_has_a_row_and_kernels() -> None:
    ops = registered()
    assert ops
    assert {name for name in autocast.CASTS if not name.endswith("_into")} == ops
    for name in ops - {"shared_product"}:  # a function of tensors, which calls the others
        for key in ("AutocastCPU", "AutocastCUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mkernel::{name}", key)


Row = tuple[str, tuple[Any, ...], dict[str, Any], str]
"""An op, its arguments and options, and the names of those that autocast casts."""


def calls() -> Iterator[Row]:
    """Make calls of which every operand has float32, or e4m3 and its scales."""
    ops, world = torch.ops.mkernel, mkernel.world()
    group = {"group": world.name}
    a, b, bias, norm = torch.randn(S, H), torch.randn(H, N), torch.randn(N), torch.ones(N)
    product = "a b bias"
    for op in ("all_gather_gemm", "all_gather_gemm_gathered", "gemm_reduce_scatter"):
        yield op, (a, b, bias), {}, product
    yield "gemm_all_reduce", (a, b, bias), {"prefetch": b}, "a b bias"
    yield "all_gather_gemms", (a, [b, b[:, :8]], [bias, bias[:8]]), {}, product
    for op in ("replicated_gemm", "invariant_mm"):
        yield op, (a, b), {}, "a b"
    # A norm has the dtype of the product's operands, and casts nothing for it.
    residual = torch.randn(S, N, dtype=HALF)
    yield "gemm_all_reduce_norm", (a, b, norm.to(HALF), residual, bias), {}, product
    quantised = (a, b, norm.to(HALF), None, bias)
    yield "gemm_all_reduce_norm_quantised", quantised, {}, product
    left, right, one = torch.ones(S, 128).to(E4M3), torch.ones(32, 128).to(E4M3).t(), torch.ones(1)
    short = torch.randn(32)
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        yield f"{op}_scaled", (left, right, one, one, short), {}, "bias"
    yield "all_gather_gemms_scaled", (left, [right], one, [one], [short]), {}, "bias"
    scaled = (left, right, torch.ones(32, dtype=HALF), None, short, one, one)
    yield "gemm_all_reduce_norm_scaled", scaled, {}, "bias"
    yield "all_reduce", (a,), {}, ""
    yield "all_reduce_norm", (torch.randn(S, N), norm, torch.randn(S, N)), {}, ""
    yield "all_reduce_norm_quantised", (torch.randn(S, N), norm), {}, ""
    ids = torch.tensor([[0, 3], [1, 2]])
    x, w, weights = torch.randn(2, H), torch.randn(2, H, N), torch.rand(2, 2)
    yield "moe_dispatch_gemm", (x, ids, w), {}, "x w"
    y, *handle = ops.moe_dispatch_gemm(x, ids, w, **group)
    yield "moe_combine", (y, *handle, weights), {}, ""
    yield "moe_gemm_combine", (y, w.transpose(1, 2).contiguous(), *handle, weights), {}, "h w2"
    yield "moe_dispatch", (x, ids, None, None, None), {"num_experts": 2 * RANKS}, ""
    wide, experts = torch.randn(2, 128), torch.ones(2, 128, 128).to(E4M3).transpose(1, 2)
    of_w = torch.ones(2, 1, 1)
    yield "moe_dispatch_gemm_scaled", (wide, ids, experts, None, of_w), {}, "x"
    rows = torch.randn(len(y), 128)
    yield "moe_gemm_combine_scaled", (rows, experts, *handle, weights, None, of_w), {}, "h"
    q = torch.randn(1, 2, S, 16)
    yield "ring_attention", (q, q, q), {}, "q k v"
    out, lse = mkernel.ring_attention(q, q, q, return_lse=True)
    yield "ring_attention_backward", (out, lse, q, q, q, None, out, lse), {"causal": False}, ""


class Seen(TorchDispatchMode):
    """The arguments of the library's ops, below autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "mkernel":
            names = [each.name for each in op._schema.arguments]
            self.given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        return op(*args, **kwargs or {})


def floats(given: Any) -> list[torch.dtype]:
    each = given if isinstance(given, (list, tuple)) else [given]
    return [x.dtype for x in each if isinstance(x, Tensor) and x.is_floating_point()]


def seen_by_ops() -> tuple[list[str], list[str]]:
    """Return the ops that were called, and arguments of the wrong dtype."""
    found, wrong = [], []
    for op, arguments, options, narrow in calls():
        call = getattr(torch.ops.mkernel, op)
        names = [each.name for each in call.default._schema.arguments]
        given = {**dict(zip(names, arguments, strict=False)), **options}
        group = {"group": mkernel.world().name} if "group" in names else {}
        with casts(), Seen() as seen:
            call(*arguments, **options, **group)
        found.append(op)
        for name, value in given.items():
            wanted = [
                HALF if name in narrow.split() and each is WIDE else each for each in floats(value)
            ]
            if floats(seen.given.get(name)) != wanted:
                wrong.append(f"{op}, {name}: {floats(seen.given.get(name))}, not {wanted}")
    return found, wrong


def test_ops_see_the_arguments_that_the_table_says() -> None:
    inner = {"all_gather_rows", "joined_columns", "shared_product"}
    for found, wrong in on_ranks(seen_by_ops):
        missing = {each for each in registered() - set(found) if not each.endswith("_backward")}
        assert missing == inner
        assert wrong == []


def written() -> list[tuple[str, ...]]:
    """Dtypes of what calls compute in and of what they write to, where no dispatcher sees them."""
    a, b, out = torch.randn(S, H), torch.randn(H, N), torch.empty(S, N)
    whole = torch.empty(RANKS * S, H, dtype=HALF)
    with casts(), plans() as made:
        mkernel.gemm_all_reduce(a, b, out=out)
        mkernel.gemm_reduce_scatter(a, b, out=out[: S // RANKS])
        mkernel.all_gather_gemm(a, [b, b], gathered=whole)
        norm = torch.ones(N, dtype=HALF)
        mkernel.gemm_all_reduce(a, b, norm_weight=norm, out=out)
        mkernel.all_reduce(torch.randn(S, N), out=out)
    return [(plan.op, plan.dtype, plan.out_dtype) for plan in made]


def test_calls_with_out_multiply_in_16_bits() -> None:
    for found in on_ranks(written):
        assert found == [
            ("gemm_all_reduce", "bfloat16", "float32"),
            ("gemm_reduce_scatter", "bfloat16", "float32"),
            ("all_gather_gemm", "bfloat16", "bfloat16"),
            ("gemm_all_reduce", "bfloat16", "float32"),
            ("all_reduce", "float32", "float32"),
        ]


def refused() -> list[str]:
    a, b, norm = torch.randn(S, H), torch.randn(H, N), torch.ones(N)
    residual, q = torch.randn(S, N), torch.randn(1, 2, S, 16)
    half = norm.to(HALF)
    several: list[Callable[[], Any]] = [
        lambda: mkernel.gemm_all_reduce(a, b, norm_weight=norm),
        lambda: mkernel.gemm_all_reduce(a, b, norm_weight=half, residual=residual),
        lambda: mkernel.all_reduce(a @ b, norm_weight=norm),
        lambda: mkernel.all_gather_gemm(a.double(), b),
        lambda: mkernel.all_gather_gemm(a, b.double()),
        lambda: mkernel.all_gather_gemm(a, b, gathered=torch.empty(RANKS * S, H)),
        lambda: mkernel.all_gather_gemm(a, b, out=torch.empty(RANKS * S, N).int()),
        lambda: mkernel.ring_attention(q.double(), q, q),
        lambda: ColumnParallelLinear(H, N, sequence_parallel=False)(a.double()),
    ]
    said = []
    for each in several:
        with casts(), pytest.raises(DtypeError) as error:
            each()
        said.append(str(error.value))
    return said


def test_what_autocast_does_not_cast_is_refused_by_name() -> None:
    names = "norm_weight residual norm_weight b.dtype b.dtype gathered out k.dtype b.dtype"
    for said in on_ranks(refused):
        for text, name in zip(said, names.split(), strict=True):
            assert text.startswith(name)
            assert "torch.autocast casts " in text
        assert "torch.autocast casts nothing in all_reduce" in said[2]


# ---- results and gradients -----------------------------------------------------------------------


def whole_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(3)
    return nn.Linear(H, N), nn.Linear(N, H)


def program(x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
    return down(up(x).relu())


def differentiated(
    call: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Any], dtype: torch.dtype
) -> list[Tensor]:
    """Return a result, and gradients of what goes in."""
    x = x.clone().requires_grad_()
    with casts(dtype):
        y = call(x)
    y.float().sin().sum().backward()
    return [y.detach(), *(each.grad for each in (x, *parameters))]


def layers(sequence_parallel: bool, way: str, dtype: torch.dtype) -> list[Tensor]:
    world = mkernel.world()
    options = {"sequence_parallel": sequence_parallel, "sequence_dim": 1}
    up, down = whole_layers()
    column = ColumnParallelLinear.from_linear(up, **options)
    row = RowParallelLinear.from_linear(down, **options)
    x = operand("x", 0, B, S, H)
    x = x.chunk(RANKS, 1)[world.rank].contiguous() if sequence_parallel else x

    def call(x: Tensor) -> Tensor:
        return program(x, column, row)

    run: Callable[[Tensor], Tensor] = call
    if way == "checkpoint":
        run = lambda x: checkpoint(call, x, use_reentrant=False)  # type: ignore[return-value] # noqa: E731
    elif way != "eager":
        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, backend=way)
    return differentiated(run, x, [*column.parameters(), *row.parameters()], dtype)


def expected(sequence_parallel: bool, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the same of torch's layers on each rank."""
    up, down = whole_layers()
    x, parameters = operand("x", 0, B, S, H), [*up.parameters(), *down.parameters()]
    y, of_x, *of = differentiated(lambda x: program(x, up, down), x, parameters, dtype)
    found = []
    for rank in range(RANKS):
        parts = [each.chunk(RANKS, d)[rank] for each, d in zip(of[:3], (0, 0, 1), strict=True)]
        ends = [y, of_x]
        if sequence_parallel:
            ends = [each.chunk(RANKS, 1)[rank] for each in ends]
        found.append([*ends, *parts, of[3]])
    return found


@pytest.mark.parametrize(
    ("sequence_parallel", "way", "dtype"),
    [
        (True, "eager", HALF),
        (False, "eager", HALF),
        (True, "eager", torch.float16),
        (True, "checkpoint", HALF),
        (True, "aot_eager", HALF),
        (False, "aot_eager", HALF),
        pytest.param(True, "inductor", HALF, marks=pytest.mark.long),
        pytest.param(False, "inductor", HALF, marks=pytest.mark.long),
    ],
)
def test_layers_are_torchs_in_the_same_autocast(
    sequence_parallel: bool, way: str, dtype: torch.dtype
) -> None:
    every = expected(sequence_parallel, dtype)
    for found, wanted in zip(on_ranks(layers, sequence_parallel, way, dtype), every, strict=True):
        assert [each.dtype for each in found] == [dtype, *[WIDE] * 5]
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            close(one, other.double(), 2e-2, str(number))


def experts() -> list[Tensor]:
    layer = ExpertParallelMLP(H, N, 2 * RANKS)
    layer.load_state_dict({"gate_up_proj": expert("up"), "down_proj": expert("down")})
    x, ids, weights = routed(mkernel.world().rank)
    weights.requires_grad_()
    run = lambda x: layer(x, ids, weights)  # noqa: E731
    return differentiated(run, x, [weights, *layer.parameters()], HALF)


def expert(name: str) -> Tensor:
    return operand(name, 0, 2 * RANKS, *((H, 2 * N) if name == "up" else (N, H))) / 4


def routed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([[0, 3], [1, 2], [3, 2]])
    return operand("x", rank, 3, H), ids, operand("weights", rank, 3, 2).abs()


def dense(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    terms = []
    for number in range(2 * RANKS):
        gate, inner = torch.mm(x, up[number]).chunk(2, dim=-1)
        weight = ((ids == number) * weights).sum(1, keepdim=True)
        terms.append(weight * torch.mm(silu(gate) * inner, down[number]))
    return torch.stack(terms).sum(0)


def test_experts_are_those_of_torchs_products() -> None:
    up, down = (expert(name).requires_grad_() for name in ("up", "down"))
    every = []
    for rank in range(RANKS):
        x, ids, weights = routed(rank)
        both = x.requires_grad_(), weights.requires_grad_()
        with casts():
            y = dense(x, ids, weights, up, down)
        y.float().sin().sum().backward()
        every.append([y.detach(), *(each.grad for each in both)])
    for rank, found in enumerate(on_ranks(experts)):
        parts = [each.grad.chunk(RANKS)[rank] for each in (up, down) if each.grad is not None]
        assert [each.dtype for each in found] == [HALF, *[WIDE] * 4]
        for one, other in zip(found, [*every[rank], *parts], strict=True):
            close(one, other.double(), 3e-2)


def attention() -> list[Tensor]:
    q, k, v = (operand(name, mkernel.world().rank, 1, 2, S, 16) for name in "qkv")
    k.requires_grad_()
    return differentiated(lambda q: mkernel.ring_attention(q, k, v), q, [k], HALF)


def test_attention_is_torchs() -> None:
    q, k, v = (
        torch.cat([operand(name, rank, 1, 2, S, 16) for rank in range(RANKS)], 2) for name in "qkv"
    )
    k.requires_grad_()
    wanted = differentiated(lambda q: scaled_dot_product_attention(q, k, v), q, [k], HALF)
    for rank, found in enumerate(on_ranks(attention)):
        assert [each.dtype for each in found] == [HALF, WIDE, WIDE]
        for one, other in zip(found, wanted, strict=True):
            close(one, other.chunk(RANKS, 2)[rank].double(), 2e-2)


# ---- regions -------------------------------------------------------------------------------------


def nested() -> list[bool]:
    """What holds of calls inside and outside of regions."""
    a, b = torch.randn(S, H), torch.randn(H, N, requires_grad=True)
    half = a.to(HALF)

    def product(a: Tensor, b: Tensor = b) -> Tensor:
        return mkernel.all_gather_gemm(a, b)

    plain, wide = product(a), product(a.double(), b.double())
    with casts():
        narrow = product(a)
        with casts(enabled=False):
            inner = product(a)
        again = product(half)
        double = product(a.double(), b.double())
    with torch.autocast("cuda", enabled=False), casts(torch.float16):
        other = product(half)
    narrow.float().sin().sum().backward()
    first, b.grad = b.grad, None
    with casts():
        product(a).float().sin().sum().backward()  # in a region, too
    within, b.grad = b.grad, None
    product(a).sin().sum().backward()
    outside, b.grad = b.grad, None
    plain = product(a)
    with casts():
        plain.sin().sum().backward()  # of a forward that was outside
    compiled = torch.compile(lambda a: region(a, b), backend="aot_eager", fullgraph=True)
    return [
        torch.equal(inner, plain) and inner.dtype is WIDE,
        torch.equal(again, narrow) and narrow.dtype is HALF,
        torch.equal(double, wide) and double.dtype is torch.float64,
        other.dtype is torch.float16,
        first is not None and within is not None and torch.equal(first, within),
        outside is not None and b.grad is not None and torch.equal(outside, b.grad),
        torch.equal(compiled(a), narrow),
    ]


def region(a: Tensor, b: Tensor) -> Tensor:
    with casts():
        return mkernel.all_gather_gemm(a, b)


def test_regions_begin_and_end_where_they_are_written() -> None:
    assert on_ranks(nested) == [[True] * 7] * RANKS


class Counted:
    """How often tensors of one shape are cast."""

    def __init__(self, *shape: int) -> None:
        self._shape, self._profile = list(shape), profile(
            activities=[ProfilerActivity.CPU], record_shapes=True
        )  # fmt: skip

    def __enter__(self) -> Counted:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    @property
    def casts(self) -> int:
        events = self._profile.events() or []
        return sum(
            each.name == "aten::_to_copy" and each.input_shapes[0] == self._shape for each in events
        )


def counts(layer: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor) -> list[int]:
    """Casts of a weight in regions: of two calls, of two without a cache, of a call that is not
    recorded before one that is, and of two regions in inference mode (which torch does not keep)."""

    def twice() -> None:
        for _ in range(2):
            layer(x)

    def mixed() -> None:
        with torch.no_grad():
            layer(x)
        layer(x).float().sum().backward()
        assert weight.grad is not None

    found = []
    for options, run in (({}, twice), ({"cache_enabled": False}, twice), ({}, mixed)):
        with Counted(*weight.shape) as counted, casts(**options):
            run()
        found.append(counted.casts)
    with Counted(*weight.shape) as counted, torch.inference_mode():
        for _ in range(2):
            with casts():
                twice()
    return [*found, counted.casts]


def cached() -> tuple[list[int], list[int], list[int], bool, bool]:
    x, reference = torch.randn(S + 1, H), nn.Linear(H, N)
    column = ColumnParallelLinear(H, N, save_gathered=False)
    weight = nn.Parameter(torch.randn(H, N))
    found = (
        counts(lambda x: linear(x, reference.weight, reference.bias), reference.weight, x),
        counts(column, column.weight, x),
        counts(lambda x: mkernel.all_gather_gemm(x, weight), weight, x),
    )
    with casts(), torch.no_grad():  # a step of an optimizer, say
        column(x)
        column.weight.add_(1)
        changed = column(x)
        held = len(autocast._CACHE._casts)
    with casts(), torch.no_grad():
        fresh = column(x)
    torch.clear_autocast_cache()
    return *found, torch.equal(changed, fresh), held > 0 and not autocast._CACHE._casts


def test_weights_are_cast_once_in_a_region() -> None:
    for torchs, layer, op, follows, forgets in on_ranks(cached):
        assert torchs[:2] == layer[:2] == op[:2] == [1, 2]
        assert layer[2:] == op[2:] == [3, 2]  # with that of the gradient
        assert follows
        assert forgets


def ours_ran(call: Callable[[], object]) -> int:
    """Count the functions of the module that casts which run in a call."""
    ran = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal ran
        ran += event == "call" and frame.f_code.co_filename == autocast.__file__

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


def paid() -> tuple[int, int]:
    a, b = torch.randn(S, H), torch.randn(H, N, requires_grad=True)
    column, row = ColumnParallelLinear(H, N), RowParallelLinear(N, H)
    q, out = torch.randn(1, 2, S, 16), torch.empty(RANKS * S, N)

    def step() -> None:
        row(column(a).relu()).float().sum().backward()
        mkernel.all_gather_gemm(a, b).float().sum().backward()
        mkernel.all_gather_gemm(a, b.detach(), out=out)
        torch.ops.mkernel.gemm_all_reduce(a, b, group=mkernel.world().name)
        mkernel.ring_attention(q, q, q)

    step()
    off = ours_ran(step)
    with casts():
        return off, ours_ran(step)


def test_nothing_runs_where_it_is_off() -> None:
    """That nothing else of ours runs before a launch either, test_call_path.py shows."""
    for off, on in on_ranks(paid):
        assert off == 0
        assert on > 0


# ---- styles and scalers --------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, N), nn.Linear(H, N), nn.Linear(N, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return y


Outcome = tuple[list[Tensor], list[str], int]


def style_steps() -> tuple[dict[str, tuple[Outcome, list[Tensor]]], list[Tensor]]:
    """Return, by way: what the styles make of a model, and torch of the unsharded one; and parameters
    after steps with a scaler of which one rank's gradients overflow in the first."""
    mesh = init_device_mesh("cpu", (RANKS,))
    mkernel.init(mesh, accelerator="streams", timeout_s=TIMEOUT_S)
    x, found = operand("x", 0, B, S, H), {}
    for name, split, way in (("sequence", 1, ""), ("whole", None, ""), ("graph", 1, "aot_eager")):
        torch.manual_seed(0)
        whole = Gated()
        wanted = differentiated(whole, x, [*whole.parameters()], HALF)
        outside = Replicate() if split is None else Shard(split)
        columns = ColwiseParallel(input_layouts=outside)
        plan = {"gate": columns, "up": columns, "down": RowwiseParallel(output_layouts=outside)}
        whole.zero_grad()
        model = parallelize_module(whole, mesh, plan)
        part = x if split is None else x.chunk(RANKS, split)[mesh.get_local_rank()].contiguous()
        run: Any = torch.compile(model, backend=way, fullgraph=True) if way else model
        with plans() as made:
            y, of_x, *of = differentiated(run, part, [*model.parameters()], HALF)
        ends = [DTensor.from_local(each, mesh, [outside]).full_tensor() for each in (y, of_x)]
        of = [each.full_tensor() for each in of if isinstance(each, DTensor)]
        with Counted(N // RANKS, H) as counted, casts():
            run(part), run(part)
        found[name] = (([*ends, *of], [plan.op for plan in made], counted.casts), wanted)
    return found, scaled(model, part, mesh)


def scaled(model: nn.Module, x: Tensor, mesh: Any) -> list[Tensor]:
    scaler = ShardedGradScaler("cpu", init_scale=2.0**15, process_group=mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        with casts(torch.float16):
            y = model(x).float()
        scaler.scale(y.square().mean()).backward()
        if mesh.get_local_rank() == 0:
            model.gate.weight.grad.to_local().mul_(factor)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        found.append(model.gate.weight.detach().to_local().clone())  # type: ignore[operator]
    return found


def test_styles_are_torchs_and_scalers_skip_steps_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = Gated().gate.weight.detach()
    for rank, (found, after) in enumerate(ranks(style_steps, tmp_path, size=RANKS)):
        for name, ((tensors, calls, _), wanted) in found.items():
            assert [each.dtype for each in tensors] == [HALF, *[WIDE] * 7], name
            for one, other in zip(tensors, wanted, strict=True):
                close(one, other.double(), 2e-2, name)
            down = "gemm_all_reduce" if name == "whole" else "gemm_reduce_scatter"
            gathers = [] if name == "whole" else ["all_gather_gemm"]
            assert sorted(calls) == sorted([*gathers, down, *gathers, down]), name
        assert [found[way][0][2] for way in ("sequence", "whole")] == [2, 2]  # of gate and up, once
        own = before.chunk(RANKS)[rank]
        assert torch.equal(after[0], own)
        assert not torch.equal(after[1], own)


def stepped() -> list[Tensor]:
    up, down = whole_layers()
    column, row = ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down)
    x = operand("x", 0, B * S, H).chunk(RANKS)[mkernel.world().rank]
    return trained(lambda x: program(x, column, row), x, [*column.parameters(), *row.parameters()])


def trained(call: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Any]) -> list[Tensor]:
    """Return parameters after a step in float16 with a scaler."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(parameters)
    with casts(torch.float16):
        y = call(x)
    scaler.scale(y.float().square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [each.detach() for each in parameters]


def test_a_step_with_a_scaler_is_torchs() -> None:
    up, down = whole_layers()
    before = [each.detach().clone() for each in (*up.parameters(), *down.parameters())]
    parameters = [*up.parameters(), *down.parameters()]
    wanted = trained(lambda x: program(x, up, down), operand("x", 0, B * S, H), parameters)
    for rank, found in enumerate(on_ranks(stepped)):
        for one, other, was, dim in zip(found, wanted, before, (0, 0, 1, None), strict=True):
            mine, old = (x if dim is None else x.chunk(RANKS, dim)[rank] for x in (other, was))
            close(one - old, (mine - old).double(), 1e-2)
