"""Planted faults of the accelerator checks: a table of honest backends with one promise broken
each.

Each row is an accelerator backend, ``mkernel.conformance.faults:Name`` where a backend's name is
expected. A check that no row trips does not count. Most faults wrap ``streams``, which has all ops;
those that need chunks or a NIC wrap ``ascend``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.backends.contracts.scaled import dequantised, quantised_rows
from mkernel.backends.contracts.tree import tree_sum
from mkernel.backends.runtime.host_kernels import Kernel
from mkernel.conformance.faults import attention, launching
from mkernel.conformance.faults.altering import (
    Altered,
    Ended,
    Honest,
    calls,
    claims,
    ended,
    from_before,
    from_previous,
    inputs,
    results,
)
from mkernel.conformance.faults.rows import Plant, Row, checks_by_name, planted
from mkernel.conformance.grid import GEMMS
from mkernel.errors import Unsupported
from mkernel.plan.invariance import Invariant, group_of, segments_of
from mkernel.plan.model import AttentionShape, DispatchShape, LaunchPlan, MoeShape
from mkernel.plan.ops import COMPANIONS
from mkernel.plan.pipeline import Chunking
from mkernel.world.failure import FailureMonitor

# ---- claims --------------------------------------------------------------------------------------


def _does_not_run_attention(self: Honest, plan: LaunchPlan) -> Workspace:
    if plan.op == "ring_attention":
        raise Unsupported(f"accelerator {self.name!r} does not run {plan.op}")
    return self.inner.workspace(plan)


class _Counting(Honest):
    cores = 0

    def capabilities(self) -> Any:
        self.cores += 1
        return self.inner.capabilities().model_copy(update={"compute_cores": self.cores})


# ---- values --------------------------------------------------------------------------------------


def _nudge(tensor: torch.Tensor) -> None:
    """Change the last bit of the first element."""
    first = tensor.reshape(-1)[:1]
    first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))


def _drop_last_row(tensor: torch.Tensor) -> None:
    if tensor.dim() == 2 and len(tensor) % 2 and len(tensor) > 1:
        tensor[-1].zero_()


def _drop_last_chunk(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if len(tensor) > 128:
        tensor[-64:] = before[-64:]


def _zero_one_element(tensor: torch.Tensor) -> None:
    tensor.view(-1)[tensor.numel() // 2] = 0


def _chunking(ended: Ended) -> Chunking | None:
    """Return the chunking of a plan that is cut into tiles, else None."""
    return getattr(ended.call.plan.schedule, "chunking", None)


def _do_few_chunks(ended: Ended) -> None:
    chunking = _chunking(ended)
    if chunking is not None and chunking.chunks_per_rank > 8:
        for rows in ended.outputs["out"].chunk(ended.call.plan.world_size):
            rows[len(rows) // 2 :] = 0


def _misread_columns(call: Call, b: torch.Tensor) -> torch.Tensor:
    if call.plan.b_layout != "column":
        return b
    return b.t().contiguous().view(b.shape).t().contiguous().t()


def _ignore_gaps(call: Call, b: torch.Tensor) -> torch.Tensor:
    if 1 not in b.stride():  # of an op whose b is no matrix
        return b
    packed = (1, len(b)) if call.plan.b_layout == "column" else (b.shape[1], 1)
    return b.as_strided(b.shape, packed)


def _norm_again(
    ended: Ended, change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, Any]]
) -> None:
    """Change normalised rows and the new residual to what ``change`` makes of (sum, residual,
    weight)."""
    given = ended.call.tensors
    if "residual" in given:
        new = ended.outputs["residual_out"]
        out, other = change(
            new.double() - given["residual"],
            given["residual"].double(),
            given["norm_weight"].double(),
        )
        ended.outputs["out"].copy_(out)
        new.copy_(other)


def _scale(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def _norm_before_residual(ended: Ended) -> None:
    norm = ended.call.plan.norm
    if norm is not None:
        _norm_again(ended, lambda s, r, w: (s * _scale(s, norm.eps) * w + r, s + r))


def _leave_eps_out(ended: Ended) -> None:
    _norm_again(ended, lambda s, r, w: ((s + r) * _scale(s + r, 0.0) * w, s + r))


def _keep_residual(ended: Ended) -> None:
    """Add the residual of the plan's previous call instead of this one's."""
    key, norm, given = (
        (ended.call.plan.digest(), "residual"),
        ended.call.plan.norm,
        ended.call.tensors,
    )
    if norm is None or "residual" not in given:
        return
    older, ended.kept[key] = ended.kept.get(key), given["residual"].double()
    if older is not None:
        _norm_again(
            ended, lambda s, r, w: ((s + older) * _scale(s + older, norm.eps) * w, s + older)
        )


def _lose_terms_in_place(call: Call) -> Call:
    x, out = call.tensors["x"], call.tensors["out"]
    if x.data_ptr() != out.data_ptr():
        return call
    less = x.clone()
    less[-1] = 0
    return replace(call, tensors={**call.tensors, "x": less})


def _last_block_unscaled(call: Call, scale: torch.Tensor) -> torch.Tensor:
    """Set the last scale of each row to 1; a row's only scale stays."""
    if scale.shape[1] == 1:
        return scale
    found = scale.clone()
    found[:, -1] = 1
    return found


def _quantised_by_row(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Quantise rows that the launch quantises by blocks, each by one scale."""
    scales = call.plan.scales
    if scales is None or scales.quantises is None:
        return rows
    return dequantised(*quantised_rows(rows)).to(rows.dtype)


def _lost_on_rank_1(call: Call, scale: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scale) if call.rank == 1 else scale


def _rolled(scale: torch.Tensor) -> torch.Tensor:
    """Give each expert the scales of another, by columns as they lie."""
    return scale.transpose(1, 2).roll(1, 0).contiguous().transpose(1, 2)


def _previous_scales(name: str) -> Plant:
    """Make the call read the scales of the plan's previous one."""

    def changed(self: Altered, call: Call) -> Call:
        if name not in call.tensors:
            return call
        key, scale = (call.plan.digest(), name), call.tensors[name]
        older, self.kept[key] = self.kept.get(key, scale), scale.clone()
        return replace(call, tensors={**call.tensors, name: older})

    return {"change": changed}


def _swap_nodes(ended: Ended) -> None:
    out, nodes = ended.outputs["out"], ended.call.plan.nodes
    if nodes > 1:
        rows = len(out) // nodes
        out[:rows], out[-rows:] = out[-rows:].clone(), out[:rows].clone()


def _sum_in_bf16(ended: Ended) -> None:
    if "a" in ended.call.tensors:
        _round_halves(ended, torch.bfloat16)


def _round_halves(ended: Ended, narrow: torch.dtype) -> None:
    call = ended.call
    a, b, out = call.tensors["a"].float(), call.tensors["b"].float(), ended.outputs["out"]
    half = a.shape[1] // 2
    partials = (a[:, :half] @ b[:half], a[:, half:] @ b[half:])
    error = sum((p.to(narrow).float() - p for p in partials), torch.zeros(()))
    rows, first = len(out), 0
    if call.plan.op == "all_gather_gemm":
        rows, first = len(a), call.rank * len(a)
    elif call.plan.op == "gemm_reduce_scatter":
        error = error[call.rank * rows : (call.rank + 1) * rows]
    out[first : first + rows] += error.to(out.dtype)


def _round_partials(ended: Ended) -> None:
    call, out = ended.call, ended.outputs["out"]
    partial = call.tensors["a"].float() @ call.tensors["b"].float()
    error = partial.to(out.dtype).float() - partial
    if call.plan.op == "gemm_reduce_scatter":
        error = error[call.rank * len(out) :][: len(out)]
    out += error.to(out.dtype)


def _half_partials_where_wide(ended: Ended) -> None:
    """Round a rank's own partial sums of wide results to float16 on their way."""
    if "a" in ended.call.tensors and ended.outputs["out"].shape[1] > 1024:
        _round_halves(ended, torch.float16)


SUMS = ("gemm_reduce_scatter", "gemm_all_reduce")


def _sum_from_the_last_rank(ended: Ended) -> None:
    """Add once more, in another order, what the ranks have added."""
    call, out = ended.call, ended.outputs["out"]
    own = call.tensors["a"].float() @ call.tensors["b"].float()
    terms = [torch.empty_like(own) for _ in range(call.plan.world_size)]
    torch.distributed.all_gather(terms, own, group=call.group)
    total = terms.pop()
    while terms:
        total = total + terms.pop()
    if call.plan.op == "gemm_reduce_scatter":
        total = total[call.rank * len(out) :][: len(out)]
    out.copy_(total)


def _add_leaves(
    add: Callable[[Ended, list[torch.Tensor]], torch.Tensor],
) -> Callable[[Ended], None]:
    """Return what adds once more, in its own way, the leaves of an invariant sum over ranks."""

    def again(ended: Ended) -> None:
        call, out = ended.call, ended.outputs["out"]
        if call.plan.invariant is None:
            return
        of_experts = "w2" in call.tensors
        own = (_leaves_of_experts if of_experts else _leaves)(call, call.plan.invariant)
        total = add(ended, list(torch.cat(_of_ranks(call, own))))
        if of_experts or call.plan.op == "gemm_reduce_scatter":
            total = total[call.rank * len(out) :][: len(out)]
        out.copy_(total)

    return again


def _of_ranks(call: Call, own: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(call.plan.world_size)]
    torch.distributed.all_gather(found, own.contiguous(), group=call.group)
    return found


def _leaves(call: Call, invariant: Invariant) -> torch.Tensor:
    """Return this rank's leaves of a product, [segments / W, M, N]."""
    a, b = (call.tensors[name].float() for name in "ab")
    partial = getattr(torch, invariant.partial_dtype or "float32")
    parts = segments_of(invariant.segments // call.plan.world_size, len(b))
    return torch.stack([(a[:, one:end] @ b[one:end]).to(partial) for one, end in parts])


def _leaves_of_experts(call: Call, invariant: Invariant) -> torch.Tensor:
    """Return this rank's leaves of the weighted results of all ranks' tokens, [segments / W, T * W,
    H]."""
    h, w2 = (call.tensors[name].float() for name in ("h", "w2"))
    weights = torch.cat(_of_ranks(call, call.tensors["topk_weights"]))
    ids = call.tensors["routing"][: weights.numel()].view(weights.shape)
    world, partial = call.plan.world_size, getattr(torch, invariant.partial_dtype or "float32")
    leaves, row = h.new_zeros((invariant.segments // world, len(ids), w2.shape[2])), 0
    for expert, w in enumerate(w2):
        token, slot = (ids == call.rank * len(w2) + expert).nonzero(as_tuple=True)
        y = (h[row : row + len(token)] @ w).to(partial).float()
        group = group_of(expert, len(w2), len(leaves))
        leaves[group].index_add_(0, token, y * weights[token, slot, None])
        row += len(token)
    return leaves.to(partial)


def _in_float64(ended: Ended, leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(leaves).double().sum(0)


def _turned_by_rank(ended: Ended, leaves: list[torch.Tensor]) -> torch.Tensor:
    rank = ended.call.rank
    return tree_sum(leaves[rank:] + leaves[:rank])


def _few_in_float64(ended: Ended, leaves: list[torch.Tensor]) -> torch.Tensor:
    few = len(leaves[0]) < 32
    return _in_float64(ended, leaves) if few else tree_sum(leaves)


def _take_ranks_modulo_8(ended: Ended) -> None:
    """Replace rows of ranks from 8 on with those of the ranks that have their slots."""
    parts = ended.outputs["out"].chunk(ended.call.plan.world_size)
    for rank, part in enumerate(parts):
        part.copy_(parts[rank % 8])


# ---- repetition ----------------------------------------------------------------------------------


def _calls(ended: Ended) -> int:
    """Count the calls of this call's plan, this one included."""
    key = "calls", ended.call.plan.digest()
    ended.kept[key] = ended.kept.get(key, 0) + 1
    return int(ended.kept[key])


def _keep_result(tensor: torch.Tensor, older: torch.Tensor) -> None:
    if older.shape == tensor.shape:
        tensor.copy_(older)


def _keep_last_row(tensor: torch.Tensor, older: torch.Tensor) -> None:
    if len(tensor) and len(older):
        tensor[-1] = older[-1]


class _CachesWeights(Altered):
    def change(self, call: Call) -> Call:
        found = {
            name: self.kept.setdefault(call.plan.digest(), call.tensors[name].clone())
            for name in {"b", "w"} & call.tensors.keys()
        }
        return replace(call, tensors={**call.tensors, **found})


def _after_another_plan(ended: Ended) -> bool:
    plan = ended.call.plan.digest()
    before, ended.kept["last"] = ended.kept.get("last", plan), plan
    return bool(before != plan)


def _keep_nearest(call: Ended) -> None:
    pairs = [(call.outputs[n], call.before[n]) for n in ("out", "grad_q") if n in call.outputs]
    for tensor, before in (*pairs, *((t, torch.empty_like(t)) for t in call.grouped())):
        if tensor.numel():
            gaps = (tensor.double() - before.double()).abs().nan_to_num(nan=float("inf"))
            at = int(gaps.argmin())
            tensor.view(-1)[at] = before.reshape(-1)[at]


def _reuse_one_buffer(call: Ended) -> None:
    for mine in call.grouped():
        buffer = call.kept.setdefault(mine.dtype, torch.zeros(1 << 20, dtype=mine.dtype))
        view = buffer[: mine.numel()].view(mine.shape)
        view.copy_(mine)
        call.results[call.name] = view


# ---- bits ----------------------------------------------------------------------------------------


def _third_call(ended: Ended) -> bool:
    plan = ended.call.plan.digest()
    ended.kept[plan] = ended.kept.get(plan, 0) + 1
    return bool(ended.kept[plan] % 3 == 0)


def _in_odd_chunks(ended: Ended) -> bool:
    return bool(getattr(ended.call.plan.schedule, "rows_per_chunk", 0) % 2)


# ---- order and memory ----------------------------------------------------------------------------


def _swap_ranks(ended: Ended) -> None:
    world, out = ended.call.plan.world_size, ended.outputs.get("out")
    if out is not None and "a" in ended.call.tensors and world > 1 and len(out) >= world:
        rows = len(out) // world
        out[: 2 * rows] = torch.cat([out[rows : 2 * rows], out[:rows]])


def _gather_by_arrival(ended: Ended) -> None:
    whole, plan = ended.outputs.get("gathered"), ended.call.plan
    if whole is not None:
        parts = whole.clone().chunk(plan.world_size)
        whole.copy_(torch.cat([parts[rank] for rank in plan.order("node")[ended.call.rank]]))


def _scribble_on_inputs(ended: Ended) -> None:
    for name in {"a", "x", "k"} & ended.call.tensors.keys():
        ended.call.tensors[name].view(-1)[-1] = 0


def _write_past_the_end(ended: Ended) -> None:
    for tensor in ended.outputs.values():
        end = tensor.storage_offset() + tensor.numel()
        if end < tensor.untyped_storage().nbytes() // tensor.element_size():
            tensor.as_strided((1,), (1,), end).fill_(1)


# ---- mixture of experts --------------------------------------------------------------------------


def _experts(call: Call) -> int:
    return int(call.plan.shape.model_dump()["experts"])


def _replace_twins(call: Call, ids: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] == 1:
        return ids
    ids = ids.clone()
    again = ids[:, 1] == ids[:, 0]
    each = _experts(call) // call.plan.world_size
    twice = ids[again, 1]
    ids[again, 1] = twice - twice % each + (twice + 1) % each
    return ids


def _of_next_expert(w2: torch.Tensor) -> torch.Tensor:
    turned = w2.transpose(1, 2)
    if w2.is_contiguous():
        return w2.roll(-1, 0)
    return turned.roll(-1, 0).contiguous().transpose(1, 2)


def _up_first(call: Call, w: torch.Tensor) -> torch.Tensor:
    shape = call.plan.shape
    if not isinstance(shape, MoeShape) or shape.activation is None:
        return w
    rolled = w.roll(shape.features, 2)
    return rolled if w.is_contiguous() else rolled.transpose(1, 2).contiguous().transpose(1, 2)


def _without_tail(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    if len(h) % 2:
        h[-1] = 0
    return h


def _reverse_experts_rows(ended: Ended) -> None:
    if parts := ended.by_expert():
        ended.results[ended.name] = torch.cat([part.flip(0) for part in parts])


class _LatestHandleOnly(Altered):
    routing: torch.Tensor | None = None
    rows = 0

    def change(self, call: Call) -> Call:
        if call.plan.op not in COMPANIONS or self.routing is None:
            return call
        name = "y" if "y" in call.tensors else "h"
        given = call.tensors[name]
        rows = given.new_zeros(self.rows, given.shape[1])
        rows[: len(given)] = given[: self.rows]
        return replace(call, tensors={**call.tensors, name: rows, "routing": self.routing})

    def alter(self, ended: Ended) -> None:
        if "outputs" in ended.results:
            self.routing = ended.call.tensors["routing"]
            self.rows = len(ended.results["outputs"])


class _OtherRouting(Altered):
    """Uses another routing than the handle's where a dispatch gets one. Rows beyond the handle's are
    left out, and missing ones are zero, so that the combine takes them."""

    latest: torch.Tensor | None = None

    def change(self, call: Call) -> Call:
        shape = call.plan.shape
        assert isinstance(shape, DispatchShape | MoeShape)
        if shape.routed:
            return self.routed(call, shape)
        self.latest = call.tensors["routing"]
        return call

    def routed(self, call: Call, shape: DispatchShape | MoeShape) -> Call:
        """Return the call with the latest dispatch's routing."""
        assert self.latest is not None
        return replace(call, tensors={**call.tensors, "routing": self.latest})

    def alter(self, ended: Ended) -> None:
        (given,), key = ended.grouped(), ended.call.tensors["routing"].data_ptr()
        if not ended.call.plan.shape.model_dump()["routed"]:
            self.kept[key] = len(given)
            return
        rows = given.new_zeros(self.kept[key], given.shape[1])
        rows[: len(given)] = given[: len(rows)]
        ended.results[ended.name] = rows


class _IgnoresHandle(_OtherRouting):
    def routed(self, call: Call, shape: DispatchShape | MoeShape) -> Call:
        """Return the call without the handle: its ids say where tokens go."""
        plan = call.plan.model_copy(update={"shape": shape.model_copy(update={"routed": False})})
        routing = call.tensors["routing"].clone()  # which it writes
        return replace(call, plan=plan, tensors={**call.tensors, "routing": routing})


# ---- attention -----------------------------------------------------------------------------------


def _see_everything(call: Call) -> Call:
    shape = call.plan.shape
    if not isinstance(shape, AttentionShape) or not shape.causal:
        return call
    open_ = shape.model_copy(update={"causal": False})
    return replace(call, plan=call.plan.model_copy(update={"shape": open_}))


def _interleaved(call: Call) -> list[int]:
    shape = call.plan.shape.model_dump()
    kv, each = shape["kv_heads"], shape["heads"] // shape["kv_heads"]
    return [h % kv * each + h // kv for h in range(shape["heads"])]


def _interleave(call: Call, given: torch.Tensor) -> torch.Tensor:
    q = torch.empty_like(given)
    q[:, _interleaved(call)] = given
    return q


def _interleave_back(ended: Ended) -> None:
    if "q" in ended.call.tensors:
        for tensor in ended.outputs.values():
            tensor.copy_(tensor[:, _interleaved(ended.call)].clone())


def _to_base_two(ended: Ended) -> None:
    if "lse" in ended.outputs:
        ended.outputs["lse"] /= 0.6931471805599453


def _default_scale(call: Call) -> Call:
    if "q" not in call.tensors:
        return call
    return replace(call, options={**call.options, "scale": call.tensors["q"].shape[-1] ** -0.5})


# ---- views and lives -----------------------------------------------------------------------------


def _in_later_worlds(ended: Ended) -> bool:
    ended.kept["worlds"] = ended.kept.get("worlds", 0) + (ended.call.number == 1)
    return bool(ended.kept["worlds"] > 1)


def _launch_and_leave_a_thread(self: Honest, call: Call) -> Any:
    if call.number == 1:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return self.inner.launch(call)


_AS_CLAIMED = claims(lambda honest: {"rounded_partials": True})
_OF_EXPERTS = claims(lambda honest: {"invariant_ops": ("moe_gemm_combine",)})


# fmt: off
TABLE: tuple[Row, ...] = (
    planted(Honest, "ClaimsUnknownOp", "Claims an op that mkernel does not have.", "capabilities",
            claims(lambda honest: {"ops": ("all_to_all_gemm", *honest.ops)})),
    planted(Honest, "HalfOfMoe", "Claims the dispatch without the combine.", "capabilities",
            claims(lambda honest: {"ops": ("moe_dispatch_gemm",)})),
    planted(Honest, "HalfOfMoeBetweenNodes", "The same of worlds of several nodes.", "capabilities",
            claims(lambda honest: {"one_node_ops": ("moe_combine",)})),
    planted(_Counting, "ChangesItsMind", "Claims something else each time.", "capabilities"),
    planted(Honest, "NoDevice", "Says that it is usable, and finds no device.", "capabilities",
            probe=lambda self: ()),
    planted(Honest, "ClaimsTooMuch", "Claims an op that it does not run.", "shapes",
            workspace=_does_not_run_attention),
    planted(Altered, "ReturnsZeros", "Every result is zero.", "shapes", results(torch.Tensor.zero_)),
    planted(Altered, "DropsLastRow",
            "The last row of an odd number of rows is zero: a partial tile is forgotten.", "shapes",
            results(_drop_last_row)),
    planted(Altered, "DropsLastChunk",
            "The last 64 rows of large results are those that were there before.", "shapes",
            from_before(_drop_last_chunk)),
    planted(Altered, "OneWrongElement",
            "One element of every result is zero, far too few for a relative error of the whole.",
            "shapes", results(_zero_one_element)),
    planted(Altered, "IgnoresLayout", "Reads column-major weights as if they were row-major.",
            "dtypes", inputs("b", change=_misread_columns)),
    planted(Altered, "IgnoresGaps", "Reads matrices as if nothing lay between their rows.",
            "operands", inputs("b", change=_ignore_gaps)),
    planted(Altered, "NormBeforeResidual", "Adds the residual to normalised rows.", "norms",
            ended(_norm_before_residual), ops=("gemm_all_reduce",)),
    planted(Altered, "LeavesEpsOut", "Divides by the root mean square alone.", "norms",
            ended(_leave_eps_out), ops=("gemm_all_reduce",)),
    planted(Altered, "WeightOfAnotherColumn", "Takes each column's norm weight for the next.", "norms",
            inputs("norm_weight", change=lambda call, weight: weight.roll(1)),
            ops=("gemm_all_reduce",)),
    planted(Altered, "StaleResidual", "Adds the residual of the previous call.", "norms",
            ended(_keep_residual), ops=("gemm_all_reduce",)),
    planted(Altered, "SumsNormBeforeResidual", "AllReduce adds the residual to normalised rows.",
            "norms", ended(_norm_before_residual), ops=("all_reduce",)),
    planted(Altered, "SumsLeaveEpsOut", "AllReduce divides by the root mean square alone.", "norms",
            ended(_leave_eps_out), ops=("all_reduce",)),
    planted(Altered, "SumsWeightOfAnotherColumn",
            "AllReduce takes each column's norm weight for the next.", "norms",
            inputs("norm_weight", change=lambda call, weight: weight.roll(1)), ops=("all_reduce",)),
    planted(Altered, "SumsStaleResidual", "AllReduce adds the residual of the previous call.", "norms",
            ended(_keep_residual), ops=("all_reduce",)),
    planted(Altered, "ResidualOfEachRank", "Each rank adds the residual to what it sends.", "norms",
            inputs("residual", change=lambda call, rows: rows * call.plan.world_size),
            ops=("all_reduce",)),
    planted(Honest, "QuantisesNothing", "Claims to quantise normalised rows, and does not.", "norms",
            claims(lambda honest: {"quantises_norms": True})),
    planted(Altered, "LosesTermsInPlace",
            "Where the sum goes into x, a rank's own terms of the last row are not in it.",
            "shapes", calls(_lose_terms_in_place), ops=("all_reduce",)),
    planted(Altered, "ScaleOfAnotherRow", "Takes each row's scale for the next.", "scales",
            inputs("a_scale", change=lambda call, scale: scale.roll(1, 0)), ops=GEMMS),
    planted(Altered, "StaleScalesOfA", "Reads the scales of A of the previous call.", "scales",
            _previous_scales("a_scale"), ops=GEMMS),
    planted(Altered, "StaleScalesOfB", "Reads the scales of B of the previous call.", "scales",
            _previous_scales("b_scale"), ops=GEMMS),
    planted(Altered, "ScalesOfAnotherExpert", "Takes each expert's scales for the next.", "scales",
            inputs("w_scale", change=lambda call, scale: _rolled(scale)),
            ops=("moe_dispatch_gemm",)),
    planted(Altered, "ScalesOfANeighbourBlock", "Takes each block's scale for the next.", "scales",
            inputs("h_scale", change=lambda call, scale: scale.roll(1, 1)),
            ops=("moe_gemm_combine",)),
    planted(Altered, "ScalesOfANeighbourBlockOfTokens", "Takes each block's scale for the next.",
            "scales", inputs("x_scale", change=lambda call, scale: scale.roll(1, 1)),
            ops=("moe_dispatch_gemm",)),
    planted(Altered, "ScalesLostOfRows", "The scales of rank 1's rows are 1.", "scales",
            inputs("x_scale", change=_lost_on_rank_1), ops=("moe_dispatch",)),
    planted(Altered, "ScalesLostOfTokens", "The scales of rank 1's tokens are 1.", "scales",
            inputs("x_scale", change=_lost_on_rank_1), ops=("moe_dispatch_gemm",)),
    planted(Altered, "ScalesLostOfExperts", "The scales of what rank 1's experts multiply are 1.",
            "scales", inputs("h_scale", change=_lost_on_rank_1), ops=("moe_gemm_combine",)),
    planted(Altered, "RowsQuantisedByRow", "Quantises a token in 16 bits by one scale, not by blocks.",
            "scales", inputs("x", change=_quantised_by_row), ops=("moe_dispatch",)),
    planted(Altered, "TokensQuantisedByRow", "The same before a product.", "scales",
            inputs("x", change=_quantised_by_row), ops=("moe_dispatch_gemm",)),
    planted(Altered, "ExpertsQuantiseByRow", "The same of what GEMM+combine multiplies.", "scales",
            inputs("h", change=_quantised_by_row), ops=("moe_gemm_combine",)),
    planted(Altered, "BlockWithoutScale", "Leaves the scales of the last block of K out.", "scales",
            inputs("a_scale", change=_last_block_unscaled), ops=GEMMS),
    planted(Altered, "NarrowOutputs", "Rounds results to bfloat16 whatever was asked for.", "dtypes",
            results(lambda tensor: tensor.copy_(tensor.bfloat16().to(tensor.dtype)))),
    planted(Altered, "SwapsNodes",
            "Rows of the first and the last node change places where there are several nodes.",
            "worlds", ended(_swap_nodes), ops=("all_gather_gemm",)),
    planted(Altered, "SlotsModuloEight", "Data of ranks from 8 on lies where that of others does.",
            "most-ranks", ended(_take_ranks_modulo_8), ops=("all_gather_gemm",)),
    planted(Altered, "FewChunksOnly",
            "Half of each rank's rows is zero where there are more than 8 chunks.", "many-chunks",
            ended(_do_few_chunks), wraps="ascend"),
    planted(Altered, "SumsInBf16",
            "A rank's own partial sums are rounded to bfloat16 on their way.", "accumulation",
            ended(_sum_in_bf16)),
    planted(Altered, "HalfPartialsWhereWide",
            "Partial sums are rounded to float16 where results have more than 1024 columns.",
            "accumulation", ended(_half_partials_where_wide)),
    planted(Altered, "SumsInBf16WithinRanks",
            "What ranks add may be rounded once, but a rank's own partial sums are rounded too.",
            "accumulation", ended(_sum_in_bf16), _AS_CLAIMED),
    planted(launching.CombinesInBf16, "CombinesInBf16",
            "The combine's sum over slots is kept in bfloat16.", "accumulation"),
    planted(launching.SumsOf14Bits, "ExpertsSumOf14Bits",
            "Dispatch+GEMM adds blocks of e4m3 products with 14 bits.", "accumulation"),
    planted(launching.SumsOf14Bits, "GemmCombineSumsOf14Bits",
            "GEMM+combine adds blocks of e4m3 products with 14 bits.", "accumulation",
            ops=("moe_gemm_combine",)),
    planted(Altered, "CleansNan", "NaN in the inputs counts as 0.", "nonfinite",
            inputs("a", change=lambda call, a: torch.nan_to_num(a, nan=0.0, posinf=6e4))),
    planted(Altered, "SumsCleanNan", "NaN in what is added counts as 0.", "nonfinite",
            inputs("x", change=lambda call, x: torch.nan_to_num(x)), ops=("all_reduce",)),
    planted(Altered, "WrongEveryFifth",
            "Every fifth call of a plan returns the previous call's result.", "repeated-calls",
            from_previous(_keep_result, when=lambda ended: _calls(ended) % 5 == 0)),
    planted(Altered, "WrongFromCall300", "Returns zeros from a plan's 300th call on.", "long-runs",
            results(torch.Tensor.zero_, when=lambda ended: _calls(ended) >= 300)),
    planted(Altered, "OnePlanOnly",
            "Plans of one op share what a workspace holds: a change of plan returns zeros.",
            "repeated-calls", results(torch.Tensor.zero_, when=_after_another_plan)),
    planted(Altered, "ReturnsPrevious",
            "From a plan's second call on, returns the previous call's result.", "stale-data",
            from_previous(_keep_result)),
    planted(Altered, "KeepsSomeRows", "One row of each result is the previous call's.",
            "stale-data", from_previous(_keep_last_row)),
    planted(_CachesWeights, "CachesWeights", "Keeps the weights of a plan's first call.",
            "stale-data"),
    planted(launching.SharesStaging, "SharesStaging",
            "Stages the inputs of all queued calls in one place.", "queued-calls",
            claims(lambda honest: {"stream_ordered": True,
                                   "ops": ("all_gather_gemm", "gemm_all_reduce")})),
    planted(Altered, "LeavesRowUnwritten",
            "The last row of each output is what was there before.", "poison",
            from_before(lambda tensor, before: tensor[-1].copy_(before[-1]))),
    planted(Altered, "LeavesElement",
            "The element that this changes least is what was there before: in a large output only "
            "what was put there on purpose tells it from a right one.", "poison",
            ended(_keep_nearest)),
    planted(Altered, "WritesOverNanOnly",
            "Takes any number in the output for a result that is there already.", "poison",
            from_before(lambda tensor, before: tensor.copy_(
                torch.where(before.isnan(), tensor, before)))),
    planted(Altered, "AddsToOutput",
            "Adds to what is in the output instead of overwriting it, as if it had been zeroed.",
            "poison", from_before(torch.Tensor.add_)),
    planted(Altered, "ReusesOutputs", "Grouped outputs of every dispatch lie in one buffer.",
            "kept-results", ended(_reuse_one_buffer)),
    planted(Altered, "NoisyLastBit",
            "The last bit of one element differs in every third call of a plan.", "determinism",
            results(_nudge, when=_third_call)),
    planted(Altered, "DependsOnChunk", "Odd chunks give another last bit.", "chunk-invariance",
            results(_nudge, when=_in_odd_chunks)),
    planted(Altered, "DependsOnSplit", "A world of several nodes gives another last bit.",
            "split-invariance", results(_nudge, when=lambda ended: ended.call.plan.nodes > 1)),
    planted(Altered, "SumsSegmentsInFloat64", "Adds an invariant sum's segments in float64.",
            "split-invariance", ended(_add_leaves(_in_float64)), ops=SUMS),
    planted(Altered, "TurnsTreeByRank", "A rank's tree begins with its own segments.",
            "split-invariance", ended(_add_leaves(_turned_by_rank)), ops=SUMS),
    planted(Altered, "SplitsByRows", "An invariant sum of few rows is added in another way.",
            "chunk-invariance", ended(_add_leaves(_few_in_float64)), ops=SUMS),
    planted(Altered, "SumsGroupsInFloat64", "Adds groups of experts in float64.",
            "split-invariance", _OF_EXPERTS, ended(_add_leaves(_in_float64)),
            ops=("moe_gemm_combine",)),
    planted(Altered, "TurnsGroupsByRank", "A rank's tree begins with its own experts.",
            "split-invariance", _OF_EXPERTS, ended(_add_leaves(_turned_by_rank)),
            ops=("moe_gemm_combine",)),
    planted(Altered, "SplitsByTokens", "Groups of experts of few tokens are added in another way.",
            "chunk-invariance", _OF_EXPERTS, ended(_add_leaves(_few_in_float64)),
            ops=("moe_gemm_combine",)),
    planted(Altered, "RanksDiffer", "One rank's copy of a result has another last bit.",
            "replicas", results(_nudge, when=lambda ended: ended.call.rank == 1)),
    planted(Altered, "SwapsRanks", "Rows of ranks 0 and 1 change places.", "rank-order",
            ended(_swap_ranks)),
    planted(Altered, "SumsFromTheLastRank", "Adds partial sums from the last rank to the first.",
            "sum-order", ended(_sum_from_the_last_rank), ops=SUMS),
    planted(Altered, "ReversesRows", "A rank's scattered rows come out backwards.", "rank-order",
            results(lambda tensor: tensor.copy_(tensor.flip(0))), ops=("gemm_reduce_scatter",)),
    planted(Altered, "GathersByArrival",
            "The gathered A is in the order of consumption instead of rank.", "gathered",
            ended(_gather_by_arrival)),
    planted(Altered, "WritesInputs", "Uses the caller's input as scratch memory.", "user-tensors",
            ended(_scribble_on_inputs)),
    planted(Altered, "IgnoresOffset", "Reads an input from the start of its storage.",
            "user-tensors",
            inputs("a", "x", "q", change=lambda call, t: t.as_strided(t.shape, t.stride(), 0))),
    planted(Altered, "WritesPastTheEnd", "Writes one element behind the output.", "bounds",
            ended(_write_past_the_end)),
    planted(Altered, "Capacity", "An expert takes no more than 20 rows; the rest is zero.",
            "routing", ended(lambda ended: [rows[20:].zero_() for rows in ended.by_expert()])),
    planted(Altered, "UniqueExperts",
            "An expert twice in one token's list counts as the next expert of its rank.",
            "routing", inputs("topk_ids", change=_replace_twins)),
    planted(Altered, "UpIsGate", "The gate's columns and the others change places.", "activations",
            inputs("w", change=_up_first)),
    planted(Altered, "OffByOneExpert", "Every token goes to the next expert.", "expert-order",
            inputs("topk_ids", change=lambda call, ids: (ids + 1) % _experts(call))),
    planted(Altered, "RowsByArrival", "Rows of an expert come in another order.", "expert-order",
            ended(_reverse_experts_rows)),
    planted(Altered, "IgnoresWeights", "The combine adds rows without weights.",
            "combine-weights", inputs("topk_weights", change=lambda call, w: torch.ones_like(w))),
    planted(Altered, "FirstWeightForAll",
            "The combine uses the first slot's weight for every slot.", "combine-weights",
            inputs("topk_weights", change=lambda call, w: w[:, :1].expand_as(w).contiguous())),
    planted(Altered, "WeightsOfAnotherToken", "The combine weighs a token's rows as the next one's.",
            "combine-weights drawn-routings",
            inputs("topk_weights", change=lambda call, w: w.roll(-1, 0))),
    planted(Altered, "OffByOneWeight", "Rows are multiplied by the next expert's second weight.",
            "drawn-routings shapes", inputs("w2", change=lambda call, w2: _of_next_expert(w2))),
    planted(Altered, "DropsTail", "The last row of an odd number of experts' rows counts as zero.",
            "drawn-routings shapes", inputs("h", change=lambda call, h: _without_tail(h))),
    planted(Altered, "StaleRow", "A row of a result at home is that of the call before.",
            "drawn-routings stale-data", from_previous(_keep_last_row), ops=COMPANIONS),
    planted(launching.CombinesBackwards, "CombinesBackwards",
            "The combine adds from the last slot to the first.", "combine-order"),
    planted(launching.CombinesBackwards, "GemmCombinesBackwards",
            "GEMM+combine adds from the last slot to the first.", "combine-order",
            ops=("moe_gemm_combine",)),
    planted(launching.CombinesInBf16, "GemmCombinesInBf16",
            "GEMM+combine's sum over slots is kept in bfloat16.", "accumulation",
            ops=("moe_gemm_combine",)),
    planted(_LatestHandleOnly, "LatestHandleOnly",
            "The combine uses the routing of the latest dispatch, whatever handle it gets. Rows "
            "beyond that are left out, and missing ones are zero.", "handles"),
    planted(_IgnoresHandle, "RowsIgnoreHandle",
            "A dispatch without a product goes by its ids, not by the handle that it gets.", "shapes",
            ops=("moe_dispatch",)),
    planted(_IgnoresHandle, "ProductsIgnoreHandle",
            "Dispatch+GEMM goes by its ids, not by the handle that it gets.", "shapes",
            ops=("moe_dispatch_gemm",)),
    planted(_OtherRouting, "RowsOfLatestRouting",
            "A dispatch without a product uses the latest routing, whatever handle it gets.", "shapes",
            ops=("moe_dispatch",)),
    planted(_OtherRouting, "ProductsOfLatestRouting",
            "Dispatch+GEMM uses the latest routing, whatever handle it gets.", "shapes",
            ops=("moe_dispatch_gemm",)),
    planted(Altered, "IgnoresCausal", "Every position sees every other.", "causal",
            calls(_see_everything)),
    planted(Altered, "HeadsInterleaved", "Query head h uses key head h % Hkv.", "gqa",
            inputs("q", change=_interleave), ended(_interleave_back)),
    planted(Altered, "LogBaseTwo", "The log-sum-exp is to base 2.", "lse", ended(_to_base_two)),
    planted(Altered, "IgnoresScale", "Scores are scaled with D^-0.5, whatever was asked for.",
            "lse", calls(_default_scale)),
    planted(Altered, "AttendsToOwnKeysFirst", "Blocks of keys are merged from a rank's own on.",
            "split-attention", calls(attention.merge_by_rank)),
    planted(Altered, "SeamOffByOne",
            "The last query of a rank's first piece sees the first key of its second.",
            "causal drawn-attention", ended(attention.see_one_key_more_at_the_seam)),
    planted(attention.StaleBlock, "StaleBlock",
            "Keys and values of one rank are those of the call before.",
            "stale-data drawn-attention"),
    planted(Altered, "MergesWithoutRescaling",
            "The results of the own keys and of all others count alike.",
            "drawn-attention extreme-scores", ended(attention.merge_without_rescaling)),
    planted(Altered, "MergesByNarrowSums",
            "Results of parts are merged by log-sum-exps that are rounded to halves.",
            "extreme-scores", ended(attention.merge_by_narrow_sums)),
    planted(Altered, "LogOfNextHead", "A head's log-sum-exp is the next one's.",
            "gqa lse drawn-attention", ended(attention.next_heads_sums)),
    planted(Altered, "AttentionCleansNan", "NaN in the keys counts as 0.", "nonfinite",
            inputs("k", change=lambda call, k: torch.nan_to_num(k))),
    planted(Altered, "IgnoresDocuments", "All documents are one.", "documents drawn-attention",
            inputs("cu_seqlens", change=lambda call, bounds: bounds[[0, -1]])),
    planted(Altered, "DocumentsOffByOne", "Documents begin one position late.",
            "documents drawn-attention",
            inputs("cu_seqlens", change=attention.boundaries_off_by_one)),
    planted(launching.SkipsWaits, "SkipsWaits",
            "Computes on the rows of other ranks that lie there: those of the call before.",
            "waits stale-data", wraps="ascend"),
    planted(launching.ReportsEarly, "ReportsEarly", "Says at once that a call of a GEMM op has ended.",
            "waits mismatched-call"),
    planted(launching.ReportsEarly, "AttentionReportsEarly",
            "Says at once that ring attention has ended.", "waits", has="q"),
    planted(launching.ReportsEarly, "CombineReportsEarly", "Says at once that a combine has ended.",
            "waits", has="y"),
    planted(launching.ReportsEarly, "GemmCombineReportsEarly",
            "Says at once that GEMM+combine has ended.", "waits", has="h"),
    planted(launching.SendsLate, "SendsLate",
            "Rank 0 returns with the right result while others still wait for its rows.",
            "input-reuse", wraps="ascend"),
    planted(launching.ReportsEarly, "GivesUpWaiting",
            "Waits for other ranks, but no longer than 20 ms. What is not there by then never comes.",
            "paused-ranks waits", limit_s=0.02),
    planted(Altered, "SequentialIsWrong",
            "The sequential view computes before the data is there.", "views",
            results(torch.Tensor.zero_, when=lambda ended: ended.call.view == "sequential")),
    planted(Honest, "TellsNoTimes", "Launches tell no times.", "views",
            launch=lambda self, call: launching.Timeless(self.inner.launch(call))),
    planted(Honest, "AcceptsAnything", "In rank processes it claims every alignment.",
            "wrong-calls",
            claims(lambda honest: {"alignment_bytes": 1} if "RANK" in os.environ else {}),
            wraps="ascend"),
    planted(Altered, "OneWorldOnly", "From a process's second world on, results are zero.",
            "two-worlds", results(torch.Tensor.zero_, when=_in_later_worlds)),
    planted(launching.BrokenForGood, "BrokenForGood",
            "Once a world has failed all results are zero, in new worlds too.", "after-failure"),
    planted(launching.LeaksMemory, "LeaksMemory", "Never frees symmetric memory.", "leaks"),
    planted(launching.GoesWhenCollected, "GoesWhenCollected",
            "Holds itself and a descriptor: they go when Python's cyclic collector runs.", "leaks"),
    planted(Honest, "LeaksThreads", "Starts a thread for every world, and leaves it.", "leaks",
            launch=_launch_and_leave_a_thread),
    planted(Honest, "IgnoresAbort", "A call of a broken world goes on for 8 seconds.",
            "killed-rank",
            launch=lambda self, call: launching.Deaf(self.inner.launch(call), call)),
    planted(Honest, "IgnoresDeadline", "Waits ten times as long as it may.", "absent-rank",
            launch=lambda self, call: self.inner.launch(
                replace(call, timeout_s=10 * call.timeout_s)), wraps="ascend"),
    planted(Honest, "SwapsSignals,ascend", "One side reads signals in another byte order.", "waits",
            launching.one_side(Kernel, wait=launching.wait_swapped)),
    planted(Altered, "ShiftsShard,ascend", "One side's shard of B begins one row too early.",
            "shapes rank-order", inputs("b", change=lambda call, b: b.roll(1, 0))),
    planted(Honest, "DeadSlow,ascend", "One side raises failures 12 seconds late.", "killed-rank",
            launching.one_side(FailureMonitor, _failed=launching.fail_late)),
    planted(Honest, "GivesUpFirst,ascend", "One side's deadline is 1.5 seconds shorter.",
            "absent-rank", launching.one_side(Kernel, wait=launching.wait_briefly)),
)

HONEST: tuple[Row, ...] = (
    planted(Honest, "Fault", "Breaks nothing: what the faults are wrapped in.", ""),
    planted(Altered, "RoundsPartials",
            "Breaks nothing: what a rank adds to a sum over ranks is rounded to the output's dtype, "
            "as is claimed.", "shapes dtypes accumulation",
            ended(_round_partials), _AS_CLAIMED, ops=SUMS),
)
# fmt: on

FAULTS = checks_by_name(__name__, TABLE)
"""Maps a backend's name to the checks that must fail on it."""
_BACKENDS = {row.name.partition(",")[0]: row.backend for row in (*TABLE, *HONEST)}


def __getattr__(name: str) -> type[Honest]:
    """Return a row's backend, as the registry requests it."""
    try:
        return _BACKENDS[name]
    except KeyError:
        raise AttributeError(f"no planted fault is called {name!r}") from None
