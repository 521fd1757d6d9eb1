"""Checks by which a world refuses plans of another world, and tensors that a plan is not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import (
    AttentionShape,
    CommonPart,
    GemmCombineShape,
    GemmShape,
    LaunchPlan,
    MoeShape,
    SumShape,
    first_difference,
)
from mkernel.plan.planner import common_part
from mkernel.plan.strides import rows_of
from mkernel.topology.world_map import WorldMap
from mkernel.world.identity import Backends


def admit_plan(
    plan: LaunchPlan, world: WorldMap, backends: Backends, accelerator: AcceleratorBackend
) -> None:
    """Check that the part of a plan that all backends share is this world's: its ranks, placement,
    routes, and what carries them; an op, dtypes and sizes that the accelerator claims. The backend's
    ``workspace`` and ``launch`` follow or refuse what its own part says.

    Raises:
        ArgumentError: a field of the plan, its value, and that of this world.
        ShapeError, DtypeError, LayoutError, Unsupported, NoRoute: this world has no such plans.
    """
    own = common_part(
        plan,
        world=world,
        accelerator=backends.accelerator,
        capabilities=accelerator.capabilities(),
        nic=backends.nic,
        verbs=backends.verbs,
    )
    for name in [field for field in CommonPart.model_fields if field != "prediction"]:
        theirs, ours = getattr(plan, name), getattr(own, name)
        if theirs != ours:
            _refuse(f"plan.{name}", theirs, ours)


def admit_tensors(
    plan: LaunchPlan, tensors: Mapping[str, torch.Tensor], capabilities: AcceleratorCapabilities
) -> None:
    """Check that a call's tensors are those of the plan.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a tensor, and what the plan has.
    """
    given = "cu_seqlens" in tensors
    if given != (isinstance(plan.shape, AttentionShape) and plan.shape.documents):
        raise ArgumentError(
            "plan.shape.documents", not given, f"{given}, as cu_seqlens of this call"
        )
    for name, wanted in planned_tensors(plan).items():
        if name in tensors:
            _check(name, tensors[name], wanted, plan, capabilities)


def _refuse(field: str, theirs: Any, ours: Any) -> None:
    """Raise ArgumentError, which names the first part of the field in which they differ."""
    dumps = [
        TypeAdapter(Any).dump_python(one, mode="json", warnings=False) for one in (theirs, ours)
    ]
    found = first_difference(dumps[0], dumps[1], field) or (field, theirs, ours)
    raise ArgumentError(found[0], found[1], f"{found[2]!r}, as in this world")


class _Planned(NamedTuple):
    """A tensor as planned. ``shape``: None is any size. ``stored``: as the plan's layout of B says."""

    shape: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    stored: bool = False


def planned_tensors(plan: LaunchPlan) -> dict[str, _Planned]:
    """Return the tensors of a rank's call, and of the call that computes its gradients."""
    shape, world = plan.shape, plan.world_size
    given, result = (plan.dtype,), (plan.out_dtype,)
    if isinstance(shape, GemmShape):
        vector = given if plan.scales is None else result
        own, gathers = shape.m // world, plan.op == "all_gather_gemm"
        rows = own if plan.op == "gemm_reduce_scatter" else shape.m
        found = {
            "a": _Planned((own if gathers else shape.m, shape.k), given),
            "b": _Planned((shape.k, shape.n), given, stored=True),
            "out": _Planned((rows, shape.n), result),
        }
        if plan.bias == "launch":
            found["bias"] = _Planned((shape.n,), vector)
        found |= _of_norm(plan, found["out"], vector)
        if plan.scales is not None:
            of_a, of_b = scale_sizes(plan.scales.mode, found["a"].shape[0] or 1, shape.n, shape.k)
            found["a_scale"] = _Planned(of_a, ("float32",))
            found["b_scale"] = _Planned(of_b, ("float32",), stored=True)
            if gathers:
                ranks = world if plan.scales.mode == "tensor" else shape.m
                found["gathered_scale"] = _Planned((ranks, of_a[1]), ("float32",))
        return found | ({"gathered": _Planned((shape.m, shape.k), given)} if gathers else {})
    if isinstance(shape, SumShape):
        out = _Planned((shape.m, shape.n), result)
        return {"x": _Planned(out.shape, given), "out": out} | _of_norm(plan, out, given)
    if isinstance(shape, AttentionShape):
        rows = shape.sequence // world
        queries = (shape.batch, shape.heads, rows, shape.head_dim)
        keys = _Planned((shape.batch, shape.kv_heads, rows, shape.head_dim), given)
        documents = {"cu_seqlens": _Planned((None,), ("int32",))} if shape.documents else {}
        return documents | {
            "q": _Planned(queries, given),
            "k": keys,
            "v": keys,
            "out": _Planned(queries, result),
            "lse": _Planned(queries[:3], (plan.sums,)),
            "grad_out": _Planned(queries, given),
            "grad_lse": _Planned(queries[:3], (plan.sums,)),
            "grad_q": _Planned(queries, given),
            "grad_k": keys,
            "grad_v": keys,
        }
    places = (shape.tokens, shape.top_k)
    if isinstance(shape, MoeShape):
        weights = (shape.experts // world, shape.hidden, shape.columns)
        return {
            "x": _Planned((shape.tokens, shape.hidden), given),
            "topk_ids": _Planned(places, ("int32", "int64")),
            "w": _Planned(weights, given, stored=True),
            "routing": _Planned((None,), ("int32",)),
            "grad_outputs": _Planned((shape.capacity, shape.features), result),
            "grad_x": _Planned((shape.tokens, shape.hidden), given),
            "grad_w": _Planned(weights, given, stored=True),
        }
    if isinstance(shape, GemmCombineShape):
        weights = (shape.experts // world, shape.features, shape.hidden)
        return {
            "h": _Planned((None, shape.features), given),
            "w2": _Planned(weights, given, stored=True),
            "topk_weights": _Planned(places, (plan.sums,)),
            "routing": _Planned((None,), ("int32",)),
            "out": _Planned((shape.tokens, shape.hidden), result),
            "grad_out": _Planned((shape.tokens, shape.hidden), result),
            "grad_h": _Planned((None, shape.features), given),
            "grad_w2": _Planned(weights, given, stored=True),
            "grad_weights": _Planned(places, (plan.sums,)),
        }
    return {
        "y": _Planned((None, shape.features), given),
        "topk_weights": _Planned(places, (plan.sums,)),
        "routing": _Planned((None,), ("int32",)),
        "out": _Planned((shape.tokens, shape.features), result),
        "grad_out": _Planned((shape.tokens, shape.features), result),
        "grad_y": _Planned((None, shape.features), given),
        "grad_weights": _Planned(places, (plan.sums,)),
    }


def _of_norm(plan: LaunchPlan, out: _Planned, vector: tuple[str, ...]) -> dict[str, _Planned]:
    """Return the tensors that a launch that normalises takes and gives beside ``out``."""
    norm = plan.norm
    if norm is None or norm.step != "launch":
        return {}
    found = {"norm_weight": _Planned(out.shape[1:], vector), "residual_out": out}
    return found | {"residual": out} if norm.residual else found


def _check(
    name: str,
    tensor: torch.Tensor,
    wanted: _Planned,
    plan: LaunchPlan,
    claims: AcceleratorCapabilities,
) -> None:
    found = tuple(tensor.shape)
    fits = len(found) == len(wanted.shape) and all(
        size in (None, there) for size, there in zip(wanted.shape, found, strict=True)
    )
    if not fits:
        raise ShapeError(name, found, f"{wanted.shape}, as planned")
    if str(tensor.dtype).removeprefix("torch.") not in wanted.dtypes:
        raise DtypeError(name, tensor.dtype, f"{' or '.join(wanted.dtypes)}, as planned")
    transposed = wanted.stored and plan.b_layout == "column"
    seen = tensor.transpose(-1, -2) if transposed else tensor
    if isinstance(plan.shape, AttentionShape) and plan.shape.layout == "positions":
        seen = tensor.transpose(1, 2) if tensor.dim() == 4 else tensor
    if seen.is_contiguous():
        return
    step = max(1, claims.alignment_bytes // tensor.element_size())
    pitched = isinstance(plan.shape, GemmShape) and name in claims.takes_pitched(plan.op)
    if not pitched or rows_of(seen.shape, seen.stride(), step) != "pitched":
        stored = f"{plan.b_layout}-major" if wanted.stored else "contiguous"
        raise LayoutError(name, f"strides {tensor.stride()}", f"{stored} and packed, as planned")
