"""``mkernel.warm``, which makes calls of a model, or of an op and sizes, before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from mkernel.errors import ArgumentError, InputFileError, ShapeError
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.all_reduce import all_reduce
from mkernel.ops.gemm_all_reduce import gemm_all_reduce
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.ops.moe import moe_combine, moe_dispatch_gemm
from mkernel.ops.moe_dispatch import moe_dispatch
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.ops.plan_file import Recording, expect_alike, spread_ids
from mkernel.ops.ring_attention import ring_attention
from mkernel.plan.model import CombineShape, DispatchShape, GemmCombineShape, MoeShape
from mkernel.plan.ops import canonical
from mkernel.plan.shapes import GEMMS, SHAPES, size_names
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

_GEMMS: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": all_gather_gemm,
    "gemm_reduce_scatter": gemm_reduce_scatter,
    "gemm_all_reduce": gemm_all_reduce,
}
_OPTIONS = {"b_layout": "row", "dtype": torch.bfloat16}
"""Options of an op that are no sizes, with their defaults."""


def warm(
    what: str | Module | Callable[..., Any],
    *inputs: Any,
    rows: Sequence[int | Sequence[int]] = (),
    save: str | Path | None = None,
    group: Group = None,
    **sizes: Any,
) -> None:
    """Make calls before they are needed, on data that nobody reads, so that later calls like them are
    known ones: native code starts them without Python, and nothing is planned, allocated in symmetric
    memory, compiled, loaded or agreed on between ranks any more.

    Collective: every rank of the world warms the same. Calls are made in the mode of the caller: for
    a server under ``torch.inference_mode()``, for training with a backward pass in a function of your
    own. They count in statistics.

    Args:
        what: a function or model, which is called once with ``inputs``, on each rank the same shapes:
            all that it calls gets known, compiled graphs and what the compiler's pass put there too. Or
            a model and ``rows``: its layers of :mod:`mkernel.nn`, and those that styles for
            ``parallelize_module`` made, are called by themselves on zeros. Or the name of an op, as
            :func:`mkernel.plan` takes it.
        inputs: the arguments of ``what``.
        rows: leading sizes of whole activations, such as ``[1, 8, (4, 512)]``: one and eight tokens,
            and four sequences of 512. A rank's share of them is what the layers' options say.
        save: a file to write, which ``MKERNEL_PLANS`` names later: all calls that ``warm`` made in this
            world since the first ``save``, as rank 0 saw them. Python makes each known call once more
            then. Calls on tensors of :func:`mkernel.empty` are left out; only their plans are there.
        group: names the world; None: the default one.
        sizes: of an op, as :func:`mkernel.plan` takes them, with ``dtype=`` (a torch.dtype, default
            bfloat16), and of GEMM ops ``b_layout=`` (``"row"``, or ``"column"``, as nn.Linear stores
            weights). With ``rows`` what layers do not know themselves: ``top_k`` of experts; of
            attention ``heads``, ``kv_heads``, ``head_dim`` and ``dtype``.

    Raises:
        PlanMismatch: ranks warm different things; the message names the difference.
        ArgumentError, ShapeError: there is nothing to warm, or a size is missing or wrong.
        InputFileError: ``save`` cannot be written; every rank raises it.
        NotInitialized, Unsupported, WorldError: as the ops.
    """
    world = current(group)
    calls, described = _wanted(world, what, inputs, rows, sizes)
    expect_alike("warm", world.gather("warm", described))
    if save is not None:
        if world.recorded is None:
            world.recorded = Recording()
            world.forget_calls()
        world.recording = world.recorded
    try:
        for each in calls:
            each()
        world.synchronize()
    finally:
        world.recording = None
    if save is not None:
        _save(world, Path(save))


def _save(world: World, path: Path) -> None:
    refused = ""
    if world.rank == 0:
        try:
            world.recorded.save(world, path)
        except InputFileError as error:
            refused = str(error)
    if why := world.gather("warm saved", refused)[0]:
        raise InputFileError(why)


def _wanted(
    world: World,
    what: str | Module | Callable[..., Any],
    inputs: tuple[Any, ...],
    rows: Sequence[int | Sequence[int]],
    sizes: Mapping[str, Any],
) -> tuple[list[Callable[[], Any]], Any]:
    """Return the calls to make, and what ranks compare of them, JSON-safe."""
    if isinstance(what, str):
        if inputs or rows:
            given = "inputs" if inputs else "rows"
            raise ArgumentError(
                given, "(set)", f"none: an op has sizes, as in warm({what!r}, m=...)"
            )
        op = canonical(what)
        return [lambda: _run(world, op, sizes)], {"op": op, "sizes": _shown(sizes)}
    if not rows:
        if sizes:
            raise ArgumentError(next(iter(sizes)), "(set)", "none, without rows=")
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        described = [[list(each.shape), str(each.dtype)] for each in tensors]
        return [lambda: what(*inputs)], {"inputs": described}
    if inputs:
        raise ArgumentError("rows", list(rows), "none beside inputs, which have rows themselves")
    layers = list(_layers(what)) if isinstance(what, Module) else []
    if not layers:
        legal = (
            "a model with layers of mkernel.nn or of its styles; or pass inputs, to call it whole"
        )
        raise ArgumentError("what", type(what).__name__, legal)
    leads = [(each,) if isinstance(each, int) else tuple(each) for each in rows]

    def run(layer: Any, lead: tuple[int, ...]) -> None:
        layer(*layer.scratch_inputs(lead, sizes))

    names = {name: f"{layer}" for name, layer in layers}
    each_alone = [partial(run, layer, lead) for _, layer in layers for lead in leads]
    return [*each_alone], {"rows": leads, "sizes": _shown(sizes), "layers": names}


def _shown(sizes: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{each}" for name, each in sizes.items()}


def _layers(module: Module, name: str = "model") -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that make inputs of their own, with their names."""
    if hasattr(type(module), "scratch_inputs"):
        yield name, module
        return
    for each, child in module.named_children():
        yield from _layers(child, f"{name}.{each}")


def _run(world: World, op: str, given: Mapping[str, Any]) -> None:
    """Call an op once on zeros, after the dispatch whose handle it takes."""
    options = {name: given.get(name, default) for name, default in _OPTIONS.items()}
    sizes = {name: each for name, each in given.items() if name not in options}
    taken = (*size_names(op), "capacity")
    for name, each in sizes.items():
        if name not in taken:
            raise ArgumentError(name, each, f"none: {op} takes {', '.join((*taken, *options))}")
    for name, size in SHAPES[op].model_fields.items():
        if size.is_required() and name in taken and name not in sizes:
            raise ArgumentError(name, None, f"a size; {op} takes {', '.join(taken)}")
    device, dtype = world.accelerator.device, options["dtype"]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def weight(*shape: int) -> Tensor:
        """Make a weight [..., K, N] in the layout that was asked for."""
        turned = (*shape[:-2], shape[-1], shape[-2])
        return zeros(*turned).mT if options["b_layout"] == "column" else zeros(*shape)

    ranks, name = world.size, world.name
    if op in GEMMS:
        m, n, k = (sizes[each] for each in ("m", "n", "k"))
        if op == "all_gather_gemm" and m % ranks:
            raise ShapeError("m", m, f"a multiple of the world's {ranks} ranks")
        a = zeros(m // ranks if op == "all_gather_gemm" else m, k)
        _GEMMS[op](a, weight(k, n), group=name)
    elif op == "all_reduce":
        all_reduce(zeros(sizes["m"], sizes["n"]), group=name)
    elif op == "ring_attention":
        batch, sequence, wide = (sizes[each] for each in ("batch", "sequence", "head_dim"))
        if sequence % ranks:
            raise ShapeError("sequence", sequence, f"a multiple of the world's {ranks} ranks")
        q, k, v = (
            zeros(batch, sizes[heads], sequence // ranks, wide)
            for heads in ("heads", "kv_heads", "kv_heads")
        )
        ring_attention(q, k, v, causal=bool(sizes.get("causal", False)), group=name)
    else:
        _run_experts(world, op, sizes, zeros, weight)


def _run_experts(
    world: World,
    op: str,
    sizes: Mapping[str, int],
    zeros: Callable[..., Tensor],
    weight: Callable[..., Tensor],
) -> None:
    tokens, experts, top_k = (sizes[each] for each in ("tokens", "experts", "top_k"))
    if experts % world.size:
        raise ShapeError("experts", experts, f"a multiple of the world's {world.size} ranks")
    own, hidden, capacity = experts // world.size, sizes.get("hidden"), sizes.get("capacity")
    ids = spread_ids((tokens, top_k), experts, world.rank).to(world.accelerator.device)
    shape, name = SHAPES[op], world.name
    if shape is MoeShape:
        up = weight(own, hidden, sizes["features"])
        moe_dispatch_gemm(zeros(tokens, hidden), ids, up, capacity=capacity, group=name)
        return
    x = zeros(tokens, hidden or 128)
    sent = moe_dispatch(x, ids, num_experts=experts, capacity=capacity, group=name)
    if shape is DispatchShape:
        return
    rows, handle = len(sent.rows), sent.handle
    weights = torch.ones(tokens, top_k, device=x.device)
    if shape is CombineShape:
        moe_combine(zeros(rows, sizes["features"]), handle, weights, group=name)
    elif shape is GemmCombineShape:
        down = weight(own, sizes["features"], hidden)
        moe_gemm_combine(zeros(rows, sizes["features"]), down, handle, weights, group=name)
