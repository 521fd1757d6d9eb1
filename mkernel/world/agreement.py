"""The agreement of ranks on a call that is new to them. Each checks that the plan is of this world and
fits the tensors; then all compare the plan, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import ArgumentError, DtypeError, LayoutError, PlanMismatch, ShapeError, Timeout
from mkernel.plan.arguments import rows_of, scale_sizes
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import (
    BLOCK,
    E4M3,
    PREDICTED,
    AttentionShape,
    CommonPart,
    DispatchShape,
    GemmCombineShape,
    GemmShape,
    LaunchPlan,
    MoeShape,
    SumShape,
    first_difference,
)
from mkernel.plan.planner import common_part
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.topology.world_map import WorldMap
from mkernel.world.exchange import Board, Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Backends
from mkernel.world.memory import Place


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
    for name in [field for field in CommonPart.model_fields if field not in PREDICTED]:
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
        own, gathers = None if shape.rows else shape.m // world, plan.op == "all_gather_gemm"
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
    if isinstance(shape, MoeShape | DispatchShape):
        tokens = {
            "x": _Planned((shape.tokens, shape.hidden), _rows_of_experts(plan)),
            "topk_ids": _Planned(places, ("int32", "int64")),
            "routing": _Planned((None,), ("int32",)),
        }
        if plan.scales is not None and plan.scales.quantises is None:
            tokens["x_scale"] = _Planned((shape.tokens, shape.hidden // BLOCK), ("float32",))
        if isinstance(shape, MoeShape):
            weights = (shape.experts // world, shape.hidden, shape.columns)
            tokens |= _of_experts(plan, "x", shape.tokens, "w", weights) | {
                "w": _Planned(weights, given, stored=True),
                "grad_outputs": _Planned((shape.capacity, shape.features), result),
                "grad_x": _Planned((shape.tokens, shape.hidden), given),
                "grad_w": _Planned(weights, given, stored=True),
            }
        return tokens
    if isinstance(shape, GemmCombineShape):
        weights = (shape.experts // world, shape.features, shape.hidden)
        return _of_experts(plan, "h", None, "w2", weights) | {
            "h": _Planned((None, shape.features), _rows_of_experts(plan)),
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


def _rows_of_experts(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the dtype of rows that a launch multiplies, or quantises first."""
    return ((plan.scales and plan.scales.quantises) or plan.dtype,)


def _of_experts(
    plan: LaunchPlan,
    name: str,
    rows: int | None,
    weight: str,
    sizes: tuple[int, int, int],
) -> dict[str, _Planned]:
    """Return the scales of e4m3 rows and of experts' e4m3 weights, beside those of these names."""
    if plan.scales is None:
        return {}
    of_rows, of_w = scale_sizes(plan.scales.mode, 1, sizes[2], sizes[1])
    found = {f"{weight}_scale": _Planned((sizes[0], *of_w), ("float32",), stored=True)}
    if plan.scales.quantises is None:
        found[f"{name}_scale"] = _Planned((rows, of_rows[1]), ("float32",))
    return found


def _of_norm(plan: LaunchPlan, out: _Planned, vector: tuple[str, ...]) -> dict[str, _Planned]:
    """Return the tensors that a launch that normalises takes and gives beside ``out``."""
    norm = plan.norm
    if norm is None or norm.step != "launch":
        return {}
    found = {"norm_weight": _Planned(out.shape[1:], vector), "residual_out": out}
    if norm.quantises:
        found["quantised"] = _Planned(out.shape, (E4M3,))
        found["quantised_scale"] = _Planned((out.shape[0], 1), ("float32",))
    return found | {"residual": out} if norm.residual else found


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(
    name: str,
    tensor: torch.Tensor,
    wanted: _Planned,
    plan: LaunchPlan,
    claims: AcceleratorCapabilities,
) -> None:
    found = tuple(tensor.shape)
    if found != wanted.shape and (
        len(found) != len(wanted.shape)
        or any(size not in (None, there) for size, there in zip(wanted.shape, found, strict=True))
    ):
        raise ShapeError(name, found, f"{wanted.shape}, as planned")
    if _name(tensor.dtype) not in wanted.dtypes:
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


Check = Callable[[LaunchPlan, Mapping[str, torch.Tensor]], None]


class AgreedCall(NamedTuple):
    """A call, as ranks compare it."""

    plan: LaunchPlan
    places: Mapping[str, Place]

    def decisions(self) -> dict[str, Any]:
        """Return all that must be the same on every rank, as JSON."""
        told = self.plan.decisions()
        told["symmetric"] = {
            name: {"buffer": buffer, "offset": offset}
            for name, (buffer, offset) in self.places.items()
        }
        return told


class Agreement:
    """The calls that all ranks of one world have agreed on."""

    def __init__(
        self, exchange: Exchange, failure: FailureMonitor, check: Check, board: Board | None
    ) -> None:
        """Begin without any call agreed on.

        Args:
            check: raises where this world cannot follow a plan, before anybody is told of it.
            board: of a world of one node; without one ranks compare through the store.
        """
        self._board = board
        self._check = check
        self._exchange = exchange
        self._failure = failure
        self._agreed: TwoGenerationCache[str, AgreedCall] = (
            TwoGenerationCache()
        )  # what is not kept is agreed on again, and named by its digest
        self._said = ""  # the key of a call that differed, which lies in the store

    def forgets(self, told: Callable[[], None]) -> None:
        """Call ``told`` whenever calls are forgotten."""
        self._agreed.forgets = told

    def enter(
        self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]
    ) -> int:
        """Begin the next call, which every rank makes alike, and return its number. PlanMismatch.

        Args:
            tensors: of the call.
            places: of tensors in symmetric memory. Peers write to them, so that they must lie at the
                same place everywhere.
        """
        number = self._failure.call[0] + 1
        key = _key(plan, places)
        known = self._agreed[key] is not None
        if not known:
            self._check(plan, tensors)
        # Until a rank has agreed its heartbeat shows no plan: its message in the agreement names it.
        self._failure.call = (number, key if known else "")
        if not known:
            self._agree(plan, key, places)
            self._failure.call = (number, key)
        return number

    def _agree(self, plan: LaunchPlan, key: str, places: Mapping[str, Place]) -> None:
        call = AgreedCall(plan, dict(places))

        def check(missing: set[int]) -> None:
            self._failure.check_peers(missing)
            # Who is not here: is it in the same call with another plan?
            for rank, told in self._failure.heartbeats(sorted(missing)).items():
                if told.call == self._failure.call[0] and told.plan not in ("", key):
                    raise self._refused(rank, (key, told.plan), call)

        keys = self._keys(key, check)
        # Whoever is in this agreement has read what was said in the last one.
        if self._said:
            self._exchange.forget(f"plans/{self._said}/{self._exchange.rank}")
            self._said = ""
        for rank in range(self._exchange.size):
            if keys[rank] != keys[0]:
                raise self._differs(rank, keys, call)
        self._agreed[key] = call

    def _keys(self, key: str, check: Callable[[set[int]], None]) -> dict[int, str]:
        """All-gather the ranks' keys of the call."""
        if self._board is None:
            told: dict[int, str] = self._exchange.gather("plan", key, check)
            return told
        try:
            digests = self._board.gather(bytes.fromhex(key), check)
        except Timeout as late:
            self._failure.raise_late(late)
        return {rank: digest.hex() for rank, digest in digests.items()}

    def _differs(self, rank: int, keys: Mapping[int, str], call: AgreedCall) -> PlanMismatch:
        """Return the error that all ranks raise where the key of ``rank`` is another than that of
        rank 0. All of them are here, and each publishes what it was about to do."""
        own = keys[self._exchange.rank]
        self._said = own
        self._exchange.publish(f"plans/{own}/{self._exchange.rank}", call.decisions())
        texts = {who: self._exchange.collect(f"plans/{keys[who]}", [who])[who] for who in (0, rank)}
        return _mismatch((0, rank), keys[0], keys[rank], texts[0], texts[rank])

    def _refused(self, rank: int, keys: tuple[str, str], call: AgreedCall) -> PlanMismatch:
        """Return the error that this rank raises where ``rank`` has already agreed on another call,
        and tell the other ranks of it, so that their waits end."""
        known = self._agreed.peek(keys[1])
        theirs = None if known is None else known.decisions()
        error = _mismatch((self._exchange.rank, rank), *keys, call.decisions(), theirs)
        self._failure.tell(error)
        return error


def _mismatch(
    ranks: tuple[int, int], ours: str, theirs: str, mine: Any, other: Any | None
) -> PlanMismatch:
    found = None if other is None else first_difference(mine, other)
    field, one, two = found or ("digest", ours, theirs)
    return PlanMismatch(ranks, field, (one, two))


def _key(plan: LaunchPlan, places: Mapping[str, Place]) -> str:
    """Return a digest, 64 hexadecimal digits, of what all ranks must share in a call: the plan, and
    where its symmetric tensors lie."""
    if not places:
        return plan.digest()
    text = plan.digest() + "".join(
        f" {name}@{number}+{offset}" for name, (number, offset) in places.items()
    )
    return sha256(text.encode()).hexdigest()
